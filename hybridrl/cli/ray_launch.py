"""`hybridrl launch --ray`: ranks as processes of Ray's actors, one a GPU (or CPU), again where
they are lost.

Owns the placement group, the actors and what is read from them. A start takes the slots that the
cluster has then: Ray says which nodes are lost and which have come. Who waits for whom: this
process waits for one actor a rank; an actor holds node.py, which holds the rank, as ssh's
connections do for `--hostfile`. Invariant: when an actor is lost, or a rank has failed, the others
are ended within KILL_AFTER_S of it; where the job may be started again, an actor that hears nothing
for LEASE_S (node.py) ends its rank. Nodes share the working folder, the Python environment and the
run folder. No torch; Ray is imported where it is needed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hybridrl import __version__
from hybridrl.cli.elastic import End
from hybridrl.cli.hostfile import (
    Host,
    any_port,
    conclude_nodes,
    end_nodes,
    forwarded,
    wait_for_nodes,
)
from hybridrl.cli.hosts_job import BACK_S, WAIT_S, NodesWatch
from hybridrl.cli.launch import STOP_CODES, Share, caught_signals
from hybridrl.cli.node import Order
from hybridrl.cli.rank_ends import lost_ranks
from hybridrl.cli.ray_actors import Place, ProcessActor, RemoteNode
from hybridrl.console import say
from hybridrl.errors import ConfigError, UserError, said

PLACE_S = 60.0  # for the placement group
FREE_S = 10.0  # until slots are free that were given back
CONNECT_S = 10.0  # to the cluster
# Ray's numbers of why a node is dead: it was stopped, or the autoscaler gave an idle one back.
STOPPED = (1, 4)
INSTALL = "pip install 'hybridrl[ray]'"


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


def dead_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the nodes that Ray lost, by address, and why in its words; not those that were
    stopped, or that have come back.

    Args:
        nodes: of `ray.nodes()`.
    """
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    return {
        node["NodeManagerAddress"]: node.get("DeathReasonMessage") or "it does not answer"
        for node in nodes
        if not node["Alive"]
        and node["NodeManagerAddress"] not in alive
        and node.get("DeathReason") not in STOPPED
    }


class RayJob:
    """Actors of a job, one a rank, as an `ElasticJob`.

    Args:
        address: of the cluster, HOST:PORT or "auto".
        world_size: ranks; None: the cluster's GPUs.
        has_gpus: whether each rank has a GPU where the cluster has any; else a CPU slot.
        least: ranks of the smallest layout, for a cluster without GPUs.
        fits: whether so many ranks can train the run; None: the job is started once.

    Raises:
        UserError: Ray is missing, the cluster does not answer, or has too few slots.
    """

    def __init__(
        self,
        address: str,
        world_size: int | None,
        has_gpus: bool,
        least: int,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        self._ray = connect(address)
        self._fits = None if fits is None else cache(fits)  # a layout is chosen for each
        self._group: Any = None
        self._unit = "GPU"
        uses_gpus = has_gpus and self._slots() > 0
        self._full = world_size or (self._slots() if uses_gpus else least)  # no start has more
        self._unit = "GPU" if uses_gpus else "CPU"
        self._slot: dict[str, float] = {"GPU": 1, "CPU": 1} if uses_gpus else {"CPU": 1}
        try:
            if not self._gather(self._full):
                raise UserError(
                    "--ray",
                    f"{self._slots()} {self._unit} slots in the cluster, not all of them free"
                    + self._dead(),
                    f"{self._full} free ones" + ", with a CPU each" * uses_gpus,
                    "Run `ray status`; add nodes, end other jobs, or give --world.",
                )
        except BaseException:
            self.close()
            raise

    @property
    def where(self) -> str:
        """How many ranks the next start has, and where, in words."""
        nodes = ", ".join(dict.fromkeys(place.address for place in self.places))
        return f"{self.world_size} ranks on {nodes}"

    def _gather(self, world_size: int, received: Sequence[int] = ()) -> bool:
        """Takes so many slots and makes their actors; returns False where that many are not free
        within PLACE_S, a node is lost meanwhile, or a signal comes.

        Raises:
            UserError: a node is not set up as this host.
        """
        ray, self.world_size = self._ray, world_size
        before, deadline = self._slots(), time.monotonic() + PLACE_S
        self._nodes = self._alive()
        self._group = ray.util.placement_group([self._slot] * world_size, strategy="PACK")
        while not self._group.wait(1):
            # More may come, by Ray's autoscaler; of a node that is lost Ray may know only now.
            if time.monotonic() > deadline or self._slots() < before or received:
                return False
        folder = os.getcwd()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = ray.remote(ProcessActor)
        self._actors = [
            kind.options(
                num_cpus=1,
                num_gpus=self._slot.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=strategy(self._group, index),
            ).remote(folder)
            for index in range(world_size)
        ]
        self._place(folder)
        return True

    def _place(self, folder: str) -> None:
        """Sorts the actors by node.

        Raises:
            UserError: a ConfigError with every node that is not set up as this host.
        """
        ray = self._ray
        try:
            places = ray.get([actor.place.remote() for actor in self._actors], timeout=PLACE_S)
        except ray.exceptions.RayError as error:
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

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        """Runs `hybridrl ARGUMENTS` as all ranks and waits for them."""
        program = ("-m", "hybridrl.cli.main", *arguments)
        where, given = str(log_dir.absolute()), {**forwarded(), **environment}
        address, port = self.places[0].address, any_port()
        for stale in log_dir.glob("node_*.json"):
            stale.unlink()
        nodes: list[RemoteNode] = []
        gone: list[int] = []  # ranks whose actor was lost
        is_wider = self._is_wider if self._fits and self.world_size < self._full else None
        watch = NodesWatch(nodes, has_lease=self._fits is not None, is_wider=is_wider)
        with caught_signals() as received:
            try:
                for rank, actor in enumerate(self._actors):
                    share = Share(1, rank, self.world_size, address, port)
                    variables = {**given, **rank_variables(self.places, rank)}
                    order = Order(rank, share, program, where, variables)
                    actor.start.remote(order.to_line())
                    nodes.append(RemoteNode(actor, self._telling(rank, gone)))
                wait_for_nodes(nodes, received, watch.look)
            finally:
                watch.end()
                end_nodes(nodes)
        hosts = [Host(f"{place.address} (rank {i})", 1) for i, place in enumerate(self.places)]
        end = conclude_nodes(nodes, hosts, log_dir, bool(received) or watch.has_asked)
        if (gone or lost_ranks(end.outcome)) and not received and end.code != 2:
            return End(1, "lost")
        if watch.has_asked and not received and end.code in STOP_CODES:
            with caught_signals() as received:
                if self.settle(True, received) and not received:
                    return End(end.code, "wider")
        return End(end.code, "over")

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Takes the slots of the next start; returns False where a signal came, or nodes stay away
        for BACK_S that every layout needs.
        """
        assert self._fits is not None
        most = self._full
        if not comes_back:  # rather all than none
            fewer = range(self.world_size - 1, 0, -1)
            most = next((size for size in fewer if self._fits(size)), most)
        deadline, is_told = time.monotonic() + BACK_S, False
        while not self._resize(most, received):
            if received or time.monotonic() > deadline:
                return False
            if not is_told:
                told = f"no layout fits the free slots of the cluster: waiting {BACK_S:g} s"
                say(f"hybridrl: {told} for nodes{self._dead()}")
                is_told = True
            time.sleep(WAIT_S)
        return True

    def _resize(self, most: int, received: Sequence[int]) -> bool:
        """Takes as many free slots as can train the run, `most` at most; returns whether there were
        any.
        """
        self._give_back()
        assert self._fits is not None
        try:
            deadline = time.monotonic() + FREE_S
            while self._free() < min(most, self._slots()) and time.monotonic() < deadline:
                time.sleep(WAIT_S)
            free = self._free()
            sizes = range(min(most, free), 0, -1)
            size = next((size for size in sizes if self._fits(size)), 0)
            if size and self._gather(size, received):
                return True
        except UserError as error:  # ConfigError is one
            say(f"hybridrl: {error}")
        except self._ray.exceptions.RayError as error:
            say(f"hybridrl: Ray: {said(error)}")
        self._give_back()
        return False

    def _slots(self) -> int:
        """Returns the slots of the cluster, free ones and others."""
        return int(self._ray.cluster_resources().get(self._unit, 0))

    def _free(self) -> int:
        return int(self._ray.available_resources().get(self._unit, 0))

    def _dead(self) -> str:
        """Returns the nodes that Ray lost, in words that follow others; empty if there is none."""
        try:
            found = dead_nodes(self._ray.nodes())
        except (self._ray.exceptions.RayError, RuntimeError, ConnectionError):
            return ""
        named = ", ".join(f"{address} ({why})" for address, why in found.items())
        return f"; Ray lost {named}" if found else ""

    def _alive(self) -> set[str]:
        return {str(node["NodeID"]) for node in self._ray.nodes() if node["Alive"]}

    def _is_wider(self) -> bool:
        """Whether nodes have come with which more ranks can train."""
        assert self._fits is not None
        try:
            if self._alive() <= self._nodes:
                return False
            most = min(self._full, self.world_size + self._free())
        except (self._ray.exceptions.RayError, RuntimeError, ConnectionError):
            return False  # Ray is away, or this job is at its end
        return any(map(self._fits, range(self.world_size + 1, most + 1)))

    def _telling(self, rank: int, gone: list[int]) -> Callable[[str], None]:
        """Returns what notes that a rank's actor was lost, and says why."""
        place = self.places[rank]

        def tell(why: str) -> None:
            gone.append(rank)
            what = f"hybridrl: Ray's actor of rank {rank} on node {place.address} was lost"
            say(f"{what}: {why}")

        return tell

    def _give_back(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Gives the slots back and leaves the cluster."""
        self._give_back()
        self._ray.shutdown()


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
