"""Makes the columns of a batch from rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from hybridrl.contracts.branches import branches_of
from hybridrl.contracts.checks import BatchError, Producer, check_rollouts
from hybridrl.contracts.ragged import blobs_of, flatten, observed_mask, token_versions
from hybridrl.contracts.samples import Rollout


def rollout_columns(
    rollouts: Sequence[Rollout], groups: Sequence[int], producer: Producer
) -> dict[str, Any]:
    """Returns a RolloutBatch's fields; rollout i answers prompt `groups[i]`. Raises BatchError."""
    check_rollouts(rollouts, groups, producer)
    logps = ([0.0] * len(r.prompt.tokens) + list(r.logps) for r in rollouts)
    finished, observed_T = [r.finish_reason == "stop" for r in rollouts], None
    sequences = [r.sequence for r in rollouts if r.sequence is not None]
    if sequences and len(sequences) != len(rollouts):
        got = f"returned {len(sequences)} of {len(rollouts)} rollouts with a sequence number"
        raise BatchError(producer, "sequence_B", got, "a number for all rollouts or for none")
    blobs = blobs_of(rollouts, producer)
    if sequences:
        branches_BN = torch.tensor(branches_of(rollouts), dtype=torch.int64)
    if any(r.observed is not None for r in rollouts):
        masks = [r.observed or (False,) * len(r.tokens) for r in rollouts]
        observed_T = observed_mask([r.prompt for r in rollouts], masks)
    tokens_T, lengths_B, prompt_lengths_B = flatten(
        [r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts]
    )
    return dict(
        prompts=tuple(r.prompt for r in rollouts),
        sample_ids_B=torch.tensor([r.sample_id for r in rollouts], dtype=torch.int64),
        group_B=torch.tensor(list(groups), dtype=torch.int64),
        tokens_T=tokens_T,
        lengths_B=lengths_B,
        prompt_lengths_B=prompt_lengths_B,
        behaviour_logp_T=torch.from_numpy(np.fromiter(chain.from_iterable(logps), np.float32)),
        versions_B=torch.tensor([r.version for r in rollouts], dtype=torch.int64),
        finished_B=torch.tensor(finished, dtype=torch.bool),
        producer=producer,
        observed_T=observed_T,
        versions_T=token_versions(rollouts),
        sequence_B=torch.tensor(sequences, dtype=torch.int64) if sequences else None,
        branch_of_B=branches_BN[:, 0] if sequences else None,
        branch_tokens_B=branches_BN[:, 1] if sequences else None,
        context_B=branches_BN[:, 2] if sequences else None,
        blobs=blobs,
    )
