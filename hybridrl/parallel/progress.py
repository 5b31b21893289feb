"""How far this process has come: a count that grows with its work, for who watches it. No torch.

Loops whose rounds are far shorter than a standstill count them: engine steps, micro-batches,
results of rewards, tensors of a file. Phases and collectives count by themselves (heartbeat.py).
"""

from __future__ import annotations

_ROUNDS = [0]


def advance() -> None:
    """Counts a round. Rounds that threads count at once may count as one."""
    _ROUNDS[0] += 1


def num_rounds() -> int:
    """Returns how many were counted."""
    return _ROUNDS[0]
