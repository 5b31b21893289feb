"""Measures how long a rank has made no progress, and records its collectives during this time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from hybridrl.parallel import progress
from hybridrl.parallel.collectives import latest_calls, num_called
from hybridrl.parallel.watch import Call


class IdleClock:
    """Measures for how long none of the counters of a rank's work has changed.

    If `look` is not called for a while, because the process was stopped or its interpreter was
    blocked, this time counts as at most two intervals (`every_s`). After `note_after_s` without
    progress, the rank's calls are recorded.
    """

    def __init__(self, note_after_s: float, every_s: float) -> None:
        self._note_after_s, self._every_s = note_after_s, every_s
        self._seen: tuple[object, ...] = ()
        self._idle_s, self._looked = 0.0, time.monotonic()
        self._noting: threading.Thread | None = None
        self._latest: Sequence[Call] = ()

    def look(self, *work: object) -> tuple[float, Sequence[Call]]:
        """Returns the seconds without progress and, after `note_after_s`, the rank's calls.

        `work` has further values that change whenever the rank makes progress.
        """
        seen = (num_called(), progress.num_rounds(), *work)
        now = time.monotonic()
        self._idle_s += min(now - self._looked, 2 * self._every_s)
        self._looked = now
        if seen != self._seen:
            self._seen, self._idle_s, self._latest = seen, 0.0, ()
        is_noting = self._noting is not None and self._noting.is_alive()
        if self._idle_s >= self._note_after_s and not is_noting:
            # Use a thread, because the flight recorder queries the device.
            self._noting = threading.Thread(target=self._note, name="calls", daemon=True)
            self._noting.start()
        return self._idle_s, self._latest

    def _note(self) -> None:
        # These errors mean that the device has failed, or that a group is being destroyed.
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            self._latest = tuple(latest_calls())
