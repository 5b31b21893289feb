"""A model family outside the package that handles a key which the shipped ones refuse: Qwen2 whose
last layers attend within a window.

Reached as `model.family: windowed_family:FAMILY`.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import size
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape
from hybridrl.models.hf.config_keys import DECODER_KEYS

WINDOW_KEYS = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


def shape(hf_config: HfConfig) -> ModelShape:
    rest = {key: value for key, value in hf_config.items() if key not in WINDOW_KEYS}
    return decoder_shape(rest, qkv_bias=True)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    sizes = shape(hf_config)
    first = size(hf_config, "max_window_layers")
    return {
        **decoder_config(hf_config, sizes),
        # Megatron counts the positions before the query's own, transformers with it.
        "window_size": (size(hf_config, "sliding_window") - 1, 0),
        "window_attn_skip_freq": [int(layer >= first) for layer in range(sizes.num_layers)],
    }


FAMILY = Family(
    "windowed",
    ("Qwen2ForCausalLM",),
    shape,
    transformer_config,
    rope_keywords,
    decoder_rows,
    config_keys=DECODER_KEYS | WINDOW_KEYS,
)
