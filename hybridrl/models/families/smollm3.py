"""SmolLM3: llama-shaped; some layers, usually every fourth, use no positions (NoPE)."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_family
from hybridrl.models.families.llama import BIAS_KEYS, shape
from hybridrl.models.families.reading import refusal, size
from hybridrl.models.family import HfConfig, ModelShape
from hybridrl.models.hf.config_keys import WINDOW_KEYS


def _without_positions(hf_config: HfConfig, shape: ModelShape) -> list[int]:
    """Returns Megatron's `no_rope_freq`: 1 for layers without rotary positions, 0 for others."""
    every = size(hf_config, "no_rope_layer_interval", 4)
    has_rope = hf_config.get("no_rope_layers")  # despite its name, 1 means that it has positions
    if has_rope is None:
        return [int((layer + 1) % every == 0) for layer in range(shape.num_layers)]
    is_list = isinstance(has_rope, list | tuple) and all(
        type(one) in (int, bool) and one in (0, 1) for one in has_rope
    )
    if not is_list or len(has_rope) != shape.num_layers:
        raise refusal("no_rope_layers", has_rope, f"{shape.num_layers} values 0 or 1, or null")
    return [1 - int(one) for one in has_rope]


def _keywords(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    return {"no_rope_freq": _without_positions(hf_config, shape)}


FAMILY = decoder_family(
    "smollm3",
    "SmolLM3ForCausalLM",
    shape,
    BIAS_KEYS | {"no_rope_layer_interval", "no_rope_layers", *WINDOW_KEYS},
    keywords=_keywords,
    # transformers' SmolLM3Config
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    # YaRN is not supported: its magnitude changes the softmax scale, even in layers without
    # positions.
    ropes=("default", "linear", "llama3"),
    is_served_fused=False,
)
