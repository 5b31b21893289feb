"""Phases take turns, and an engine of one process needs no process group."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.phases import Phase, PhaseError, PhaseSwitch
from hybridrl.hybrid_engine.plan import PlanError
from hybridrl.models.weights import RankLayout, hf_layout


class Engine:
    def __init__(self) -> None:
        self.live = {"w": torch.zeros(3, 2)}
        self.version = -1
        self.said: list[str] = []

    def layout(self) -> RankLayout:
        return hf_layout({name: tuple(tensor.shape) for name, tensor in self.live.items()})

    def tensors(self) -> Mapping[str, Tensor]:
        return self.live

    def sleep(self) -> None:
        self.said.append("sleep")

    def begin_update(self) -> None:
        self.said.append("map weights")

    def finish_update(self, version: int) -> None:
        self.version = version
        self.said.append("map KV cache")


class Gradients:
    def __init__(self, said: list[str]) -> None:
        self.said = said

    def release(self) -> None:
        self.said.append("release")

    def restore(self) -> None:
        self.said.append("restore")


def test_phases_alternate() -> None:
    phases = PhaseSwitch()
    phases.require(Phase.TRAIN, "an update")
    with pytest.raises(PhaseError, match="cannot enter phase train: it is train already"):
        phases.enter(Phase.TRAIN)
    phases.enter(Phase.ROLLOUT)
    with pytest.raises(PhaseError, match="an update needs phase train, but it is rollout"):
        phases.require(Phase.TRAIN, "an update")
    phases.enter(Phase.TRAIN)
    phases.require(Phase.TRAIN, "an update")


def test_engine_of_one_process_follows_the_policy() -> None:
    engine, weights = Engine(), {"w": torch.arange(6.0).reshape(3, 2)}
    hybrid = HybridEngine([hf_layout({"w": (3, 2)})], weights, engine, staging_bytes=1 << 20)
    stats = hybrid.to_rollout()
    assert (stats.version, engine.version, stats.total_sent_bytes) == (0, 0, 0)
    assert torch.equal(engine.live["w"], weights["w"])
    weights["w"] = weights["w"] + 1  # tensors are looked up anew, so they may be replaced
    hybrid.to_train()
    assert hybrid.to_rollout(9).version == engine.version == 9
    assert torch.equal(engine.live["w"], weights["w"])
    weights["w"].mul_(2)
    assert hybrid.to_rollout().version == 10  # a loop that says nothing has trained since
    assert torch.equal(engine.live["w"], weights["w"])


def test_engine_refuses_weights_that_are_not_the_layouts() -> None:
    layouts = [hf_layout({"w": (3, 2)})]
    with pytest.raises(PlanError, match=r"rank 0: parameter w: got shape \(2, 3\)"):
        HybridEngine(layouts, {"w": torch.zeros(2, 3)}, Engine(), staging_bytes=64)
    with pytest.raises(PlanError, match=r"rank 0: w\[0:3, 0:2\] is needed"):
        layouts = [hf_layout({"v": (3, 2)})]
        HybridEngine(layouts, {"v": torch.zeros(3, 2)}, Engine(), staging_bytes=64)


def test_each_side_gives_memory_back_before_the_other_takes_it() -> None:
    engine, weights = Engine(), {"w": torch.ones(3, 2)}
    hybrid = HybridEngine(
        [hf_layout({"w": (3, 2)})],
        weights,
        engine,
        staging_bytes=1 << 20,
        training=[Gradients(engine.said)],
    )
    hybrid.to_rollout()
    hybrid.to_train()
    into_rollout = ["release", "map weights", "map KV cache"]
    assert engine.said == [*into_rollout, "sleep", "restore"]
