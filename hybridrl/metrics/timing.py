"""Where the time of a step goes, and what a rank is doing right now.

A rank writes its current phase into a small file beside its log. When the rank dies, the launcher
reads there what it was doing: the file is written before the phase begins and never needs closing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

IDLE = "between phases"
# One write of a fixed size: a reader sees the old line or the new, never half of one.
LINE_BYTES = 64


@dataclass(frozen=True)
class Span:
    """One run of a phase, by this process's `time.perf_counter`."""

    name: str
    began: float
    ended: float


class PhaseTimer:
    """Collects the seconds of each phase of a step and the most memory in it, and tells the current
    phase.

    A phase inside another counts for both. Times of one name within a step add up. `around` is
    called with the name of each phase for what is to surround it.

    Args:
        phase_file: gets the current phase, e.g. `logs/rank_3.phase`; None: kept in memory only.
        synchronize: called at both ends of each phase, so that an accelerator's queued work counts
            for the phase that queued it; None: nothing to wait for (CPU).
        take_peak: returns the most bytes in use since it was called last; None: not known by phase.
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
        self._tell()

    @property
    def current(self) -> str:
        """The innermost phase that is running, and the step, if one is known."""
        innermost = self._open[-1:]  # at once: another thread may ask
        phase = innermost[0] if innermost else IDLE
        return phase if self._step is None else f"{phase}, step {self._step}"

    def start_step(self, step: int | None = None) -> None:
        """Forgets the times collected so far and starts the clock of the whole step."""
        self._step = step
        self._seconds.clear()
        self._spans.clear()
        self.note_peak()
        self._peaks.clear()
        self._tell()
        self._step_began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block for phase `name`, also when it raises.

        After an exception the phase stays the current one, it is where the rank died, and so does
        its peak, for who explains an out-of-memory error.
        """
        with self.around(name):
            yield from self._counted(name)

    def _counted(self, name: str) -> Iterator[None]:
        self.note_peak()
        self._open.append(name)
        self._tell()
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
        self._tell()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase since `start_step`, and all of them as "step"."""
        return {**self._seconds, "step": time.perf_counter() - self._step_began}

    def spans(self) -> list[Span]:
        """Returns every run of a phase since `start_step`, in the order of their ends."""
        return list(self._spans)

    def peak_bytes(self) -> dict[str, int]:
        """Returns the most bytes in use in each phase since `start_step`, as "step" in all of it,
        and as "run" since this timer began; empty where that is not known.
        """
        if self._take_peak is None:
            return {}
        self.note_peak()
        return {**self._peaks, "run": self._most}

    def note_peak(self) -> None:
        """Counts the memory that has been in use until now for the phases that are running."""
        if self._take_peak is None:
            return
        most = self._take_peak()
        self._most = max(self._most, most)
        for name in {*self._open, "step"}:
            self._peaks[name] = max(most, self._peaks.get(name, 0))

    def close(self) -> None:
        """Closes the phase file, which keeps its last line."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _wait(self) -> None:
        # A sync point: without it a phase would be charged only for queueing its kernels.
        if self._synchronize is not None:
            self._synchronize()

    def _tell(self) -> None:
        if self._file is not None:
            line = self.current.encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"
            os.pwrite(self._file, line, 0)


def read_phase(phase_file: Path) -> str | None:
    """Returns what `PhaseTimer` last wrote there, or None if it never began."""
    try:
        return phase_file.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # there is none, or the file system does not answer
        return None
