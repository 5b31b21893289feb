"""Samples of prompt and response laid flat, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.prompts import Prompt


def observed_mask(prompts: Sequence[Prompt], masks: Sequence[Sequence[bool]]) -> Tensor:
    """Returns which tokens of these samples others than the policy gave, (T,) bool; `masks` are of
    the responses.
    """
    return flatten([(False,) * len(p.tokens) for p in prompts], masks)[0].bool()


def flatten(
    prompts: Iterable[Sequence[int]], responses: Iterable[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the flat tokens, the lengths of the samples and those of their prompts, all int64."""
    pairs = list(zip(prompts, responses, strict=True))
    tokens = np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.int64)
    lengths_B = torch.tensor([len(p) + len(r) for p, r in pairs], dtype=torch.int64)
    return (
        torch.from_numpy(tokens),
        lengths_B,
        torch.tensor([len(p) for p, _ in pairs], dtype=torch.int64),
    )
