"""What `hybridrl plan` shows: layouts, the reshard's traffic, and an estimate of memory. No torch.

Owns the report and its estimates. Needs only the configuration and the model's config.json.
"""

from __future__ import annotations

from math import prod
from typing import Any

from hybridrl.cli.validate import model_violations
from hybridrl.config.algorithm import PolicyGradientConfig, PpoConfig
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.hybrid_engine.assign import assign
from hybridrl.hybrid_engine.plan import Plan, plan_reshard
from hybridrl.models.family import Family, ModelShape, resolve_family
from hybridrl.models.weights import (
    RankLayout,
    fused_layout,
    hf_layout,
    hf_shapes,
    megatron_layout,
)
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

CPU_ENGINES = ("hf", "scripted")
# Bytes a second between two ranks: a GPU's NVLink, measured with send/recv, and gloo over loopback.
NVLINK_BYTES_PER_S = 345e9
GLOO_BYTES_PER_S = 1e9
MIB = 2**20
# Bytes a decoder layer keeps for its backward for each token and hidden unit in 16 bit, without
# attention scores (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.1).
ACTIVATION_BYTES = 34
ADAM_BYTES = 8  # two fp32 moments
MASTER_BYTES = 4  # fp32 copy of 16-bit parameters
MAIN_GRAD_BYTES = 4


def plan_report(config: Config, world_size: int) -> tuple[dict[str, Any], list[UserError]]:
    """Returns the report and the violations; where there are any, what depends on them is None."""
    hf_config, violations = model_violations(config, world_size)
    if violations:
        return empty_report(ConfigError(violations)), violations
    family = resolve_family(config.model.family, hf_config)
    shape = family.shape(hf_config)
    train = config.train
    layout = TrainLayout(
        world_size, tp=train.tp, pp=train.pp, cp=train.cp, ep=train.ep, vpp=train.vpp
    )
    rollout = assign(layout, config.rollout.tp)
    ranks = range(world_size)
    sources = [megatron_layout(family, shape, layout, rank) for rank in ranks]
    targets = _engine_layouts(config, family, shape, rollout)
    itemsize = _itemsize(config)
    reshard = plan_reshard(sources, targets, itemsize)
    report = {
        "train": {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")},
        "rollout": {
            "engine": config.rollout.engine,
            "tp": rollout.tp,
            "replicas": rollout.replicas,
            "assignment": [list(pair) for pair in rollout.assignment],
        },
        "reshard": _reshard(config, reshard),
        "memory": _memory(config, shape, layout, sources, targets),
        "violations": [],
    }
    return report, []


def empty_report(error: ConfigError) -> dict[str, Any]:
    """Returns the report of a configuration that cannot be planned."""
    parts = dict.fromkeys(("train", "rollout", "reshard", "memory"))
    return {**parts, "violations": error.as_json()}


def plan_text(report: dict[str, Any]) -> str:
    """Returns the report as lines for people."""
    train, rollout, reshard = report["train"], report["rollout"], report["reshard"]
    sizes = " ".join(f"{axis}{size}" for axis, size in train.items())
    lines = [
        f"train    {sizes}",
        f"rollout  {rollout['engine']}: {rollout['replicas']} replicas at tp {rollout['tp']}",
        f"reshard  about {reshard['predicted_ms']:.3g} ms",
        "rank  replica  tp_rank  receives_MiB  sends_MiB  local_MiB  messages",
    ]
    traffic = zip(*(reshard[key] for key in _TRAFFIC), reshard["messages"], strict=True)
    for rank, (received, sent, local, messages) in enumerate(traffic):
        replica, tp_rank = rollout["assignment"][rank]
        lines.append(
            f"{rank:4}  {replica:7}  {tp_rank:7}  {received / MIB:12.1f}  {sent / MIB:9.1f}  "
            f"{local / MIB:9.1f}  {messages:8}"
        )
    for name, size in report["memory"].items():
        lines.append(f"{name:20} {size / MIB:12.1f} MiB")
    return "\n".join(lines)


_TRAFFIC = ("receive_bytes", "send_bytes", "local_bytes")


def _engine_layouts(
    config: Config, family: Family, shape: ModelShape, rollout: RolloutLayout
) -> list[RankLayout]:
    if config.rollout.engine in CPU_ENGINES:
        return [hf_layout(hf_shapes(family, shape))] * len(rollout.assignment)
    parts = [fused_layout(family, shape, rollout.tp, tp_rank) for tp_rank in range(rollout.tp)]
    return [parts[tp_rank] for _, tp_rank in rollout.assignment]


def _reshard(config: Config, plan: Plan) -> dict[str, Any]:
    rate = GLOO_BYTES_PER_S if config.rollout.engine in CPU_ENGINES else NVLINK_BYTES_PER_S
    busiest = max(*plan.receive_bytes, *plan.send_bytes)
    return {
        "receive_bytes": list(plan.receive_bytes),
        "send_bytes": list(plan.send_bytes),
        "local_bytes": list(plan.local_bytes),
        "alias_bytes": [0] * plan.world_size,  # engines own their parameters; nothing is shared yet
        "messages": list(plan.messages),
        "predicted_ms": 1e3 * busiest / rate,
    }


def _memory(
    config: Config,
    shape: ModelShape,
    layout: TrainLayout,
    sources: list[RankLayout],
    targets: list[RankLayout],
) -> dict[str, int]:
    """Returns the estimated peak of the fullest rank in each phase, in bytes.

    Training holds parameters, fp32 gradients, the optimizer's share of a data-parallel rank, frozen
    models, activations and logits; generation holds the training state and the KV cache. The
    engine's weights stay in both: no phase frees anything yet.
    """
    itemsize = _itemsize(config)
    num_params = max(_num_elements(source) for source in sources)
    engine = itemsize * max(_num_elements(target) for target in targets)
    optimizer = ADAM_BYTES + (MASTER_BYTES if itemsize == 2 else 0)
    sharded = optimizer * num_params // (layout.dp * layout.cp)
    trained = num_params * (itemsize + MAIN_GRAD_BYTES) + sharded
    num_trained = 2 if isinstance(config.algorithm, PpoConfig) else 1
    reference = itemsize * num_params if _has_reference(config) else 0
    state = num_trained * trained + reference
    kv_size = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * itemsize
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    kv_cache = config.rollout.max_batch * longest * kv_size // config.rollout.tp
    return {
        "train_peak_bytes": state + engine + _activation_bytes(config, shape, layout),
        "rollout_peak_bytes": state + engine + kv_cache,
        "staging_bytes": config.rollout.staging_mib * MIB,
    }


def _activation_bytes(config: Config, shape: ModelShape, layout: TrainLayout) -> int:
    tokens = config.train.micro_batch_tokens // layout.cp
    layers = shape.num_layers // layout.pp
    per_token = shape.hidden_size * ACTIVATION_BYTES * _itemsize(config) // 2
    if config.train.recompute == "full":  # each layer keeps its input; one layer at a time is whole
        kept = tokens * shape.hidden_size * _itemsize(config) * layers + tokens * per_token
    else:
        kept = tokens * per_token * layers
    logits = tokens * shape.padded_vocab(layout.tp) * 4
    return (kept * layout.pp + logits) // layout.tp


def _has_reference(config: Config) -> bool:
    return isinstance(config.algorithm, PolicyGradientConfig) and config.algorithm.kl_coef > 0


def _num_elements(layout: RankLayout) -> int:
    return sum(prod(shape) for shape in layout.shapes.values())


def _itemsize(config: Config) -> int:
    """Returns bytes of a parameter; 'auto' is float32 where the engine is one for CPU."""
    if config.model.dtype == "auto":
        return 4 if config.rollout.engine in CPU_ENGINES else 2
    return {"float32": 4, "bfloat16": 2}[config.model.dtype]
