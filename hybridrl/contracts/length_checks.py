"""Checks the lengths of a batch's prompts and responses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridrl.contracts.checks import INTEGER, NO_MASK, BatchError, Producer, check
from hybridrl.contracts.prompts import Prompt

LENGTHS = ("lengths_B", "prompt_lengths_B")
"""Fields that define where samples are in the columns; not columns themselves."""


def check_lengths(
    prompts: Sequence[Prompt],
    lengths_B: Tensor,
    prompt_lengths_B: Tensor,
    has_contexts: bool,
    producer: Producer,
) -> None:
    """Raises BatchError if a length is impossible, or differs from the prompt's; agents may have
    rendered their own contexts (`has_contexts`) in place of the prompts.
    """
    for name, value in zip(LENGTHS, (lengths_B, prompt_lengths_B), strict=True):
        check(value, name, INTEGER, len(prompts), producer, NO_MASK)
    if not prompts:
        raise BatchError(producer, "prompts", "returned no sample", "at least 1 sample")
    # An agent's contexts have other lengths than the prompts.
    if not has_contexts and [len(p.tokens) for p in prompts] != prompt_lengths_B.tolist():
        got = "returned lengths that differ from the lengths of its prompts"
        raise BatchError(producer, "prompt_lengths_B", got, "the number of tokens in each prompt")
    wrong = (prompt_lengths_B < 1) | (lengths_B <= prompt_lengths_B)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        prompt, total = int(prompt_lengths_B[i]), int(lengths_B[i])
        got = f"returned {prompt} prompt and {total - prompt} response tokens for sample {i}"
        expected = "at least 1 prompt token and at least 1 response token"
        raise BatchError(producer, "lengths_B", got, expected)


def check_observed_counts(
    counts_B: Tensor, response_lengths_B: Tensor, has_holders: bool, producer: Producer
) -> None:
    """Raises BatchError if counts of observed tokens are impossible or not needed."""
    name = "num_observed_B"
    check(counts_B, name, INTEGER, len(response_lengths_B), producer, NO_MASK)
    if not has_holders:
        got = (
            "returned num_observed_B without holders, although observed_T already determines "
            "these counts"
        )
        raise BatchError(producer, name, got, "None")
    if bool(((counts_B < 0) | (counts_B >= response_lengths_B)).any()):
        lengths = response_lengths_B.tolist()[:8]
        got = f"returned {counts_B.tolist()[:8]} for responses with {lengths} tokens"
        raise BatchError(producer, name, got, "the number of observed tokens of each response")
