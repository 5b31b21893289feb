"""Engines on ranks of their own generate while the policy trains; checks are in ahead_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from packaged import PACKAGED

WORKER = str(Path(__file__).with_name("ahead_worker.py"))
TWO = ("placement.policy=0", "placement.rollout=1")
THREE = ("placement.policy=2", "placement.rollout=0-1")
# So that in few steps of few samples some go on with new weights.
MANY = "rollout.unfinished_at_update=0.6"
TP = ("rollout.tp=2",)
TURNS = (
    "environment={name: 'own_environments:Counts', workers: 2, max_turns: 3}",
    "reward.function=environment",
)
REPLACES = ("algorithm.max_resampling=2", "reward.function=scripted_reward:begins_even")


@pytest.mark.dist
def test_engines_generate_while_the_policy_trains(tmp_path: Path) -> None:
    parts = "versions,overlap,stopped,stuck,fails"
    run_ranks(2, WORKER, [str(tmp_path), "scripted", "2", parts, *TWO, MANY], timeout_s=300)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "lag", "parts", "knobs"),
    [
        ("hf", 1, "versions,repeats,fails", (*THREE, "rollout.unfinished_at_update=0.3")),
        ("hf", 1, "versions,repeats", TWO),
        ("hf", 3, "versions,stopped", (*THREE, "rollout.in_flight=14", MANY)),
        ("scripted", 2, "versions,killed", (*TWO, "rollout.at_lag_bound=drop", MANY)),
        ("scripted", 1, "versions,killed", (*TWO, "algorithm.name=remax")),
        ("scripted", 2, "repeats,stopped", (*THREE, MANY, *REPLACES)),
        ("scripted", 2, "repeats,stopped", (*THREE, MANY, *TURNS)),
        ("hf", 1, "killed", (*TWO, *TURNS)),
    ],
)
def test_runs_that_generate_ahead_repeat(
    engine: str, lag: int, parts: str, knobs: tuple[str, ...], tmp_path: Path
) -> None:
    world = 2 if TWO[0] in knobs else 3
    run_ranks(world, WORKER, [str(tmp_path), engine, str(lag), parts, *knobs], timeout_s=500)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
@pytest.mark.parametrize(
    "knobs",
    [(*TP, *THREE), TP, (), (*TP, *TURNS)],
    ids=["apart", "shared", "replicas", "turns of two ranks"],
)
def test_replicas_of_a_packages_engine_repeat_with_a_lag(
    engine: str, knobs: tuple[str, ...], tmp_path: Path
) -> None:
    world = 3 if THREE[0] in knobs else 2
    run_ranks(world, WORKER, [str(tmp_path), engine, "2", "repeats", *knobs], timeout_s=500)
