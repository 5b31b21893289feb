"""A model family outside the package, as a user would add one: OLMo, whose norms have no weights.

Reached as `model.family: olmo_family:FAMILY`. Its layers are Megatron's own with another norm, put
in through the ModuleSpec.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape, Row
from hybridrl.models.megatron.layers import torch_layer_spec


class PlainLayerNorm:
    """A LayerNorm without weights (transformers: OlmoLayerNorm, eps 1e-5)."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, **_: Any) -> torch.nn.Module:
        return torch.nn.LayerNorm(hidden_size, eps=1e-5, elementwise_affine=False)


def layer_spec(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    return torch_layer_spec(config, norm=PlainLayerNorm)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    return decoder_config(hf_config, decoder_shape(hf_config))


def rows(shape: ModelShape) -> tuple[Row, ...]:
    return tuple(row for row in decoder_rows(shape) if "norm" not in row.megatron)


FAMILY = Family(
    "olmo",
    ("OlmoForCausalLM",),
    decoder_shape,
    transformer_config,
    rope_keywords,
    rows,
    layer_spec,
)
