"""Creates the report of `hybridrl plan`: layouts, reshard traffic, memory and verdict.

No torch. Reads only the configuration, the models' config.json, and a user's own algorithm.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from hybridrl.checkpoint.host_memory import locked_bytes
from hybridrl.config.placement import Machines, Placement
from hybridrl.config.roles import RunModels
from hybridrl.config.rules_numerics import gpu_numerics_rules
from hybridrl.config.rules_optimizer import is_written_from_copies
from hybridrl.config.rules_placement import placed
from hybridrl.config.rules_quantization import quantization_rules
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.hybrid_engine.planning.nodes import planned_ms, predict, transfer_ms
from hybridrl.hybrid_engine.planning.owned import without
from hybridrl.hybrid_engine.planning.pieces import join
from hybridrl.hybrid_engine.planning.plan import Plan, PlannedOps, plan_reshard
from hybridrl.hybrid_engine.planning.wire_elements import wire_itemsize
from hybridrl.loop.preflight import model_violations
from hybridrl.models.adapters.settings import base_notice
from hybridrl.models.families.by_length import positions_summary
from hybridrl.models.family import read_model
from hybridrl.models.trainable import frozen_names, synced_family, trained_summary
from hybridrl.models.weights import RankLayout, hf_shapes
from hybridrl.parallel.host_gpus import Host
from hybridrl.rollout.model_rules import (
    held_family,
    merging_notice,
    quantized_model_rules,
)
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.alike import transport_of
from hybridrl.services.planner.estimate import Estimate, estimate
from hybridrl.services.planner.fit import cpu_verdict, gpu_verdict
from hybridrl.services.planner.hardware import Assumptions, ClusterFile, assume, merged
from hybridrl.services.planner.image_costs import images_report
from hybridrl.services.planner.micro_batch_sizes import positions_of_update
from hybridrl.services.planner.optimizer_report import optimizer_report
from hybridrl.services.planner.phase_memory import (
    Memory,
    RankMemory,
    RoleModel,
    estimate_memory,
    itemsize_of,
    role_models,
    state_copy_bytes,
)
from hybridrl.services.planner.place import Placed, choices, held_by_ranks, place_models
from hybridrl.services.planner.plan_text import order_reason
from hybridrl.services.planner.planned_models import planned_models
from hybridrl.services.planner.times import engine_note

# Rates on CPU: for gloo over loopback, and for copies within a rank.
GLOO_BYTES_PER_S = 1e9
CPU_COPY_BYTES_PER_S = 8e9
QUANTIZATION = "rollout.quantization"
PAYS = 0.95  # maximum ratio of step times at which FP8 is advised; it also changes samples
SIZES = ("tp", "pp", "vpp", "cp", "ep", "dp")
SECTIONS = ("train", "rollout", "reshard", "memory")
# Keys of the report in addition to the sections and the violations.
ADDED = (
    "fits",
    "verdict",
    "step",
    "gpu_memory_bytes",
    "positions",
    "trained",
    "lora",
    "update_positions",
    "images",
    "optimizer",
    "order",
    "ranks",
    "assumptions",
    "cluster",
)


def plan_report(
    config: Config, world_size: int, given: ClusterFile | None = None, host: Host | None = None
) -> tuple[dict[str, Any], list[UserError]]:
    """Returns the report and any violations; if there are any, its other values are None."""
    host = host or Host()
    runs_on_gpus = ENGINES[config.rollout.engine].runs_on_gpus
    given = merged(config.cluster, given)
    on_gpu = runs_on_gpus or given is not None or host.num_gpus > 0
    dtype = "bfloat16" if on_gpu else "float32"
    assumed, mismatch = None, list[UserError]()
    if on_gpu:
        assumed, mismatch = assume(given or ClusterFile(), world_size, host)
    machines = _machines(world_size, assumed, host) if assumed or not on_gpu else None
    hf_config, violations = model_violations(
        config, world_size, default_dtype=dtype, machines=machines
    )
    if on_gpu and config.numerics.is_exact:
        violations += gpu_numerics_rules(config, hf_config)
    models, unknown = planned_models(config)
    violations += [*unknown, *mismatch, *_transport_rules(config, assumed)]
    if violations or models is None or machines is None:
        return empty_report(ConfigError(violations)), violations
    with _without_cycle_collection():
        return _report(config, models, hf_config, machines, assumed), []


@contextlib.contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Disables Python's cyclic garbage collector while a plan is computed.

    A plan creates millions of tuples and no cycles. For 235B parameters on 64 ranks, planning takes
    5.5 s of CPU time without the collector and 13.8 s with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _machines(world_size: int, assumed: Assumptions | None, host: Host) -> Machines:
    if assumed is None:
        return Machines(world_size, world_size)
    gpus = host.names if len(host.names or ()) == world_size else None
    return Machines(world_size, assumed.cluster.gpus_per_node, gpus)


def _report(
    config: Config,
    models: RunModels,
    hf_config: dict[str, Any],
    machines: Machines,
    assumed: Assumptions | None,
) -> dict[str, Any]:
    (family, shape), on_gpu = read_model(config.model.family, hf_config), assumed is not None
    node = machines.ranks_per_node or machines.num_ranks
    placement, _ = placed(config, machines)
    roles = role_models(config, models, family, shape)
    family = roles[0].family
    laid = place_models(config, placement, family, shape, node)
    itemsize = itemsize_of(config, on_gpu)
    sources, targets = (without(part, laid.once) for part in (laid.sources, laid.targets))
    sent = wire_itemsize(laid.targets, itemsize)
    plan = plan_reshard(sources, targets, sent, node, weight_itemsize=itemsize)
    found = _memories(config, roles, laid, assumed)
    if assumed is not None:
        verdict = gpu_verdict(config, roles, hf_config, found, assumed, placement.is_shared)
    else:
        verdict = cpu_verdict(found)
    expert_axes = ("etp", "edp") if shape.moe else ()
    shared = assumed if placement.is_shared else None
    order, layout, memories = laid.layout.order, laid.best.layout, [one.memory for one in found]
    reason = order_reason(
        config.train.order, order, laid.choice, itemsize, placement.is_shared, bool(expert_axes)
    )
    return {
        "fits": verdict["fits"],
        "verdict": verdict,
        "step": _step(config, roles, placement, assumed),
        "gpu_memory_bytes": assumed.gpu_memory_bytes if assumed else None,
        "positions": positions_summary(hf_config, config.longest_sequence()),
        "trained": trained_summary(frozen_names(config.train.freeze, shape), family, shape) or None,
        "lora": _lora(config, roles, laid, itemsize, node),
        "update_positions": positions_of_update(config, shape, laid.layout),
        "images": images_report(config, shape.vision, itemsize),
        "optimizer": optimizer_report(config, roles, machines.num_ranks, shared),
        "train": {axis: getattr(laid.layout, axis) for axis in (*SIZES, *expert_axes)},
        "order": {"axes": order, "reason": reason},
        "rollout": {
            "engine": config.rollout.engine,
            "tp": layout.tp,
            **({"ep": config.rollout.ep, "experts": layout.experts} if shape.moe else {}),
            "replicas": layout.replicas,
            "assignment": [place and list(place) for place in layout.assignment],
            "choices": choices(config.train.order, laid, node, itemsize),
        },
        "reshard": _reshard(config, laid, plan, itemsize, assumed),
        "memory": _peaks(config, memories, machines.num_ranks // node, on_gpu),
        "ranks": [one.as_json() for one in found],
        "assumptions": assumed and {key: v._asdict() for key, v in assumed.values.items()},
        "cluster": _cluster_report(sources, targets, plan, assumed),
        "violations": [],
    }


def _peaks(
    config: Config, memories: Sequence[Memory], num_hosts: int, on_gpu: bool
) -> dict[str, Any]:
    replay, likely = memories[0].replay, memories[0].likely
    saved = max(memory.saved for memory in memories)
    copied = locked_bytes(saved) if on_gpu else saved  # GPU tensors: to page-locked memory
    return {
        "train_peak_bytes": max(memory.train for memory in memories),
        "usual_train_peak_bytes": max(memory.usual_train for memory in memories),
        "rollout_peak_bytes": max(memory.rollout for memory in memories),
        "staging_bytes": memories[0].staging,
        "checkpoint_copy_bytes": copied if is_written_from_copies(config) else 0,
        "state_copy_bytes": state_copy_bytes(config, saved, copied, num_hosts),
        "router_replay": replay.as_json() if replay else None,
        "likely_tokens": likely.as_json() if likely else None,
    }


def _step(
    config: Config, roles: Sequence[RoleModel], placement: Placement, assumed: Assumptions | None
) -> dict[str, Any] | None:
    """Returns the predicted step with the longest responses; None on CPU and with own ranks."""
    if assumed is None or not placement.is_shared:
        return None
    found = estimate(config, roles, placement.num_ranks, assumed)
    advice = _quantization_note(config, roles, placement.num_ranks, assumed, found)
    note = "; ".join(filter(None, (engine_note(config), advice))) or None
    return {"predicted_s": found.times.step, "phases_s": asdict(found.times), "note": note}


def _quantization_note(
    config: Config,
    models: Sequence[RoleModel],
    world_size: int,
    assumed: Assumptions,
    found: Estimate,
) -> str | None:
    """Returns advice on `rollout.quantization`, unless its value is faster or FP8 impossible."""
    needs, is_on = config.algorithm.needs, config.rollout.quantization == "fp8"
    if (needs and not needs.rollouts) or not ENGINES[config.rollout.engine].quantizes:
        return None
    other = config.with_values({QUANTIZATION: "none" if is_on else "fp8"})
    family, shape = models[0].family, models[0].shape
    rules = quantized_model_rules(other.rollout, other.train, family, shape)
    if any(quantization_rules(other, "bfloat16")) or any(rules):
        return None
    changed = estimate(other, models, world_size, assumed)
    before, after = found.times.step, changed.times.step
    if is_on and after <= before:
        gain = f"a step of {before:.1f} s would take {after:.1f} s with {QUANTIZATION}=none"
        return f"{QUANTIZATION}=fp8 does not pay here: {gain}"
    if not is_on and after < PAYS * before and changed.spare_bytes >= 0:
        return f"with {QUANTIZATION}=fp8 a step would take {after:.1f} s instead of {before:.1f} s"
    return None


def empty_report(error: ConfigError) -> dict[str, Any]:
    """Returns the report for a configuration that cannot be planned."""
    return {**dict.fromkeys((*ADDED, *SECTIONS)), "violations": error.as_json()}


def _memories(
    config: Config, models: Sequence[RoleModel], laid: Placed, assumed: Assumptions | None
) -> Sequence[RankMemory]:
    on_gpu, transport = assumed is not None, transport_of(config, assumed)
    itemsize, world_size = itemsize_of(config, on_gpu), len(laid.whole)
    return [
        RankMemory(
            ranks,
            held.roles,
            estimate_memory(config, models[0].shape, world_size, held, transport, on_gpu),
            held.fullest,
        )
        for ranks, held in held_by_ranks(models, laid, itemsize, transport)
    ]


def _lora(
    config: Config, roles: Sequence[RoleModel], laid: Placed, itemsize: int, node: int
) -> dict[str, Any] | None:
    """Returns the report's part about adapters; None if the run has none.

    `sync_bytes` is what a replica of the engine receives at each sync; other weights are received
    once (`once_receive_bytes` by rank). `roles` says for each other model whether it uses the
    policy's frozen weights, and how large its other weights are.
    """
    family, shape = roles[0].family, roles[0].shape
    if (lora := family.lora) is None:
        return None
    held = held_family(config.rollout.engine, family, shape)
    synced = hf_shapes(synced_family(family, shape, held), shape)
    sources, targets = (without(part, synced) for part in (laid.sources, laid.targets))
    once = plan_reshard(sources, targets, itemsize, node)
    return {
        "rank": lora.rank,
        "adapter_bytes": itemsize * roles[0].adapter_params,
        "engine_holds_adapters": held.lora is not None,
        "merging": merging_notice(config.rollout.engine, family, shape),
        "base": base_notice(config.lora, config.model),
        "sync_bytes": itemsize * sum(map(prod, synced.values())),
        "once_receive_bytes": list(once.receive_bytes),
        "roles": {
            model.role: {
                "shares_frozen_weights": (shares := laid.shares(model)),
                "own_bytes": itemsize * _num_elements(model, shares),
            }
            for model in roles[1:]
        },
    }


def _num_elements(model: RoleModel, shares: bool) -> int:
    own = model.own if shares else None
    return sum(map(prod, hf_shapes(own or model.family, model.shape, model.head).values()))


def _cluster_report(
    sources: Sequence[RankLayout],
    targets: Sequence[RankLayout],
    plan: Plan,
    assumed: Assumptions | None,
) -> dict[str, Any] | None:
    if assumed is None:
        return None
    joined = plan.ops.joined if isinstance(plan.ops, PlannedOps) else None
    joined = joined or join(sources, targets)
    found = vars(predict(joined, plan.itemsize, assumed.cluster))
    return {**found, "planned_ms": planned_ms(plan.traffic, assumed.cluster)}


def _reshard(
    config: Config, laid: Placed, plan: Plan, itemsize: int, assumed: Assumptions | None
) -> dict[str, Any]:
    shared = [itemsize * elements for elements in laid.shared]
    layout = laid.layout
    # Number of ranks over which each parameter's new values are sharded. In shared parameters, the
    # part that a rank owns needs no copy.
    owners = layout.dp * layout.cp if config.train.fuse_param_gather else 1
    local = [a - b // owners for a, b in zip(plan.local_bytes, shared, strict=True)]
    if laid.once:  # parts that are shared are not in this plan
        local = list(plan.local_bytes)
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
    cluster, transport = assumed.cluster, transport_of(config, assumed)
    within = transfer_ms(transport, busiest, local_bytes, cluster.link_gb_per_s)
    if cluster.nodes == 1:
        return within
    return max(planned_ms(plan.traffic, cluster), transfer_ms(transport, 0, local_bytes))


def _transport_rules(config: Config, assumed: Assumptions | None) -> Iterator[UserError]:
    if config.rollout.transport == "peer" and assumed is not None and assumed.cluster.nodes > 1:
        found = assumed.cluster
        reason = "because ranks can only read memory on their own node"
        allowed = f"packed or auto on {found.nodes} nodes of {found.gpus_per_node} GPUs, {reason}"
        remedy = "Set rollout.transport=auto, or correct gpus_per_node in --cluster FILE."
        yield UserError("rollout.transport", "peer", allowed, remedy)
