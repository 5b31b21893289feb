"""The batch of a step without rollouts: the responses that the data has, and what it says of them.

Owns how feedback stands in a batch: `reward_B` is 1 for the better response of a pair and for one
that is labelled good, else 0; the two of a pair share `group_B`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridrl.config.needs import Feedback
from hybridrl.contracts.batch import UNRELATED, Producer, Prompt, TrainBatch


def supervised_batch(prompts: Sequence[Prompt], feedback: Feedback | None) -> TrainBatch:
    """Builds the batch of these prompts' responses.

    Args:
        prompts: with what `feedback` says they have.
        feedback: None gives the demonstrations, 'pairs' both sides of each. 'labels' gives the
            responses and then every prompt with the response to the next other one, of reward part
            `unrelated` 1: those are only to be looked at, for KTO's estimate of the KL.
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
    """Returns the first prompt after this one that is another; the next if all are the same."""
    after = [*prompts[number + 1 :], *prompts[:number]]
    own = prompts[number].tokens
    return next((prompt for prompt in after if prompt.tokens != own), [*after, prompts[number]][0])
