"""What `hybridrl plan` shows: layouts, the reshard's traffic, and an estimate of memory. No torch.

Owns the report and the estimates of the reshard; those of memory are plan_memory.py's. Needs only
the configuration and the model's config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from hybridrl.cli.plan_memory import CPU_ENGINES, MIB, itemsize_of, memory_peaks
from hybridrl.cli.validate import model_violations
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.hybrid_engine.alias import shared_names
from hybridrl.hybrid_engine.assign import Assignment, assign, judge, order_without_loss
from hybridrl.hybrid_engine.cluster import Cluster, planned_ms, predict
from hybridrl.hybrid_engine.owned import owned_layout
from hybridrl.hybrid_engine.pieces import join
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

# By transport, what bytes over NVLink cost beside their number, ms, and the bytes a second that a
# GPU then receives; bytes a second copied on a GPU; what a reshard costs that moves nothing. Fitted
# to 4 x H200 (benchmarks/results/reshard_h200.json). gloo: over loopback.
TRANSPORTS = {"peer": (0.0, 362e9), "packed": (1.2, 330e9)}
LOCAL_BYTES_PER_S = 1.85e12
LEAST_MS = 0.1
GLOO_BYTES_PER_S = 1e9
GPUS_PER_NODE = 8  # of most GPU hosts; a cluster file says otherwise


def plan_report(
    config: Config, world_size: int, cluster: Cluster | None = None
) -> tuple[dict[str, Any], list[UserError]]:
    """Returns the report and the violations; where there are any, what depends on them is None.

    With a cluster the report has a section `cluster`, and its nodes are those that replicas and
    sources keep to.
    """
    hf_config, violations = model_violations(config, world_size)
    if cluster is not None and cluster.nodes * cluster.gpus_per_node != world_size:
        size = f"{cluster.nodes} * {cluster.gpus_per_node}"
        remedy = "Change the cluster file or the world size."
        violations.append(
            UserError("nodes * gpus_per_node", size, f"the world size {world_size}", remedy)
        )
    if violations:
        return empty_report(ConfigError(violations)), violations
    family = resolve_family(config.model.family, hf_config)
    shape = family.shape(hf_config)
    train = config.train
    layout = TrainLayout(world_size, train.tp, train.pp, train.cp, train.ep, train.vpp, train.order)
    whole = [megatron_layout(family, shape, layout, rank) for rank in range(world_size)]
    sources = _sources(config, layout, whole)
    parts = _engine_parts(config, family, shape)
    node = cluster.gpus_per_node if cluster else min(GPUS_PER_NODE, world_size)
    best = assign(sources, parts, node)
    rollout = best.layout
    targets = [parts[tp_rank] for _, tp_rank in rollout.assignment]
    itemsize, shared = itemsize_of(config), _shared_bytes(config, whole, targets)
    reshard = plan_reshard(sources, targets, itemsize, node if cluster else None)
    report = {
        "train": {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")},
        "rollout": {
            "engine": config.rollout.engine,
            "tp": rollout.tp,
            "replicas": rollout.replicas,
            "assignment": [list(pair) for pair in rollout.assignment],
            "choices": _choices(best, layout, sources, parts, node, itemsize),
        },
        "reshard": _reshard(config, layout, reshard, shared),
        "memory": memory_peaks(
            config, shape, layout, whole, targets, shared, _transport(config, world_size)
        ),
        "violations": [],
    }
    if cluster is not None:
        found = vars(predict(join(sources, targets), itemsize, cluster))
        report["cluster"] = {**found, "planned_ms": planned_ms(reshard.traffic, cluster)}
    return report, []


def load_cluster(path: Path) -> Cluster:
    """Reads a cluster file, YAML or JSON.

    Raises:
        ConfigError: it is not such a file, or with every key that is wrong.
    """
    fields = Cluster.model_fields
    keys = "the keys " + ", ".join(fields)
    try:
        return Cluster.model_validate(OmegaConf.to_container(OmegaConf.load(path), resolve=True))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        what = str(error).splitlines()[0]
        raise ConfigError(
            [UserError(str(path), what, f"YAML or JSON of {keys}", "Mend it.")]
        ) from None
    except ValidationError as error:
        violations = []
        for found in error.errors():
            key = ".".join(map(str, found["loc"]))
            value = "nothing" if found["type"] == "missing" else repr(found["input"])
            allowed = found["msg"].removeprefix("Input should be ") if key in fields else keys
            remedy = f"Set {key}. {fields[key].description}" if key in fields else "Remove it."
            violations.append(UserError(f"{path}: {key}", value, allowed, remedy))
        raise ConfigError(violations) from None


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
        *_choice_lines(rollout["choices"]),
        f"reshard  about {reshard['predicted_ms']:.3g} ms",
        *_cluster_lines(report.get("cluster", {})),
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


def _engine_parts(config: Config, family: Family, shape: ModelShape) -> list[RankLayout]:
    if config.rollout.engine in CPU_ENGINES:
        return [hf_layout(hf_shapes(family, shape))]
    tp = config.rollout.tp
    return [fused_layout(family, shape, tp, tp_rank) for tp_rank in range(tp)]


def _choices(
    best: Assignment,
    train: TrainLayout,
    sources: list[RankLayout],
    parts: list[RankLayout],
    node: int,
    itemsize: int,
) -> dict[str, Any]:
    """Returns what the chosen assignment costs, and what others would."""
    consecutive = judge(sources, parts, RolloutLayout.consecutive(len(sources), len(parts)))
    free = assign(sources, parts, node, is_ascending=False)
    remedy = None
    if free.cost < best.cost:
        order = order_without_loss(train, sources, parts, free, node)
        remedy = (
            f"Set train.order={order}: the engine's ranks must ascend, and training axes in this "
            "order cost as little as any order of the engine's ranks."
            if order
            else "No order of the training axes that keeps tensor-parallel groups on a node "
            "costs as little."
        )
    named = {"used": best, "consecutive": consecutive, "any_order": free}
    costs = {
        name: {
            "tp_ranks": [tp_rank for _, tp_rank in found.layout.assignment],
            "max_receive_bytes": itemsize * found.receive,
            "max_send_bytes": itemsize * found.send,
        }
        for name, found in named.items()
    }
    return {**costs, "remedy": remedy}


def _choice_lines(choices: dict[str, Any]) -> Iterator[str]:
    for name in ("used", "consecutive", "any_order"):
        most = [choices[name][f"max_{way}_bytes"] / MIB for way in ("receive", "send")]
        yield f"         ranks {name}: at most {most[0]:.1f} MiB received, {most[1]:.1f} MiB sent"
    if choices["remedy"]:
        yield f"         {choices['remedy']}"


def _cluster_lines(found: dict[str, Any]) -> Iterator[str]:
    if found:
        yield (
            f"cluster  about {found['predicted_ms']:.3g} ms with each piece sent once to a node; "
            f"{found['planned_ms']:.3g} ms as planned, a network card for each rank; least of any "
            f"schedule {found['bound_ms']:.3g} ms"
        )


def _shared_bytes(
    config: Config, sources: list[RankLayout], targets: list[RankLayout]
) -> list[int]:
    """Returns, for each rank, the bytes of engine parameters that are the trainer's own memory."""
    if config.rollout.engine != "vllm" or config.train.release_weights_in_rollout:
        return [0] * len(sources)
    itemsize = itemsize_of(config)
    return [
        itemsize * sum(prod(target.shapes[name]) for name in shared_names(source, target))
        for source, target in zip(sources, targets, strict=True)
    ]


def _sources(config: Config, layout: TrainLayout, whole: list[RankLayout]) -> list[RankLayout]:
    """Returns what engines are written from: the whole layouts, or what each optimizer owns.

    Megatron shares buckets of several tensors out over data- and context-parallel ranks. Here every
    tensor is cut into as many equal parts: the same bytes altogether, and nearly so on each rank.
    """
    owners = _owners(config, layout)
    if owners == 1:
        return whole
    found = []
    for rank, own in enumerate(whole):
        where = layout.coordinates(rank)
        part = where.dp * layout.cp + where.cp
        sizes = {name: prod(shape) for name, shape in own.shapes.items()}
        ranges = {n: (s * part // owners, s * (part + 1) // owners) for n, s in sizes.items()}
        found.append(owned_layout(own, ranges))
    return found


def _owners(config: Config, layout: TrainLayout) -> int:
    """Returns over how many ranks a parameter's new values lie when the engine is written."""
    return layout.dp * layout.cp if config.train.fuse_param_gather else 1


def _reshard(config: Config, layout: TrainLayout, plan: Plan, shared: list[int]) -> dict[str, Any]:
    owners = _owners(config, layout)  # a shared parameter's owned part is in place
    local = [a - b // owners for a, b in zip(plan.local_bytes, shared, strict=True)]
    busiest = max(*plan.receive_bytes, *plan.send_bytes)
    if config.rollout.engine in CPU_ENGINES:
        predicted_ms = 1e3 * busiest / GLOO_BYTES_PER_S
    else:
        predicted_ms = transfer_ms(_transport(config, layout.world_size), busiest, max(local))
    return {
        "receive_bytes": list(plan.receive_bytes),
        "send_bytes": list(plan.send_bytes),
        "local_bytes": local,
        "alias_bytes": shared,
        "messages": list(plan.messages),
        "predicted_ms": predicted_ms,
    }


def transfer_ms(transport: str, busiest_bytes: int, local_bytes: int) -> float:
    """Predicts a reshard within a node, milliseconds.

    Args:
        transport: a key of TRANSPORTS.
        busiest_bytes: that the busiest rank receives, or sends.
        local_bytes: that a rank copies on itself, at the same time.
    """
    fixed_ms, rate = TRANSPORTS[transport]
    link_ms = fixed_ms + 1e3 * busiest_bytes / rate if busiest_bytes else 0.0
    return LEAST_MS + max(link_ms, 1e3 * local_bytes / LOCAL_BYTES_PER_S)


def _transport(config: Config, world_size: int) -> str:
    """Returns what 'auto' becomes on GPUs whose links the planner takes for granted."""
    far = world_size > GPUS_PER_NODE or config.train.release_weights_in_rollout
    return "packed" if far or config.rollout.transport == "packed" else "peer"
