"""Registers the text parts of multimodal models with vLLM, where vLLM itself does not.

vLLM 0.26 contains, but does not register, the text part of Qwen3.5, as a class that lacks the
description of recurrent states. Newer versions register a complete class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.models.families.qwen3_5 import plain_positions

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
