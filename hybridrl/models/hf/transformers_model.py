"""A causal language model of transformers, built from a config.json; its weights are set by others.

Owns which keys of the config.json transformers gets, and the refusal of models that it does not
take.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.errors import ModelError
from hybridrl.models.family import is_kept_in_fp32
from hybridrl.models.hf.config_keys import NEUTRAL_KEYS
from hybridrl.models.hf.directory import read_config

# Keys whose null is not the default of every architecture: as many as heads, no window, no cap, no
# latent of queries.
NULL_IS_A_VALUE = (
    "num_key_value_heads",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "q_lora_rank",
)
# Else they are an architecture's own, of which a small vocabulary has none.
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def transformers_model(
    model_config: str | Path | Mapping[str, Any],
    dtype: str,
    device: torch.device,
    attention: Literal["sdpa", "eager"],
) -> Any:
    """Returns transformers' causal language model with unset weights, leaving every global random
    generator as it was.

    Args:
        model_config: HF directory, or the contents of a config.json.
        dtype: of its parameters.
        device: where they live.
        attention: transformers' name of the implementation.

    Raises:
        ModelError: transformers does not know the model, or does not take its config.json, or makes
            another architecture of it than it names.
    """
    if not isinstance(model_config, Mapping):
        model_config = read_config(model_config)
    named = model_config.get("architectures")
    # Without what changes no number: labels, defaults of generation, forms of the output. A null
    # means "not set", which transformers does not take everywhere; of some keys it is a value.
    fields = {
        key: value
        for key, value in model_config.items()
        if key not in NEUTRAL_KEYS and (value is not None or key in NULL_IS_A_VALUE)
    }
    cuda = [device.index or 0] if device.type == "cuda" else []
    try:
        config = AutoConfig.for_model(model_config.get("model_type"), **fields, **NO_TOKENS)
        with torch.random.fork_rng(devices=cuda), device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
    # transformers judges the config by types and rules of its own, each with errors of its own.
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        said = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelError(
            "model_type",
            f"{model_config.get('model_type')}, with a config.json that transformers does not take",
            f"a causal language model of the installed transformers, for {attention} attention",
            f"Use another rollout engine, or a newer transformers, which said: {said}.",
        ) from error
    for name, buffer in model.named_buffers():
        if is_kept_in_fp32(name):  # transformers does so only with weights that it reads itself
            buffer.data = buffer.data.float()
    if named and type(model).__name__ not in named:
        raise ModelError(
            "config.json: model_type",
            f"{model_config.get('model_type')}, which transformers makes {type(model).__name__} of",
            f"the type of {', '.join(named)}, as architectures say",
            "Get config.json again, or mend the key.",
        )
    return model.eval().requires_grad_(False)
