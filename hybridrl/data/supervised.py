"""Builds the training batch of a step without rollouts from the responses and feedback in the data.

Owns how feedback is encoded in a batch: `reward_B` is 1 for the better response of a pair and for a
response labelled good, and 0 otherwise. The two responses of a pair share `group_B`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridrl.config.needs import Feedback
from hybridrl.contracts.batch import UNRELATED, Producer, Prompt, TrainBatch


def supervised_batch(prompts: Sequence[Prompt], feedback: Feedback | None) -> TrainBatch:
    """Builds the batch from the responses of the prompts: the demonstrations, or both sides of
    'pairs'.

    With 'labels', it has each response and also, for each prompt, the response to the next
    different prompt, with reward part `unrelated` 1, which KTO uses only to estimate the KL
    divergence.
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
    """Returns the next prompt with different tokens or images; any if all are equal."""
    after, own = [*prompts[number + 1 :], *prompts[:number]], prompts[number]
    different = (prompt for prompt in after if prompt.input_key != own.input_key)
    return next(different, [*after, own][0])
