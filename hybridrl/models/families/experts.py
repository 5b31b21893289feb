"""Code shared by families with mixtures of experts: sizes, Megatron keywords, weight rows.

The router is a linear layer without bias. The softmax of its outputs (or their sigmoids,
`biased_config`) scores the experts, and a few experts are selected for each token. An expert is a
gated feed-forward layer; shared experts process every token. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hybridrl.models.families.reading import flag, number, refusal, require, size
from hybridrl.models.family import HfConfig, ModelShape, MoeShape, Row, RowKind

Shapes = tuple[tuple[int, ...], ...]

# transformers trains with `router_aux_loss_coef` if `output_router_logits` is set; hybridrl uses
# `train.moe` instead.
EXPERT_KEYS = frozenset({"num_experts_per_tok", "num_local_experts", "router_aux_loss_coef"})
# fmt: off
LISTED_KEYS = EXPERT_KEYS | {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
    "num_experts",
}
BIASED_KEYS = EXPERT_KEYS | {
    "attention_bias", "first_k_dense_replace", "moe_intermediate_size", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_mtp_layers",
    "num_nextn_predict_layers", "routed_scaling_factor", "topk_group",
}
# fmt: on

# A group's score is the sum of its best BEST_OF_GROUP scores. Megatron-Core 0.16.1 uses (experts
# per token / groups per token) scores instead (moe_utils.py, group_limited_topk), so this quotient
# must equal BEST_OF_GROUP.
BEST_OF_GROUP = 2


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's HF tensors in a layer, without `.weight`; `{E}` is the expert.

    Args:
        bias: Complete name of the router's bias; "" if there is none.
        shared: Prefix of the shared experts' gate_proj, up_proj and down_proj.
        shared_gate: Linear layer whose sigmoid multiplies the output of the shared experts.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{E}.gate_proj"
    up: str = "mlp.experts.{E}.up_proj"
    down: str = "mlp.experts.{E}.down_proj"
    bias: str = ""
    shared: str = ""
    shared_gate: str = ""


# Names in models whose routers have a bias.
BIASED_NAMES = ExpertNames(bias="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.")


def read_moe(
    hf_config: HfConfig,
    num_experts: int,
    chosen: int,
    width: int | None,
    key: str = "num_experts",
    width_key: str = "moe_intermediate_size",
    **more: Any,
) -> MoeShape:
    """Reads the sizes of experts.

    Args:
        num_experts, chosen, width: The architecture's defaults for the number of experts, and of
            experts per token, and for an expert's width.
        key, width_key: Keys of the number of experts and the width.
        more: Other fields of the result.
    """
    num_experts = _num_experts(hf_config, key, num_experts)
    chosen = size(hf_config, "num_experts_per_tok", chosen)
    if chosen > num_experts:
        raise refusal("num_experts_per_tok", chosen, f"at most the {num_experts} experts")
    return MoeShape(num_experts, chosen, size(hf_config, width_key, width), **more)


def read_biased_moe(
    hf_config: HfConfig, num_experts: int, chosen: int, width: int, num_dense: int
) -> MoeShape:
    """Reads the sizes of experts with shared ones, after `num_dense` dense layers by default.

    Their routers have a bias. See `read_moe` for the other arguments.
    """
    dense = _leading_dense_layers(hf_config, num_dense)
    key = "n_routed_experts"
    moe = read_moe(hf_config, num_experts, chosen, width, key, dense_layers=dense, has_bias=True)
    shared = moe.expert_ffn_size * size(hf_config, "n_shared_experts", 1)
    return replace(moe, shared_ffn_size=shared)


def _num_experts(hf_config: HfConfig, key: str, default: int) -> int:
    """Reads the number of experts from `key` or transformers 5's name, `num_local_experts`."""
    keys = (key, "num_local_experts")
    given = {name: size(hf_config, name) for name in keys if hf_config.get(name) is not None}
    if len(set(given.values())) > 1:
        raise refusal(keys[1], given[keys[1]], f"the same as {key} = {given[key]}")
    return next(iter(given.values()), default)


def _leading_dense_layers(hf_config: HfConfig, default: int) -> tuple[int, ...]:
    """Reads `first_k_dense_replace`, the number of dense layers before the layers with experts."""
    num_layers = size(hf_config, "num_hidden_layers")
    first = hf_config.get("first_k_dense_replace")
    first = default if first is None else first
    if type(first) is not int or not 0 <= first < num_layers:
        allowed = f"an integer from 0 to {num_layers - 1}, so that at least one layer has experts"
        raise refusal("first_k_dense_replace", first, allowed)
    return tuple(range(first))


def listed_dense_layers(hf_config: HfConfig) -> tuple[int, ...]:
    """Reads the dense layers: `mlp_only_layers`, and all but every `decoder_sparse_step`th one."""
    named = hf_config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list | tuple) or not all(type(one) is int for one in named):
        raise refusal("mlp_only_layers", named, "a list of layer indices, or null")
    every = size(hf_config, "decoder_sparse_step", 1)
    num_layers = size(hf_config, "num_hidden_layers")
    dense = tuple(
        layer for layer in range(num_layers) if layer in named or (layer + 1) % every != 0
    )
    if len(dense) == num_layers:
        allowed = f"values that leave one of the {num_layers} layers with experts"
        raise refusal("mlp_only_layers, decoder_sparse_step", f"{named}, {every}", allowed)
    return dense


def expert_config(shape: ModelShape, renormalized: bool) -> dict[str, Any]:
    """Returns the arguments of Megatron's TransformerConfig that the mixtures determine.

    Args:
        renormalized: Whether the weights of a token's experts add up to 1. This equals a softmax
            over only the selected experts.

    Raises ModelError if a token's only expert always has weight 1, so the router gets no gradient.
    """
    moe = shape.moe
    assert moe is not None
    if renormalized and moe.experts_per_token == 1:
        raise refusal(
            "num_experts_per_tok",
            1,
            "2 or more, because a single expert's weight would always be 1",
        )
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not renormalized,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": moe.has_shared_gate,
    }


def renormalized_config(_: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Returns `expert_config` if the weights of a token's experts always add up to 1."""
    return expert_config(shape, renormalized=True)


def configured_config(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Returns `expert_config` if `norm_topk_prob` says whether these weights add up to 1."""
    return expert_config(shape, renormalized=flag(hf_config, "norm_topk_prob"))


def biased_config(
    hf_config: HfConfig, shape: ModelShape, groups: int, kept: int, scale: float
) -> dict[str, Any]:
    """Returns `expert_config` for routers with a bias that balances the experts' load.

    Experts are selected by sigmoid scores plus the bias (DeepSeek-AI 2024, "DeepSeek-V3", section
    2.1.2), from the groups with the largest sums of their two best scores.

    Args:
        groups, kept, scale: The architecture's defaults for `n_group` (of consecutive experts),
            `topk_group` and `routed_scaling_factor` (sum of the weights of a token's experts).
    """
    assert shape.moe is not None
    num_experts, chosen = shape.moe.num_experts, shape.moe.experts_per_token
    require(hf_config, "norm_topk_prob", True, (True,))
    groups, kept = size(hf_config, "n_group", groups), size(hf_config, "topk_group", kept)
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
    return expert_config(shape, renormalized=True) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # Megatron updates the bias whenever gradients are accumulated; hybridrl updates it in the
        # optimizer step (models/megatron/router.py).
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": kept if groups > 1 else None,
        "moe_router_topk_scaling_factor": number(
            hf_config, "routed_scaling_factor", scale, 1e-6, 1e6
        ),
    }


def expert_rows(shape: ModelShape, names: ExpertNames) -> tuple[Row, ...]:
    moe, hidden = shape.moe, shape.hidden_size
    assert moe is not None
    width, num_experts = moe.expert_ffn_size, moe.num_experts
    layers = tuple(layer for layer in range(shape.num_layers) if shape.has_experts(layer))
    local = "decoder.layers.{L}.mlp."
    expert = f"{local}experts.local_experts.{{E}}."
    router, gate, up, down = (_weight(n) for n in (names.router, names.gate, names.up, names.down))

    def row(name: str, parts: tuple[str, ...], shapes: Shapes, kind: RowKind, num: int = 0) -> Row:
        return Row(name, parts, shapes, kind, num_experts=num, layers=layers)

    rows = [
        row(f"{local}router.weight", (router,), ((num_experts, hidden),), "replicated"),
        row(
            f"{expert}linear_fc1.weight", (gate, up), ((width, hidden),) * 2, "gate_up", num_experts
        ),
        row(f"{expert}linear_fc2.weight", (down,), ((hidden, width),), "row", num_experts),
    ]
    if moe.has_bias:
        bias = f"model.layers.{{L}}.{names.bias}"
        rows.append(row(f"{local}router.expert_bias", (bias,), ((num_experts,),), "replicated"))
    if shared := moe.shared_ffn_size:
        gate, up, down = (_weight(f"{names.shared}{x}_proj") for x in ("gate", "up", "down"))
        fc1, fc2 = (f"{local}shared_experts.linear_{fc}.weight" for fc in ("fc1", "fc2"))
        rows.append(row(fc1, (gate, up), ((shared, hidden),) * 2, "gate_up"))
        rows.append(row(fc2, (down,), ((hidden, shared),), "row"))
    if moe.has_shared_gate:
        gate = _weight(names.shared_gate)
        name = f"{local}shared_experts.gate_weight"
        rows.append(row(name, (gate,), ((1, hidden),), "replicated"))
    return tuple(rows)


def _weight(name: str) -> str:
    return f"model.layers.{{L}}.{name}.weight"
