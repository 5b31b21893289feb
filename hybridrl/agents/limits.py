"""Limits of a session: turns, sampled tokens and the context. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hybridrl.agents.conversation import BadRequest, ContextOverflow
from hybridrl.agents.forest import Prepared
from hybridrl.agents.samples import Budgets

TURN_BUDGET, TOKEN_BUDGET = "turn_budget_exhausted", "token_budget_exhausted"


class Limits:
    """Admits turns while the limits of a session allow it. Not for several threads at the same
    time.
    """

    def __init__(self, budgets: Budgets, max_context: int) -> None:
        bound = budgets.max_row_tokens
        self._budgets = budgets
        self.max_context = max_context if bound is None else min(bound, max_context)
        self._num_requested = self._num_abandoned = self._num_sampled = 0
        self.reached: Literal["turns", "tokens"] | None = None

    def admit(self, prepared: Prepared, max_tokens: int | None) -> Prepared:
        """Returns a turn with its number and token limit.

        Turns that are sampled at the same time may together exceed `max_sampled_tokens`.

        Raises:
            BadRequest: A budget is exhausted, or the messages are too long.
        """
        budgets, num = self._budgets, len(prepared.tokens)
        if num >= self.max_context:
            self.note_overflow()
            raise ContextOverflow(num, self.max_context)
        num_taken = self._num_requested - self._num_abandoned
        if budgets.max_turns is not None and num_taken >= budgets.max_turns:
            self.reached = self.reached or "turns"
            raise BadRequest(
                f"This session may take {budgets.max_turns} turns, and has taken all of them.",
                code=TURN_BUDGET,
            )
        limits = [self.max_context - num, max_tokens, budgets.max_turn_tokens]
        if budgets.max_sampled_tokens is not None:
            limits.append(budgets.max_sampled_tokens - self._num_sampled)
            if self._num_sampled >= budgets.max_sampled_tokens:
                self.reached = self.reached or "tokens"
                raise BadRequest(
                    f"This session may sample {budgets.max_sampled_tokens} tokens, and has "
                    "sampled all of them.",
                    code=TOKEN_BUDGET,
                )
        most = min(limit for limit in limits if limit is not None)
        self._num_requested += 1
        return replace(prepared, max_new_tokens=most, turn=self._num_requested - 1)

    def give_back(self) -> None:
        """Gives an admitted turn that was not sampled back to the turn budget."""
        self._num_abandoned += 1

    def note_overflow(self) -> None:
        self.reached = self.reached or "tokens"

    def note_sampled(self, num_tokens: int) -> None:
        self._num_sampled += num_tokens
