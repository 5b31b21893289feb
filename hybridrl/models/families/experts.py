"""What families with mixtures of experts share: sizes, Megatron keywords, weight rows. No torch.

A mixture: a router, one linear layer without bias whose softmax (or sigmoids, `BiasedRouting`)
weighs experts, chooses a few of them for each token; each is a gated feed-forward layer. Further
ones may compute with every token. A family says under which names the HF checkpoint has them. What
a config asks for beyond this is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.models.families.reading import flag, refusal, size
from hybridrl.models.family import HfConfig, ModelShape, MoeShape, Row, RowKind

Shapes = tuple[tuple[int, ...], ...]

# What `experts_per_token` and transformers read; the coefficient has effect in training with
# transformers only, where `output_router_logits` is set: `train.moe` says what is used here.
EXPERT_KEYS = frozenset({"num_experts_per_tok", "router_aux_loss_coef"})


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's HF tensors below a layer, without `.weight`; `{E}` is the expert.

    `bias` is the whole name of the router's bias; `shared` are gate, up and down of the experts
    that compute with every token. Empty where there are none.
    """

    router: str
    gate: str
    up: str
    down: str
    bias: str = ""
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class BiasedRouting:
    """How a router chooses whose scores are sigmoids, and whose choice a bias balances.

    DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.

    Args:
        scale: of the weights of a token's experts, which add up to it.
        num_groups: of equally many experts, in order.
        kept_groups: groups that a token's experts are of: those whose best two score highest.
    """

    scale: float
    num_groups: int
    kept_groups: int


def experts_per_token(hf_config: HfConfig, num_experts: int, default: int) -> int:
    """Returns how many experts compute with a token.

    Raises:
        ModelError: more than there are.
    """
    found = size(hf_config, "num_experts_per_tok", default)
    if found > num_experts:
        raise refusal("num_experts_per_tok", found, f"at most the {num_experts} experts")
    return found


def expert_config(hf_config: HfConfig, shape: ModelShape, renormalized: bool) -> dict[str, Any]:
    """Returns the keywords of Megatron's TransformerConfig that the mixtures fix.

    Args:
        hf_config: the content of config.json.
        shape: sizes of the model.
        renormalized: whether the weights of a token's experts add up to 1. A softmax over the
            chosen experts is the same as one over all, divided by the sum over the chosen.

    Raises:
        ModelError: one expert a token with a weight that is always 1, which gives the router no
            gradient.
    """
    moe = _moe(shape)
    if renormalized and moe.experts_per_token == 1:
        raise refusal("num_experts_per_tok", 1, "2 or more where weights add up to 1")
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not renormalized,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def biased_config(shape: ModelShape, routing: BiasedRouting) -> dict[str, Any]:
    """Returns the keywords that differ from `expert_config`'s where the router is a biased one."""
    grouped = routing.num_groups > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # Megatron's update of the bias comes with every accumulation of gradients, ours with the
        # optimizer's step (models/megatron/router.py).
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": routing.num_groups if grouped else None,
        "moe_router_group_topk": routing.kept_groups if grouped else None,
        "moe_router_topk_scaling_factor": routing.scale,
        "moe_shared_expert_intermediate_size": _moe(shape).shared_ffn_size or None,
    }


def expert_rows(shape: ModelShape, names: ExpertNames) -> tuple[Row, ...]:
    """Returns the weight rows of the mixtures."""
    moe, hidden = _moe(shape), shape.hidden_size
    width, num_experts = moe.expert_ffn_size, moe.num_experts
    layers = tuple(layer for layer in range(shape.num_layers) if shape.has_experts(layer))
    local = "decoder.layers.{L}.mlp."
    expert = f"{local}experts.local_experts.{{E}}."
    router, gate, up, down = (_weight(n) for n in (names.router, names.gate, names.up, names.down))

    def row(name: str, parts: tuple[str, ...], shapes: Shapes, kind: RowKind, num: int = 0) -> Row:
        return Row(name, parts, shapes, kind, num_experts=num, layers=layers)

    found = [
        row(f"{local}router.weight", (router,), ((num_experts, hidden),), "replicated"),
        row(
            f"{expert}linear_fc1.weight", (gate, up), ((width, hidden),) * 2, "gate_up", num_experts
        ),
        row(f"{expert}linear_fc2.weight", (down,), ((hidden, width),), "row", num_experts),
    ]
    if moe.has_bias:
        bias = f"model.layers.{{L}}.{names.bias}"
        found.append(row(f"{local}router.expert_bias", (bias,), ((num_experts,),), "replicated"))
    if shared := moe.shared_ffn_size:
        gate, up, down = map(_weight, names.shared)
        fc1, fc2 = (f"{local}shared_experts.linear_{fc}.weight" for fc in ("fc1", "fc2"))
        found.append(row(fc1, (gate, up), ((shared, hidden),) * 2, "gate_up"))
        found.append(row(fc2, (down,), ((hidden, shared),), "row"))
    return tuple(found)


def _weight(name: str) -> str:
    return f"model.layers.{{L}}.{name}.weight"


def is_renormalized(hf_config: Mapping[str, Any]) -> bool:
    """Returns Qwen's `norm_topk_prob`, which is false where it is absent."""
    return flag(hf_config, "norm_topk_prob")


def _moe(shape: ModelShape) -> MoeShape:
    if shape.moe is None:
        raise ValueError("the shape has no experts")
    return shape.moe
