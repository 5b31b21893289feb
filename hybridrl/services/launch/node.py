"""Runs the ranks of one machine for `hybridrl launch --hostfile` or `--ray`, without torch.

The first line on stdin is an `Order` as JSON, each further line the number of a signal for the
ranks, or 0 to keep the connection alive. The ranks are ended when stdin ends, and after the first 0
if no line arrives for LEASE_S, because the job may have restarted elsewhere. The last output, after
MARK, is the `Outcome` as JSON.
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

BEAT, BEAT_S = b"0\n", 5.0  # Line that keeps the connection alive, and its interval.
LEASE_S = 25.0  # Must be shorter than the timeout of ssh (hosts.py).
MARK = b"\0"


@dataclass(frozen=True)
class Order:
    """Python's `command` for each rank of a machine.

    Sent over stdin, because the environment may have API keys, and others can read commands.
    """

    share: Share
    command: Sequence[str]
    log_dir: str
    environment: dict[str, str]

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Order:
        found = json.loads(line)
        return Order(**{**found, "share": Share(**found["share"])})


def main() -> int:
    """Runs the ranks on this machine. Returns 0, or 2 if the ranks cannot be started."""
    order = Order.from_line(_read_line())
    log_dir = Path(order.log_dir)
    try:
        if not log_dir.is_dir():
            found = f"{log_dir}, which does not exist on {os.uname().nodename}"
            allowed = "a folder that all hosts share"
            raise UserError("run.dir", found, allowed, "Put run.dir on a shared file system.")
        outcome = run_ranks(order.command, order.share, log_dir, order.environment, _obey)
    except UserError as error:
        say(str(error))
        return 2
    with suppress(OSError), os.fdopen(os.dup(1), "wb") as stdout:  # the launcher may be gone
        stdout.write(MARK + json.dumps(asdict(outcome)).encode())
    return 0


def _obey(received: list[int]) -> None:
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
    """Reads one line from stdin without buffering; an empty line at its end."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
