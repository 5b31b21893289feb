"""A finished response, as generation hands it over. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.prompts import Prompt

UNKNOWN_LOGP = 1.0
"""What stands for a log-probability that is not finite, where it is only shown: none is above 0."""


@dataclass(frozen=True)
class Rollout:
    """One finished response: tokens (with the end token, if it came) and log-probabilities.

    Where an environment takes part, `observed` says which of the tokens it gave; their
    log-probabilities are 0. None: all were sampled. `blobs` are of prompt and response, by name.
    `versions` are runs of (version, number of tokens), where more than one version of the weights
    made the tokens; empty: all are of `version`.
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
    """Returns of each of `num` tokens of a response whether it is in a gap, as of Prompt."""
    found = [False] * num
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        found[begin:end] = [True] * (end - begin)
    return tuple(found)
