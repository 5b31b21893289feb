"""DeepSeek-V3 and models with the same architecture (R1, Moonlight).

The models have latent attention, shared experts, and a router with a bias that balances the
experts. A checkpoint may contain layers for multi-token prediction (MTP) after the last layer;
hybridrl neither reads nor writes MTP layers.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    BiasedRouting,
    ExpertNames,
    biased_config,
    expert_config,
    expert_rows,
    experts_per_token,
    read_num_experts,
)
from hybridrl.models.families.latent import (
    LATENT_KEYS,
    latent_config,
    latent_rope_keywords,
    latent_rows,
    latent_shape,
)
from hybridrl.models.families.reading import number, refusal, require, size
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
# A group's score is the sum of its best BEST_OF_GROUP scores. Megatron-Core 0.16.1 uses (experts
# per token / groups per token) scores instead (moe_utils.py, group_limited_topk), so this quotient
# must equal BEST_OF_GROUP.
BEST_OF_GROUP = 2
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
        dense_layers=_dense_layers(hf_config, num_layers),
        has_bias=True,
    )
    heads = {"head_dim": latent.query_dim, "num_key_value_heads": num_heads}
    return decoder_shape({**hf_config, **heads}, moe=moe, latent=latent)


def _dense_layers(hf_config: HfConfig, num_layers: int) -> tuple[int, ...]:
    first = hf_config.get("first_k_dense_replace", 3)
    if type(first) is not int or not 0 <= first < num_layers:
        allowed = f"an integer from 0 to {num_layers - 1}, so that at least one layer has experts"
        raise refusal("first_k_dense_replace", first, allowed)
    return tuple(range(first))


def _routing(hf_config: HfConfig, num_experts: int, chosen: int) -> BiasedRouting:
    """Reads the routing; the defaults come from transformers."""
    require(hf_config, "norm_topk_prob", True, (True,))
    groups, kept = size(hf_config, "n_group", 8), size(hf_config, "topk_group", 4)
    if num_experts % groups or num_experts // groups < 2:
        allowed = f"a divisor of {num_experts} experts, with two or more in each group"
        raise refusal("n_group", groups, allowed)
    if kept > groups or chosen > kept * (num_experts // groups):
        allowed = f"at most {groups}, and enough groups for {chosen} experts"
        raise refusal("topk_group", kept, allowed)
    if groups > 1 and chosen // kept != BEST_OF_GROUP:
        allowed = (
            f"a value that selects {BEST_OF_GROUP} of num_experts_per_tok = {chosen} experts "
            f"from each group"
        )
        raise refusal("topk_group", kept, allowed)
    scale = number(hf_config, "routed_scaling_factor", 2.5, 1e-6, 1e6)
    return BiasedRouting(scale, groups, kept)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns arguments of MLATransformerConfig."""
    sizes = shape(hf_config)
    assert sizes.moe is not None  # every model in this family has experts
    routing = _routing(hf_config, sizes.moe.num_experts, sizes.moe.experts_per_token)
    experts = expert_config(sizes, renormalized=True) | biased_config(sizes, routing)
    return decoder_config(hf_config, sizes) | latent_config(hf_config, sizes) | experts


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table."""
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
        "num_local_experts",
        "routed_scaling_factor",
        "topk_group",
    },
    stated=STATED,
)
