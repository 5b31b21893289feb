"""What `hybridrl plan` reports: layouts, the reshard's traffic, memory, and whether it fits. No
torch.

Owns the report and the prediction of the reshard; what is taken for granted is plan_cluster.py's,
memory plan_memory.py's, the verdict plan_fit.py's, the words plan_text.py's. Needs only the
configuration, the config.json of its models and, where the algorithm is the user's own, its module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from hybridrl.algorithms import needs_of, not_a_term
from hybridrl.cli.plan_cluster import Assumptions, ClusterFile, Host, assume
from hybridrl.cli.plan_fit import cpu_verdict, gpu_verdict
from hybridrl.cli.plan_memory import (
    Memory,
    estimate_memory,
    itemsize_of,
    most_elements,
)
from hybridrl.cli.plan_text import order_reason
from hybridrl.cli.validate import model_violations
from hybridrl.config.engines import ENGINES
from hybridrl.config.needs import Needs
from hybridrl.config.own_code import contained
from hybridrl.config.roles import RunModels, run_models
from hybridrl.config.rules_placement import layer_rules, split_rules
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import read_model_config
from hybridrl.errors import ConfigError, UserError
from hybridrl.hybrid_engine.alias import shared_names
from hybridrl.hybrid_engine.assign import Assignment, OrderChoice, assign, judge
from hybridrl.hybrid_engine.cluster import planned_ms, predict, transfer_ms
from hybridrl.hybrid_engine.order import order_layout
from hybridrl.hybrid_engine.pieces import join
from hybridrl.hybrid_engine.plan import Plan, plan_reshard
from hybridrl.models.family import Family, ModelShape, read_model
from hybridrl.models.weights import NOTHING, RankLayout, fused_layout, hf_layout, hf_shapes
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

# On CPU: gloo over loopback, and copies of a rank.
GLOO_BYTES_PER_S = 1e9
CPU_COPY_BYTES_PER_S = 8e9
SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp")
SECTIONS = ("train", "rollout", "reshard", "memory")
# Keys beside the sections, and the violations.
ADDED = ("fits", "verdict", "gpu_memory_bytes", "order", "assumptions", "cluster")


def plan_report(
    config: Config,
    world_size: int,
    given: ClusterFile | None = None,
    host: Host | None = None,
) -> tuple[dict[str, Any], list[UserError]]:
    """Returns the report and the violations; where there are any, what depends on them is None.

    Args:
        config: of the run.
        world_size: number of ranks.
        given: keys of a cluster file.
        host: the GPUs of this host, taken for those of the run; None: nothing is known of them.
    """
    host = host or Host()
    runs_on_gpus = ENGINES[config.rollout.engine].runs_on_gpus
    on_gpu = runs_on_gpus or given is not None or host.num_gpus > 0
    dtype = "bfloat16" if on_gpu else "float32"
    hf_config, violations = model_violations(config, world_size, default_dtype=dtype)
    models, unknown = _models(config)
    violations += unknown
    assumed = None
    if on_gpu:
        assumed, mismatch = assume(given or ClusterFile(), world_size, host)
        violations += [*mismatch, *_transport_rules(config, assumed)]
    if violations or models is None:
        return empty_report(ConfigError(violations)), violations
    return _report(config, models, hf_config, world_size, assumed), []


def _models(config: Config) -> tuple[RunModels | None, list[UserError]]:
    """Returns the models that the run holds, or why they are not known.

    An algorithm of the user's own is imported and made here, as for a run: only its class says
    whether it needs a critic. A mistake in it, be it sys.exit, is a violation.
    """
    needs: dict[str, Needs] = {}
    found: list[UserError] = []
    terms = config.terms()
    sections = {"": config.algorithm} | {name: term.algorithm for name, term in terms.items()}
    for term, section in sections.items():
        try:
            with contained():
                needs[term] = needs_of(section)
        except UserError as error:
            is_key = term and error.name.startswith("algorithm.")
            name = f"mix.{term}.{error.name}" if is_key else error.name
            found.append(UserError(name, error.value, error.allowed, error.remedy))
            continue
        if term and not needs[term].fits_term:
            found.append(not_a_term(term, section.name))
    if found:
        return None, found
    own = needs.pop("")
    models = run_models(config, own, needs.values())
    for scorer, served in models.reward_models.items():
        found += _reward_model_rules(config, f"reward {scorer}: ", served)
    return models, found


def _reward_model_rules(config: Config, prefix: str, served: ModelConfig) -> Iterator[UserError]:
    """Yields what of a reward model cannot be read, or cut as `train` says."""
    train = config.train
    try:
        content = read_model_config(served)
        read_model(served.family, content)
        errors = [
            *layer_rules("train.pp * train.vpp", train.pp * train.vpp, content),
            *split_rules("train.tp", train.tp, content),
        ]
    except UserError as error:
        errors = [error]
    for fault in errors:
        yield UserError(f"{prefix}{fault.name}", fault.value, fault.allowed, fault.remedy)


def _report(
    config: Config,
    models: RunModels,
    hf_config: dict[str, Any],
    world_size: int,
    assumed: Assumptions | None,
) -> dict[str, Any]:
    """Returns the report of a configuration without violations; on CPU nothing is assumed."""
    (family, shape), on_gpu = read_model(config.model.family, hf_config), assumed is not None
    node = assumed.cluster.gpus_per_node if assumed else world_size
    placed = _place(config, family, shape, world_size, node)
    itemsize = itemsize_of(config, on_gpu)
    plan = plan_reshard(placed.sources, placed.targets, itemsize, node)
    memory = _memory(config, models, shape, placed, itemsize, assumed)
    if assumed is not None:
        verdict = gpu_verdict(config, models, hf_config, family, world_size, memory, assumed)
    else:
        verdict = cpu_verdict(world_size, memory)
    order, layout = placed.layout.order, placed.best.layout
    return {
        "fits": verdict["fits"],
        "verdict": verdict,
        "gpu_memory_bytes": assumed.gpu_memory_bytes if assumed else None,
        "train": {axis: getattr(placed.layout, axis) for axis in SIZES},
        "order": {
            "axes": order,
            "reason": order_reason(config.train.order, order, placed.choice, itemsize),
        },
        "rollout": {
            "engine": config.rollout.engine,
            "tp": layout.tp,
            "replicas": layout.replicas,
            "assignment": [place and list(place) for place in layout.assignment],
            "choices": _choices(config.train.order, placed, node, itemsize),
        },
        "reshard": _reshard(config, placed, plan, assumed),
        "memory": {
            "train_peak_bytes": memory.train,
            "rollout_peak_bytes": memory.rollout,
            "staging_bytes": memory.staging,
        },
        "assumptions": assumed and {key: v._asdict() for key, v in assumed.values.items()},
        "cluster": _cluster_report(placed, plan, assumed),
        "violations": [],
    }


def empty_report(error: ConfigError) -> dict[str, Any]:
    """Returns the report of a configuration that cannot be planned."""
    return {**dict.fromkeys((*ADDED, *SECTIONS)), "violations": error.as_json()}


@dataclass(frozen=True)
class _Placed:
    """Who trains and who generates with what.

    Args:
        layout: the training layout, its order chosen.
        choice: of the order.
        whole: what each rank trains with.
        sources: what engines are written from.
        parts: what each tensor-parallel rank of the engine holds.
        best: which part each rank generates with.
        targets: the part of each rank.
        shared: elements of each rank's engine parameters that are the trainer's own memory.
    """

    layout: TrainLayout
    choice: OrderChoice | None
    whole: list[RankLayout]
    sources: list[RankLayout]
    parts: list[RankLayout]
    best: Assignment
    targets: list[RankLayout]
    shared: list[int]


def _place(
    config: Config, family: Family, shape: ModelShape, world_size: int, node: int
) -> _Placed:
    train, tp = config.train, config.rollout.tp
    ordered = order_layout(train, family, shape, world_size, tp, node)
    whole, sources = ordered.whole, ordered.sources
    if ENGINES[config.rollout.engine].has_fused_parameters:
        parts = [fused_layout(family, shape, tp, tp_rank) for tp_rank in range(tp)]
    else:
        parts = [hf_layout(hf_shapes(family, shape))]
    best = assign(sources, parts, node)
    tp_ranks = map(best.layout.tp_rank, range(world_size))
    targets = [NOTHING if tp_rank is None else parts[tp_rank] for tp_rank in tp_ranks]
    shared = _shared(config, whole, targets)
    return _Placed(ordered.layout, ordered.choice, whole, sources, parts, best, targets, shared)


def _shared(config: Config, whole: list[RankLayout], targets: list[RankLayout]) -> list[int]:
    """Returns, for each rank, the elements of engine parameters that are the trainer's memory."""
    shares_memory = ENGINES[config.rollout.engine].shares_memory
    if not shares_memory or config.train.release_weights_in_rollout:
        return [0] * len(whole)
    found: dict[tuple[int, int], int] = {}
    for source, target in zip(whole, targets, strict=True):
        if (id(source), id(target)) not in found:
            names = shared_names(source, target)
            found[id(source), id(target)] = sum(prod(target.shapes[name]) for name in names)
    return [found[id(s), id(t)] for s, t in zip(whole, targets, strict=True)]


def _choices(order: str, placed: _Placed, node: int, itemsize: int) -> dict[str, Any]:
    """Returns what the chosen assignment costs, and what others would."""
    sources, parts = placed.sources, placed.parts
    consecutive = judge(sources, parts, RolloutLayout.consecutive(len(sources), len(parts)))
    free = assign(sources, parts, node, is_ascending=False)
    choice, remedy = placed.choice, None
    if choice is not None and choice.receive < placed.best.receive:
        remedy = f"Set train.order=auto, which chooses {choice.order}, in place of {order}."
    named = {"used": placed.best, "consecutive": consecutive, "any_order": free}
    costs = {
        name: {
            "tp_ranks": [found.layout.tp_rank(rank) for rank in range(len(sources))],
            "max_receive_bytes": itemsize * found.receive,
            "max_send_bytes": itemsize * found.send,
        }
        for name, found in named.items()
    }
    return {**costs, "remedy": remedy}


def _memory(
    config: Config,
    models: RunModels,
    shape: ModelShape,
    placed: _Placed,
    itemsize: int,
    assumed: Assumptions | None,
) -> Memory:
    engine_bytes = max(
        itemsize * (most_elements([target]) - shared)
        for target, shared in zip(placed.targets, placed.shared, strict=True)
    )
    held, transport = most_elements(placed.whole), _transport(config, assumed)
    on_gpu = assumed is not None
    sizes = shape, placed.layout, held, engine_bytes
    return estimate_memory(config, models, *sizes, transport, on_gpu)


def _cluster_report(
    placed: _Placed, plan: Plan, assumed: Assumptions | None
) -> dict[str, Any] | None:
    if assumed is None:
        return None
    found = vars(predict(join(placed.sources, placed.targets), plan.itemsize, assumed.cluster))
    return {**found, "planned_ms": planned_ms(plan.traffic, assumed.cluster)}


def _reshard(
    config: Config,
    placed: _Placed,
    plan: Plan,
    assumed: Assumptions | None,
) -> dict[str, Any]:
    shared = [plan.itemsize * elements for elements in placed.shared]
    layout = placed.layout
    # Over how many ranks a parameter's new values lie; where it is shared, the owned part is there.
    owners = layout.dp * layout.cp if config.train.fuse_param_gather else 1
    local = [a - b // owners for a, b in zip(plan.local_bytes, shared, strict=True)]
    return {
        "receive_bytes": list(plan.receive_bytes),
        "send_bytes": list(plan.send_bytes),
        "local_bytes": local,
        "alias_bytes": shared,
        "messages": list(plan.messages),
        "predicted_ms": _predicted_ms(config, plan, max(local), assumed),
    }


def _predicted_ms(
    config: Config, plan: Plan, local_bytes: int, assumed: Assumptions | None
) -> float:
    busiest = max(*plan.receive_bytes, *plan.send_bytes)
    if assumed is None:
        return 1e3 * max(busiest / GLOO_BYTES_PER_S, local_bytes / CPU_COPY_BYTES_PER_S)
    cluster, transport = assumed.cluster, _transport(config, assumed)
    within = transfer_ms(transport, busiest, local_bytes, cluster.link_gb_per_s)
    if cluster.nodes == 1:
        return within
    return max(planned_ms(plan.traffic, cluster), transfer_ms(transport, 0, local_bytes))


def _transport(config: Config, assumed: Assumptions | None) -> str:
    """Returns what 'auto' becomes on GPUs that can read each other's memory within a node."""
    far = assumed is None or assumed.cluster.nodes > 1 or config.train.release_weights_in_rollout
    return "packed" if far or config.rollout.transport == "packed" else "peer"


def _transport_rules(config: Config, assumed: Assumptions | None) -> Iterator[UserError]:
    if config.rollout.transport == "peer" and assumed is not None and assumed.cluster.nodes > 1:
        found = assumed.cluster
        yield UserError(
            "rollout.transport",
            "peer",
            f"packed or auto on {found.nodes} nodes of {found.gpus_per_node} GPUs: ranks read the "
            "memory of their own node",
            "Set rollout.transport=auto, or gpus_per_node in --cluster FILE.",
        )
