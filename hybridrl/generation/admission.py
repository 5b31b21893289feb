"""Decides when requests of agents enter the engine.

A step in which a request begins costs as much as several other steps: the engine computes prompts,
cannot replay its graph of a whole step, and runs its slow scheduler for all requests. Requests
therefore wait for others, until their absence from the engine has cost as much as such a step. If
requests arrive evenly, the sum of the two costs is then as small as possible. If many arrive
together, the sum of the two costs is at most twice the smallest possible sum, as when renting or
buying skis (Karlin et al. 1988, "Competitive snoopy caching", Algorithmica 3).

This rule alone does not limit how late a round ends. If one program has many short turns and the
others have long ones, the waiting requests of this program cost the engine little, but the round
ends only with it. The wait of the oldest request therefore has a limit.
"""

from __future__ import annotations

from collections.abc import Iterable

# Fixed cost of a step in which requests begin, measured in ordinary steps: 3.5 to 4.5 with 0.5B
# parameters on an H200 (benchmarks/results/agents_h200.json).
COST_OF_BEGIN = 3.5
FIRST_LENGTH = 128.0  # assumed number of tokens in a turn until one has finished
MAX_AVERAGED = 256  # number of turns over which the mean length is taken
# Maximum wait of a request in engine steps. In the tests' simulation, rounds of sessions with
# similar lengths take up to 4% longer with this limit than without (with a limit of 16, up to 8%).
# A round that ends with one session of 200 turns of 20 tokens takes 20% less time (with 16, 25%).
MAX_WAIT_STEPS = 24


class Admission:
    """Decides for the requests of one replica; `cost` is COST_OF_BEGIN."""

    def __init__(self, cost: float = COST_OF_BEGIN) -> None:
        self._cost = cost
        self._length, self._num_lengths = FIRST_LENGTH, 0
        self._lost, self._num_waited = 0.0, 0

    def note_lengths(self, lengths: Iterable[int]) -> None:
        """Notes the numbers of tokens of finished turns."""
        for length in lengths:
            self._num_lengths = min(self._num_lengths + 1, MAX_AVERAGED)
            self._length += (length - self._length) / self._num_lengths

    def is_due(self, num_waiting: int, num_in_engine: int, num_steps: int) -> bool:
        """Whether waiting requests should enter the engine now; `num_steps` since the last call."""
        if not num_waiting:
            self._num_waited = 0  # the programs have dropped their waiting requests
            return False
        num = num_waiting + num_in_engine
        self._lost += num_steps * num_waiting / num
        self._num_waited += num_steps
        # With few requests, no other is likely to arrive before waiting has cost more than it can
        # save: num / length arrive per step, and waiting costs 1 / num of a step.
        is_cheap = self._lost < self._cost and self._num_waited < MAX_WAIT_STEPS
        if is_cheap and self._cost * num**2 > self._length and num_in_engine:
            return False
        self._lost, self._num_waited = 0.0, 0
        return True
