"""Whole runs, two data-parallel ranks, of what algorithms ask of the loop: further prompts, greedy
responses, a state of their own. Through the command line, with the quickstart's model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import FRESH, NO_EVALUATION, QUICKSTART, run

SMALL = (
    QUICKSTART / "grpo.yaml",
    *FRESH,
    *NO_EVALUATION,
    "steps.prompts_per_step=6",
    "log.tensorboard=false",
    "reward.function=scripted_reward:begins_even",
    "reward.extract=null",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "train.learning_rate=1e-3",
)
ADAPTIVE = (
    "steps.num_steps=4",
    "steps.samples_per_prompt=3",
    "steps.updates_per_step=2",
    "algorithm.max_resampling=2",
    "algorithm.kl_coef=0.05",
    "algorithm.kl_target=0.01",
    "algorithm.kl_horizon=100",
    "algorithm.correction.weight=token",
    "algorithm.correction.reject=geometric",
)


def train(folder: Path, *more: str) -> list[dict[str, float]]:
    run("train", *SMALL, f"run.dir={folder}", *more, "--world", "2")
    lines = (folder / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.dist
def test_resampling_and_the_kl_coefficient_go_on_after_a_stop_as_without_one(
    tmp_path: Path,
) -> None:
    whole = train(tmp_path / "whole", *ADAPTIVE)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "quickstart-grpo" / "checkpoints" / "step_4")
    again = train(tmp_path / "stopped", *ADAPTIVE)

    assert sum(record["generate/resampled_groups"] for record in whole) > 0
    assert all(0 <= record["reward/uniform_groups"] < 1 for record in whole)
    assert all(record["generate/resampling_rounds"] <= 2 for record in whole)
    for record in whole:  # as many tokens a sample, but for what the dropped ones had
        share = record["generate/tokens"] / (18 + 3 * record["generate/resampled_groups"])
        assert share == pytest.approx(6 + record["response_tokens/mean"], rel=0.2)
        rate = record["throughput/tokens_per_s_per_gpu"] * record["time_s/step"] * 2
        assert rate == pytest.approx(record["generate/tokens"])
    coefficients = [record["policy/kl_coef"] for record in whole]
    assert coefficients[0] == 0.05 and len(set(coefficients)) == 4
    # 18 samples a step: at most a fifth of 18 / 100 more or less.
    for before, after in zip(coefficients, coefficients[1:], strict=False):
        assert abs(after / before - 1) <= 0.2 * 18 / 100 + 1e-9
    for record in whole:
        assert record["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert record["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)
        assert record["correction/rejected_sequences"] == 0, "engine and trainer agree in fp32"
        assert record["mismatch/ppl_ratio"] == pytest.approx(1, abs=1e-4)
    assert [record["step"] for record in again] == [1, 2, 3, 4]
    timed = ("time", "slowest", "throughput", "memory", "mfu", "generate/idle_share")
    timed += ("reshard/transfer_s",)
    for one, two in zip(whole, again, strict=True):
        names = [name for name in one if not name.startswith(timed)]
        assert {name: one[name] for name in names} == {name: two[name] for name in names}


@pytest.mark.full
@pytest.mark.dist
def test_remax_trains_on_one_sample_a_prompt_against_the_greedy_one(tmp_path: Path) -> None:
    found = train(
        tmp_path,
        "algorithm.name=remax",
        "steps.num_steps=2",
        "steps.samples_per_prompt=1",
        "log.rollouts_every=1",
    )
    rollouts = (tmp_path / "quickstart-grpo" / "rollouts").glob("*.jsonl")
    samples = [json.loads(line) for path in rollouts for line in path.read_text().splitlines()]
    assert sorted(sample["sample"] for sample in samples) == sorted([*range(6)] * 2)
    assert all(record["policy/grad_norm"] > 0 for record in found), "samples differ from greedy"
