"""The loss on held-out rows is transformers' own; a run has the epochs that it was asked for."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import MARKED, byte_tokenizer
from command_line import QUICKSTART, ROOT
from small_runs import small_run
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
)

from hybridrl import Trainer
from hybridrl.cli.eval import evaluated_config
from hybridrl.contracts.prompts import in_gaps
from hybridrl.hybrid_engine.export import export_hf
from hybridrl.loop.run import evaluate_rank
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.stopping import StopAsked

ROWS = ROOT / "tests" / "data"
CLOSE = 1e-5  # nats: fp32 sums of some hundred terms, in another order
SUPERVISED = (
    "data.eval_share=0",
    "steps.stop_at_accuracy=null",
    "data.chat_template=true",
    "data.max_prompt_tokens=300",
    "data.max_response_tokens=300",
    "train.micro_batch_tokens=1024",
    "train.learning_rate=1e-2",
    "steps.samples_per_prompt=1",
    "steps.prompts_per_step=2",
    "rollout.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.save_pretrained(folder)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    shape: Any = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=2, **sizes)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(shape)
    made.config.architectures = [type(made).__name__]
    made.save_pretrained(folder)
    return folder


def records(trainer: Trainer) -> list[dict[str, Any]]:
    lines = (trainer.journal.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def export(trainer: Trainer, folder: Path) -> Path:
    """Writes the policy's weights as an HF directory."""
    model, source = trainer.policy.model, trainer.source
    shapes = hf_shapes(source.family, source.shape)
    config = dict(source.hf_config)
    export_hf(folder, model.whole_weights(), shapes, torch.float32, config, peers=trainer.world)
    return folder


def transformers_sums(folder: Path, trainer: Trainer, is_rejected: bool = False) -> torch.Tensor:
    """Each row's log-likelihood and number of learned tokens by transformers: (rows, 2)."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in trainer.validation._prompts:
        response = prompt.rejected_tokens if is_rejected else prompt.response_tokens
        gaps = prompt.rejected_gaps if is_rejected else prompt.response_gaps
        assert response is not None
        labels = [-100] * len(prompt.tokens)
        flags = in_gaps(len(response), gaps)
        labels += [-100 if gap else t for t, gap in zip(response, flags, strict=True)]
        ids = torch.tensor([[*prompt.tokens, *response]])
        with torch.no_grad():
            loss = oracle(input_ids=ids, labels=torch.tensor([labels])).loss
        num = sum(label >= 0 for label in labels)
        found.append([-float(loss) * num, num])
    return torch.tensor(found, dtype=torch.float64)


def test_validation_loss_of_demonstrations_is_that_of_transformers(
    model: Path, tmp_path: Path
) -> None:
    knobs = (
        "model.init=null",
        f"model.path={model}",
        f"data.prompts={ROWS / 'alpaca.jsonl'}",
        f"data.validation={ROWS / 'ultrachat.jsonl'}",
        "steps.num_epochs=2.5",
        "steps.eval_every=1",
    )
    with small_run(tmp_path, *SUPERVISED, *knobs, config="sft.yaml") as trainer:
        trainer.fit()
        found = records(trainer)
        assert [record["step"] for record in found] == [1, 2, 3]  # 2 rows, 2 a step
        assert [record["train/epoch"] for record in found] == [1.0, 2.0, 3.0]
        out = export(trainer, tmp_path / "hf")
        sums = transformers_sums(out, trainer).sum(0)
        before = transformers_sums(model, trainer).sum(0)
        log = (trainer.journal.folder / "logs" / "rank_0.log").read_text()
        summary = json.loads((trainer.journal.folder / "summary.json").read_text())
    expected = float(-sums[0] / sums[1])
    assert found[-1]["eval/loss"] == pytest.approx(expected, abs=CLOSE)
    assert found[-1]["eval/perplexity"] == pytest.approx(math.exp(expected), rel=2 * CLOSE)
    assert found[0]["eval/loss"] != found[-1]["eval/loss"], "weights have changed"
    assert f"held-out loss {float(-before[0] / before[1]):.4g}" in log
    assert summary["validation_loss"] == found[-1]["eval/loss"]
    assert summary["validation/loss_after"] == found[-1]["eval/loss"]
    assert summary["validation/loss_before"] > summary["validation/loss_after"]
    shown = f"held-out loss {found[-1]['eval/loss']:.3f}"
    assert shown in next(line for line in log.splitlines() if line.startswith("step 3/3"))
    assert "[gen]" not in log and "[reshard]" not in log  # phases of runs with rollouts


def test_a_stop_between_a_step_and_its_evaluation_leaves_one_record(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = (
        "model.init=null",
        f"model.path={model}",
        f"data.prompts={ROWS / 'alpaca.jsonl'}",
        f"data.validation={ROWS / 'ultrachat.jsonl'}",
        f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}",
        "data.eval_limit=2",
        "steps.num_steps=3",
        "steps.eval_every=2",
    )
    every = [*SUPERVISED, *knobs]
    with small_run(tmp_path, *every, config="sft.yaml") as trainer:

        def stop(world: Any) -> None:
            if trainer.step == 2:
                raise StopAsked(signal.SIGTERM)

        with monkeypatch.context() as patched, pytest.raises(SystemExit):
            patched.setattr("hybridrl.loop.trainer.check_stop", stop)
            trainer.fit()
        assert "eval/loss" not in records(trainer)[-1] and trainer.step == 2
    with small_run(tmp_path, *every, config="sft.yaml") as trainer:
        trainer.fit()
        found = records(trainer)
        assert set(trainer.evaluations.by_step) == {"0", "2", "3"}
    assert [record["step"] for record in found] == [1, 2, 3]
    measured = {"policy/loss", "eval/loss", "eval/perplexity", "eval/reward"}
    assert measured <= found[1].keys() and measured <= found[2].keys()


def test_a_reward_model_is_measured_and_scored_at_the_last_token(
    model: Path, tmp_path: Path
) -> None:
    """Figures, export and `hybridrl eval` agree with transformers' classifier, at the end token."""
    knobs = (
        "model.init=null",
        f"model.path={model}",
        "algorithm.name=reward_model",
        f"data.prompts={ROWS / 'dpo_mix.jsonl'}",
        f"data.validation=[{ROWS / 'ultrafeedback_binarized.jsonl'},{ROWS / 'hh_rlhf.jsonl'}]",
        "steps.num_steps=2",
        "checkpoint.export_hf=true",
        "reward.function=exact_match",
    )
    with small_run(tmp_path, *SUPERVISED, *knobs, config="sft.yaml") as trainer:
        trainer.fit()
        found, run = records(trainer), trainer.journal.folder
        pairs = [
            [[*prompt.tokens, *side] for side in (prompt.response_tokens, prompt.rejected_tokens)]
            for prompt in trainer.validation._prompts
        ]
        log = (run / "logs" / "rank_0.log").read_text()
    assert found[-1]["critic/learning_rate"] > 0 and "policy/learning_rate" not in found[-1]
    export = run / "exports" / "step_2"
    oracle = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32).eval()
    pad = oracle.config.pad_token_id
    # What pads texts is what the model passes over, and no end token.
    assert pad == AutoTokenizer.from_pretrained(export).pad_token_id not in (None, 2)
    with torch.no_grad():
        scores = torch.tensor(
            [[float(oracle(torch.tensor([one])).logits) for one in pair] for pair in pairs]
        ).double()
        rows = [torch.tensor(one) for pair in pairs for one in pair]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        lengths = torch.tensor([[len(row)] for row in rows])
        mask = (torch.arange(padded.size(1)) < lengths).long()
        together = oracle(padded, attention_mask=mask).logits.double()
    torch.testing.assert_close(together.view_as(scores), scores, atol=CLOSE, rtol=CLOSE)
    loss = float(-logsigmoid(scores[:, 0] - scores[:, 1]).mean())
    assert found[-1]["eval/loss"] == pytest.approx(loss, abs=CLOSE)
    accuracy = float((scores[:, 0] > scores[:, 1]).double().mean())
    assert found[-1]["eval/preference/accuracy"] == accuracy
    assert f"held-out preference accuracy {accuracy:.3f}" in log
    # The same of the folder alone, with knobs of training that do not fit the run.
    given = ["steps.prompts_per_step=3", "steps.samples_per_prompt=4"]
    config, checkpoint = evaluated_config(run, given)
    measured = evaluate_rank(config, checkpoint, None)
    assert measured["validation"]["loss"] == pytest.approx(loss, abs=CLOSE)
    assert measured["validation"]["preference/accuracy"] == accuracy
    assert measured["num_prompts"] == 0 and measured["checkpoint"].endswith("checkpoints/step_2")
    state = json.loads((run / "checkpoints" / "step_2" / "state.json").read_text())
    assert state["score_token"] == "last"


def test_validation_loss_of_pairs_is_that_of_transformers(model: Path, tmp_path: Path) -> None:
    knobs = (
        "model.init=null",
        f"model.path={model}",
        "algorithm.name=dpo",
        f"data.prompts={ROWS / 'dpo_mix.jsonl'}",
        f"data.validation=[{ROWS / 'ultrafeedback_binarized.jsonl'},{ROWS / 'hh_rlhf.jsonl'}]",
        "steps.num_steps=2",
    )
    with small_run(tmp_path, *SUPERVISED, *knobs, config="sft.yaml") as trainer:
        trainer.fit()
        found = records(trainer)
        out = export(trainer, tmp_path / "hf")
        chosen, rejected = (
            torch.sub(*(transformers_sums(folder, trainer, side)[:, 0] for folder in (out, model)))
            for side in (False, True)
        )
        likelihood = transformers_sums(out, trainer).sum(0)
    assert "eval/loss" not in found[0] and len(chosen) == 4
    loss = float(-logsigmoid(0.1 * (chosen - rejected)).mean())
    assert found[-1]["eval/loss"] == pytest.approx(loss, abs=CLOSE)
    perplexity = math.exp(float(-likelihood[0] / likelihood[1]))
    assert found[-1]["eval/perplexity"] == pytest.approx(perplexity, rel=2 * CLOSE)
    accuracy = float((chosen > rejected).double().mean())
    assert found[-1]["eval/preference/accuracy"] == accuracy


def test_rows_that_are_held_out_of_demonstrations_give_a_loss(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} is", "completion": f"{number}"} for number in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = ("model.init=null", f"model.path={model}", f"data.prompts={path}")
    shared = [knob for knob in SUPERVISED if "eval_share" not in knob]
    more = ("data.eval_share=0.2", "steps.num_steps=1", "reward.function=exact_match")
    with small_run(tmp_path, *shared, *knobs, *more, config="sft.yaml") as trainer:
        assert not trainer.eval_prompts, "no answers to compare with"
        assert 0 < len(trainer.validation._prompts) < 10
        assert len(trainer.prompts) + len(trainer.validation._prompts) == 20
        trainer.fit()
        assert records(trainer)[-1]["eval/loss"] > 0
