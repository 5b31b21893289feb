"""Manages connections to node.py on the machines of a job, and ends the job. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl import console
from hybridrl.console import say
from hybridrl.services.launch.local_ranks import GRACE_S, KILL_AFTER_S, LEAVE_S, POLL_S
from hybridrl.services.launch.node import MARK, Order
from hybridrl.services.launch.rank_ends import Outcome, conclude

# Time that machines have to end their ranks and report. The kernel may take a minute to free
# page-locked memory. If a machine is gone, the connection to it ends too.
END_S = 180.0
OUTPUT_S = 1.0  # time to read the remaining output of a process that has ended


@dataclass(frozen=True)
class Host:
    """A machine of a job: its name for ssh or address for Ray, and the ranks that it can run."""

    name: str
    slots: int


class NodeOutput:
    """Copies the stdout of node.py to the console, up to MARK."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, block: bytes) -> None:
        shown, mark, rest = (self._held + block).partition(MARK)
        self._held = mark + rest
        if shown:
            console.write(console.STDOUT, shown)

    def outcome(self) -> Outcome | None:
        """Returns the outcome that follows MARK in the output; None if it is missing."""
        printed, _, found = self._held.rpartition(MARK)
        if printed:  # a rank has printed MARK
            console.write(console.STDOUT, printed)
        with suppress(ValueError):
            return Outcome.from_json(found.decode())
        return None


class Connection(ABC):
    """A connection to node.py on one machine.

    `code`, -N for signal N, is None until `poll` has detected the end. `outcome` of the ranks is
    then None if node.py could not report it.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.code: int | None = None
        self.outcome: Outcome | None = None
        self._output = NodeOutput()

    @abstractmethod
    def tell(self, line: bytes) -> None:
        """Writes a line to node.py, if it still runs."""

    @abstractmethod
    def close(self) -> None:
        """Closes the stdin of node.py, which ends its ranks."""

    @abstractmethod
    def poll(self) -> int | None:
        """Returns the exit code; None while node.py runs."""

    @abstractmethod
    def kill(self) -> None:
        """Ends node.py."""

    @property
    def how(self) -> str:
        if self.code is not None and self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with code {self.code}"


class ProcessConnection(Connection):
    """A connection through a local process: `command` runs node.py on the host."""

    def __init__(self, host: Host, command: Sequence[str], order: Order) -> None:
        super().__init__(host)
        # In a new session, Ctrl-C reaches the ranks only through this process.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell(order.to_line())

    def _read(self) -> None:
        assert self._process.stdout is not None
        while block := os.read(self._process.stdout.fileno(), 65536):
            self._output.take(block)

    def tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended; `poll` returns its code
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def poll(self) -> int | None:
        if self.code is None and (code := self._process.poll()) is not None:
            self._reader.join(OUTPUT_S)
            self.code, self.outcome = code, self._output.outcome()
        return self.code

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.poll()


def wait_for_nodes(
    nodes: Sequence[Connection], received: list[int], look: Callable[[], None] = lambda: None
) -> None:
    """Waits until all machines are done, or until one has failed and the others could report.

    Forwards the signals in `received`, which may grow, and calls `look` every POLL_S.
    """
    deadline, num_sent = float("inf"), 0
    while None in [node.poll() for node in nodes]:
        for number in received[num_sent:]:
            for node in nodes:
                node.tell(b"%d\n" % number)
            num_sent += 1
        if len(received) > 1:
            return
        look()
        deadline = min(deadline, time.monotonic() + _time_left_s(nodes))
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def _time_left_s(nodes: Sequence[Connection]) -> float:
    lefts = [float("inf")]
    for node in nodes:
        if node.code is None:
            continue
        if node.outcome is None:  # ranks elsewhere only report that this machine is gone
            lefts.append(KILL_AFTER_S if node.code == 2 else GRACE_S)
        elif node.outcome.culprits:
            lefts.append(KILL_AFTER_S)
        elif node.outcome.stopped_by:
            lefts.append(LEAVE_S)
    return min(lefts)


def end_nodes(nodes: Sequence[Connection]) -> None:
    """Ends machines that still run. Closing the stdin of node.py ends its ranks."""
    for node in nodes:
        node.close()
    deadline = time.monotonic() + END_S
    while None in [node.poll() for node in nodes] and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for node in nodes:
        node.kill()


@dataclass(frozen=True)
class NodesEnd:
    """How a job ended: merged outcome, machines whose connection was lost, exit code."""

    outcome: Outcome
    cut_off: Sequence[str]
    code: int


def conclude_nodes(nodes: Sequence[Connection], log_dir: Path, is_stopped: bool) -> NodesEnd:
    """Prints and returns how the job ended. All connections have ended.

    `is_stopped`: whether the launcher asked ranks to stop, other than by `end_nodes`.
    """
    outcome = Outcome.together([node.outcome for node in nodes if node.outcome is not None])
    silent = [node for node in nodes if node.outcome is None]
    if silent and not is_stopped:
        outcome = replace(outcome, stopped_by=0)
    code = conclude(outcome, log_dir)
    # Code 2: the machine has printed a UserError.
    cut_off = [node for node in silent if node.code != 2]
    for node in cut_off:
        say(f"hybridrl: the connection to host {node.host.name} {node.how}")
    has_refused = len(cut_off) < len(silent)
    names = [node.host.name for node in cut_off]
    return NodesEnd(outcome, names, 2 if has_refused else code or int(bool(cut_off)))
