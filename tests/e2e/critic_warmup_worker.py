"""One rank of the test of a critic's warm-up: critic_warmup_worker.py FOLDER

After each step, which of the two models' weights are bit for bit as before it.
"""

from __future__ import annotations

import sys

import torch
from command_line import QUICKSTART

from hybridrl import Trainer
from hybridrl.training.model import ParallelModel

OVERRIDES = (
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    "train.tp=1",
    "train.pp=1",
    "train.learning_rate=1e-3",
    "train.warmup_steps=0",
    "algorithm.critic_warmup_steps=2",
    "data.eval_prompts=null",
    "steps.eval_every=0",
    "steps.prompts_per_step=6",
    "steps.updates_per_step=2",
    "steps.num_steps=4",
    "reward.function=scripted_reward:digits",
    "reward.extract=null",
    "log.tensorboard=false",
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
    trainer.close()


if __name__ == "__main__":
    main()
