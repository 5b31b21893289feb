"""Builds transformers' causal language model from a config.json, without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from hybridrl.config.wrapped_models import WRAPPER, has_images, wrapped
from hybridrl.errors import ModelError
from hybridrl.models.family import is_kept_in_fp32
from hybridrl.models.hf.config_keys import NEUTRAL_KEYS, QUANTIZATION
from hybridrl.models.hf.directory import read_config

# Keys for which null is a meaningful value and does not select the architecture's default: one
# key-value head per query head, no window, no cap, no latent for queries.
NULL_IS_A_VALUE = (
    "num_key_value_heads",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "q_lora_rank",
)
# Without this, transformers would set the architecture's default special tokens, which may be
# outside of a small vocabulary.
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def transformers_model(
    model_config: str | Path | Mapping[str, Any],
    dtype: str,
    device: torch.device,
    attention: Literal["sdpa", "eager"],
) -> Any:
    """Returns transformers' causal language model with unset weights.

    The states of global random generators do not change.

    Args:
        attention: transformers' name for the attention implementation. Models that cap their
            attention scores, or have attention sinks, use "eager" in any case.

    Raises ModelError if transformers rejects config.json, or its names mean different models.
    """
    if not isinstance(model_config, Mapping):
        model_config = read_config(model_config)
    named = model_config.get("architectures")
    # Keys that do not affect results are omitted. So are nulls that mean "not set", because
    # transformers does not accept them for every key.
    is_multimodal = has_images(model_config)
    content = wrapped(model_config) if is_multimodal else model_config
    fields = {
        key: value
        for key, value in content.items()
        if key not in (*NEUTRAL_KEYS, QUANTIZATION, WRAPPER)
        and (value is not None or key in NULL_IS_A_VALUE)
    }
    cuda = [device.index or 0] if device.type == "cuda" else []
    try:
        # transformers changes nested objects, such as rotary parameters.
        fields = copy.deepcopy(fields)
        config = AutoConfig.for_model(model_config.get("model_type"), **fields, **NO_TOKENS)
        has_cap = getattr(config, "attn_logit_softcapping", None) is not None
        classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = AutoModelForCausalLM
        if is_multimodal:
            classes, auto = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText
        if has_cap or not classes[type(config)]._supports_sdpa:
            # sdpa ignores the cap (transformers 5.19) or is refused (5.24), and has no sinks.
            attention = "eager"
        with torch.random.fork_rng(devices=cuda), device:
            model = auto.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
    # transformers raises many kinds of errors for configs that it rejects.
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelError(
            "model_type",
            f"{model_config.get('model_type')}, with a config.json that transformers rejects",
            f"a causal language model of the installed transformers, for {attention} attention",
            f"Use another rollout engine, or a newer transformers. Its error: {reason}.",
        ) from error
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if is_kept_in_fp32(name):  # transformers keeps fp32 only when it loads weights itself
            tensor.data = tensor.data.float()
    if named and type(model).__name__ not in named:
        raise ModelError(
            "config.json: model_type",
            f"{model_config.get('model_type')}, which is {type(model).__name__} in transformers",
            f"the type of {', '.join(named)}, from architectures",
            "Download config.json again, or fix the key.",
        )
    return model.eval().requires_grad_(False)
