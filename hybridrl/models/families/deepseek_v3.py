"""DeepSeek-V3 and models with the same architecture (R1, Moonlight, Kimi K2).

They have latent attention, shared experts, and a router with a bias. Training passes over their
layers for multi-token prediction.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.experts import (
    BIASED_KEYS,
    BIASED_NAMES,
    biased_config,
    expert_rows,
    read_biased_moe,
)
from hybridrl.models.families.latent import (
    LATENT_KEYS,
    latent_config,
    latent_rope_keywords,
    latent_rows,
    latent_shape,
)
from hybridrl.models.families.reading import require, size
from hybridrl.models.family import Family, HfConfig, ModelShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS

# Values that the architecture implies. If config.json lacks them, engines use a different router or
# fail.
STATED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
# Training options and the location of the model's code, which do not affect results here.
WITHOUT_EFFECT = {"auto_map", "aux_loss_alpha", "ep_size", "seq_aux"}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the model's sizes; the defaults come from transformers' DeepseekV3Config."""
    require(hf_config, "attention_bias", False, (False,))
    for key, value in STATED.items():
        require(hf_config, key, value, (value,))
    latent = latent_shape(hf_config)
    num_heads = size(hf_config, "num_attention_heads")
    require(hf_config, "num_key_value_heads", num_heads, (num_heads,))
    moe = read_biased_moe(hf_config, 256, 8, 2048, num_dense=3)
    heads = {"head_dim": latent.query_dim, "num_key_value_heads": num_heads}
    return decoder_shape({**hf_config, **heads}, moe=moe, latent=latent)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    sizes = shape(hf_config)
    experts = biased_config(hf_config, sizes, groups=8, kept=4, scale=2.5)
    return decoder_config(hf_config, sizes) | latent_config(hf_config, sizes) | experts


def rows(shape: ModelShape) -> tuple[Row, ...]:
    return decoder_rows(shape, expert_rows(shape, BIASED_NAMES), latent_rows(shape))


FAMILY = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    shape,
    transformer_config,
    latent_rope_keywords,
    rows,
    config_keys=DECODER_KEYS | BIASED_KEYS | LATENT_KEYS | frozenset(STATED) | WITHOUT_EFFECT,
    stated=STATED,
    other_types=("kimi_k2",),
)
