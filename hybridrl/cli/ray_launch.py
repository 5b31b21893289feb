"""`hybridrl launch --ray`: ranks as processes of Ray's actors, one actor a GPU (or CPU).

Owns the placement group, the actors and what is read from them. Who waits for whom: this process
waits for one actor a rank; an actor holds node.py, which holds the rank, as ssh's connections do
for `--hostfile`. Invariant: when an actor is lost, or a rank has failed, the others are ended
within KILL_AFTER_S of it. Actors run nothing of ours but that. Nodes share the working folder, the
Python environment and the run folder. No torch; Ray is imported where it is needed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl import __version__
from hybridrl.cli.hostfile import (
    Host,
    any_port,
    conclude_nodes,
    end_nodes,
    forwarded,
    wait_for_nodes,
)
from hybridrl.cli.launch import Share, caught_signals
from hybridrl.cli.node import Order, outcome_file
from hybridrl.errors import ConfigError, UserError, said

PLACE_S = 60.0  # for the placement group
CONNECT_S = 10.0  # to the cluster
ANSWER_S = 60.0  # for an actor
POLL_S = 0.2  # that an actor waits for output before it answers
INSTALL = "pip install 'hybridrl[ray]'"


@dataclass(frozen=True)
class Place:
    """Where an actor is.

    Args:
        node: Ray's identifier of the node.
        address: of the node.
        gpus: of the node that are the actor's, as CUDA numbers them; none on CPU.
        version: of hybridrl there.
        folder: whether the working folder is there.
    """

    node: str
    address: str
    gpus: tuple[str, ...]
    version: str
    folder: bool


class RankActor:
    """What Ray starts on a node: holds one process of node.py, and nothing else."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._output: list[tuple[int, bytes]] = []
        self._has_output = threading.Event()

    def place(self) -> Place:
        """Returns where this is."""
        import ray

        context, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        is_there = os.path.isdir(self._folder)
        return Place(context.get_node_id(), address, gpus, __version__, is_there)

    def start(self, order: bytes) -> None:
        """Starts node.py and tells it its order."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.cli.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            start_new_session=True,
        )
        for number, source in ((1, self._process.stdout), (2, self._process.stderr)):
            assert source is not None
            threading.Thread(target=self._read, args=(number, source), daemon=True).start()
        self.tell(order)

    def tell(self, line: bytes) -> None:
        """Writes to the process; nothing closes its stdin, which ends its ranks."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError, ValueError):
            if line:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def poll(self) -> tuple[int | None, list[tuple[int, bytes]]]:
        """Returns the exit code, or None, and what was written to stdout (1) and stderr (2)."""
        assert self._process is not None
        self._has_output.wait(POLL_S)
        self._has_output.clear()
        code = self._process.poll()
        if code is not None:
            time.sleep(POLL_S)  # what is still in the pipes
        found, self._output = self._output, []
        return code, found

    def _read(self, number: int, source: Any) -> None:
        while block := os.read(source.fileno(), 65536):
            self._output.append((number, block))
            self._has_output.set()


class _Stdin:
    """The stdin of a process that an actor holds."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._line = actor, b""

    def write(self, line: bytes) -> int:
        """Keeps a line until it is flushed."""
        self._line += line
        return len(line)

    def flush(self) -> None:
        """Sends it."""
        self._actor.tell.remote(self._line)
        self._line = b""

    def close(self) -> None:
        """Closes the stdin there."""
        self._actor.tell.remote(b"")


class RemoteNode:
    """A process that an actor holds, as `subprocess.Popen` would be one here.

    Args:
        actor: the handle.
        fault: gets why the actor was lost.
    """

    def __init__(self, actor: Any, fault: Callable[[str], None]) -> None:
        self.stdin = _Stdin(actor)
        self.returncode: int | None = None
        self._actor, self._fault = actor, fault
        self._asked = actor.poll.remote()
        self._since = time.monotonic()

    def poll(self) -> int | None:
        """Returns the exit code, or None; prints what the process wrote."""
        import ray

        if self.returncode is not None:
            return self.returncode
        if not ray.wait([self._asked], timeout=0)[0]:
            if time.monotonic() - self._since > ANSWER_S:
                self._lose(f"it has not answered for {ANSWER_S:g} s")
            return self.returncode
        try:
            self.returncode, output = ray.get(self._asked)
        except ray.exceptions.RayError as error:
            self._lose(said(error))
            return self.returncode
        for number, block in output:
            stream = sys.stdout if number == 1 else sys.stderr
            stream.flush()
            os.write(number, block)
        if self.returncode is None:
            self._asked, self._since = self._actor.poll.remote(), time.monotonic()
        return self.returncode

    def kill(self) -> None:
        """Ends the actor and with it the process."""
        import ray

        ray.kill(self._actor)

    def wait(self) -> int:
        """Returns the exit code; of a process that was killed the signal."""
        self.returncode = -signal.SIGKILL if self.returncode is None else self.returncode
        return self.returncode

    def _lose(self, why: str) -> None:
        self.returncode = -signal.SIGKILL
        self._fault(why)


def in_order(places: Sequence[Place]) -> list[int]:
    """Returns the numbers of actors in the order of ranks: those of a node are consecutive, nodes
    in the order in which they first appear, GPUs in theirs.
    """
    first = {place.node: index for index, place in reversed(list(enumerate(places)))}

    def key(index: int) -> tuple[int, list[tuple[int, str]], int]:
        gpus = [(len(gpu), gpu) for gpu in places[index].gpus]
        return first[places[index].node], gpus, index

    return sorted(range(len(places)), key=key)


def counts(places: Sequence[Place]) -> list[int]:
    """Returns the ranks of each node, of places in the order of ranks."""
    found: dict[str, int] = {}
    for place in places:
        found[place.node] = found.get(place.node, 0) + 1
    return list(found.values())


def rank_variables(places: Sequence[Place], rank: int) -> dict[str, str]:
    """Returns the variables in which a rank's place on its node stands.

    Every rank sees all GPUs of the node that are the job's, as under other launchers: ranks of one
    node read each other's memory.
    """
    node = places[rank].node
    first = next(index for index, place in enumerate(places) if place.node == node)
    together = [place for place in places if place.node == node]
    variables = {"LOCAL_RANK": str(rank - first), "LOCAL_WORLD_SIZE": str(len(together))}
    gpus = [gpu for place in together for gpu in place.gpus]
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else variables


class RayJob:
    """Actors of a job, one a rank.

    Args:
        address: of the cluster, HOST:PORT or "auto".
        world_size: ranks; None: the cluster's GPUs.
        has_gpus: whether each rank has a GPU where the cluster has any; else a CPU slot.
        least: ranks of the smallest layout, for a cluster without GPUs.

    Raises:
        UserError: Ray is missing, the cluster does not answer, or has too few slots.
    """

    def __init__(self, address: str, world_size: int | None, has_gpus: bool, least: int) -> None:
        ray = connect(address)
        total = ray.cluster_resources()
        num_gpus = int(total.get("GPU", 0))
        uses_gpus = has_gpus and num_gpus > 0
        self.world_size = world_size or (num_gpus if uses_gpus else least)
        slot: dict[str, float] = {"GPU": 1, "CPU": 1} if uses_gpus else {"CPU": 1}
        self._group = ray.util.placement_group([slot] * self.world_size, strategy="PACK")
        if not self._group.wait(PLACE_S):
            self.close()
            name = "GPU" if uses_gpus else "CPU"
            raise UserError(
                "--ray",
                f"{int(total.get(name, 0))} {name} slots in the cluster, not all of them free",
                f"{self.world_size} free slots of one {name} and one CPU",
                "Run `ray status`; add nodes, end other jobs, or give --world.",
            )
        folder = os.getcwd()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = ray.remote(RankActor)
        self._actors = [
            kind.options(
                num_cpus=1,
                num_gpus=slot.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=strategy(self._group, index),
            ).remote(folder)
            for index in range(self.world_size)
        ]
        self._place(folder)

    def _place(self, folder: str) -> None:
        """Sorts the actors by node.

        Raises:
            UserError: a ConfigError with every node that is not set up as this host.
        """
        import ray

        try:
            places = ray.get([actor.place.remote() for actor in self._actors], timeout=PLACE_S)
        except ray.exceptions.RayError as error:
            self.close()
            raise UserError(
                "--ray",
                said(error),
                f"nodes with hybridrl {__version__} in the same Python environment",
                "Share the environment among the nodes and start `ray start` in it.",
            ) from error
        order = in_order(places)
        self._actors = [self._actors[index] for index in order]
        self.places = [places[index] for index in order]
        wrong = [p for p in self.places if p.version != __version__ or not p.folder]
        if wrong:
            self.close()
            allowed = f"hybridrl {__version__} and the folder {folder}"
            raise ConfigError(
                [
                    UserError(
                        f"node {place.address}",
                        f"hybridrl {place.version}" + (", no such folder" * (not place.folder)),
                        allowed,
                        "Share the environment and the working folder among the nodes.",
                    )
                    for place in wrong
                ]
            )

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> int:
        """Runs `hybridrl ARGUMENTS` as all ranks; returns the exit code, as of `launch`."""
        program = ("-m", "hybridrl.cli.main", *arguments)
        where, given = str(log_dir.absolute()), {**forwarded(), **environment}
        address, port = self.places[0].address, any_port()
        for stale in log_dir.glob("node_*.json"):
            stale.unlink()
        nodes: list[RemoteNode] = []
        with caught_signals() as received:
            try:
                for rank, actor in enumerate(self._actors):
                    share = Share(1, rank, self.world_size, address, port)
                    variables = {**given, **rank_variables(self.places, rank)}
                    order = Order(rank, share, program, where, variables)
                    actor.start.remote(order.to_line())
                    nodes.append(RemoteNode(actor, self._telling(rank)))
                wait_for_nodes(nodes, received, log_dir)
            finally:
                end_nodes(nodes)
        hosts = [Host(f"{place.address} (rank {i})", 1) for i, place in enumerate(self.places)]
        lost = [rank for rank in range(len(nodes)) if not outcome_file(log_dir, rank).exists()]
        code = conclude_nodes(nodes, hosts, log_dir).code
        return code or (1 if lost else 0)

    def _telling(self, rank: int) -> Callable[[str], None]:
        place = self.places[rank]

        def tell(why: str) -> None:
            what = f"hybridrl: Ray's actor of rank {rank} on node {place.address} was lost"
            print(f"{what}: {why}", file=sys.stderr, flush=True)

        return tell

    def close(self) -> None:
        """Gives the slots back."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(self._group)
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises a UserError where nobody listens, which Ray finds out only after minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # "auto", or what Ray says a word about
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise UserError(
            "--ray",
            f"{address}: {error.strerror or error}",
            "the address of a running cluster",
            f"Run `ray status --address {address}`; start one by `ray start --head`.",
        ) from error


def connect(address: str) -> Any:
    """Connects to a cluster; returns the module `ray`.

    Raises:
        UserError: Ray is missing, or there is no such cluster.
    """
    if "://" in address or address in ("", "local"):
        raise UserError(
            "--ray",
            address,
            'HOST:PORT of a running cluster, or "auto"',
            "Start `ray start --head`.",
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    # GPUs are shown to ranks by rank_variables, whatever Ray thinks of processes without one.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError("--ray", said(error), "Ray", f"Run: {INSTALL}") from error
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UserError(
            "--ray",
            f"{address}: {said(error)}",
            "a running cluster of the same versions of Ray and Python",
            "Run `ray status --address ADDRESS`; start one by `ray start --head`.",
        ) from error
    return ray
