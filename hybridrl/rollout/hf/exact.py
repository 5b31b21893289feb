"""Makes a model of transformers compute the same bits as the trainer, whatever the batch.

Replaces products, norms and attention by the operations that the trainer then uses too
(models/megatron/exact.py). All other operations work element by element.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from hybridrl import ops
from hybridrl.errors import ModelError

ATTENTION = "hybridrl_exact"  # name of the attention in transformers' table


def compute_exactly(model: Any) -> None:
    """Replaces the operations of a model.

    Raises:
        ModelError: A module with parameters has no such operation.
    """
    for name, part in model.named_modules():
        kind = type(part).__name__
        if part is model.lm_head:
            part.forward = partial(_logits, part)
        elif isinstance(part, torch.nn.Linear):
            part.forward = partial(_linear, part)  # type: ignore[method-assign]
        elif kind.endswith("RMSNorm"):
            part.forward = partial(_norm, part, kind.startswith("Gemma"))
        elif not isinstance(part, torch.nn.Embedding) and [*part.parameters(recurse=False)]:
            raise ModelError(
                "numerics.match",
                "exact",
                f"close with {kind} ({name})",
                "Set numerics.match=close.",
            )
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)


def _linear(linear: Any, x: Tensor) -> Tensor:
    found = ops.invariant_linear(x.reshape(-1, x.size(-1)), linear.weight, linear.bias)
    return found.view(*x.shape[:-1], -1)


def _logits(head: Any, hidden: Tensor) -> Tensor:
    rows = hidden.reshape(-1, hidden.size(-1))
    return ops.invariant_logits(rows, head.weight).view(*hidden.shape[:-1], -1)


def _norm(norm: Any, is_centered: bool, x: Tensor) -> Tensor:
    eps = norm.eps if is_centered else norm.variance_epsilon
    return ops.invariant_rms_norm(x, norm.weight, eps, is_centered)[0]


def _attention(
    module: Any,
    query_BHQD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends as transformers' attention functions do; the mask is boolean, (B, 1, Q, S)."""
    result = ops.invariant_attention(
        query_BHQD, key_BHSD, value_BHSD, attention_mask[:, 0], scaling
    )
    return result.transpose(1, 2), None
