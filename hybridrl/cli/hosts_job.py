"""Ranks on several hosts, started over ssh, again where hosts or ranks are lost. No torch.

Owns which hosts take part. A host is lost when its connection is: it is asked once whether it
answers again, and else the job goes on without it. Where the hosts that are left hold no layout
they are waited for, BACK_S. While a job runs without a host, that one is asked every ASK_EVERY_S;
once it answers and more ranks can train, the ranks save, end and start with it.

Who waits for whom: as of hostfile.py. Where a job may be started again, a host that hears nothing
for LEASE_S (node.py) ends its ranks, so that two starts never train side by side.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hybridrl.cli.elastic import End
from hybridrl.cli.hostfile import (
    Connection,
    Host,
    answers,
    any_port,
    conclude_nodes,
    end_nodes,
    forwarded,
    shares,
    start_node,
    tell_node,
    wait_for_nodes,
)
from hybridrl.cli.launch import STOP_CODES, Share, caught_signals
from hybridrl.cli.node import BEAT, BEAT_S, Order
from hybridrl.cli.rank_ends import lost_ranks
from hybridrl.console import say

# A reboot with the firmware's tests of a large machine takes five to ten minutes.
BACK_S = 900.0
ASK_EVERY_S = 10.0
# Starts in a row that lose ranks of a host before these are left out: copies of the state may
# leave with them.
FUTILE_STARTS = 2
WAIT_S = 1.0  # between questions while nothing else can be done
CONNECT_S = 5  # for a host that was lost; ssh takes the first of several values


class HostsJob:
    """The ranks of several hosts, as an `ElasticJob`.

    Args:
        hosts: of the hostfile.
        parts: the ranks of each at the first start; hosts beyond them have none.
        ssh: the program with its options.
        port: of the job's store; None: any.
        fits: whether so many ranks can train the run; None: the job is started once.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        parts: Sequence[Share],
        ssh: Sequence[str],
        port: int | None,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        self._ssh, self._port, self._fits = ssh, port, fits
        self._given, self._hosts, self._down = list(hosts), list(hosts), set[str]()
        self._used, self._parts = list(hosts[: len(parts)]), list(parts)
        self._full = parts[0].world_size  # no start has more
        self._named = hosts[0].name, parts[0].address
        self._lost: list[tuple[str, int]] = []  # hosts with the number of ranks that they lost
        self._futile: dict[str, int] = {}  # starts without a step that lost ranks of a host

    @property
    def where(self) -> str:
        """How many ranks the next start has, and where, in words."""
        names = ", ".join(host.name for host in self._used)
        return f"{self._parts[0].world_size} ranks on {names}"

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        """Runs the ranks of all hosts and waits for them."""
        program = ("-m", "hybridrl.cli.main", *arguments)
        variables = {**forwarded(), **environment}
        for stale in log_dir.glob("node_*.json"):
            stale.unlink()
        nodes: list[subprocess.Popen[bytes]] = []
        is_wider = self._is_wider if self._down else None
        watch = NodesWatch(nodes, has_lease=self._fits is not None, is_wider=is_wider)
        with caught_signals() as received:
            try:
                for index, (host, share) in enumerate(zip(self._used, self._parts, strict=True)):
                    order = Order(index, share, program, str(log_dir.absolute()), variables)
                    nodes.append(start_node(host.name, self._ssh, order))
                wait_for_nodes(nodes, received, watch.look)
            finally:
                watch.end()
                end_nodes(nodes)
        is_stopped = bool(received) or watch.has_asked
        end = conclude_nodes(nodes, self._used, log_dir, is_stopped)
        lost = lost_ranks(end.outcome)
        self._lost = [
            (host.name, sum(share.first <= rank < share.first + share.count for rank in lost))
            for host, share in zip(self._used, self._parts, strict=True)
        ]
        cut_off = {self._used[index].name for index in end.cut_off}
        self._down |= cut_off
        if (cut_off or lost) and not received and end.code != 2:
            return End(1, "lost")
        if watch.has_asked and not received and end.code in STOP_CODES:
            self._choose()
            return End(end.code, "wider")
        return End(end.code, "over")

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Chooses hosts and ranks of the next start; returns False where a signal came, or hosts
        stay away for BACK_S that every layout needs.
        """
        if comes_back:
            self._hosts, self._futile = self._given, {}
        else:
            counts = dict[str, int]()
            for name, count in self._lost:
                if count and name not in self._down:
                    self._futile[name] = self._futile.get(name, 0) + 1
                    counts[name] = count if self._futile[name] >= FUTILE_STARTS else 0
            self._hosts = [
                replace(host, slots=max(host.slots - counts.get(host.name, 0), 0))
                for host in self._hosts
            ]
        deadline, is_told = time.monotonic() + BACK_S, False
        while True:
            self._ask()
            if self._choose():
                return True
            self._hosts = self._given  # rather those that did not come back than none
            if self._choose():
                return True
            if received or not self._down or time.monotonic() > deadline:
                return False
            if not is_told:
                names = ", ".join(sorted(self._down))
                said = f"hybridrl: no layout fits without {names}: waiting {BACK_S:g} s for them"
                say(said)
                is_told = True
            time.sleep(WAIT_S)

    def close(self) -> None:
        """Nothing is left: each host waits for its ranks at the end of a start."""

    def _ask(self) -> None:
        """Takes in those hosts that were down and answer again."""
        down = [host for host in self._hosts if host.name in self._down]
        ssh = [*self._ssh, "-o", f"ConnectTimeout={CONNECT_S}"]
        found = answers(down, ssh, self._hosts[0].name)
        self._down -= {host.name for host, wrong in zip(down, found, strict=True) if wrong is None}

    def _is_wider(self) -> bool:
        """Whether hosts have come back with which more ranks can train."""
        before = self._parts[0].world_size
        self._ask()
        return next(self._layouts(), (0, []))[0] > before

    def _choose(self) -> bool:
        """Takes the most ranks that the hosts which are up can hold, for the next start."""
        size, used = next(self._layouts(), (0, []))
        if not size:
            return False
        name, address = self._named
        self._used = used
        first = address if used[0].name == name else used[0].name
        self._parts = shares(used, size, first, self._port or any_port())
        return True

    def _layouts(self) -> Iterator[tuple[int, list[Host]]]:
        """Yields what can train the run, most ranks first: their number and their hosts, each with
        as many slots as it has ranks, which are the same on all.
        """
        up = [host for host in self._hosts if host.name not in self._down and host.slots]
        found = []
        for slots in sorted({each for host in up for each in range(1, host.slots + 1)}):
            fitting = [replace(host, slots=slots) for host in up if host.slots >= slots]
            found += [(slots * n, fitting[:n]) for n in range(1, len(fitting) + 1)]
        for size, hosts in sorted(found, key=lambda one: (-one[0], len(one[1]))):
            if size <= self._full and self._fits is not None and self._fits(size):
                yield size, hosts


class NodesWatch:
    """What is done while ranks run: hosts hear that this process lives, and ranks are asked to save
    and end once more of them can run.

    Args:
        nodes: the connections, which may be added later.
        has_lease: whether hosts end their ranks when they hear nothing.
        is_wider: asks hosts, which takes time; None: all take part.
    """

    def __init__(
        self,
        nodes: Sequence[Connection],
        has_lease: bool,
        is_wider: Callable[[], bool] | None,
    ) -> None:
        self._nodes, self._has_lease, self._is_wider = nodes, has_lease, is_wider
        self._beaten = 0.0
        self._has_room, self._ended = threading.Event(), threading.Event()
        self.has_asked = False
        if is_wider is not None:
            threading.Thread(target=self._ask, name="lost hosts", daemon=True).start()

    def look(self) -> None:
        """Called often; writes to the hosts what they are to know."""
        now = time.monotonic()
        if self._has_lease and now - self._beaten > BEAT_S:
            self._beaten = now
            self._tell(BEAT)
        if self._has_room.is_set() and not self.has_asked:
            self.has_asked = True
            say("hybridrl: hosts have come back: the ranks save and end")
            self._tell(b"%d\n" % signal.SIGTERM)

    def end(self) -> None:
        """Asks no host any more."""
        self._ended.set()

    def _tell(self, line: bytes) -> None:
        for node in self._nodes:
            tell_node(node, line)

    def _ask(self) -> None:
        assert self._is_wider is not None
        while not self._ended.wait(ASK_EVERY_S):
            if self._is_wider():
                self._has_room.set()
                return
