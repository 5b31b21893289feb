"""Measures the phases of a step, and records which phase a rank is in.

Before a phase begins, its name is written to a file next to the rank's log, which says what a dead
rank was doing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

IDLE = "between phases"
# The line has a fixed size and is written by one system call, so a reader sees either the old or
# the new line.
LINE_BYTES = 64


@dataclass(frozen=True)
class Span:
    """One execution of a phase. Times are seconds from this process's `time.perf_counter`."""

    name: str
    began: float
    ended: float


class PhaseTimer:
    """Collects the duration and the peak memory of each phase, and records the current phase.

    The time of a nested phase also counts for the enclosing phase. Within a step, the times of
    phases with the same name are summed.

    Args:
        phase_file: File for the current phase, such as `logs/rank_3.phase`, if any.
        synchronize: Function called at both ends of each phase, so that the time of kernels counts
            for the phase that enqueued them. None on CPUs.
        take_peak: Function that returns the peak bytes in use since its last call; None if unknown.

    Attributes:
        around: Function from a phase's name to a context manager that is entered around it.
    """

    def __init__(
        self,
        phase_file: Path | None = None,
        synchronize: Callable[[], None] | None = None,
        take_peak: Callable[[], int] | None = None,
    ) -> None:
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._most = 0
        self._spans: list[Span] = []
        self._take_peak = take_peak
        self._open: list[str] = []
        self.around: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._step: int | None = None
        self._step_began = time.perf_counter()
        self._synchronize = synchronize
        self._file: int | None = None
        if phase_file is not None:
            phase_file.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(phase_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write_phase()

    @property
    def current(self) -> str:
        innermost = self._open[-1:]  # read `_open` only once, because another thread may change it
        phase = innermost[0] if innermost else IDLE
        return phase if self._step is None else f"{phase}, step {self._step}"

    def start_step(self, step: int | None = None) -> None:
        """Discards the collected times, and restarts the clock for the whole step."""
        self._step = step
        self._seconds.clear()
        self._spans.clear()
        self.note_peak()
        self._peaks.clear()
        self._write_phase()
        self._step_began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures its block. After an error, the file still names the phase."""
        with self.around(name):
            self.note_peak()
            self._open.append(name)
            self._write_phase()
            self._wait()
            began = time.perf_counter()
            try:
                yield
                self._wait()
                self.note_peak()
            finally:
                ended = time.perf_counter()
                self._seconds[name] = self._seconds.get(name, 0.0) + ended - began
                self._spans.append(Span(name, began, ended))
                self._open.pop()
            self._write_phase()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds in each phase since `start_step`, and in the whole step as "step"."""
        return {**self._seconds, "step": time.perf_counter() - self._step_began}

    def spans(self) -> list[Span]:
        return list(self._spans)

    def peak_bytes(self) -> dict[str, int]:
        """Returns the peak bytes of each phase, of the "step", and of the "run"; {} if unknown."""
        if self._take_peak is None:
            return {}
        self.note_peak()
        return {**self._peaks, "run": self._most}

    def note_peak(self) -> None:
        """Attributes the peak memory since the last call to all running phases."""
        if self._take_peak is None:
            return
        most = self._take_peak()
        self._most = max(self._most, most)
        for name in {*self._open, "step"}:
            self._peaks[name] = max(most, self._peaks.get(name, 0))

    def close(self) -> None:
        """Closes the phase file, which still contains the last phase."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _wait(self) -> None:
        # Sync point: otherwise only the time to enqueue a phase's kernels would count.
        if self._synchronize is not None:
            self._synchronize()

    def _write_phase(self) -> None:
        if self._file is not None:
            line = self.current.encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"
            os.pwrite(self._file, line, 0)
