"""Which version of the weights sampled each token of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.samples import Rollout


def token_versions(rollouts: Sequence[Rollout]) -> Tensor | None:
    """Returns the version of each token, 0 on prompt tokens: (T,) int64; None where one version
    made each response.
    """
    if not any(rollout.versions for rollout in rollouts):
        return None
    versions: list[int] = []
    counts: list[int] = []
    for one in rollouts:
        runs = one.versions or ((one.version, len(one.tokens)),)
        versions += [0, *(version for version, _ in runs)]
        counts += [len(one.prompt.tokens), *(count for _, count in runs)]
    return torch.from_numpy(np.repeat(np.array(versions, np.int64), counts))


def repeated_versions(versions_B: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor) -> Tensor:
    """Returns what `token_versions` would of samples that one version each made; they are whole."""
    repeats = torch.stack([prompt_lengths_B, lengths_B - prompt_lengths_B], 1).flatten()
    values = torch.stack([torch.zeros_like(versions_B), versions_B], 1).flatten()
    return torch.repeat_interleave(values, repeats)
