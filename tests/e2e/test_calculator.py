"""examples/calculator: a model learns to call a tool, and is trained on exactly what it was fed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import ROOT, run
from packaged import PACKAGED
from transformers import AutoModelForCausalLM

from hybridrl import Trainer
from hybridrl.rollout.engine import Request

CALCULATOR = ROOT / "examples" / "calculator"
QUIET = ("log.tensorboard=false", "log.console=false")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs, with part 1 of the example and its weights."""
    folder = tmp_path_factory.mktemp("runs")
    run("train", CALCULATOR / "sft.yaml", f"run.dir={folder}", *QUIET)
    run("convert", folder / "calculator-sft", folder / "calculator-sft" / "hf", "--to", "hf")
    return folder


def settings(warm: Path, *more: str) -> list[str]:
    return [f"model.path={warm / 'calculator-sft' / 'hf'}", f"run.dir={warm}", *QUIET, *more]


@pytest.mark.full
@pytest.mark.dist
def test_grpo_learns_to_call_the_calculator_with_a_lag(warm: Path) -> None:
    named = ("run.name=lagged", "steps.max_policy_lag=1", "data.eval_prompts=null")
    given = settings(warm, *named, "steps.num_steps=20", "steps.eval_every=0")
    run("train", CALCULATOR / "grpo.yaml", *given, "--world", "2")
    lines = (warm / "lagged" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first, last = (sum(r["reward/mean"] for r in part) / 3 for part in (records[:3], records[-3:]))
    assert first < 0.45 and last > first + 0.25, (first, last)
    assert max(r["lag/max"] for r in records) == 1
    assert sum(r["lag/mean"] for r in records) / 20 > 0.3
    assert records[-1]["environment/turns_mean"] > 1.7


@pytest.mark.full
@pytest.mark.dist
def test_grpo_learns_to_call_the_calculator(warm: Path) -> None:
    given = settings(warm, "steps.num_steps=16", "steps.eval_every=0")
    run("train", CALCULATOR / "grpo.yaml", *given)
    lines = (warm / "calculator-grpo" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first, last = (sum(r["reward/mean"] for r in part) / 3 for part in (records[:3], records[-3:]))
    # It calls in three of ten responses at first; the rest of the reward is what GRPO adds.
    assert first < 0.45 and last > first + 0.25, (first, last)
    assert records[0]["environment/turns_mean"] < 1.5 < 1.8 < records[-1]["environment/turns_mean"]
    summary = json.loads((warm / "calculator-grpo" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.1 and summary["accuracy_after"] > 0.6
    # Another process, and the checkpoint: the same responses to the same prompts.
    said = json.loads(run("eval", CALCULATOR / "grpo.yaml", *given, "--json").splitlines()[-1])
    assert said["accuracy"] == pytest.approx(summary["accuracy_after"])


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("lag", [0, 1])
def test_an_agent_learns_to_call_the_calculator(warm: Path, lag: int) -> None:
    named = (f"run.name=agent-{lag}", f"steps.max_policy_lag={lag}")
    given = settings(warm, *named, "steps.num_steps=16", "steps.eval_every=0")
    run("train", ROOT / "examples" / "agents" / "grpo.yaml", *given, "--world", "2", timeout_s=500)
    lines = (warm / f"agent-{lag}" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first, last = (sum(r["reward/mean"] for r in part) / 3 for part in (records[:3], records[-3:]))
    assert first < 0.45 and last > first + 0.25, (first, last)
    assert records[0]["agent/turns_mean"] < 1.5 < 1.8 < records[-1]["agent/turns_mean"]
    summary = json.loads((warm / f"agent-{lag}" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.1 and summary["accuracy_after"] > 0.6


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("engine", PACKAGED)
def test_a_replica_of_two_ranks_has_turns_too(warm: Path, engine: str) -> None:
    named = (f"rollout.engine={engine}", f"run.name={engine}")
    more = (*named, "rollout.tp=2", "data.eval_prompts=null")
    short = ("steps.num_steps=2", "steps.eval_every=0", "steps.updates_per_step=2")
    given = settings(warm, *more, *short)
    run("train", CALCULATOR / "grpo.yaml", *given, "--world", "2", timeout_s=400)
    for line in (warm / engine / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert 1.1 < record["environment/turns_mean"] < 2
        # Over all turns, continued from tokens that the engine did not sample; fp32.
        assert record["mismatch/logprob_diff_max"] < 1e-4


@pytest.mark.full
def test_what_is_trained_on_is_what_the_engine_was_fed(warm: Path) -> None:
    directory = warm / "calculator-sft" / "hf"
    more = ("run.name=exact", "algorithm.kl_coef=0.1", "steps.prompts_per_step=8")
    trainer = Trainer.from_config(CALCULATOR / "grpo.yaml", settings(warm, *more))
    fed: dict[int, list[Request]] = {}
    submit = trainer.engine.submit

    def recorded(requests: list[Request]) -> None:
        submit(requests)
        for request in requests:
            fed.setdefault(request.request_id, []).append(request)

    trainer.engine.submit = recorded  # type: ignore[method-assign,assignment]
    trainer.check_engine()
    fed.clear()
    batch = trainer.sampler.score(trainer.sampler.generate(trainer.prompts.take(8), step=0))
    assert batch.observed_T is not None and int(batch.observed_T.sum()) > 20
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trained_T = trainer.policy.logprobs(batch.to_train(batch.producer))
    mask_T, calls = batch.response_mask_T, []
    for i, sample_id in enumerate(batch.sample_ids_B.tolist()):
        bounds = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        tokens_L, mask_L = batch.tokens_T[bounds], mask_T[bounds]
        for request in fed[sample_id]:
            assert list(request.prompt) == tokens_L[: len(request.prompt)].tolist()
        text = trainer.tokenizer.decode(tokens_L.tolist())
        calls += re.findall(r"\[(\d+)\*(\d+)\]<eos>\((\d+)\)", text)
        # Log-probabilities of the finished sequence, by transformers, where tokens were sampled.
        with torch.no_grad():
            logits_LV = reference(tokens_L[None]).logits[0].log_softmax(-1)
        expected_L = logits_LV[:-1].gather(1, tokens_L[1:, None])[:, 0]
        for found_T in (trained_T, batch.behaviour_logp_T):
            found_L = found_T[bounds]
            # fp32 sums in another order, of log-probabilities of a few nats.
            torch.testing.assert_close(
                found_L[1:][mask_L[1:]], expected_L[mask_L[1:]], rtol=1e-4, atol=1e-4
            )
            assert not found_L[~mask_L].any()
    assert len(calls) > 5 and all(int(a) * int(b) == int(product) for a, b, product in calls)
    metrics = trainer.train_step()
    assert metrics["environment/turns_mean"] > 1
    assert metrics["response_tokens/mean"] < batch.lengths_B.float().mean()
    trainer.close()
