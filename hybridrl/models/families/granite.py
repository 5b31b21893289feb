"""Granite 3 (dense): llama-shaped; scales embeddings, attention, residuals and logits."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows
from hybridrl.models.families.llama import BIAS_KEYS, shape
from hybridrl.models.families.reading import number
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, Scales
from hybridrl.models.hf.config_keys import DECODER_KEYS

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)


def _multiplier(hf_config: HfConfig, key: str) -> float:
    return number(hf_config, key, 1, 1e-9, 1e9)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    number(hf_config, "attention_dropout", 0, 0, 1)
    scale = _multiplier(hf_config, "attention_multiplier")
    return decoder_config(hf_config, shape(hf_config), scale)


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    scales = Scales(
        _multiplier(hf_config, "embedding_multiplier"),
        _multiplier(hf_config, "residual_multiplier"),
        _multiplier(hf_config, "logits_scaling"),
    )
    return rope_keywords(hf_config) | {"scales": scales}


FAMILY = Family(
    "granite",
    ("GraniteForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    decoder_rows,
    # Granite 3 was pretrained with attention dropout 0.1; hybridrl trains without dropout.
    config_keys=DECODER_KEYS | BIAS_KEYS | {"attention_dropout", *MULTIPLIERS},
)
