"""One machine's part of a job that `hybridrl launch --hostfile` starts. No torch.

The command that started the job steers this process through its stdin, and needs nothing else than
that: the first line is an `Order` as JSON, each further line the number of a signal for the ranks,
or 0. The end of stdin ends the ranks at once: whoever started the job is gone, or another machine
failed. So does silence of LEASE_S once a 0 has come: the network is cut, and the job may have been
started elsewhere.
How the ranks ended is left in the run folder, as `node_N.json`, and in short in the exit code,
which needs no file system that the machines share.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.cli.launch import Share, run_ranks
from hybridrl.console import say
from hybridrl.errors import UserError

BEAT, BEAT_S = b"0\n", 5.0  # what is written to a machine, and how often
# Exit codes where ranks have ended: all are done, some have failed, all were asked to stop. 2 says
# that the ranks could not be started; anything else that the connection was lost.
DONE, FAILED, STOPPED = 0, 3, 4
LEASE_S = 25.0  # less than what ssh gives a host that does not answer (hostfile.py)


@dataclass(frozen=True)
class Order:
    """What a machine is to do.

    Args:
        node: its number in the hostfile, from 0.
        share: the ranks that it starts.
        command: what Python runs as each of them.
        log_dir: of the run, a path that all machines share.
        environment: variables of the ranks. They are sent here, and not in a command line that
            others could read: there may be keys of services among them.
    """

    node: int
    share: Share
    command: Sequence[str]
    log_dir: str
    environment: dict[str, str]

    def to_line(self) -> bytes:
        """Returns the order as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Order:
        """Returns the order that a line says."""
        found = json.loads(line)
        return Order(**{**found, "share": Share(**found["share"])})


def outcome_file(log_dir: Path, node: int) -> Path:
    """Returns where a machine says how its ranks ended."""
    return log_dir / f"node_{node}.json"


def main() -> int:
    """Runs the ranks of this machine; returns DONE, FAILED or STOPPED, 2 where it cannot."""
    order = Order.from_line(_read_line())
    log_dir = Path(order.log_dir)
    file = outcome_file(log_dir, order.node)
    try:
        if not log_dir.is_dir():
            raise UserError(
                "run.dir",
                f"{log_dir}, which {os.uname().nodename} does not have",
                "a folder that all hosts share",
                "Put run.dir on a shared file system.",
            )
        file.unlink(missing_ok=True)  # of an earlier start
        outcome = run_ranks(order.command, order.share, log_dir, order.environment, _obey)
    except UserError as error:
        say(str(error))
        return 2
    outcome.write(file)
    if outcome.culprits:
        return FAILED
    return STOPPED if outcome.stopped_by else DONE


def _obey(received: list[int]) -> None:
    """Appends what stdin says to the signals that the ranks get."""

    def listen() -> None:
        lease_s: float | None = None
        while select.select([0], [], [], lease_s)[0] and (line := _read_line()):
            if line == BEAT:
                lease_s = LEASE_S
            else:
                received.append(int(line))
        received.extend((signal.SIGTERM, signal.SIGTERM))

    threading.Thread(target=listen, name="stdin", daemon=True).start()


def _read_line() -> bytes:
    """Returns a line of stdin without buffering, or nothing at its end."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
