"""Logits in float32, as in the trainer, for vLLM's models of other data types on CPU, where vLLM
itself would convert the whole output layer in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl import ops


def compute_wide_logits(model: torch.nn.Module) -> None:
    """Replaces the product of a model's output layer."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    for module in model.modules():
        part: Any = module
        if isinstance(part, LogitsProcessor):
            part._apply_head = _wide_product


def _wide_product(lm_head: Any, hidden_ND: Tensor, bias: Tensor | None) -> Tensor:
    logits_NV = ops.wide_logits(hidden_ND, lm_head.weight)
    return logits_NV if bias is None else logits_NV + bias.float()
