"""How long a rank makes no progress, and in which collectives it is meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from hybridrl.parallel import progress
from hybridrl.parallel.collectives import latest_calls, num_called
from hybridrl.parallel.watch import Call


class IdleClock:
    """Counts the time in which nothing changes that counts a rank's work.

    Time in which nobody looked, because the process was stopped or its Python held up, counts for
    two looks at most: others know about it, and the rank continues.

    Args:
        note_after_s: Seconds after which the rank's calls are noted.
        every_s: Seconds between two looks; more looks do no harm.
    """

    def __init__(self, note_after_s: float, every_s: float) -> None:
        self._note_after_s, self._every_s = note_after_s, every_s
        self._seen: tuple[object, ...] = ()
        self._idle_s, self._looked = 0.0, time.monotonic()
        self._noting: threading.Thread | None = None
        self._latest: Sequence[Call] = ()

    def look(self, *work: object) -> tuple[float, Sequence[Call]]:
        """Returns the seconds without a change, and the calls if they are many.

        Args:
            work: Anything that changes with the rank's work, besides calls and rounds.
        """
        seen = (num_called(), progress.num_rounds(), *work)
        now = time.monotonic()
        self._idle_s += min(now - self._looked, 2 * self._every_s)
        self._looked = now
        if seen != self._seen:
            self._seen, self._idle_s, self._latest = seen, 0.0, ()
        is_noting = self._noting is not None and self._noting.is_alive()
        if self._idle_s >= self._note_after_s and not is_noting:
            # In a thread: the flight recorder asks the device.
            self._noting = threading.Thread(target=self._note, name="calls", daemon=True)
            self._noting.start()
        return self._idle_s, self._latest

    def _note(self) -> None:
        # Errors of a device that has failed, or of a group that is removed meanwhile.
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            self._latest = tuple(latest_calls())
