"""A reward whose import lets a rank end itself, or its node with the node's memory, as it enters a
phase: from outside nobody meets a phase of milliseconds.

The file `kill_in` in the run folder has the phase, the rank and "rank" or "node". Nodes are those
of elastic_moments.py, with one rank each and memory of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from scripted_reward import digits

from hybridrl.metrics.timing import PhaseTimer

__all__ = ["digits"]

FILE = "kill_in"
_write_phase = PhaseTimer._write_phase


def _write_and_look(timer: PhaseTimer) -> None:
    _write_phase(timer)
    file = Path(os.environ["HYBRIDRL_LOG_DIR"]).parent / FILE
    with suppress(FileNotFoundError):
        phase, rank, what = file.read_text().split()
        if rank == os.environ["RANK"] and timer.current.startswith(f"{phase}, step"):
            _end(file, what)


def _end(file: Path, what: str) -> None:
    file.unlink()
    if what == "node":
        assert os.uname().nodename.startswith("node-")
        for folder in Path("/dev/shm").iterdir():
            gone = folder.with_name(f"gone-{time.time_ns()}")  # a thread may write there
            shutil.rmtree(folder.rename(gone), ignore_errors=True)
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if "RANK" in os.environ:
    PhaseTimer._write_phase = _write_and_look  # type: ignore[method-assign]
