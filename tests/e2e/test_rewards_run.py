"""Rewards in a run: several scorers with weights, some of which fail, on ranks that share engines'
work; and what the run says of them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from command_line import QUICKSTART, records, run

NUM_PROMPTS, NUM_SAMPLES = 8, 4


def write_run(folder: Path, **reward: object) -> Path:
    content = {
        "run": {"name": "mine", "dir": str(folder)},
        "model": {"init": str(QUICKSTART / "model")},
        "train": {"micro_batch_tokens": 512},
        "rollout": {"max_new_tokens": 12},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 6},
        "reward": reward,
        "steps": {
            "prompts_per_step": NUM_PROMPTS,
            "samples_per_prompt": NUM_SAMPLES,
            "updates_per_step": 4,
            "num_steps": 2,
        },
        "log": {"rollouts_every": 1},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(content))
    return folder / "c.yaml"


FUNCTIONS = {
    "digits": {"function": "scripted_reward:digits", "weight": 2.0},
    "flaky": {"function": "own_rewards:fails_on_odd_lengths", "timeout_s": 2.0},
    "short": {"function": "length", "options": {"max_chars": 40, "buffer_chars": 40}},
}


@pytest.mark.dist
def test_failures_are_dropped_counted_and_trained_around(tmp_path: Path) -> None:
    """What is left of 32 samples need be no multiple of the 4 updates."""
    config = write_run(tmp_path, functions=FUNCTIONS, on_error="drop")
    run("train", config, "--world", "2")
    found = records(tmp_path / "mine")
    assert len(found) == 2
    for step, record in enumerate(found, 1):
        errors = record["reward/flaky/errors"]
        assert 0 < errors < NUM_PROMPTS * NUM_SAMPLES
        assert record["reward/digits/errors"] == record["reward/short/errors"] == 0
        dump = next((tmp_path / "mine" / "rollouts").glob(f"*{step}.jsonl"))
        samples = [json.loads(line) for line in dump.read_text().splitlines()]
        assert 0 < len(samples) <= NUM_PROMPTS * NUM_SAMPLES - errors
        assert all(len(sample["response"]) % 2 == 0 for sample in samples)
        parts = [record[f"reward/{name}/mean"] for name in ("digits", "flaky", "short")]
        assert record["reward/mean"] == pytest.approx(2 * parts[0] + parts[1] + parts[2], abs=1e-5)
        assert record["policy/grad_norm"] > 0


@pytest.mark.dist
def test_pass_at_k_leaves_out_groups_of_fewer_than_k(tmp_path: Path) -> None:
    config = write_run(tmp_path, functions=FUNCTIONS, on_error="drop")
    more = ("algorithm.name=pass_at_k", "algorithm.pass_k=3")
    run("train", config, *more, f"steps.prompts_per_step={2 * NUM_PROMPTS}", "--world", "2")
    dropped = 0
    for step, record in enumerate(records(tmp_path / "mine"), 1):
        dump = next((tmp_path / "mine" / "rollouts").glob(f"*{step}.jsonl"))
        lines = [json.loads(line)["sample"] for line in dump.read_text().splitlines()]
        groups = Counter(sample // NUM_SAMPLES for sample in lines)
        assert set(groups.values()) <= {3, 4}
        assert record["reward/dropped_groups"] == 2 * NUM_PROMPTS - len(groups)
        dropped += 2 * NUM_PROMPTS - len(groups)
    assert dropped > 0
