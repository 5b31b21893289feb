"""A finished response, the result of generation. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.prompts import Prompt

UNKNOWN_LOGP = 1.0
"""Placeholder in displays for a log-probability that is not finite; real ones are at most 0."""


@dataclass(frozen=True)
class Rollout:
    """One finished response.

    Args:
        sample_id: Number of the sample in the run.
        prompt: Its prompt.
        tokens: Token ids, with the end token if it was sampled.
        logps: Log-probability of each token; 0 on observations.
        finish_reason: `stop` at an end token or stop text, `length` at a limit.
        version: Version of the weights that sampled it.
        observed: Whether an environment gave the token, for each token; None if all were sampled.
        blobs: Blobs of prompt and response, by name.
        versions: Runs of (version, number of tokens) if several versions sampled the tokens;
            otherwise empty.
    """

    sample_id: int
    prompt: Prompt
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    version: int
    observed: tuple[bool, ...] | None = None
    blobs: Blobs = field(default_factory=dict, compare=False)
    versions: tuple[tuple[int, int], ...] = ()


def in_gaps(num: int, gaps: Sequence[int]) -> tuple[bool, ...]:
    """Returns for each of `num` response tokens whether it is in one of the prompt's `gaps`."""
    found = [False] * num
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        found[begin:end] = [True] * (end - begin)
    return tuple(found)
