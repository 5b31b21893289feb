"""Counts the rounds of work of this process, so that others can see whether it makes progress.

Loops with short rounds count them: engine steps, micro-batches, reward results, tensors of a file.
Phases and collectives are counted elsewhere (heartbeat.py). Imports no torch.
"""

from __future__ import annotations

_ROUNDS = [0]


def advance() -> None:
    """Counts a round. Rounds counted by two threads at the same time may count as one."""
    _ROUNDS[0] += 1


def num_rounds() -> int:
    """Returns the number of rounds so far."""
    return _ROUNDS[0]
