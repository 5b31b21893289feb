"""Runs one machine's ranks in a job of `hybridrl launch --hostfile` or `--ray`. No torch.

The launching command controls this process through stdin. The first line is an `Order` as JSON;
each further line is the number of a signal for the ranks, or 0 as keep-alive. The end of stdin ends
the ranks immediately, because the launching command is gone or another machine failed. Once a 0 has
come, silence of LEASE_S does the same: the network is cut, and the job may have restarted
elsewhere. The last output on stdout, after MARK, is the `Outcome` of the ranks as JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.console import say
from hybridrl.errors import UserError
from hybridrl.services.launch.local_ranks import Share, run_ranks

BEAT, BEAT_S = b"0\n", 5.0  # keep-alive line to a machine, and its interval
LEASE_S = 25.0  # shorter than ssh's timeout (hosts.py)
MARK = b"\0"


@dataclass(frozen=True)
class Order:
    """Instructions for a machine.

    Args:
        share: Ranks that it starts.
        command: Arguments of Python in each rank.
        log_dir: Folder of the run's logs, shared by all machines.
        environment: Variables of the ranks. They may contain API keys, so they are sent over stdin
            and not in a command line, which others could read.
    """

    share: Share
    command: Sequence[str]
    log_dir: str
    environment: dict[str, str]

    def to_line(self) -> bytes:
        """Returns the order as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Order:
        """Returns the order that `to_line` wrote."""
        found = json.loads(line)
        return Order(**{**found, "share": Share(**found["share"])})


def main() -> int:
    """Runs the ranks of this machine; returns 0, or 2 if they cannot be started."""
    order = Order.from_line(_read_line())
    log_dir = Path(order.log_dir)
    try:
        if not log_dir.is_dir():
            raise UserError(
                "run.dir",
                f"{log_dir}, which {os.uname().nodename} does not have",
                "a folder that all hosts share",
                "Put run.dir on a shared file system.",
            )
        outcome = run_ranks(order.command, order.share, log_dir, order.environment, _obey)
    except UserError as error:
        say(str(error))
        return 2
    with (
        suppress(OSError),
        os.fdopen(os.dup(1), "wb") as stdout,
    ):  # the launching command may be gone
        stdout.write(MARK + json.dumps(asdict(outcome)).encode())
    return 0


def _obey(received: list[int]) -> None:
    """Appends the signals from stdin to those for the ranks."""

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
    """Reads a line of stdin without buffering; empty at the end."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
