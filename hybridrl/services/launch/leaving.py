"""Processes that have ended and still hold memory, and those that wait for it. No torch.

The kernel takes seconds to free what a rank holds: page-locked host memory, GPU memory. How a
killed rank ended is known at once, and the next start need not wait: its ranks import while the
memory is freed. Invariant: a rank of the next start takes no GPU memory and reads no copy of the
state before all processes of the starts before it are gone.

Who waits for whom: a rank waits in `wait_for_gate` for its launcher, which waits for the processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from hybridrl.console import say

GATE_FD = "HYBRIDRL_GATE_FD"  # of a pipe that ends when the ranks of the starts before are gone
EXIT_CODE = 49  # field of /proc/PID/stat, counted from the state (proc(5), field 52)
SLOW_S = 30.0  # for a process to free its memory; it is said then


def is_killed(pid: int) -> bool:
    """Whether a process has got SIGKILL, so that nothing of its program runs any more; known before
    its memory is freed. False where the system does not say (no Linux).

    Args:
        pid: of a child that nobody has waited for yet.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[EXIT_CODE]) & 0x7F == signal.SIGKILL
    except (OSError, IndexError, ValueError):
        return False


class Leaving:
    """Processes of ranks that have ended, until they are gone."""

    def __init__(self) -> None:
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def take(self, processes: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> None:
        """Takes over processes that need no signal any more, each with its name for people."""
        self._processes += processes

    def wait(self) -> None:
        """Returns when all are gone; says which take long."""
        for name, process in list(self._processes):  # another thread may add some
            try:
                process.wait(SLOW_S)
            except subprocess.TimeoutExpired:
                said = f"hybridrl: {name} has ended, and process {process.pid} of it still holds"
                say(f"{said} memory; it is waited for")
                process.wait()

    def gate(self) -> int | None:
        """Returns the descriptor for GATE_FD, which the caller closes; None: all are gone."""
        self._processes = [one for one in self._processes if one[1].poll() is None]
        if not self._processes:
            return None
        reads, writes = os.pipe()

        def open_when_gone() -> None:
            try:
                self.wait()
            finally:
                os.close(writes)

        threading.Thread(target=open_when_gone, name="leaving", daemon=True).start()
        return reads


def wait_for_gate() -> None:
    """Returns when the ranks of the starts before are gone; a rank calls it before it uses its GPU.

    Where the launcher ends, so does the wait, and this process (`launch.die_with_launcher`).
    """
    if (descriptor := os.environ.pop(GATE_FD, None)) is not None:
        with os.fdopen(int(descriptor), "rb") as pipe:
            pipe.read()
