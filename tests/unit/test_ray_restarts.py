"""Which slots of a Ray cluster the starts of a job take; Ray is a stub here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.cli import ray_launch
from hybridrl.cli.ray_actors import Place
from hybridrl.cli.ray_launch import RayJob


class Cluster:
    """A cluster of CPU slots, as the module `ray` shows it.

    Args:
        nodes: the slots of each, by name.
    """

    def __init__(self, **nodes: int) -> None:
        self.alive, self.taken, self.held = nodes, 0, 0  # taken by other jobs, held by this one
        self.on_wait: Callable[[], None] = lambda: None
        self.lost: list[str] = []
        self.exceptions = SimpleNamespace(RayError=OSError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_: None)
        self.util = SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=self._remove,
            scheduling_strategies=strategies,
        )

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.alive.values())}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.alive.values()) - self.taken - self.held}

    def nodes(self) -> list[dict[str, Any]]:
        alive = [(name, True) for name in self.alive] + [(name, False) for name in self.lost]
        return [
            {"NodeID": name, "NodeManagerAddress": name, "Alive": is_alive}
            for name, is_alive in alive
        ]

    def _group(self, slots: list[Any], strategy: str) -> Any:
        def wait(_: float) -> bool:
            self.on_wait()
            free = sum(self.alive.values()) - self.taken - self.held
            self.held += len(slots) if len(slots) <= free else 0
            return len(slots) <= free

        return SimpleNamespace(wait=wait, size=len(slots))

    def _remove(self, _: Any) -> None:
        self.held = 0

    def remote(self, _: Any) -> Any:
        actor = SimpleNamespace(place=SimpleNamespace(remote=lambda: None))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))

    def get(self, asked: list[Any], timeout: float) -> list[Place]:
        names = [name for name, slots in self.alive.items() for _ in range(slots)]
        version = ray_launch.__version__
        return [Place(name, name, (), version, True) for name in names[: len(asked)]]

    def shutdown(self) -> None:
        self.held = 0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Cluster, RayJob]]:
    for name in ("PLACE_S", "FREE_S", "WAIT_S"):
        monkeypatch.setattr(ray_launch, name, 0.01)
    monkeypatch.setattr(ray_launch, "BACK_S", 0.2)

    def made(world: int, fits: Callable[[int], bool], **nodes: int) -> tuple[Cluster, RayJob]:
        cluster = Cluster(**nodes)
        monkeypatch.setattr(ray_launch, "connect", lambda _: cluster)
        return cluster, RayJob("auto", world, False, 1, fits)

    return made


def test_a_start_takes_the_most_ranks_that_fit_what_is_free(make: Any) -> None:
    cluster, job = make(8, lambda size: size in (2, 4, 8), a=4, b=4)
    assert job.world_size == 8 and job.where == "8 ranks on a, b"
    del cluster.alive["b"]
    assert job.settle(True, []) and (job.world_size, cluster.held) == (4, 4)
    cluster.taken = 1  # by another job, meanwhile
    assert job.settle(True, []) and (job.world_size, cluster.held) == (2, 2)
    cluster.taken = 0
    cluster.alive["c"] = 4
    assert job._is_wider()
    assert job.settle(True, []) and job.where == "8 ranks on a, c"


def test_a_rank_that_does_not_come_back_is_left_out_until_another_loss(make: Any) -> None:
    cluster, job = make(4, lambda size: size != 3, a=4)
    assert job.settle(False, []) and job.world_size == 2
    assert not job._is_wider()  # no node has come
    assert job.settle(False, []) and job.world_size == 1
    assert job.settle(False, []) and job.world_size == 4  # rather all than none
    assert cluster.held == 4


def test_a_node_of_which_ray_hears_only_while_slots_are_taken_is_left_out(make: Any) -> None:
    cluster, job = make(4, lambda size: size % 2 == 0, a=2, b=2)
    cluster.taken = 2  # b's are gone, though it is counted

    def notice() -> None:
        cluster.alive.pop("b", None)
        cluster.taken, cluster.on_wait = 0, lambda: None

    cluster.on_wait = notice
    assert job.settle(True, []) and (job.world_size, cluster.held) == (2, 2)


def test_a_wait_for_nodes_ends_with_a_signal_or_in_time(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, job = make(4, lambda size: size == 4, a=2, b=2)
    del cluster.alive["b"]
    cluster.lost.append("b")
    assert not job.settle(True, [15])
    assert not job.settle(True, [])
    told = capsys.readouterr().err
    assert told.count("no layout fits the free slots") == 1
    assert "for nodes; Ray lost b (it does not answer)" in told
    assert cluster.held == 0


def test_a_job_at_its_end_takes_no_nodes_in(make: Any) -> None:
    cluster, job = make(2, lambda _: True, a=2)

    def gone() -> None:
        raise OSError("Ray is shut down")

    cluster.nodes = gone
    assert not job._is_wider()
