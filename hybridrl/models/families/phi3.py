"""Phi-3 and Phi-4 (Phi3ForCausalLM): llama-shaped, with fused tensors for QKV, and gate and up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_family, decoder_rows, fused, windowed_shape
from hybridrl.models.families.reading import number, size
from hybridrl.models.families.rotary import rope_kind, rope_parameters
from hybridrl.models.family import HfConfig, ModelShape, Row

FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
# `auto_map` names the location of the model's own code.
KEYS = frozenset(
    {"auto_map", "embd_pdrop", "original_max_position_embeddings", "resid_pdrop", "sliding_window"}
)


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; a window applies to all layers.

    Phi-3.5 and Phi-4-mini set a window longer than the longest sequence. With longrope, such a
    window has no effect, because longer sequences are rejected.
    """
    sizes = windowed_shape(hf_config)
    window = sizes.window
    is_long = window is not None and window >= size(hf_config, "max_position_embeddings")
    if is_long and rope_kind(rope_parameters(hf_config)[0]) == "longrope":
        return replace(sizes, window=None)
    return sizes


def _no_dropout(hf_config: HfConfig, _: ModelShape) -> dict[str, Any]:
    for key in ("resid_pdrop", "embd_pdrop"):
        number(hf_config, key, 0, 0, 0)
    return {}


def rows(shape: ModelShape) -> tuple[Row, ...]:
    return fused(decoder_rows(shape), FUSED)


FAMILY = decoder_family(
    "phi3",
    "Phi3ForCausalLM",
    shape,
    KEYS,
    rows=rows,
    keywords=_no_dropout,
    defaults={"rms_norm_eps": 1e-5},  # transformers' Phi3Config
    # transformers computes longrope for every kind except default.
    ropes=("default", "longrope"),
    rotary_share=1.0,  # by default, whole heads rotate; Phi-4-mini rotates 0.75 of each
)
