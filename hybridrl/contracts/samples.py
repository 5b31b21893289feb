"""Defines a finished response, the result of generation. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.prompts import Prompt

UNKNOWN_LOGP = 1.0
"""Placeholder shown for a non-finite log-probability; real log-probabilities are at most 0."""


@dataclass(frozen=True)
class Rollout:
    """One finished response.

    Args:
        tokens: Token ids, with the end token if it was sampled.
        logps: Log-probability of each token; 0 on observations.
        finish_reason: `stop` if the response ended with an end token or stop text; `length` if it
            reached a limit.
        version: Version of the weights that sampled the response.
        observed: For each token, whether it came from an environment; None if none did.
        versions: Pairs (version, number of tokens) if several versions sampled the response;
            otherwise empty.
        sequence: Index of this sequence among those of its sample, for which `prompt` has the
            context; None if every sample is one sequence.
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
    sequence: int | None = None


def in_gaps(num: int, gaps: Sequence[int]) -> tuple[bool, ...]:
    """Returns for each of `num` response tokens whether it is inside one of the `gaps`."""
    found = [False] * num
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        found[begin:end] = [True] * (end - begin)
    return tuple(found)
