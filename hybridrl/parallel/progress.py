"""Counts short rounds of work, such as micro-batches, for the heartbeat (idle_clock.py)."""

from __future__ import annotations

_ROUNDS = [0]


def advance() -> None:
    """Counts a round. If two threads call it at the same time, only one round may be counted."""
    _ROUNDS[0] += 1


def num_rounds() -> int:
    return _ROUNDS[0]
