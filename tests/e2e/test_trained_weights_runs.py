"""Runs whose weights are gathered late, read by peers or freed learn the same, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART, exported_weights, run
from small_runs import small_run

PPO = (
    QUICKSTART / "grpo.yaml",
    "algorithm.name=ppo",  # a critic trains beside the policy, and a reference does not train
    "algorithm.kl_coef=0.01",
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    "model.dtype=bfloat16",
    "train.pp=1",  # two replicas
    "train.learning_rate=1e-3",
    "train.warmup_steps=0",
    "train.lr_schedule=constant",  # the same whatever steps.num_steps is
    "steps.prompts_per_step=8",
    "steps.samples_per_prompt=2",
    "steps.updates_per_step=2",
    "steps.eval_every=2",
    "data.eval_limit=8",
    "reward.function=scripted_reward:digits",
    "reward.extract=null",
    "rollout.verify=2",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "log.tensorboard=false",
)
LATE, FREED = "train.fuse_param_gather=true", "train.release_weights_in_rollout=true"
PEER = "rollout.transport=peer"
KNOBS = {
    "peer": (LATE, PEER),
    "freed": (FREED,),
    "both": (LATE, FREED),
}
MESSAGES = "reshard/messages"
SAME = ("policy/", "critic/", "reward/", "mismatch/", "eval/")


def train(folder: Path, *knobs: str, num_steps: int = 4) -> tuple[list[dict[str, float]], Path]:
    """Returns what the run learned, step by step, and its folder."""
    steps = f"steps.num_steps={num_steps}"
    run("train", *PPO, steps, f"run.dir={folder}", *knobs, "--world", "4")
    found = folder / "quickstart-grpo"
    lines = (found / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all((r[MESSAGES] == 0) == (PEER in knobs) for r in records)
    return [{k: v for k, v in r.items() if k.startswith(SAME)} for r in records], found


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares runs on CPU, which repeat exactly")
def test_late_gathers_peer_memory_and_freed_weights_learn_the_same(tmp_path: Path) -> None:
    expected, plain = train(tmp_path / "plain")
    weights = exported_weights(plain, tmp_path / "plain" / "hf")
    assert len(expected) == 4 and expected[0].keys() >= {"policy/loss", "critic/loss"}
    for name, knobs in KNOBS.items():
        if name == "both":  # goes on from a checkpoint half-way
            train(tmp_path / name, *knobs, num_steps=2)
        records, folder = train(tmp_path / name, *knobs)
        assert records == expected, name
    found = exported_weights(folder, tmp_path / "both" / "hf")
    assert all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares runs on CPU, which repeat exactly")
def test_a_run_whose_training_memory_is_given_back_goes_on_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    knobs = ("model.dtype=bfloat16", FREED, "checkpoint.every=1")
    found = []
    for folder, parts in (("whole", (2,)), ("parts", (1, 2))):
        for until in parts:  # each part by a Trainer of its own, and both of its fits
            with small_run(tmp_path / folder, *knobs) as trainer:
                trainer.fit(until=until)
                trainer.fit(until=until)
        (records,) = (tmp_path / folder).glob("*/metrics.jsonl")
        steps = [json.loads(line) for line in records.read_text().splitlines()]
        same = [{k: v for k, v in s.items() if k.startswith(SAME)} for s in steps]
        found.append([one for one in same if one])
    assert len(found[0]) == 2 and found[0] == found[1]
