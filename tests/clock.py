"""Judges how long Python takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def is_within(limit_s: float, call: Callable[[], object], tries: int = 5) -> bool:
    """Returns whether one of a few calls takes less CPU time than the limit.

    A call may meet a slower core, or the garbage of all tests before it; each of five does not.
    """
    for _ in range(tries):
        began = time.process_time()
        call()
        if time.process_time() - began < limit_s:
            return True
    return False
