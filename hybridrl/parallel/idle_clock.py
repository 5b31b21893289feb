"""Measures how long a rank makes no progress, and records its collectives meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from hybridrl.parallel import progress
from hybridrl.parallel.collectives import latest_calls, num_called
from hybridrl.parallel.watch import Call


class IdleClock:
    """Counts the time in which none of the counters of a rank's work changes.

    If nobody looks for a while, because the process was stopped or its interpreter blocked, that
    time counts as two intervals at most.

    Args:
        note_after_s: Seconds without progress after which the rank's calls are recorded.
        every_s: Seconds between two calls of `look`; more frequent calls do no harm.
    """

    def __init__(self, note_after_s: float, every_s: float) -> None:
        self._note_after_s, self._every_s = note_after_s, every_s
        self._seen: tuple[object, ...] = ()
        self._idle_s, self._looked = 0.0, time.monotonic()
        self._noting: threading.Thread | None = None
        self._latest: Sequence[Call] = ()

    def look(self, *work: object) -> tuple[float, Sequence[Call]]:
        """Returns the seconds without progress, and the rank's calls once these are many.

        Args:
            work: Values that change with the rank's work, in addition to collectives and rounds.
        """
        seen = (num_called(), progress.num_rounds(), *work)
        now = time.monotonic()
        self._idle_s += min(now - self._looked, 2 * self._every_s)
        self._looked = now
        if seen != self._seen:
            self._seen, self._idle_s, self._latest = seen, 0.0, ()
        is_noting = self._noting is not None and self._noting.is_alive()
        if self._idle_s >= self._note_after_s and not is_noting:
            # In a thread, because the flight recorder queries the device.
            self._noting = threading.Thread(target=self._note, name="calls", daemon=True)
            self._noting.start()
        return self._idle_s, self._latest

    def _note(self) -> None:
        # The device has failed, or a group is being destroyed.
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            self._latest = tuple(latest_calls())
