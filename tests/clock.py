"""Judges how long Python takes."""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS, ROUNDS_S = 500_000, 0.045  # of a loop, and the CPU time that limits are made for


def slowness() -> float:
    """Returns how much slower this core is now than the one for which limits are made; >= 1."""
    began = time.process_time()
    total = 0
    for number in range(ROUNDS):
        total += number * number % 7
    return max(1.0, (time.process_time() - began) / ROUNDS_S)


def is_within(limit_s: float, call: Callable[[], object], tries: int = 5) -> bool:
    """Returns whether one of `tries` calls is within a limit of CPU time, scaled to this core.

    A call may meet the garbage of all earlier tests.
    """
    for _ in range(tries):
        factor = slowness()
        began = time.process_time()
        call()
        if time.process_time() - began < limit_s * factor:
            return True
    return False
