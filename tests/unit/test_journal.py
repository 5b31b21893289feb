"""Which ranks make the sinks of a run: the one that writes, and no other."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.config.load import load_config_dict
from hybridrl.loop import journal
from hybridrl.loop.journal import Journal, _compared, before_and_after
from hybridrl.loop.rollout_setup import unseen_bytes
from hybridrl.metrics.estimates import Estimate

SERVICES = {"Wandb": "a project", "Mlflow": "an experiment"}


def stand_in_world(rank: int) -> Any:
    """What a journal asks of the ranks, without a process group."""
    heartbeat = SimpleNamespace(reports=SimpleNamespace())
    platform = SimpleNamespace(is_cpu=True)
    agreed = contextlib.nullcontext
    return SimpleNamespace(
        rank=rank, size=8, num_hosts=1, platform=platform, heartbeat=heartbeat, all_agree=agreed
    )


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_rank_0_alone_writes_metrics_and_talks_to_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    made, asked = [], []

    class Service:
        def __init__(self, target: str, folder: Path) -> None:
            self.name = target
            made.append(target)

        def __getattr__(self, name: str) -> Any:
            return lambda *given: asked.append(name)

    for name in SERVICES:
        monkeypatch.setattr(journal, name, Service)
    samples = [{"prompt": "p"}] if rank == 0 else []
    monkeypatch.setattr(journal, "sample_records", lambda *given: iter(samples))
    config = load_config_dict(
        {
            "run": {"name": "a", "dir": str(tmp_path)},
            "model": {"init": "m"},
            "algorithm": {"name": "grpo"},
            "steps": {"samples_per_prompt": 2},
            "log": {"wandb": SERVICES["Wandb"], "mlflow": SERVICES["Mlflow"], "console": True},
        }
    )
    run = Journal(config, stand_in_world(rank))
    run.start(0, 2)
    sinks = [*run.sinks, *run.sample_sinks, *run.trackers]
    run.log(1, {"reward/mean": 0.5})
    given: Any = None
    run.dump_samples(1, given, given, given)
    run.finish(0, 1, {}, 1.0)
    run.close()
    files = {path.name for path in (tmp_path / "a").iterdir()}
    if rank == 0:
        assert made == [*SERVICES.values()] and files >= {"metrics.jsonl", "tensorboard"}
        found = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload().Tags()
        assert found["scalars"] == ["reward/mean"]
        assert {"samples/text_summary", "config/text_summary"} <= {*found["tensors"]}
        assert sorted(asked) == sorted(["begin", "metrics", "samples", "end"] * 2)
    else:
        assert not made and not asked and not sinks and files == {"logs"}
        assert [path.name for path in (tmp_path / "a" / "logs").iterdir()] == [f"rank_{rank}.phase"]


def test_figures_of_another_step_do_not_stand_for_the_last_evaluation() -> None:
    """The last evaluation has no accuracy where a score is above 1, the first one had."""
    by_step = {
        "0": {"reward": 0.25, "accuracy": 0.25, "accuracy_stderr": 0.1, "validation/loss": 2.0},
        "20": {"reward": 1.5, "form": 0.5, "sums/accuracy": 0.75},
        "30": {"validation/loss": 1.0},
    }
    found = before_and_after(by_step)
    assert found == {
        "eval_reward_before": 0.25,
        "accuracy_before": 0.25,
        "accuracy_before_stderr": 0.1,
        "eval_reward_after": 1.5,
        "form_after": 0.5,
        "sums/accuracy_after": 0.75,
        "validation/loss_before": 2.0,
        "validation/loss_after": 1.0,
    }
    assert _compared({"seconds": 1.0, **found}) == {
        "held-out accuracy": (Estimate(0.25, 0.1), None),
        "held-out form": (None, Estimate(0.5, None)),
        "sums/accuracy": (None, Estimate(0.75, None)),
        "held-out loss": (Estimate(2.0, None), Estimate(1.0, None)),
        "held-out reward": (Estimate(0.25, None), Estimate(1.5, None)),
    }


def test_peaks_count_lent_gradients_and_no_engine_that_gave_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GiB. torch counts an engine's 20, 6 of them lent to gradients, which have 4 more."""
    counted = {"most": 0, "now": 0}

    def hold(most: int, now: int) -> None:
        counted.update(most=max(most, counted["most"]), now=now)

    for name, value in {
        "max_memory_allocated": lambda: counted["most"] * 2**30,
        "reset_peak_memory_stats": lambda: counted.update(most=counted["now"]),
        "get_device_name": lambda: "NVIDIA H200",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    world = stand_in_world(0)
    world.platform.is_cpu, world.platform.synchronize = False, lambda: None
    config = load_config_dict(
        {
            "run": {"name": "a", "dir": str(tmp_path)},
            "model": {"init": "m"},
            "algorithm": {"name": "grpo"},
            "steps": {"samples_per_prompt": 2},
        }
    )
    run = Journal(config, world)
    lender = SimpleNamespace(released=0)
    lender.lend, lender.released_bytes = lambda size: [], lambda: lender.released * 2**30
    gradients = SimpleNamespace(unseen_bytes=0)
    model: Any = SimpleNamespace(memory=gradients, trained_weights=None)
    engine: Any = lender
    run.unseen_bytes = lambda: unseen_bytes({"policy": model}, engine)
    hold(50, 40)
    run.timer.start_step(1)
    with run.timer.phase("generate"):
        hold(45, 40)
    run.note_peak()  # memory goes to training
    lender.released, gradients.unseen_bytes = 14, 4 * 2**30
    with run.timer.phase("update"):
        hold(70, 41)
    with run.timer.phase("reshard"):
        gradients.unseen_bytes = 0  # they are released
        run.note_peak()
        lender.released = 0
        hold(44, 40)
    found = {phase: size // 2**30 for phase, size in run.timer.peak_bytes().items()}
    assert found == {"generate": 45, "update": 70 - 14 + 4, "reshard": 44, "step": 60, "run": 60}


def test_a_reward_that_is_the_accuracy_but_for_rounding_has_no_row() -> None:
    found = {"accuracy_before": 0.83, "eval_reward_before": 0.8299999833106995}
    assert list(_compared({**found, "accuracy_after": 0.9, "eval_reward_after": 0.9})) == [
        "held-out accuracy"
    ]
    assert "held-out reward" in _compared({**found, "accuracy_after": 0.9})


def test_an_evaluation_set_keeps_its_whole_name() -> None:
    assert list(_compared({"eval_sums/accuracy_before": 0.5})) == ["eval_sums/accuracy"]
