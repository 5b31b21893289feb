"""Decides whether a planned run fits into GPU memory, and which changes help. No torch.

Phases of 7 runs on H200 used 0.86 to 1.18 times the estimates, and at most 2.3 GiB more
(benchmarks/results/step_h200.json). A run fits if its estimate plus 5% for fragmentation, plus 2
GiB for CUDA context and libraries, fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from hybridrl.config.lag import requests_under_way
from hybridrl.config.placement import Machines, shown
from hybridrl.config.rules import check
from hybridrl.config.rules_optimizer import LEVEL_KEY, lower_levels
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config
from hybridrl.errors import ModelError, UserError
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.mtp import mtp_rules
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.model_rules import hybrid_layout_rules, quantized_model_rules
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.alike import fullest_rank, memory_alike
from hybridrl.services.planner.hardware import GIB, Assumptions
from hybridrl.services.planner.phase_memory import (
    Memory,
    RankMemory,
    RoleModel,
    gradient_bytes,
    itemsize_of,
)
from hybridrl.services.planner.sizes import fullest_stage
from hybridrl.services.planner.text import memory_size

MARGIN_SHARE, MARGIN_BYTES = 0.05, 2 * GIB
MAX_REMEDIES = 3
MOST_NAMED = 16  # Maximum number of ranks that the verdict lists.
SIZES = (1, 2, 4, 8, 16)  # Parallel sizes that are tried.
MULTIPLES = (*SIZES, 32, 64, 128)  # Factors by which the number of ranks is multiplied.
Changes = dict[str, Any]


def model_rules(
    config: Config, policy: RoleModel, hf_config: Mapping[str, Any]
) -> Iterator[UserError]:
    """Yields why the policy, with its adapters, cannot have a layout that `rules.check` accepts.

    loop/preflight.py checks these rules before ranks start too.
    """
    train, family, shape = config.train, policy.family, policy.shape
    is_adapted = family.lora is not None
    yield from hybrid_layout_rules(config, shape)
    yield from mtp_rules(train, policy.is_trained, is_adapted, family, shape, hf_config)
    yield from quantized_model_rules(config.rollout, train, base_of(family), shape)


def with_margin(estimate_bytes: int) -> int:
    return int(estimate_bytes * (1 + MARGIN_SHARE)) + MARGIN_BYTES


def gpu_verdict(
    config: Config,
    models: Sequence[RoleModel],
    hf_config: Mapping[str, Any],
    found: Sequence[RankMemory],
    assumed: Assumptions,
    may_change: bool = True,
) -> dict[str, Any]:
    """Decides whether the GPU that needs the most memory has enough.

    Returns whether the run `fits`, and why (`summary`); the phase that needs most, with its sizes
    in bytes; how many requests fit into the KV cache; and, if the search for changes `may_change`
    the configuration, those that would help (`remedies`).
    """
    gpu, phases = assumed.gpu_memory_bytes, list[tuple[int, int, str, RankMemory]]()
    for one in found:
        rollout = one.memory.rollout_with(num_requests(one.memory, gpu))
        phases.append((one.memory.train, one.memory.usual_train, "training", one))
        phases.append((rollout, rollout, "rollout", one))
        phases.append((one.memory.start, one.memory.start, "start-up", one))
    most, usual, phase, fullest = max(phases, key=lambda judged: judged[0])
    caches = [one.memory for one in found if one.memory.has_engine]
    cache, room = caches[0], min(num_requests(memory, gpu) for memory in caches)
    spare = gpu - with_margin(most)
    where = _on_ranks(fullest.ranks if phase == "rollout" else fullest.fullest, found)
    may_fit = max(judged[1] for judged in phases) <= gpu
    outcome = "fits" if spare >= 0 else "may not fit" if may_fit else "does not fit"
    at_most = memory_size(most)
    bound = "" if memory_size(usual) == at_most else f" and at most {at_most}"
    summary = (
        f"{outcome}: {phase}{where} uses about {memory_size(usual)}{bound}, "
        f"{memory_size(with_margin(most))} with a margin of {MARGIN_SHARE:.0%} and "
        f"{MARGIN_BYTES // GIB} GiB, of a GPU's {memory_size(gpu)} "
        f"({assumed.values['gpu_memory_gib'].source}): "
        f"{memory_size(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    )
    remedies: list[str] = []
    if spare < 0 and may_change:
        search = _Search(config, models, hf_config, assumed)
        remedies = search.remedies(sum(len(one.ranks) for one in found))
        none = "no larger layout that was tried fits"
        summary += f"; it fits with {remedies[0]}" if remedies else f"; {none}"
    elif spare >= 0:
        num_ranks = sum(len(one.ranks) for one in found if one.memory.has_engine)
        summary += _waiting(config, cache, room, num_ranks)
    return {
        "fits": spare >= 0,
        "summary": summary,
        "phase": phase,
        "estimate_bytes": most,
        "usual_bytes": usual,
        "needed_bytes": with_margin(most),
        "spare_bytes": spare,
        "kv_cache_bytes": cache.kv_cache,
        "max_requests": cache.num_requests,
        "kv_cache_requests": room,
        "remedies": remedies,
    }


def _on_ranks(ranks: tuple[int, ...], found: Sequence[RankMemory]) -> str:
    if len(ranks) == sum(len(one.ranks) for one in found):
        return ""
    others = " and others" if len(ranks) > MOST_NAMED else ""
    return f" on ranks {shown(ranks[:MOST_NAMED])}{others}"


def _waiting(config: Config, cache: Memory, room: int, num_ranks: int) -> str:
    """Returns a note if the KV cache (`room`) or the batch is too small for all requests."""
    said, lag, most = "", config.steps.max_policy_lag, config.rollout.max_batch
    if room < cache.num_requests:
        said = (
            f"; the KV cache has room for {room} of {cache.num_requests} concurrent requests of "
            "maximum length (rollout.max_batch); the others wait"
        )
    requests = requests_under_way(config, num_ranks // config.rollout.tp)
    if lag and requests > most:
        said += (
            f"; with steps.max_policy_lag={lag}, a replica has {requests} requests in flight, but "
            f"decodes only rollout.max_batch={most} of them at once; the others wait"
        )
    return said


def num_requests(memory: Memory, gpu: int) -> int:
    """Returns how many requests fit into the KV cache of a GPU with `gpu` bytes of memory."""
    room = int((gpu - MARGIN_BYTES) / (1 + MARGIN_SHARE)) - memory.rollout_with(0)
    per_request = max(1, memory.kv_cache // memory.num_requests)
    return min(memory.num_requests, max(memory.least_requests, room // per_request))


def cpu_verdict(found: Sequence[RankMemory]) -> dict[str, Any]:
    """Returns a report that explains why there is no verdict on CPU, with the known sizes."""
    peaks = [max(one.memory.train, one.memory.rollout) for one in found]
    memory, most = found[peaks.index(max(peaks))].memory, max(peaks)
    usual = memory.usual_train if memory.train >= memory.rollout else memory.rollout
    cache = next(one.memory for one in found if one.memory.has_engine)
    world_size = sum(len(one.ranks) for one in found)
    total = sum(len(one.ranks) * peak for one, peak in zip(found, peaks, strict=True))
    ranks = f"{world_size} ranks use" if world_size > 1 else "1 rank uses"
    summary = (
        f"no verdict on CPU, because ranks share the host's memory: {ranks} about "
        f"{memory_size(total)}, in addition to what Python's libraries use"
    )
    phase = "training" if memory.train >= memory.rollout else "rollout"
    return {
        "fits": None,
        "summary": summary,
        "phase": phase,
        "estimate_bytes": most,
        "usual_bytes": usual,
        "needed_bytes": None,
        "spare_bytes": None,
        "kv_cache_bytes": cache.kv_cache,
        "max_requests": cache.num_requests,
        "kv_cache_requests": cache.num_requests,
        "remedies": [],
    }


@dataclass(frozen=True)
class _Search:
    """Searches for changes that make a run fit; nodes keep their size, and models stay."""

    config: Config
    models: Sequence[RoleModel]
    hf_config: Mapping[str, Any]
    assumed: Assumptions

    def remedies(self, world_size: int) -> list[str]:
        for factor in MULTIPLES:
            if found := list(islice(self._fitting(world_size, factor), MAX_REMEDIES)):
                return found
        return []

    def _fitting(self, world_size: int, factor: int) -> Iterator[str]:
        world, found = world_size * factor, list[Changes]()
        if with_margin(self._least() // world) > self.assumed.gpu_memory_bytes:
            return
        for changes in sorted(self._candidates(), key=len):
            if any(one.keys() <= changes.keys() for one in found):
                continue  # a subset of these changes already fits
            config = self.config.with_values(changes)
            if check(config, world, self.hf_config):
                continue
            if any(model_rules(config, self.models[0], self.hf_config)):
                continue
            placement, _ = placed(config, Machines(world))
            if not placement.is_shared:  # the changes would give some roles dedicated ranks
                continue
            try:
                held = fullest_rank(config, self.models, world)
                memory = memory_alike(config, held, world, self.assumed)
            except ModelError:  # no rule checks whether tensors can be sharded
                continue
            if with_margin(memory.least) <= self.assumed.gpu_memory_bytes:
                found.append(changes)
                options = [f"{key}={value}" for key, value in changes.items()]
                options += [f"--world {world}"] if factor > 1 else []
                yield f"{' '.join(options)} (about {memory_size(memory.least)})"

    def _least(self) -> int:
        """Returns the bytes of weights and gradients alone: the optimizer state may be on hosts."""
        itemsize = itemsize_of(self.config, on_gpu=True)
        policy = self.models[0]
        held, trained = (
            fullest_stage(family, policy.shape, TrainLayout(1)).num
            for family in (policy.family, policy.trained_family)
        )
        return held * itemsize + trained * gradient_bytes(self.config)

    def _candidates(self) -> Iterator[Changes]:
        train, rollout = self.config.train, self.config.rollout
        per_node = self.assumed.max_gpus_per_node
        wanted: dict[str, list[Any]] = {
            "train.tp": [size for size in SIZES if train.tp < size <= per_node],
            "train.pp": [size for size in SIZES if train.pp < size],
            "rollout.tp": [size for size in SIZES if rollout.tp < size <= per_node],
        }
        if not ENGINES[rollout.engine].is_tensor_parallel:
            del wanted["rollout.tp"]
        if self.models[0].shape.moe is not None:
            wanted["train.ep"] = [size for size in SIZES if train.ep < size]
        layouts: list[Changes] = [{}]
        for key, sizes in wanted.items():
            layouts += [{**found, key: size} for found in layouts for size in sizes]
        if rollout.ep > 1:  # rollout.ep must equal rollout.tp
            for found in layouts:
                if "rollout.tp" in found:
                    found["rollout.ep"] = found["rollout.tp"]
        longest = self.config.data.max_prompt_tokens + rollout.max_new_tokens
        fewer = max(longest, train.micro_batch_tokens // 4)
        # Settings that save memory at the cost of speed, the cheapest first.
        levels: list[Changes] = [{}, *({LEVEL_KEY: name} for name in lower_levels(self.config))]
        recomputes: list[Changes] = [
            {},
            {"train.recompute": "selective"},
            {"train.recompute": "full"},
            {"train.recompute": "full", "train.micro_batch_tokens": fewer},
        ]
        savings = [{**level, **recompute} for level in levels for recompute in recomputes]
        for layout, saving in product(layouts, savings):
            yield {**layout, **saving}
