"""Judges how long Python takes."""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS, ROUNDS_S = 500_000, 0.045  # of a loop, and the CPU time that limits are made for


def slowness() -> float:
    """Returns how much slower this core is, at this moment, than the one that limits are made for;
    1 for a faster one. Cores of two machines differ by 2, and share what a busy one beside leaves.
    """
    began = time.process_time()
    total = 0
    for number in range(ROUNDS):
        total += number * number % 7
    return max(1.0, (time.process_time() - began) / ROUNDS_S)


def is_within(limit_s: float, call: Callable[[], object], tries: int = 5) -> bool:
    """Returns whether one of a few calls takes less CPU time than the limit, on a slower core than
    the one that limits are made for as much more.

    A call may meet the garbage of all tests before it; each of five does not.
    """
    for _ in range(tries):
        factor = slowness()
        began = time.process_time()
        call()
        if time.process_time() - began < limit_s * factor:
            return True
    return False
