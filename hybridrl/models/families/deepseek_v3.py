"""DeepSeek-V3 and models with the same architecture (R1, Moonlight, Kimi K2).

The models have latent attention, shared experts, and a router with a bias that balances the
experts. A checkpoint may contain layers for multi-token prediction (MTP) after the last layer;
training passes over them.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    ExpertNames,
    biased_config,
    expert_config,
    expert_rows,
    experts_per_token,
    leading_dense_layers,
    read_biased_routing,
    read_num_experts,
)
from hybridrl.models.families.latent import (
    LATENT_KEYS,
    latent_config,
    latent_rope_keywords,
    latent_rows,
    latent_shape,
)
from hybridrl.models.families.reading import require, size
from hybridrl.models.family import Family, HfConfig, ModelShape, MoeShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS

EXPERT, SHARED = "mlp.experts.{E}.", "mlp.shared_experts."
NAMES = ExpertNames(
    "mlp.gate",
    f"{EXPERT}gate_proj",
    f"{EXPERT}up_proj",
    f"{EXPERT}down_proj",
    bias="mlp.gate.e_score_correction_bias",
    shared=(f"{SHARED}gate_proj", f"{SHARED}up_proj", f"{SHARED}down_proj"),
)
# Values that the architecture implies. If config.json lacks them, engines use a different router or
# fail.
STATED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
# Keys in published configs that do not affect results here: training options, the location of the
# model's code, and the number of MTP layers.
WITHOUT_EFFECT = frozenset(
    {
        "auto_map",
        "aux_loss_alpha",
        "ep_size",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "seq_aux",
    }
)


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the model's sizes; the defaults come from transformers' DeepseekV3Config."""
    require(hf_config, "attention_bias", False, (False,))
    for key, value in STATED.items():
        require(hf_config, key, value, (value,))
    latent = latent_shape(hf_config)
    num_heads = size(hf_config, "num_attention_heads")
    num_layers = size(hf_config, "num_hidden_layers")
    require(hf_config, "num_key_value_heads", num_heads, (num_heads,))
    num_experts = read_num_experts(hf_config, "n_routed_experts", 256)
    width = size(hf_config, "moe_intermediate_size", 2048)
    moe = MoeShape(
        num_experts,
        experts_per_token(hf_config, num_experts, 8),
        width,
        shared_ffn_size=width * size(hf_config, "n_shared_experts", 1),
        dense_layers=leading_dense_layers(hf_config, num_layers, default=3),
        has_bias=True,
    )
    heads = {"head_dim": latent.query_dim, "num_key_value_heads": num_heads}
    return decoder_shape({**hf_config, **heads}, moe=moe, latent=latent)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    sizes = shape(hf_config)
    assert sizes.moe is not None  # every model in this family has experts
    routing = read_biased_routing(hf_config, sizes.moe, groups=8, kept=4, scale=2.5)
    experts = expert_config(sizes, renormalized=True) | biased_config(sizes, routing)
    return decoder_config(hf_config, sizes) | latent_config(hf_config, sizes) | experts


def rows(shape: ModelShape) -> tuple[Row, ...]:
    return decoder_rows(shape, expert_rows(shape, NAMES), latent_rows(shape))


FAMILY = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    shape,
    transformer_config,
    latent_rope_keywords,
    rows,
    config_keys=DECODER_KEYS
    | EXPERT_KEYS
    | LATENT_KEYS
    | frozenset(STATED)
    | WITHOUT_EFFECT
    | {
        "attention_bias",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
        "topk_group",
    },
    stated=STATED,
    other_types=("kimi_k2",),
)
