"""One machine's part of a job that `hybridrl launch --hostfile` or `--ray` starts. No torch.

The command that started the job controls this process through its stdin: the first line is an
`Order` as JSON, each further line the number of a signal for the ranks, or 0. The end of stdin ends
the ranks immediately, because whoever started the job is gone or another machine failed. So does
silence of LEASE_S once a 0 has come: the network is cut, and the job may have been started
elsewhere. The last thing on stdout, after MARK, is the `Outcome` of the ranks as JSON.
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

BEAT, BEAT_S = b"0\n", 5.0  # what is written to a machine, and how often
LEASE_S = 25.0  # less than what ssh gives a host that does not answer (hosts.py)
MARK = b"\0"


@dataclass(frozen=True)
class Order:
    """What a machine is to do.

    Args:
        share: Ranks that it starts.
        command: What Python runs as each of them.
        log_dir: Folder of the run's logs, a path that all machines share.
        environment: Variables of the ranks. They are sent here and not in a command line that
            others could read: there may be keys of services among them.
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
        """Returns the order of `to_line`."""
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
    with suppress(OSError), os.fdopen(os.dup(1), "wb") as stdout:  # nobody may be left to tell
        stdout.write(MARK + json.dumps(asdict(outcome)).encode())
    return 0


def _obey(received: list[int]) -> None:
    """Appends what stdin brings to the signals that the ranks get."""

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
