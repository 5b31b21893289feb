"""Phases take turns, and an engine of one process needs no process group."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from thread_ranks import only_rank
from torch import Tensor

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.memory.headroom import Headroom
from hybridrl.hybrid_engine.memory.phases import Phase, PhaseError, PhaseSwitch
from hybridrl.hybrid_engine.planning.plan import PlanError
from hybridrl.models.sources import FullWeights
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

    def sleep(self, keeps_memory: bool = False) -> None:
        self.said.append("stop" if keeps_memory else "sleep")

    def begin_update(self) -> None:
        self.said.append("map weights")

    def finish_update(self, version: int) -> None:
        self.version = version
        self.said.append("map KV cache")


class Gradients:
    def __init__(self, said: list[str], may_stay: bool = False) -> None:
        self.said, self.may_stay, self.growth_bytes = said, may_stay, 0

    def release(self) -> None:
        self.said.append("release")

    def restore(self) -> None:
        self.said.append("restore")


def test_phases_alternate() -> None:
    phases = PhaseSwitch()
    phases.require(Phase.TRAIN, "an update")
    with pytest.raises(PhaseError, match="train, because it is the current phase"):
        phases.enter(Phase.TRAIN)
    phases.enter(Phase.ROLLOUT)
    with pytest.raises(
        PhaseError, match="update needs phase train, but the current phase is rollout"
    ):
        phases.require(Phase.TRAIN, "an update")
    phases.enter(Phase.TRAIN)
    phases.require(Phase.TRAIN, "an update")


def test_engine_of_one_process_follows_the_policy() -> None:
    engine, weights = Engine(), {"w": torch.arange(6.0).reshape(3, 2)}
    hybrid = HybridEngine(
        FullWeights([hf_layout({"w": (3, 2)})], weights), engine, only_rank(), staging_bytes=1 << 20
    )
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
        HybridEngine(
            FullWeights(layouts, {"w": torch.zeros(2, 3)}), Engine(), only_rank(), staging_bytes=64
        )
    with pytest.raises(PlanError, match=r"rank 0: w\[0:3, 0:2\] is needed"):
        layouts = [hf_layout({"v": (3, 2)})]
        HybridEngine(
            FullWeights(layouts, {"v": torch.zeros(3, 2)}), Engine(), only_rank(), staging_bytes=64
        )


def test_each_side_gives_memory_back_before_the_other_takes_it() -> None:
    engine, weights = Engine(), {"w": torch.ones(3, 2)}
    hybrid = HybridEngine(
        FullWeights([hf_layout({"w": (3, 2)})], weights),
        engine,
        only_rank(),
        staging_bytes=1 << 20,
        training=[Gradients(engine.said)],
    )
    hybrid.before_change = lambda: engine.said.append("measure")
    hybrid.to_rollout()
    hybrid.to_train()
    into_rollout = ["release", "measure", "map weights", "map KV cache"]
    assert engine.said == [*into_rollout, "measure", "sleep", "restore"]


class Device:
    """Of 100 bytes, of which the engine takes 20 while it is awake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
        self.said, self.in_training, self.heard = said, 0, 0
        self.flushes = 0
        made = partial(Headroom, self.measure, lambda: self.flushes)
        monkeypatch.setattr("hybridrl.hybrid_engine.engine.Headroom", made)

    def measure(self) -> tuple[int, int]:
        last = {word: i for i, word in enumerate(self.said)}
        awake = last.get("map KV cache", -1) > last.get("sleep", -1)
        freed = last.get("release", -1) > last.get("restore", -1)
        return 100 - 20 * awake - (0 if freed else self.in_training), 100


def test_nothing_is_freed_once_a_whole_step_has_left_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, weights = Engine(), {"w": torch.ones(3, 2)}
    device, gradients = Device(monkeypatch, engine.said), Gradients(engine.said)
    layouts = [hf_layout({"w": (3, 2)})]
    hybrid = HybridEngine(
        FullWeights(layouts, weights), engine, only_rank(), staging_bytes=64, training=[gradients]
    )
    into_rollout = ["release", "map weights", "map KV cache"]

    def step(used: int) -> bool:
        """Trains with so many bytes; returns whether all stays afterwards."""
        hybrid.to_train()
        device.in_training = used
        return hybrid.to_rollout().keeps_memory

    def said() -> list[str]:
        """Returns what was said since the last time."""
        start, device.heard = device.heard, len(engine.said)
        return engine.said[start:]

    assert not hybrid.to_rollout().keeps_memory  # nothing has been updated yet
    gradients.may_stay = True
    assert not step(71)  # 71 + 20 for the engine, and less than 10 to spare
    assert said() == [*into_rollout, "sleep", "restore", *into_rollout]
    assert step(70)
    assert said() == ["sleep", "restore", *into_rollout]
    assert step(70)
    assert said() == ["stop", "restore", "map weights", "map KV cache"]
    assert step(75)  # less to spare than at first, but the engine is there
    assert said() == ["stop", "map weights", "map KV cache"]
    assert not step(76)  # less than 5 left: both take turns again
    hybrid.to_train()
    assert said() == ["stop", "map weights", "map KV cache", "sleep"]
    hybrid.to_rollout()
    assert step(70)
    said()
    hybrid.to_train(frees_memory=True)  # for what is large and rare
    assert said() == ["sleep", "restore"]
    assert not hybrid.to_rollout().keeps_memory  # what is free now is not what an update leaves
    assert said() == into_rollout
    assert step(70)
    assert said() == ["sleep", "restore", *into_rollout]
    hybrid.to_train()
    hybrid.free_engine()  # as for a checkpoint after an evaluation, in the training phase
    assert said() == ["stop", "restore", "sleep"]
    assert not hybrid.to_rollout().keeps_memory and step(70)
    assert torch.equal(engine.live["w"], weights["w"])


def test_headroom_is_for_full_micro_batches_and_not_taken_from_a_flushed_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, weights = Engine(), {"w": torch.ones(3, 2)}
    device, gradients = Device(monkeypatch, engine.said), Gradients(engine.said)
    layouts = [hf_layout({"w": (3, 2)})]
    hybrid = HybridEngine(
        FullWeights(layouts, weights), engine, only_rank(), staging_bytes=64, training=[gradients]
    )

    def step(used: int, growth: int, flushes: int = 0) -> bool:
        hybrid.to_train()
        device.in_training, gradients.growth_bytes, device.flushes = used, growth, flushes
        return hybrid.to_rollout().keeps_memory

    hybrid.to_rollout()
    gradients.may_stay = True
    assert not step(50, growth=21)  # 50 + 21 + 20 for the engine: less than 10 to spare
    assert step(50, growth=20) and step(70, growth=5)
    assert not step(70, growth=6)
    assert step(70, growth=0)
    assert not step(70, growth=0, flushes=1)  # what is free says nothing of what was taken
    assert step(70, growth=0, flushes=1)


def test_memory_that_someone_wants_freed_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, weights = Engine(), {"w": torch.ones(3, 2)}
    Device(monkeypatch, engine.said)
    layouts, gradients = [hf_layout({"w": (3, 2)})], Gradients(engine.said, may_stay=True)

    class Weights:
        is_freed = True

        def release(self) -> None: ...
        def restore(self) -> None: ...

    hybrid = HybridEngine(
        FullWeights(layouts, weights),
        engine,
        only_rank(),
        staging_bytes=64,
        training=[gradients],
        training_weights=[Weights()],
    )
    assert not any(hybrid.to_rollout().keeps_memory for _ in range(3))
    hybrid = HybridEngine(
        FullWeights(layouts, weights), engine, only_rank(), staging_bytes=64, training=[gradients]
    )
    assert [hybrid.to_rollout().keeps_memory for _ in range(2)] == [True, True]


def test_memory_stays_only_where_every_rank_has_room() -> None:
    headroom = Headroom(measure=lambda: None, count_flushes=lambda: 0)
    headroom.decide([5, 0])
    assert headroom.is_enough
    headroom.decide([5, -1])
    assert not headroom.is_enough
