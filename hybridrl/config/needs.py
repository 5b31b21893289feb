"""Needs of an algorithm: models, batch columns and the kind of data. No torch.

Owns the type `Needs`. An algorithm's section states its needs (`section.needs`) and its class reads
them; a user's own algorithm states them in its class. Rules, checks of data, `hybridrl plan` and
the loop read them; roles.py derives the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Feedback = Literal["pairs", "labels"]
"""Feedback on responses: the better of two, or whether one is good."""


@dataclass(frozen=True)
class Needs:
    """Inputs that an algorithm needs from the trainer.

    Args:
        rollouts: Whether it learns from sampled responses and rewards; otherwise from the data's
            responses.
        feedback: Feedback on the responses: the better of two ('pairs') or whether one is good
            ('labels'); None for demonstrations. data/supervised.py has the batch. With rollouts,
            'pairs' are formed from the samples by their rewards.
        reference: Whether it needs `reference_logp_T`, from the frozen initial weights.
        values: Whether it needs `values_T`, from a critic; it is then a CriticAlgorithm.
        scores: Whether entry t of `values_T` is the score at token t itself, as in a reward model,
            and not the value of the state before it.
        old_logps: Whether advantages need `old_logp_T` even if a step makes one update. The loss
            itself uses the policy's detached log-probabilities if the column is None.
        policy: Whether the policy is trained; otherwise only the critic is.
        greedy: Whether it needs the reward part `batch.GREEDY`, from a greedy response per prompt.
        group_samples: Smallest number of scored responses to a prompt that can be compared; with
            fewer (`reward.on_error` drop) the whole group is dropped.
        teacher: Whether it needs `teacher_logp_T`, from `algorithm.teacher`.
        teacher_top: Number of the teacher's likeliest tokens per position in `teacher_logp_TK` and
            `teacher_tokens_TK`; the loss then gets the policy's log-probabilities of them.
        allows_lag: Whether the loss corrects samples of older weights by their ratio to the
            behaviour policy, so that `steps.max_policy_lag` may be above 0.
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
        """Whether any column comes from the teacher."""
        return self.teacher or self.teacher_top > 0

    @property
    def fits_term(self) -> bool:
        """Whether the algorithm trains only the policy, on given responses, so that it can be a
        further loss term.
        """
        others = self.rollouts or self.values or self.greedy or self.has_teacher
        return self.policy and not others
