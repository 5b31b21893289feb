"""Phi-3 and Phi-4 (Phi3ForCausalLM): llama-shaped; on disk queries, keys and values are one tensor,
gate and up another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import number, refusal, size
from hybridrl.models.families.rotary import (
    read_rotary,
    rope_keywords,
    rope_kind,
    rope_parameters,
)
from hybridrl.models.family import Family, HfConfig, ModelShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS

DEFAULTS = {"rms_norm_eps": 1e-5}  # of transformers' Phi3Config
# transformers computes longrope wherever the config names another than these.
ROPES = ("default", "longrope")
WHOLE = 1.0  # of each head turns where the config does not say it; Phi-4-mini: 0.75
FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
# Where the code that came with the model was; beside it, the length that longrope goes by.
OWN_KEYS = frozenset({"auto_map", "original_max_position_embeddings"})


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; a window is of all layers.

    Phi-3.5 and Phi-4-mini have one that is longer than the longest sequence. With longrope, which
    has no longer ones, it is none.
    """
    has_window = hf_config.get("sliding_window") is not None
    window = size(hf_config, "sliding_window") if has_window else None
    kinds = {"sliding_attention" if window else "full_attention"}
    plain = {key: value for key, value in hf_config.items() if key != "sliding_window"}
    found = decoder_shape(plain, window=window, kinds=kinds)
    is_long = window is not None and window >= size(hf_config, "max_position_embeddings")
    if is_long and rope_kind(rope_parameters(hf_config)[0]) == "longrope":
        return replace(found, window=None)
    return found


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    for key in ("resid_pdrop", "embd_pdrop"):
        number(hf_config, key, 0, 0, 0)
    found, rotary = shape(hf_config), read_rotary(hf_config, ROPES, WHOLE)
    if int(found.head_dim * rotary.share) % 2:
        allowed = f"a share of head_dim = {found.head_dim} that is an even number"
        raise refusal("partial_rotary_factor", rotary.share, allowed)
    return decoder_config({**DEFAULTS, **hf_config}, found, rotary=rotary)


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of GPTModel for positions."""
    return rope_keywords(hf_config, ROPES, WHOLE)


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table."""

    def fused(row: Row) -> Row:
        name = f"model.layers.{{L}}.{FUSED[row.kind]}.weight"
        return replace(row, parts=(name,) * len(row.parts))

    return tuple(fused(row) if row.kind in FUSED else row for row in decoder_rows(shape))


FAMILY = Family(
    "phi3",
    ("Phi3ForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    rows,
    config_keys=DECODER_KEYS | OWN_KEYS | {"embd_pdrop", "resid_pdrop", "sliding_window"},
)
