"""Counts rounds of work in this process, by which the heartbeat sees progress. No torch.

Loops with short rounds count each round: engine steps, micro-batches, reward results, tensors in a
file. Phases and collectives are counted elsewhere (heartbeat.py).
"""

from __future__ import annotations

_ROUNDS = [0]


def advance() -> None:
    """Counts a round; two threads at the same time may count only one."""
    _ROUNDS[0] += 1


def num_rounds() -> int:
    return _ROUNDS[0]
