"""One rank of the test of a critic's warm-up: critic_warmup_worker.py FOLDER

After each step, which of the two models' weights are bit for bit as before it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from command_line import FRESH, NO_EVALUATION, QUICKSTART
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hybridrl import Trainer
from hybridrl.contracts.batch import Producer, TrainBatch
from hybridrl.training.model import ParallelModel

OVERRIDES = (
    *FRESH,
    "train.learning_rate=1e-3",
    "train.warmup_steps=0",
    "algorithm.critic_warmup_steps=2",
    *NO_EVALUATION,
    "steps.prompts_per_step=6",
    "steps.updates_per_step=2",
    "steps.num_steps=4",
    "reward.function=scripted_reward:digits",
    "reward.isolated=false",
    "reward.extract=null",
    "log.tensorboard=false",
    "checkpoint.export_hf=true",
)


def weights(model: ParallelModel) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]


def main() -> None:
    overrides = [*OVERRIDES, f"run.dir={sys.argv[1]}"]
    trainer = Trainer.from_config(QUICKSTART / "ppo.yaml", overrides)
    assert trainer.critic is not None
    models = {"policy": trainer.policy.model, "critic": trainer.critic.model}
    trainer.check_engine()
    for step in (1, 2, 3, 4):
        before = {name: weights(model) for name, model in models.items()}
        metrics = trainer.train_step()
        is_same = {
            name: all(map(torch.equal, before[name], weights(model)))
            for name, model in models.items()
        }
        assert is_same == {"policy": step <= 2, "critic": False}, (step, is_same)
        # The learning rate's course of a model counts its own updates.
        updates = {name: model.num_updates for name, model in models.items()}
        assert updates == {"policy": 2 * max(0, step - 2), "critic": 2 * step}
        assert ("policy/grad_norm" in metrics) == (step > 2), sorted(metrics)
        assert metrics["flops/update"] > 0 and metrics["critic/grad_norm"] > 0
    check_exports(trainer, trainer.save_checkpoint())
    trainer.close()


def check_exports(trainer: Trainer, checkpoint: Path) -> None:
    """Beside the checkpoint lie a causal language model and a sequence classifier of transformers,
    which gives responses of unequal lengths the critic's values.
    """
    prompts = [
        dataclasses.replace(prompt, response_tokens=(5, 6, 7, 8, 9, 4)[: 2 + 2 * i])
        for i, prompt in enumerate(trainer.prompts.take(3))
    ]
    batch = TrainBatch.supervised(prompts, Producer.here("the test"))
    assert trainer.critic is not None
    trainer.enter_training()
    values_T = trainer.critic.values(batch)
    if trainer.world.rank:
        return
    folder = checkpoint.parents[1] / "exports"
    assert {path.name for path in folder.iterdir()} == {"step_4", "step_4_critic"}
    AutoModelForCausalLM.from_pretrained(folder / "step_4")
    given: dict[str, Any] = {"output_loading_info": True, "dtype": torch.float32}
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "step_4_critic", **given
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(model).__name__ == model.config.architectures[0] == "Qwen3ForSequenceClassification"
    tokenizer = AutoTokenizer.from_pretrained(folder / "step_4_critic")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    # The value of the state that the last token was sampled from: the score of what is before it.
    rows = [[*prompt.tokens, *(prompt.response_tokens or ())[:-1]] for prompt in prompts]
    longest = max(map(len, rows))
    padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    with torch.no_grad():
        scores_B = model(torch.tensor(padded)).logits[:, 0]
        alone = float(model(torch.tensor(rows[:1])).logits)
    ours_B = values_T[batch.offsets[1:] - 1]
    # float32 sums in another order
    torch.testing.assert_close(scores_B, ours_B, rtol=1e-5, atol=1e-5)
    assert abs(alone - float(ours_B[0])) < 1e-5 and scores_B.std() > 1e-4


if __name__ == "__main__":
    main()
