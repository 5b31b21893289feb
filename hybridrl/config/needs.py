"""What an algorithm needs of the trainer: models, columns, and the kind of data. No torch.

Owns the type `Needs`. The section of an algorithm states its needs (`section.needs`), and its class
takes them from there; an algorithm of the user's own states them in its class. Readers are rules,
checks of data, `hybridrl plan` and the loop. Which models follow from needs is roles.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Feedback = Literal["pairs", "labels"]
"""What rows say of responses: which of two is better, or whether one is good."""


@dataclass(frozen=True)
class Needs:
    """What the trainer has to provide before `advantages` is called.

    Args:
        rollouts: sampled responses and rewards; False takes the data's own responses.
        feedback: what the data says of these: which of two is better ('pairs'), or whether one is
            good ('labels'); data/supervised.py has the batch. None: they are demonstrations. With
            rollouts, 'pairs' are made of the samples by their rewards.
        reference: `reference_logp_T`, from the frozen first weights.
        values: `values_T`, from a critic; the algorithm is then a CriticAlgorithm.
        scores: entry t of `values_T` is the score that is read at token t itself, as a reward
            model's, in place of the value of the state before it.
        old_logps: `old_logp_T` even when a step makes one update, for the advantages. The loss
            itself takes the policy's own detached log-probabilities where the column is None.
        policy: the policy is trained; False trains the critic alone.
        greedy: the reward part `batch.GREEDY`, from one more response to each prompt.
        group_samples: responses to a prompt of which enough are left to compare, where some got no
            score (`reward.on_error` drop); with fewer left all of them are dropped.
        teacher: `teacher_logp_T`, from the model `algorithm.teacher`.
        teacher_top: of so many tokens, the teacher's likeliest in each place, `teacher_logp_TK` and
            `teacher_tokens_TK`; the loss then gets the policy's log-probabilities of the same.
        allows_lag: the loss weighs samples of older weights right, by their ratio to the
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
        """Whether the algorithm can be a further term of another one's loss: it trains the policy
        alone, on the data's responses.
        """
        others = self.rollouts or self.values or self.greedy or self.has_teacher
        return self.policy and not others
