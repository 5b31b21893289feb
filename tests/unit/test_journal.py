"""Which ranks make the sinks of a run: the one that writes, and no other."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.config.load import load_config_dict
from hybridrl.loop import journal
from hybridrl.loop.journal import Journal

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
