"""Which nodes of a Ray cluster a job may use; Ray is a stub here that runs tasks at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl import __version__
from hybridrl.errors import UserError
from hybridrl.services.cluster_check import check
from hybridrl.services.cluster_check.check import NodeLost
from hybridrl.services.launch import ray_cluster
from hybridrl.services.launch.connections import Host
from hybridrl.services.launch.local_ranks import Share
from hybridrl.services.launch.node import Order
from hybridrl.services.launch.ray_cluster import RayCluster, dead_nodes


class RayError(Exception):
    """What Ray raises."""


class Cluster:
    """The module `ray` with nodes of CPU slots (`free`); those in `gone` do not answer."""

    def __init__(self, **free: int) -> None:
        self.free, self.gone = free, set[str]()
        self.lost: dict[str, str] = {}
        self.options: list[dict[str, Any]] = []
        self.exceptions = SimpleNamespace(
            RayError=RayError, RayTaskError=type("T", (RayError,), {})
        )
        affinity = lambda node, soft: node  # noqa: E731
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=affinity)
        self.util = SimpleNamespace(scheduling_strategies=strategies)
        self.shutdown = self.kill = lambda *_: None

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.free.values())}

    def available(self) -> dict[str, dict[str, float]]:
        return {f"id-{name}": {"CPU": float(count)} for name, count in self.free.items()}

    def nodes(self) -> list[dict[str, Any]]:
        alive = [(name, True, "") for name in self.free]
        return [
            {"NodeID": f"id-{n}", "NodeManagerAddress": n, "Alive": a, "DeathReasonMessage": why}
            for n, a, why in [*alive, *((n, False, why) for n, why in self.lost.items())]
        ]

    def remote(self, what: Any) -> Any:
        def options(scheduling_strategy: str, **given: Any) -> Any:
            name = scheduling_strategy.removeprefix("id-")
            self.options.append({"node": name, **given})

            def start(*args: Any) -> Callable[[], Any]:
                if isinstance(what, type):  # an actor that never answers
                    method = SimpleNamespace(remote=lambda *_: None)
                    return SimpleNamespace(tell=method, poll=method)  # type: ignore[return-value]
                if name in self.gone:
                    return self._fail
                return lambda: what(*args)

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    @staticmethod
    def _fail() -> Any:
        raise RayError("the node is gone")

    def wait(self, answers: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return [], answers

    def get(self, answer: Callable[[], Any], timeout: float) -> Any:
        return answer()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Cluster, RayCluster]]:
    monkeypatch.setattr(ray_cluster, "FREE_S", 0.0)

    def made(**free: int) -> tuple[Cluster, RayCluster]:
        ray = Cluster(**free)
        state = SimpleNamespace(available_resources_per_node=ray.available)
        monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace(state=state))
        monkeypatch.setitem(sys.modules, "ray._private.state", state)
        monkeypatch.setattr(ray_cluster, "connect", lambda _: ray)
        monkeypatch.setattr(check, "connect", lambda _: ray)
        return ray, RayCluster("auto", has_gpus=True)

    return made


def test_nodes_with_free_slots_take_part_most_slots_first(make: Any) -> None:
    ray, cluster = make(a=2, b=4, c=0)
    assert cluster.hosts(set()) == [Host("b", 4), Host("a", 2)]
    assert cluster.unit == "CPU"
    ray.free["d"] = 8  # it has joined
    assert cluster.hosts(set())[0] == Host("d", 8)


def test_a_lost_node_takes_part_again_once_it_answers(make: Any) -> None:
    """Ray lists a node that lost its power as alive for a while."""
    ray, cluster = make(a=2, b=2)
    ray.gone = {"b"}
    assert cluster.hosts({"b"}) == [Host("a", 2)]
    ray.gone = set()
    assert cluster.hosts({"b"}) == [Host("a", 2), Host("b", 2)]


def test_slots_of_the_job_itself_count_while_it_runs(make: Any) -> None:
    ray, cluster = make(a=4)
    order = Order(Share(3, 0, 3), [], "logs", {})
    connection = cluster.connect(Host("a", 3), order)
    assert ray.options[-1] == {"node": "a", "num_cpus": 3, "num_gpus": 0, "max_restarts": 0}
    ray.free["a"] = 1
    assert cluster.hosts(set()) == [Host("a", 4)]
    connection.kill()
    assert connection.code == 1 and connection.outcome is None
    assert cluster.hosts(set()) == [Host("a", 1)]  # others have taken the rest


def test_nodes_that_are_set_up_otherwise_are_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    with pytest.raises(UserError, match=f"node a: got hybridrl {__version__}, no such folder"):
        make(a=1)


def test_nodes_that_ray_lost_are_told_with_why() -> None:
    lost = {"NodeManagerAddress": "a", "Alive": False, "DeathReasonMessage": "no heartbeat"}
    stopped = {"NodeManagerAddress": "b", "Alive": False, "DeathReason": 1}
    back = [{**lost, "NodeManagerAddress": "c"}, {"NodeManagerAddress": "c", "Alive": True}]
    back[1]["NodeID"] = "id"
    assert dead_nodes([lost, stopped, *back]) == {"a": "no heartbeat"}


def test_the_cluster_check_asks_nodes_without_taking_slots(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, _ = make(a=1, b=1)
    ray.lost["c"], ray.gone = "health check failed", {"b"}
    monkeypatch.setattr(check, "ask", lambda command, question: {"answer": question, "time": 0})
    with check._ray_nodes("auto") as (names, reach):
        assert names == ["a", "b", "c"]
        assert reach("a", {"ask": "clean"})["answer"] == {"ask": "clean"}
        assert {key: ray.options[-1][key] for key in ("num_cpus", "num_gpus")} == dict.fromkeys(
            ("num_cpus", "num_gpus"), 0
        )
        for name, told in (("b", "the node is gone"), ("c", "Ray lost this node: health")):
            with pytest.raises(NodeLost, match=told):
                reach(name, {"ask": "clean"})
