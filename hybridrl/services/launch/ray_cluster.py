"""Runs ranks on the nodes of a Ray cluster, for `hybridrl launch --ray`. Does not import torch.

An actor on each node runs node.py. If it is lost, its node counts as lost until it responds.
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
from hybridrl.errors import ConfigError, UserError, error_text
from hybridrl.services.launch.connections import Connection, Host
from hybridrl.services.launch.node import Order

ANSWER_S = 60.0  # Maximum time until an actor replies.
ASK_S = 20.0  # Maximum time until a node reports its version and folder.
CONNECT_S = 10.0  # Timeout for connecting to the cluster.
FREE_S = 10.0  # Maximum time until the slots of an ended actor are free.
POLL_S = 0.2  # Time that an actor waits for output before it replies.
# Ray's codes for nodes that were stopped, or that the autoscaler removed because they were idle.
STOPPED = (1, 4)
INSTALL = "pip install 'hybridrl[ray]'"


class NodeActor:
    """Runs node.py on a Ray node, in a working folder."""

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
        """Writes a line to the process; an empty line closes its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            if line:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def poll(self) -> tuple[int | None, list[tuple[int, bytes]]]:
        """Returns the exit code, or None, and new output as (descriptor 1 or 2, block)."""
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
    """A connection to a node.py process that an actor runs."""

    def __init__(self, host: Host, actor: Any, order: Order) -> None:
        super().__init__(host)
        self._actor, self._fault = actor, ""
        self.tell(order.to_line())
        self._asked, self._since = actor.poll.remote(), time.monotonic()

    def tell(self, line: bytes) -> None:
        self._actor.tell.remote(line)

    def close(self) -> None:
        self._actor.tell.remote(b"")

    def poll(self) -> int | None:
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
            self._fault = error_text(error)
        if self._fault:
            self.code = 1
        return self.code

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
        self.code = 1 if self.code is None else self.code

    @property
    def how(self) -> str:
        return f"was lost: {self._fault}" if self._fault else super().how


class RayCluster:
    """The nodes of a Ray cluster (HOST:PORT or "auto"), as the `Cluster` of a `HostsJob`.

    `unit` of a slot is "GPU" if `has_gpus` and the cluster has GPUs, otherwise "CPU".

    Raises:
        UserError: The cluster does not respond, or a node's installation differs from this host's.
    """

    def __init__(self, address: str, has_gpus: bool) -> None:
        self._ray = connect(address)
        self.unit = "GPU" if has_gpus and self._ray.cluster_resources().get("GPU") else "CPU"
        self._ids: dict[str, str] = {}  # Ids of nodes that match this host, by address.
        self._refused: dict[str, str] = {}  # Ids of nodes whose installation does not match.
        self._taken: dict[str, int] = {}  # Slots that the current or last start uses.
        self._connections: list[RayConnection] = []
        if wrong := self._ask_new(set()):
            self.close()
            raise ConfigError(list(wrong.values()))

    def lost_nodes(self) -> str:
        """Returns text about nodes that Ray has lost, to append to a message."""
        lost = dead_nodes(self._ray.nodes())
        named = ", ".join(f"{address} ({why})" for address, why in lost.items())
        return f"; Ray lost {named}" if named else ""

    def connect(self, host: Host, order: Order) -> Connection:
        self._taken[host.name] = host.slots
        actors = self._ray.remote(NodeActor).options(
            num_cpus=host.slots,
            num_gpus=host.slots if self.unit == "GPU" else 0,
            max_restarts=0,
            scheduling_strategy=self._on(self._ids[host.name]),
        )
        actor = actors.remote(os.getcwd())
        self._connections.append(RayConnection(host, actor, order))
        return self._connections[-1]

    def hosts(self, down: Set[str]) -> list[Host]:
        """Returns the nodes with free slots, most slots first. Checks new and lost nodes first."""
        try:
            for name, error in self._ask_new(down).items():
                if name not in down:  # nodes that are down are checked repeatedly
                    say(f"hybridrl: {error}")
            free = self._free()
        except (self._ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            say(f"hybridrl: Ray: {error_text(error)}")
            return []
        found = [Host(name, free.get(name, 0)) for name in self._ids if free.get(name, 0) > 0]
        return sorted(found, key=lambda host: -host.slots)

    def close(self) -> None:
        self._ray.shutdown()

    def _on(self, node: str) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _ask_new(self, down: Set[str]) -> dict[str, UserError]:
        alive = alive_nodes(self._ray.nodes())
        kept = {n: i for n, i in self._ids.items() if alive.get(n) == i and n not in down}
        asked = [n for n, i in alive.items() if n not in kept and self._refused.get(n) != i]
        folder = os.getcwd()

        def setup() -> tuple[str, bool]:
            import hybridrl  # imported on that node, because Ray would send this host's module

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
            try:
                version, is_there = self._ray.get(answer, timeout=1)
                found = f"hybridrl {version}" + ", no such folder" * (not is_there)
            except self._ray.exceptions.RayError as error:
                found = error_text(error)
            if found == f"hybridrl {__version__}":
                kept[name] = alive[name]
                continue
            allowed = f"hybridrl {__version__} and the folder {folder}"
            remedy = "Share the environment and the working folder, and run `ray start` there."
            wrong[name] = UserError(f"node {name}", found, allowed, remedy)
            if name not in down:
                self._refused[name] = alive[name]
        self._ids = {name: kept[name] for name in alive if name in kept}
        return wrong

    def _free(self) -> dict[str, int]:
        """Returns each node's slots for this job, including those it already uses.

        For a moment after an actor has ended, Ray still reports its slots as used.
        """
        from ray._private.state import available_resources_per_node  # not public API

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
    """Returns Ray's ids for all nodes that are alive, by address."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in nodes if node["Alive"]}


def dead_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns Ray's reason for each lost node, by address, without those stopped or returned."""
    alive = alive_nodes(nodes)
    return {
        node["NodeManagerAddress"]: node.get("DeathReasonMessage") or "it does not answer"
        for node in nodes
        if not node["Alive"]
        and node["NodeManagerAddress"] not in alive
        and node.get("DeathReason") not in STOPPED
    }


def connect(address: str) -> Any:
    """Connects to a cluster; returns the module `ray`. UserError without Ray or a response."""
    if "://" in address or address in ("", "local"):
        allowed = 'HOST:PORT of a running cluster, or "auto"'
        raise UserError("--ray", address, allowed, "Start a cluster with `ray start --head`.")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Do not send usage statistics.
    # Allow tasks that reserve no GPU to see the GPUs on their node.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError("--ray", error_text(error), "Ray", f"Run: {INSTALL}") from error
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # checked first, because Ray takes minutes to fail
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        allowed = "the address of a running cluster with the same versions of Ray and Python"
        remedy = "Run `ray status --address ADDRESS`; start a cluster with `ray start --head`."
        raise UserError("--ray", f"{address}: {error_text(error)}", allowed, remedy) from error
    return ray
