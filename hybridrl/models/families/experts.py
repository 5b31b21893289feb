"""Code shared by families with mixtures of experts: sizes, Megatron keywords, weight rows.

The router is a linear layer without bias. The softmax of its outputs (or their sigmoids,
`BiasedRouting`) scores the experts, and a few experts are selected for each token. An expert is a
gated feed-forward layer; shared experts process every token. Each family defines the names in the
HF checkpoint. If a config uses other options, the error names the key. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridrl.models.families.reading import flag, number, refusal, require, size
from hybridrl.models.family import HfConfig, ModelShape, MoeShape, Row, RowKind

Shapes = tuple[tuple[int, ...], ...]

# transformers trains with `router_aux_loss_coef` if `output_router_logits` is set; hybridrl uses
# `train.moe` instead.
EXPERT_KEYS = frozenset({"num_experts_per_tok", "num_local_experts", "router_aux_loss_coef"})

# A group's score is the sum of its best BEST_OF_GROUP scores. Megatron-Core 0.16.1 uses (experts
# per token / groups per token) scores instead (moe_utils.py, group_limited_topk), so this quotient
# must equal BEST_OF_GROUP.
BEST_OF_GROUP = 2


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's HF tensors in a layer, without `.weight`; `{E}` is the expert.

    Args:
        bias: Complete name of the router's bias; "" if there is none.
        shared: Gate, up and down projections of the shared experts; empty if there are none.
        shared_gate: Linear layer whose sigmoid multiplies the output of the shared experts; "" if
            there is none.
    """

    router: str
    gate: str
    up: str
    down: str
    bias: str = ""
    shared: tuple[str, ...] = ()
    shared_gate: str = ""


@dataclass(frozen=True)
class BiasedRouting:
    """Selection of experts by sigmoid scores plus a bias that balances their load.

    DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.

    Args:
        scale: Sum of the weights of a token's experts.
        num_groups: Number of equally large groups of consecutive experts.
        kept_groups: Number of groups from which a token's experts are selected. The groups with the
            largest sums of their two best scores are kept.
    """

    scale: float
    num_groups: int
    kept_groups: int


def read_biased_routing(
    hf_config: HfConfig, moe: MoeShape, groups: int, kept: int, scale: float
) -> BiasedRouting:
    """Reads the routing of a model whose routers have a bias.

    Args:
        groups, kept, scale: The architecture's defaults for `n_group`, `topk_group` and
            `routed_scaling_factor`.
    """
    num_experts, chosen = moe.num_experts, moe.experts_per_token
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
    scale = number(hf_config, "routed_scaling_factor", scale, 1e-6, 1e6)
    return BiasedRouting(scale, groups, kept)


def experts_per_token(hf_config: HfConfig, num_experts: int, default: int) -> int:
    chosen = size(hf_config, "num_experts_per_tok", default)
    if chosen > num_experts:
        raise refusal("num_experts_per_tok", chosen, f"at most the {num_experts} experts")
    return chosen


def read_num_experts(hf_config: HfConfig, key: str, default: int) -> int:
    """Reads the number of experts from `key` or transformers 5's name, `num_local_experts`."""
    keys = (key, "num_local_experts")
    given = {name: size(hf_config, name) for name in keys if hf_config.get(name) is not None}
    if len(set(given.values())) > 1:
        raise refusal(keys[1], given[keys[1]], f"the same as {key} = {given[key]}")
    return next(iter(given.values()), default)


def leading_dense_layers(hf_config: HfConfig, num_layers: int, default: int) -> tuple[int, ...]:
    """Reads `first_k_dense_replace`, the number of dense layers before the layers with experts."""
    first = hf_config.get("first_k_dense_replace")
    first = default if first is None else first
    if type(first) is not int or not 0 <= first < num_layers:
        allowed = f"an integer from 0 to {num_layers - 1}, so that at least one layer has experts"
        raise refusal("first_k_dense_replace", first, allowed)
    return tuple(range(first))


def listed_dense_layers(hf_config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Reads the dense layers: `mlp_only_layers`, and all but every `decoder_sparse_step`th one."""
    named = hf_config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list | tuple) or not all(type(one) is int for one in named):
        raise refusal("mlp_only_layers", named, "a list of layer indices, or null")
    every = size(hf_config, "decoder_sparse_step", 1)
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

    Raises ModelError if the weight of the only expert is always 1: no gradient for the router.
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


def biased_config(shape: ModelShape, routing: BiasedRouting) -> dict[str, Any]:
    """Returns arguments for a router with a bias, which override arguments from `expert_config`."""
    assert shape.moe is not None
    grouped = routing.num_groups > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # Megatron updates the bias whenever gradients are accumulated; hybridrl updates it in the
        # optimizer step (models/megatron/router.py).
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": routing.num_groups if grouped else None,
        "moe_router_group_topk": routing.kept_groups if grouped else None,
        "moe_router_topk_scaling_factor": routing.scale,
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
        gate, up, down = map(_weight, names.shared)
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
