"""Detects exploded weights. The check reads all of them, so it runs only after failures."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.errors import UserError

# The largest weights in trained language models (norms, biases of keys) are a few hundred.
LARGEST_WEIGHT = 1e4


def exploded(tensors: Mapping[str, Tensor]) -> str | None:
    """Describes the worst tensor; returns None if all are finite and below the bound."""
    worst, largest = "", LARGEST_WEIGHT
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # torch does not implement aminmax for float8; other types need no copy.
        values = tensor.float() if tensor.element_size() == 1 else tensor
        low, high = (float(x) for x in torch.aminmax(values))
        if not max(abs(low), abs(high)) < torch.inf:  # comparisons with NaN are False
            return f"{name} is not finite"
        if (size := max(-low, high)) >= largest:
            worst, largest = f"{name} reaches {size:.1e}", size
    return worst or None


def explosion(found: str, when: str, symptom: object, rate: float | None = None) -> UserError:
    """Returns an error that names exploded weights as the cause of another failure.

    Args:
        when: Last event before the failure, such as "step 3".
    """
    return UserError(
        "train.learning_rate",
        f"{'a value' if rate is None else f'{rate:g}'}, at which weights grew until {found} after "
        f"{when}; {symptom}",
        f"a value that keeps all weights finite and below {LARGEST_WEIGHT:g}",
        "Lower train.learning_rate, or train.critic_learning_rate for a critic. policy/loss and "
        "policy/grad_norm in metrics.jsonl show when the weights began to grow. Remove the "
        "checkpoints since then to continue from the last good one, or start a new run.",
    )
