"""Finds the beginning that a sequence of an agent's sample has in common with an earlier sequence.

Ranks compute this for the tokens that they have. The batch has the results as columns on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridrl.contracts.blobs import KINDS
from hybridrl.contracts.prompts import Rollout

NONE = -1


class Branch(NamedTuple):
    """Leading tokens of a sequence that an earlier sequence of its sample also begins with.

    Args:
        num_tokens: Leading positions that need not be computed again, and are not trained.
        context: Digest of all tokens before the first sampled token; -1 if the sequence has inputs
            other than tokens.
    """

    sequence: int
    num_tokens: int
    context: int


def branches_of(rollouts: Sequence[Rollout]) -> list[Branch]:
    """Returns the branch of each sequence. The sequences of a sample must be consecutive."""
    found: list[Branch] = []
    earlier: list[tuple[Rollout, np.ndarray]] = []
    for rollout in rollouts:
        if earlier and earlier[0][0].sample_id != rollout.sample_id:
            earlier = []
        if any(KINDS[name].rows == "any" for name in rollout.blobs):
            # Equal tokens may stand for different images.
            found.append(Branch(NONE, 0, NONE))
            continue
        tokens = np.array((*rollout.prompt.tokens, *rollout.tokens), dtype=np.int64)
        most = _first_trained(rollout) - 1  # the position before predicts the first trained token
        shared, sequence = 0, NONE
        for other, others in earlier:
            common = min(_num_common(tokens, others) - 1, most)
            if common > shared:
                assert other.sequence is not None
                shared, sequence = common, other.sequence
        digest = hashlib.blake2b(tokens[: len(rollout.prompt.tokens)].tobytes(), digest_size=8)
        context = int.from_bytes(digest.digest(), "little") >> 1  # fits into an int64
        found.append(Branch(sequence, shared, context))
        earlier.append((rollout, tokens))
    return found


def _first_trained(rollout: Rollout) -> int:
    observed = rollout.observed or ()
    leading = next((i for i, is_observed in enumerate(observed) if not is_observed), len(observed))
    return len(rollout.prompt.tokens) + leading


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
