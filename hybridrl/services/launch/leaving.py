"""Makes new ranks wait for ended processes that still hold memory. Does not import torch.

The kernel takes seconds to free a killed rank's page-locked and GPU memory. Ranks of the next start
import modules in the meantime, then wait in `wait_for_gate`. Invariant: a rank neither allocates
GPU memory nor reads a copy of the state until all processes from earlier starts are gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from hybridrl.console import say

GATE_FD = "HYBRIDRL_GATE_FD"  # Descriptor of a pipe that closes when earlier ranks are gone.
EXIT_CODE = 49  # Index in /proc/PID/stat, where 0 is the state (proc(5), field 52).
SLOW_S = 30.0  # A message names processes that need longer to free their memory.


def is_killed(pid: int) -> bool:
    """Whether a child has received SIGKILL, which Linux reports before it frees the memory."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[EXIT_CODE]) & 0x7F == signal.SIGKILL
    except (OSError, IndexError, ValueError):
        return False


class Leaving:
    """Tracks rank processes that have ended until the kernel has freed their memory."""

    def __init__(self) -> None:
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def take(self, processes: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> None:
        """Adds processes that have ended or been killed, each with a name for messages."""
        self._processes += processes

    def wait(self) -> None:
        """Waits until all processes are gone. Prints which processes take a long time."""
        for name, process in list(self._processes):  # another thread may add processes
            try:
                process.wait(SLOW_S)
            except subprocess.TimeoutExpired:
                say(f"hybridrl: waiting for process {process.pid} of {name} to free its memory")
                process.wait()

    def gate(self) -> int | None:
        """Returns the descriptor for GATE_FD, to be closed by the caller; None if all are gone."""
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
    """Waits until the ranks of earlier starts are gone, before a rank uses its GPU."""
    if (descriptor := os.environ.pop(GATE_FD, None)) is not None:
        with os.fdopen(int(descriptor), "rb") as pipe:
            pipe.read()
