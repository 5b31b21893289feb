"""Nodes of a Ray cluster, for `hybridrl launch --ray`. No torch; Ray is imported on use.

An actor on each node holds node.py, which holds the node's ranks, as ssh does for a hostfile; it
does nothing else. When an actor is lost, so is its node, until the node answers again. Nodes share
the working folder, the Python environment and the run folder.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from hybridrl import __version__, console
from hybridrl.console import say
from hybridrl.errors import ConfigError, UserError, said
from hybridrl.services.launch.connections import Connection, Host
from hybridrl.services.launch.node import Order

ANSWER_S = 60.0  # for an actor
ASK_S = 20.0  # for a node that is asked how it is set up
CONNECT_S = 10.0  # to the cluster
FREE_S = 10.0  # until slots are free that an actor had
POLL_S = 0.2  # for which an actor waits for output before it answers
# Ray's numbers for why a node is dead: it was stopped, or the autoscaler gave an idle one back.
STOPPED = (1, 4)
INSTALL = "pip install 'hybridrl[ray]'"


class NodeActor:
    """Runs node.py on a node of Ray's.

    Args:
        folder: Folder in which it runs.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.services.launch.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,
        )
        self._output: list[tuple[int, bytes]] = []
        self._has_output = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(number, source), daemon=True)
            for number, source in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, line: bytes) -> None:
        """Writes a line to the process; an empty one closes its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            if line:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def poll(self) -> tuple[int | None, list[tuple[int, bytes]]]:
        """Returns the exit code, or None, and what was written to stdout (1) and stderr (2)."""
        self._has_output.wait(POLL_S)
        self._has_output.clear()
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(1)
        found, self._output = self._output, []
        return code, found

    def _read(self, number: int, source: Any) -> None:
        while block := os.read(source.fileno(), 65536):
            self._output.append((number, block))
            self._has_output.set()


class RayConnection(Connection):
    """node.py in an actor.

    Args:
        host: The node.
        actor: Handle of its actor.
        order: What the node is to do.
    """

    def __init__(self, host: Host, actor: Any, order: Order) -> None:
        super().__init__(host)
        self._actor, self._fault = actor, ""
        self.tell(order.to_line())
        self._asked, self._since = actor.poll.remote(), time.monotonic()

    def tell(self, line: bytes) -> None:
        """Writes a line to node.py."""
        self._actor.tell.remote(line)

    def close(self) -> None:
        """Closes the stdin of node.py, which ends its ranks."""
        self._actor.tell.remote(b"")

    def poll(self) -> int | None:
        """Returns the exit code; None before the end."""
        import ray

        if self.code is not None:
            return self.code
        try:
            if ray.wait([self._asked], timeout=0)[0]:
                code, output = ray.get(self._asked)
                for number, block in output:
                    if number == console.STDOUT:
                        self._output.take(block)
                    else:
                        console.write(console.STDERR, block)
                if code is None:
                    self._asked, self._since = self._actor.poll.remote(), time.monotonic()
                else:
                    self.code, self.outcome = code, self._output.outcome()
            elif time.monotonic() - self._since > ANSWER_S:
                self._fault = f"its actor has not answered for {ANSWER_S:g} s"
        except ray.exceptions.RayError as error:
            self._fault = said(error)
        if self._fault:
            self.code = 1
        return self.code

    def kill(self) -> None:
        """Ends the actor and with it node.py."""
        import ray

        ray.kill(self._actor)
        self.code = 1 if self.code is None else self.code

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return f"was lost: {self._fault}" if self._fault else super().how


class RayCluster:
    """The nodes of a Ray cluster, as the `Cluster` of a `HostsJob`.

    Args:
        address: HOST:PORT of the cluster, or "auto".
        has_gpus: Whether each rank has a GPU if the cluster has any; else a CPU slot.

    Raises:
        UserError: Ray is missing, the cluster does not answer, or a node is not set up as this one.

    Attributes:
        unit: What a slot is, "GPU" or "CPU".
    """

    def __init__(self, address: str, has_gpus: bool) -> None:
        self._ray = connect(address)
        self.unit = "GPU" if has_gpus and self._ray.cluster_resources().get("GPU") else "CPU"
        self._ids: dict[str, str] = {}  # nodes that are set up as this one, by address
        self._refused: dict[str, str] = {}  # nodes that are not
        self._taken: dict[str, int] = {}  # slots of the start that runs, or has ended last
        self._connections: list[RayConnection] = []
        if wrong := self._ask_new(set()):
            self.close()
            raise ConfigError(list(wrong.values()))

    @property
    def has_gpus(self) -> bool:
        """Whether the slots are GPUs."""
        return self.unit == "GPU"

    def lost_nodes(self) -> str:
        """Returns the nodes that Ray lost, in words that follow others; empty if there is none."""
        lost = dead_nodes(self._ray.nodes())
        named = ", ".join(f"{address} ({why})" for address, why in lost.items())
        return f"; Ray lost {named}" if named else ""

    def connect(self, host: Host, order: Order) -> Connection:
        """Starts node.py on a node, in an actor that takes its slots."""
        self._taken[host.name] = host.slots
        actor = (
            self._ray.remote(NodeActor)
            .options(
                num_cpus=host.slots,
                num_gpus=host.slots if self.has_gpus else 0,
                max_restarts=0,
                scheduling_strategy=self._on(self._ids[host.name]),
            )
            .remote(os.getcwd())
        )
        self._connections.append(RayConnection(host, actor, order))
        return self._connections[-1]

    def hosts(self, down: Set[str]) -> list[Host]:
        """Returns the nodes with free slots, most slots first; those that are new or were lost are
        asked how they are set up.
        """
        try:
            for name, error in self._ask_new(down).items():
                if name not in down:  # those are asked again and again
                    say(f"hybridrl: {error}")
            free = self._free()
        except (self._ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            say(f"hybridrl: Ray: {said(error)}")
            return []
        found = [Host(name, free.get(name, 0)) for name in self._ids if free.get(name, 0) > 0]
        return sorted(found, key=lambda host: -host.slots)

    def close(self) -> None:
        """Leaves the cluster."""
        self._ray.shutdown()

    def _on(self, node: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _ask_new(self, down: Set[str]) -> dict[str, UserError]:
        """Asks the nodes that are new or were lost; keeps those that are set up as this one and
        returns what is wrong with each of the others.
        """
        alive = {
            one["NodeManagerAddress"]: one["NodeID"] for one in self._ray.nodes() if one["Alive"]
        }
        kept = {n: i for n, i in self._ids.items() if alive.get(n) == i and n not in down}
        asked = [n for n, i in alive.items() if n not in kept and self._refused.get(n) != i]
        folder = os.getcwd()

        def setup() -> tuple[str, bool]:
            import hybridrl  # of that node: Ray sends the values of names from outside

            return hybridrl.__version__, os.path.isdir(folder)

        task = self._ray.remote(setup)
        answers = [
            task.options(num_cpus=0, max_retries=0, scheduling_strategy=self._on(alive[n])).remote()
            for n in asked
        ]
        if answers:
            self._ray.wait(answers, num_returns=len(answers), timeout=ASK_S)
        wrong: dict[str, UserError] = {}
        for name, answer in zip(asked, answers, strict=True):
            found = "no answer"
            try:
                version, is_there = self._ray.get(answer, timeout=1)
                found = f"hybridrl {version}" + ", no such folder" * (not is_there)
            except self._ray.exceptions.RayError as error:
                found = said(error)
            if found == f"hybridrl {__version__}":
                kept[name] = alive[name]
                continue
            allowed = f"hybridrl {__version__} and the folder {folder}"
            remedy = "Share the environment and the working folder; run `ray start` in them."
            wrong[name] = UserError(f"node {name}", found, allowed, remedy)
            if name not in down:
                self._refused[name] = alive[name]
        self._ids = {name: kept[name] for name in alive if name in kept}
        return wrong

    def _free(self) -> dict[str, int]:
        """Returns the slots of each node that this job may take: those that nobody has, and those
        that it has while it runs. Ray counts an actor's slots as taken for a moment after its end.
        """
        from ray._private.state import available_resources_per_node  # Ray has no public way

        deadline = time.monotonic() + FREE_S
        while True:
            resources = available_resources_per_node()
            free = {
                name: int(min(resources.get(node, {}).get(u, 0) for u in {self.unit, "CPU"}))
                for name, node in self._ids.items()
            }
            if any(one.code is None for one in self._connections):
                return {name: count + self._taken.get(name, 0) for name, count in free.items()}
            late = [n for n, c in self._taken.items() if free.get(n, c) < c]
            if not late or time.monotonic() > deadline:
                self._taken, self._connections = {}, []
                return free
            time.sleep(POLL_S)


def alive_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns Ray's identifiers of the nodes that live, by address."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in nodes if node["Alive"]}


def dead_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the nodes that Ray lost, by address, and why in its words; not those that were
    stopped, or that have come back.

    Args:
        nodes: What `ray.nodes()` returns.
    """
    alive = alive_nodes(nodes)
    return {
        node["NodeManagerAddress"]: node.get("DeathReasonMessage") or "it does not answer"
        for node in nodes
        if not node["Alive"]
        and node["NodeManagerAddress"] not in alive
        and node.get("DeathReason") not in STOPPED
    }


def connect(address: str) -> Any:
    """Connects to a cluster; returns the module `ray`.

    Raises:
        UserError: Ray is missing, or there is no such cluster.
    """
    if "://" in address or address in ("", "local"):
        allowed = 'HOST:PORT of a running cluster, or "auto"'
        raise UserError("--ray", address, allowed, "Start `ray start --head`.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    # A task without GPUs keeps the variables of its node, so that it may look at them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError("--ray", said(error), "Ray", f"Run: {INSTALL}") from error
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # Ray finds out only after minutes that nobody listens
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UserError(
            "--ray",
            f"{address}: {said(error)}",
            "the address of a running cluster of the same versions of Ray and Python",
            "Run `ray status --address ADDRESS`; start one by `ray start --head`.",
        ) from error
    return ray
