"""How `check --cluster` reaches nodes of a Ray cluster; Ray is a stub that runs actors here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.cli import cluster_check, cluster_reach
from hybridrl.cli.cluster_check import Conversation, NodeLost, command, refuse_without_cluster
from hybridrl.cli.cluster_facts import ClusterFacts
from hybridrl.cli.cluster_reach import nodes_of
from hybridrl.errors import UserError

ADDRESSES = {"10.0.0.1": "first", "10.0.0.2": "second"}


class RayError(Exception):
    """What Ray raises."""


class RayTaskError(RayError):
    """What it raises where a method of an actor has raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a long text with frames")
        self.cause = cause


class Method:
    """A method of an actor: runs at once, its outcome is asked for later."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any) -> Callable[[], Any]:
        try:
            value = self._method(*args)
        except Exception as error:
            return self._raising(error)
        return lambda: value

    @staticmethod
    def _raising(error: Exception) -> Callable[[], Any]:
        def get() -> Any:
            raise RayTaskError(error) from error

        return get


class Cluster:
    """The module `ray` with two nodes that live, one that it lost, one that was stopped, and one of
    them before it was started again.
    """

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.killed, self.is_open = 0, True
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda n, soft: (n, soft))
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def nodes(self) -> list[dict[str, Any]]:
        alive = [self._node(*one, True) for one in ADDRESSES.items()]
        lost = self._node("10.0.0.3", "gone", False, 2, "health check failed")
        stopped = self._node("10.0.0.4", "stopped", False, 1, "SIGTERM")
        return [*alive, lost, stopped, self._node(next(iter(ADDRESSES)), "before", False, 2, "")]

    @staticmethod
    def _node(
        address: str, name: str, is_alive: bool, number: int = 0, why: str = ""
    ) -> dict[str, Any]:
        died = {"DeathReason": number, "DeathReasonMessage": why}
        return {"NodeManagerAddress": address, "NodeID": name, "Alive": is_alive, **died}

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=lambda folder: self._actor(kind(folder)))

        return SimpleNamespace(options=options)

    @staticmethod
    def _actor(actor: Any) -> Any:
        methods = {name: Method(getattr(actor, name)) for name in ("start", "tell", "poll")}
        return SimpleNamespace(held=actor, **methods)

    def get(self, asked: Callable[[], Any], timeout: float) -> Any:
        return asked()

    def kill(self, actor: Any) -> None:
        self.killed += 1
        if actor.held._process is not None:
            actor.held._process.kill()
            actor.held._process.wait()

    def shutdown(self) -> None:
        self.is_open = False


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(cluster_reach, "connect", lambda address: made)
    monkeypatch.setitem(sys.modules, "ray", made)  # type: ignore[arg-type]
    return made


def test_a_probe_on_every_node_of_a_ray_cluster_answers(cluster: Cluster, tmp_path: Path) -> None:
    with nodes_of(None, False, "auto", ["ssh"]) as (names, reach, _):
        assert names == [*ADDRESSES, "10.0.0.3"]
        lost = Conversation(names.pop(), reach("10.0.0.3"), tmp_path)
        with pytest.raises(NodeLost, match="Ray lost this node: health check failed"):
            lost.ask("clock")
        lost.close()
        talks = [Conversation(name, reach(name), tmp_path) for name in names]
        before = [one.ask("write", token="t", version=1)["node"] for one in talks]
        seen = talks[1].ask("read", token="t", version=1, peers=names)
        with pytest.raises(NodeLost, match="KeyError: 'nothing'"):
            talks[0].ask("nothing")
        for one in talks:
            one.close()
    assert not list(tmp_path.iterdir())  # what a probe wrote it takes away
    assert before == names and seen == {"unseen": [], "differing": []}
    assert cluster.killed == 2 and not cluster.is_open
    for name, options in zip(ADDRESSES.values(), cluster.options, strict=True):
        # Other jobs may have all slots of the cluster.
        assert options["num_cpus"] == options["num_gpus"] == options["max_restarts"] == 0
        assert options["scheduling_strategy"] == (name, False)


def test_a_node_without_the_working_folder_says_so(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    with nodes_of(None, False, "auto", ["ssh"]) as (names, reach, _):
        gone.rmdir()
        monkeypatch.setattr("os.getcwd", lambda: str(gone))
        talk = Conversation(names[0], reach(names[0]), tmp_path)
        with pytest.raises(NodeLost, match="No such file or directory.*gone"):
            talk.ask("clock")


def test_the_last_words_of_a_node_are_heard(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_probe.py").write_text(
        "import sys\nsys.stdin.readline()\nsys.stdout.buffer.write(b'no room on \\xff')\n"
        "sys.exit(3)\n"
    )
    (tmp_path / "silent_probe.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, told in (("dying_probe", "no room on \ufffd"), ("silent_probe", "ended with code 3")):
        monkeypatch.setattr(cluster_reach, "PROBE", name)
        with nodes_of(None, False, "auto", ["ssh"]) as (names, reach, _):
            talk = Conversation(names[0], reach(names[0]), tmp_path)
            with pytest.raises(NodeLost, match=told):
                talk.ask("clock")
            talk.close()


def test_the_command_checks_the_nodes_and_leaves_the_cluster(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[Any] = []

    def gather(names: list[str], reach: Any, folder: Path) -> Any:
        asked.append((names, cluster.is_open))
        return ClusterFacts([], {}, [], [], [])

    monkeypatch.setattr(cluster_check, "gather", gather)
    assert command(None, False, "auto", "ssh", tmp_path, True) == 0
    assert asked == [([*ADDRESSES, "10.0.0.3"], True)] and not cluster.is_open
    assert json.loads(capsys.readouterr().out)["ok"]


def test_one_set_of_nodes_is_named(tmp_path: Path) -> None:
    told = "--hostfile and --ray; allowed: one of them"
    with pytest.raises(UserError, match=told), nodes_of(tmp_path, False, "auto", ["ssh"]):
        pass
    with pytest.raises(UserError, match="--ray.*nothing without --cluster"):
        refuse_without_cluster(None, False, "auto")
    refuse_without_cluster(None, False, None)
