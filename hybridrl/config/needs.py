"""The type `Needs`: models, batch columns and kind of data that an algorithm requires. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Feedback = Literal["pairs", "labels"]
"""Kind of feedback on responses: 'pairs' of a better and a worse one, or 'labels' (good or bad)."""


@dataclass(frozen=True)
class Needs:
    """Inputs that an algorithm requires from the trainer.

    Args:
        rollouts: Whether it learns from sampled responses and rewards, not from those in the data.
        feedback: Kind of feedback on responses; None for demonstrations. The layout of the batch is
            in data/supervised.py. With rollouts, 'pairs' are formed from samples by their rewards.
        reference: Whether it needs `reference_logp_T`, computed with the frozen initial weights.
        values: Whether it needs `values_T` from a critic; its class is then a CriticAlgorithm.
        scores: Whether entry t of `values_T` is the score after token t, as in a reward model, not
            the value before it.
        old_logps: Whether advantages need `old_logp_T` even if a step has a single update, whose
            loss uses the policy's detached log-probabilities instead.
        policy: Whether the policy is trained; otherwise only the critic is trained.
        greedy: Whether it needs the reward of a greedy response to each prompt (`batch.GREEDY`).
        group_samples: Minimum number of scored responses per prompt, below which `reward.on_error`
            drops the whole group.
        teacher: Whether it needs `teacher_logp_T` from `algorithm.teacher`.
        teacher_top: Number of the teacher's likeliest tokens per position in `teacher_logp_TK` and
            `teacher_tokens_TK`. Above 0, the loss receives the policy's log-probabilities of them.
        allows_lag: Whether the loss corrects for samples of older weights, using the ratio to the
            behaviour policy. Otherwise `steps.max_policy_lag` must be 0.
    """

    rollouts: bool = True
    feedback: Feedback | None = None
    reference: bool = False
    values: bool = False
    scores: bool = False
    old_logps: bool = False
    greedy: bool = False
    policy: bool = True
    group_samples: int = 2
    teacher: bool = False
    teacher_top: int = 0
    allows_lag: bool = False

    @property
    def has_teacher(self) -> bool:
        return self.teacher or self.teacher_top > 0

    @property
    def fits_term(self) -> bool:
        """Whether it can be a loss term: it trains only the policy, on given responses."""
        others = self.rollouts or self.values or self.greedy or self.has_teacher
        return self.policy and not others
