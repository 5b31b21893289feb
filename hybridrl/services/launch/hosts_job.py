"""Runs ranks on several hosts, and restarts them after losses. Does not import torch.

A host counts as lost when the connection to it breaks. The job continues without it unless it
responds; if no layout fits, it waits up to BACK_S. While fewer ranks run than at first, the cluster
is checked every ASK_EVERY_S; as soon as more ranks can train, the ranks save and restart. Hosts end
their ranks after LEASE_S of silence, so that ranks from two starts never train at the same time.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hybridrl.console import say
from hybridrl.services.launch.connections import (
    Connection,
    Host,
    conclude_nodes,
    end_nodes,
    wait_for_nodes,
)
from hybridrl.services.launch.hosts import any_port, forwarded, shares
from hybridrl.services.launch.local_ranks import PROGRAM, STOP_CODES, Share, caught_signals
from hybridrl.services.launch.node import BEAT, BEAT_S, Order
from hybridrl.services.launch.rank_ends import lost_ranks
from hybridrl.services.launch.restarts import End

# A large machine takes five to ten minutes to reboot, because its firmware runs tests.
BACK_S = 900.0
ASK_EVERY_S = 10.0
# Number of starts that must lose ranks on a host before these ranks are left out. One start is not
# enough, because leaving a host out may lose the copies of the state in its memory.
FUTILE_STARTS = 2
WAIT_S = 1.0  # interval between checks while no start is possible


class Cluster(Protocol):
    """A set of hosts, and a way to connect to them."""

    def connect(self, host: Host, order: Order) -> Connection:
        """Starts node.py on a host."""

    def hosts(self, down: Set[str]) -> list[Host]:
        """Returns the hosts that can run ranks now, in rank order. Checks those in `down` first."""

    def close(self) -> None:
        """Waits until all processes from all starts are gone."""


class HostsJob:
    """Ranks on several hosts, as an `ElasticJob`.

    `parts` are the ranks of the first hosts; the others have none. `port` is None for any port;
    `fits` says whether a number of ranks can train, and is None without restarts.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: Sequence[Host],
        parts: Sequence[Share],
        port: int | None,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        self._cluster, self._port, self._fits = cluster, port, fits
        self._down = set[str]()
        self._left_out = dict[str, int]()  # Number of unused slots, by host.
        self._used, self._parts = list(hosts[: len(parts)]), list(parts)
        self._max_size = parts[0].world_size
        self._named = hosts[0].name, parts[0].address
        self._lost: list[tuple[str, int]] = []  # Ranks that each host lost in the last start.
        self._futile: dict[str, int] = {}  # Starts that lost ranks and made no step, by host.

    @property
    def where(self) -> str:
        names = ", ".join(host.name for host in self._used)
        return f"{self._parts[0].world_size} ranks on {names}"

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        variables = {**forwarded(), **environment}
        nodes: list[Connection] = []
        size = self._parts[0].world_size
        is_wider = self._is_wider if self._fits and size < self._max_size else None
        watch = NodesWatch(nodes, has_lease=self._fits is not None, is_wider=is_wider)
        with caught_signals() as received:
            try:
                for host, share in zip(self._used, self._parts, strict=True):
                    command = [*PROGRAM, *arguments]
                    order = Order(share, command, str(log_dir.absolute()), variables)
                    nodes.append(self._cluster.connect(replace(host, slots=share.count), order))
                wait_for_nodes(nodes, received, watch.look)
            finally:
                watch.end()
                end_nodes(nodes)
        end = conclude_nodes(nodes, log_dir, bool(received) or watch.has_asked)
        lost = lost_ranks(end.outcome)
        self._lost = [
            (host.name, sum(share.first <= rank < share.first + share.count for rank in lost))
            for host, share in zip(self._used, self._parts, strict=True)
        ]
        self._down |= set(end.cut_off)
        if (end.cut_off or lost) and not received and end.code != 2:
            return End(1, "lost")
        if watch.has_asked and not received and end.code in STOP_CODES:
            self._choose(self._cluster.hosts(self._down))
            return End(end.code, "wider")
        return End(end.code, "over")

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Chooses the next start's hosts and ranks; False after a signal or BACK_S."""
        if comes_back:
            self._left_out, self._futile = {}, {}
        else:
            for name, count in self._lost:
                if count and name not in self._down:
                    self._futile[name] = self._futile.get(name, 0) + 1
                    if self._futile[name] >= FUTILE_STARTS:
                        self._left_out[name] = self._left_out.get(name, 0) + count
        deadline, is_told = time.monotonic() + BACK_S, False
        while True:
            hosts = self._ask()
            if self._choose(hosts):
                return True
            self._left_out = {}  # try all slots before giving up
            if self._choose(hosts):
                return True
            if received or time.monotonic() > deadline:
                return False
            if not is_told:
                names = ", ".join(sorted(self._down)) or "more free slots"
                say(f"hybridrl: no layout fits without {names}: waiting {BACK_S:g} s for them")
                is_told = True
            time.sleep(WAIT_S)

    def close(self) -> None:
        self._cluster.close()

    def _ask(self) -> list[Host]:
        hosts = self._cluster.hosts(self._down)
        self._down -= {host.name for host in hosts}
        return hosts

    def _is_wider(self) -> bool:
        return next(self._layouts(self._ask()), (0, []))[0] > self._parts[0].world_size

    def _choose(self, hosts: Sequence[Host]) -> bool:
        """Plans a start with as many ranks as the hosts can run; False if they can run none."""
        size, used = next(self._layouts(hosts), (0, []))
        if not size:
            return False
        name, address = self._named
        self._used = used
        first = address if used[0].name == name else used[0].name
        self._parts = shares(used, size, first, self._port or any_port())
        return True

    def _layouts(self, hosts: Sequence[Host]) -> Iterator[tuple[int, list[Host]]]:
        """Yields numbers of ranks that can train, largest first, with hosts of equal numbers."""
        up = [replace(h, slots=h.slots - self._left_out.get(h.name, 0)) for h in hosts]
        found = []
        for slots in sorted({each for host in up for each in range(1, host.slots + 1)}):
            fitting = [replace(host, slots=slots) for host in up if host.slots >= slots]
            found += [(slots * n, fitting[:n]) for n in range(1, len(fitting) + 1)]
        for size, used in sorted(found, key=lambda one: (-one[0], len(one[1]))):
            if size <= self._max_size and self._fits is not None and self._fits(size):
                yield size, used


class NodesWatch:
    """Sends keep-alive messages to hosts, and asks ranks to save as soon as more ranks can run."""

    def __init__(
        self, nodes: Sequence[Connection], has_lease: bool, is_wider: Callable[[], bool] | None
    ) -> None:
        self._nodes, self._has_lease, self._is_wider = nodes, has_lease, is_wider
        self._beaten = 0.0
        self._has_room, self._ended = threading.Event(), threading.Event()
        self.has_asked = False
        if is_wider is not None:
            threading.Thread(target=self._ask, name="lost hosts", daemon=True).start()

    def look(self) -> None:
        """Sends the hosts all messages that are due; must be called frequently."""
        now = time.monotonic()
        if self._has_lease and now - self._beaten > BEAT_S:
            self._beaten = now
            self._tell(BEAT)
        if self._has_room.is_set() and not self.has_asked:
            self.has_asked = True
            say("hybridrl: lost hosts are reachable again; the ranks save and restart")
            self._tell(b"%d\n" % signal.SIGTERM)

    def end(self) -> None:
        self._ended.set()

    def _tell(self, line: bytes) -> None:
        for node in self._nodes:
            node.tell(line)

    def _ask(self) -> None:
        assert self._is_wider is not None
        while not self._ended.wait(ASK_EVERY_S):
            if self._is_wider():
                self._has_room.set()
                return
