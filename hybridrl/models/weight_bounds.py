"""Finds weights that training has made so large, or not finite, that computing with them fails.

Called only after a failure that they may explain, since it passes over all weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridrl.errors import UserError

# The largest weights of trained language models, norms and biases of keys, are some hundreds.
LARGEST_WEIGHT = 1e4


def exploded(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the worst of these tensors and what is wrong with it; None if no weight
    is as large as LARGEST_WEIGHT and all are finite.
    """
    worst, largest = "", LARGEST_WEIGHT
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # Of float8 torch knows no extremes. Those of the others need no memory.
        values = tensor.float() if tensor.element_size() == 1 else tensor
        low, high = (float(x) for x in torch.aminmax(values))
        if not max(abs(low), abs(high)) < torch.inf:  # NaN compares as False
            return f"{name} is not finite"
        if (size := max(-low, high)) >= largest:
            worst, largest = f"{name} reaches {size:.1e}", size
    return worst or None


def explosion(found: str, when: str, symptom: object, rate: float | None = None) -> UserError:
    """Returns the error that names exploded weights as the reason of another failure.

    Args:
        found: what `exploded` said.
        when: after what, for example "step 3".
        symptom: the failure.
        rate: the learning rate, where it is known.
    """
    return UserError(
        "train.learning_rate",
        f"{'a value' if rate is None else f'{rate:g}'} with which the weights grew until {found} "
        f"after {when}; {symptom}",
        f"a value that leaves all weights finite and below {LARGEST_WEIGHT:g}",
        "Lower train.learning_rate, or of a critic train.critic_learning_rate. policy/loss and "
        "policy/grad_norm in metrics.jsonl show when the weights began to grow: remove the run's "
        "checkpoints from then on to go on from the last good one, or start again.",
    )
