"""Estimates memory and step time if all models share all ranks, for layout search. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridrl.config.schema import Config
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.alike import fullest_rank, memory_alike
from hybridrl.services.planner.fit import num_requests, with_margin
from hybridrl.services.planner.hardware import Assumptions
from hybridrl.services.planner.phase_memory import Memory, RoleModel, gradient_bytes, itemsize_of
from hybridrl.services.planner.sizes import engine_elements
from hybridrl.services.planner.times import Times, giving_back_s, step_times


@dataclass(frozen=True)
class Estimate:
    """Predicted memory and time. `most_bytes`: largest phase, with the largest KV cache that fits.

    `spare_bytes` are left after the safety margin; negative if the run does not fit.
    """

    memory: Memory
    times: Times
    most_bytes: int
    spare_bytes: int


def estimate(
    config: Config, models: Sequence[RoleModel], world_size: int, assumed: Assumptions
) -> Estimate:
    """Estimates memory and step time of a valid configuration; ModelError as `fullest_rank`."""
    train, rollout = config.train, config.rollout
    itemsize = itemsize_of(config, on_gpu=True)
    is_fused = ENGINES[rollout.engine].has_fused_parameters
    ranks = fullest_rank(config, models, world_size)
    held, layout, engine, shared = ranks.models, ranks.layout, ranks.engine, ranks.shared
    memory = memory_alike(config, ranks, world_size, assumed)
    requests = num_requests(memory, assumed.gpu_memory_bytes)
    most = max(memory.start, memory.train, memory.rollout_with(requests))
    tp, policy = rollout.tp if is_fused else 1, held[0]
    kept = 1.0  # share of the weights' bytes that quantization keeps
    if rollout.quantization == "fp8":
        kept = engine / engine_elements(models[0].family, models[0].engine_shape, tp, rollout.ep)
    if models[0].family.lora is None:
        own = int(kept * _own_elements(layout, policy.held.num, tp))
        crossing = max(0, engine - shared - own)
    else:
        crossing = max(0, ranks.synced - _own_elements(layout, policy.trained.num, tp))
    times = step_times(
        config,
        models,
        layout,
        assumed,
        (held[0].trained.num, held[0].num_updated),
        itemsize * engine,
        itemsize * ranks.synced,
        itemsize * crossing,
        requests * rollout.tp if is_fused else requests,
    )
    if memory.has_engine and ENGINES[rollout.engine].sleeps:
        cache = memory.rollout_with(requests) - memory.rollout_with(0)
        asleep = itemsize * (engine - shared) + cache
        trained = sum(one.trained.num for one in held)
        # Gradients are stored in memory that the engine lends.
        both = memory.train + asleep - min(asleep, gradient_bytes(config) * trained)
        always = train.release_weights_in_rollout
        changes_s = giving_back_s(1.0 if always else both / assumed.gpu_memory_bytes)
        times = replace(times, reshard=times.reshard + changes_s)
    return Estimate(memory, times, most, assumed.gpu_memory_bytes - with_margin(most))


def _own_elements(layout: TrainLayout, held: int, tp: int) -> int:
    """Returns roughly how many of the `held` elements of a rank are in its own engine shard."""
    return held * layout.tp // max(tp, layout.tp)
