"""DeepSeek-V3 and what has its shape (R1, Moonlight): latent attention, shared experts, a router
whose choice a bias balances.

The layers for predicting further tokens (MTP), which the checkpoint may have after the last one,
take no part: they are neither read nor written.
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
# A group's score is the sum of so many best ones. Megatron-Core 0.16.1 takes experts per token over
# groups per token of them (moe_utils.py, group_limited_topk).
BEST_OF_GROUP = 2
# What the architecture means. Engines take other routers, or end, where config.json does not say
# it.
STATED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
# Keys of published configs that change no number here: how the model was trained, where its code
# was, and how many layers for further tokens there are.
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
    """Reads the sizes; defaults are those of transformers' DeepseekV3Config."""
    require(hf_config, "attention_bias", False, (False,))
    for key, value in STATED.items():
        require(hf_config, key, value, (value,))
    latent = latent_shape(hf_config)
    num_heads = size(hf_config, "num_attention_heads")
    num_layers = size(hf_config, "num_hidden_layers")
    require(hf_config, "num_key_value_heads", num_heads, (num_heads,))
    num_experts = _num_experts(hf_config)
    width = size(hf_config, "moe_intermediate_size", 2048)
    moe = MoeShape(
        num_experts,
        experts_per_token(hf_config, num_experts, 8),
        width,
        shared_ffn_size=width * size(hf_config, "n_shared_experts", 1),
        dense_layers=_dense_layers(hf_config, num_layers),
        has_bias=True,
    )
    plain = {**hf_config, "head_dim": latent.query_dim, "num_key_value_heads": num_heads}
    return decoder_shape(plain, moe=moe, latent=latent)


def _num_experts(hf_config: HfConfig) -> int:
    """Returns the number of experts, which transformers knows under two names."""
    keys = ("n_routed_experts", "num_local_experts")
    found = {key: size(hf_config, key) for key in keys if hf_config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise refusal(keys[1], found[keys[1]], f"the same as n_routed_experts = {found[keys[0]]}")
    return next(iter(found.values()), 256)


def _dense_layers(hf_config: HfConfig, num_layers: int) -> tuple[int, ...]:
    first = hf_config.get("first_k_dense_replace", 3)
    if type(first) is not int or not 0 <= first < num_layers:
        allowed = f"an integer from 0 to {num_layers - 1}: some layer has experts"
        raise refusal("first_k_dense_replace", first, allowed)
    return tuple(range(first))


def _routing(hf_config: HfConfig, num_experts: int, chosen: int) -> BiasedRouting:
    """Reads how experts are chosen; defaults are those of transformers."""
    require(hf_config, "norm_topk_prob", True, (True,))
    groups, kept = size(hf_config, "n_group", 8), size(hf_config, "topk_group", 4)
    if num_experts % groups or num_experts // groups < 2:
        raise refusal("n_group", groups, f"a divisor of {num_experts} experts, two or more each")
    if kept > groups or chosen > kept * (num_experts // groups):
        raise refusal("topk_group", kept, f"groups that hold {chosen} experts, at most {groups}")
    if groups > 1 and chosen // kept != BEST_OF_GROUP:
        allowed = f"a number that num_experts_per_tok = {chosen} is {BEST_OF_GROUP} times of"
        raise refusal("topk_group", kept, allowed)
    scale = number(hf_config, "routed_scaling_factor", 2.5, 1e-6, 1e6)
    return BiasedRouting(scale, groups, kept)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of MLATransformerConfig."""
    found = shape(hf_config)
    assert found.moe is not None  # every model of the family has experts
    routing = _routing(hf_config, found.moe.num_experts, found.moe.experts_per_token)
    experts = expert_config(hf_config, found, renormalized=True) | biased_config(found, routing)
    return decoder_config(hf_config, found) | latent_config(hf_config, found) | experts


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
