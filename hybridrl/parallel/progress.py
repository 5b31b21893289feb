"""Counts rounds of work in this process, so that the heartbeat can tell whether the process makes
progress.

Loops with short rounds count each round: engine steps, micro-batches, reward results, tensors in a
file. Phases and collectives are counted elsewhere (heartbeat.py). Does not import torch.
"""

from __future__ import annotations

_ROUNDS = [0]


def advance() -> None:
    """Counts a round. If two threads call this at the same time, the count may increase by only
    one.
    """
    _ROUNDS[0] += 1


def num_rounds() -> int:
    """Returns the number of rounds counted so far."""
    return _ROUNDS[0]
