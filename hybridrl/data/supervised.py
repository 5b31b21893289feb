"""Builds the batch of a step without rollouts, from the data's responses and feedback.

Owns how feedback is encoded in a batch: `reward_B` is 1 for the better response of a pair and for a
response that is labelled good, otherwise 0. The two of a pair share `group_B`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridrl.config.needs import Feedback
from hybridrl.contracts.batch import UNRELATED, Producer, Prompt, TrainBatch


def supervised_batch(prompts: Sequence[Prompt], feedback: Feedback | None) -> TrainBatch:
    """Builds the batch of the prompts' responses.

    Args:
        prompts: Prompts with the responses and labels that `feedback` needs.
        feedback: Kind of feedback. None gives demonstrations, 'pairs' both sides of each pair.
            'labels' adds, for each prompt, the response to the next different prompt, with reward
            part `unrelated` 1; KTO uses these only to estimate the KL divergence.
    """
    num, producer = len(prompts), Producer.here("the data's responses")
    if feedback is None:
        return TrainBatch.supervised(prompts, producer)
    if feedback == "pairs":
        others = [
            replace(p, response_tokens=p.rejected_tokens, response_gaps=p.rejected_gaps)
            for p in prompts
        ]
        reward_B, parts = torch.ones(2 * num), {}
        reward_B[num:] = 0
    else:
        others = [
            replace(
                prompt, response_tokens=other.response_tokens, response_gaps=other.response_gaps
            )
            for number, prompt in enumerate(prompts)
            for other in [_next_other(prompts, number)]
        ]
        reward_B = torch.tensor([float(p.columns["label"] is True) for p in prompts] * 2)
        parts = {UNRELATED: torch.tensor([0.0, 1.0]).repeat_interleave(num)}
    batch = TrainBatch.supervised([*prompts, *others], producer)
    group_B = torch.arange(num).repeat(2)
    return replace(batch, group_B=group_B, reward_B=reward_B, reward_parts=parts)


def _next_other(prompts: Sequence[Prompt], number: int) -> Prompt:
    """Returns the next different prompt, or the next one if all prompts are equal."""
    after = [*prompts[number + 1 :], *prompts[:number]]
    own = prompts[number].tokens
    return next((prompt for prompt in after if prompt.tokens != own), [*after, prompts[number]][0])
