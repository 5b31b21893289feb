"""Whether a planned run fits into its GPUs, by how much, and what to change otherwise. No torch.

The estimates of plan_memory.py were compared with 7 runs on H200 (benchmarks/results/
step_h200.json): a phase took between 0.86 and 1.18 of its estimate, and never more than 2.3 GiB
beyond it, but for one run with NCCL groups that are not made any more. The estimates leave the CUDA
context out, 0.6 GiB. So a run fits if its estimate with 5% and 2 GiB on top does: 5% for what the
allocator cannot use of its own blocks, 2 GiB for the context and libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from math import prod
from typing import Any

from hybridrl.cli.plan_cluster import GIB, Assumptions
from hybridrl.cli.plan_memory import (
    ADAM_BYTES,
    MAIN_GRAD_BYTES,
    MASTER_BYTES,
    Memory,
    estimate_memory,
    itemsize_of,
)
from hybridrl.cli.plan_text import memory_size
from hybridrl.config.engines import ENGINES
from hybridrl.config.roles import RunModels
from hybridrl.config.rules import check
from hybridrl.config.schema import Config
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.alias import shared_names
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import RankLayout, fused_layout, megatron_layout
from hybridrl.parallel.layout import TrainLayout

MARGIN_SHARE, MARGIN_BYTES = 0.05, 2 * GIB
MAX_REMEDIES = 3
SIZES = (1, 2, 4, 8, 16)  # that other layouts are tried with
MULTIPLES = (*SIZES, 32, 64, 128)  # of the ranks
Changes = dict[str, Any]


def with_margin(estimate_bytes: int) -> int:
    """Returns what a GPU must have for an estimate to be trusted to fit."""
    return int(estimate_bytes * (1 + MARGIN_SHARE)) + MARGIN_BYTES


def gpu_verdict(
    config: Config,
    models: RunModels,
    hf_config: Mapping[str, Any],
    family: Family,
    world_size: int,
    memory: Memory,
    assumed: Assumptions,
) -> dict[str, Any]:
    """Judges the fullest GPU.

    Returns:
        `fits`, a sentence about it (`summary`), the phase that takes most, its estimate, what it
        needs with the margin and what the GPU has to spare then, all in bytes; how many of the
        requests that are decoded together the KV cache holds; and changes that fit (`remedies`).
    """
    gpu = assumed.gpu_memory_bytes
    room = int((gpu - MARGIN_BYTES) / (1 + MARGIN_SHARE)) - memory.rollout_with(0)
    per_request = max(1, memory.kv_cache // memory.num_requests)
    num_requests = min(memory.num_requests, max(memory.least_requests, room // per_request))
    rollout = memory.rollout_with(num_requests)
    phase, most = max(("training", memory.train), ("rollout", rollout), key=lambda found: found[1])
    spare = gpu - with_margin(most)
    outcome = "fits" if spare >= 0 else "may not fit" if most <= gpu else "does not fit"
    summary = (
        f"{outcome}: {phase} takes about {memory_size(most)}, {memory_size(with_margin(most))} "
        f"with a margin of {MARGIN_SHARE:.0%} and {MARGIN_BYTES // GIB} GiB, of a GPU's "
        f"{memory_size(gpu)} ({assumed.values['gpu_memory_gib'].source}): "
        f"{memory_size(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    )
    remedies: list[str] = []
    if spare < 0:
        remedies = _Search(config, models, hf_config, family, assumed).remedies(world_size)
        summary += f"; it fits with {remedies[0]}" if remedies else "; no larger layout tried fits"
    elif num_requests < memory.num_requests:
        summary += (
            f"; the KV cache holds {num_requests} of the {memory.num_requests} longest requests of "
            "rollout.max_batch, others wait"
        )
    return {
        "fits": spare >= 0,
        "summary": summary,
        "phase": phase,
        "estimate_bytes": most,
        "needed_bytes": with_margin(most),
        "spare_bytes": spare,
        "kv_cache_bytes": memory.kv_cache,
        "max_requests": memory.num_requests,
        "kv_cache_requests": num_requests,
        "remedies": remedies,
    }


def cpu_verdict(world_size: int, memory: Memory) -> dict[str, Any]:
    """Says why there is no verdict on CPU, and what is known."""
    most = max(memory.train, memory.rollout)
    ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
    summary = (
        f"no verdict on CPU, where ranks share the host's memory: {ranks} take about "
        f"{memory_size(most * world_size)}, beside what Python's libraries take"
    )
    phase = "training" if memory.train >= memory.rollout else "rollout"
    return {
        "fits": None,
        "summary": summary,
        "phase": phase,
        "estimate_bytes": most,
        "needed_bytes": None,
        "spare_bytes": None,
        "kv_cache_bytes": memory.kv_cache,
        "max_requests": memory.num_requests,
        "kv_cache_requests": memory.num_requests,
        "remedies": [],
    }


@dataclass(frozen=True)
class _Search:
    """Looks for changes of a configuration with which it fits.

    Args:
        config: that does not.
        models: of the run, which no change adds or removes.
        hf_config: of its model.
        family: of its model.
        assumed: of the cluster; other numbers of ranks have nodes of the same size.
    """

    config: Config
    models: RunModels
    hf_config: Mapping[str, Any]
    family: Family
    assumed: Assumptions

    def remedies(self, world_size: int) -> list[str]:
        """Returns some changes that fit, on as few ranks as they can, the smallest changes first;
        none where none does that is tried.
        """
        for factor in MULTIPLES:
            if found := list(islice(self._fitting(world_size, factor), MAX_REMEDIES)):
                return found
        return []

    def _fitting(self, world_size: int, factor: int) -> Iterator[str]:
        shape = self.family.shape(self.hf_config)
        world, found = world_size * factor, list[Changes]()
        if with_margin(self._least(shape) // world) > self.assumed.gpu_memory_bytes:
            return
        for changes in sorted(self._candidates(), key=len):
            if any(one.keys() <= changes.keys() for one in found):
                continue  # what fits already needs none of the rest
            config = _changed(self.config, changes)
            if check(config, world, self.hf_config):
                continue
            try:
                memory = _estimate(config, self.models, self.family, shape, world)
            except ModelError:  # a tensor that cannot be cut so, which the rules do not know
                continue
            most = max(memory.train, memory.rollout_with(memory.least_requests))
            if with_margin(most) <= self.assumed.gpu_memory_bytes:
                found.append(changes)
                said = [f"{key}={_yaml(value)}" for key, value in changes.items()]
                said += [f"--world {world}"] if factor > 1 else []
                yield f"{' '.join(said)} (about {memory_size(most)})"

    def _least(self, shape: ModelShape) -> int:
        """Returns the bytes of weights, gradients and optimizer over all ranks, each held once."""
        itemsize = itemsize_of(self.config, on_gpu=True)
        optimizer = ADAM_BYTES + (MASTER_BYTES if itemsize == 2 else 0)
        elements, _, _ = _sizes(self.family, shape, 1, 1, 1, 1)
        return elements * (itemsize + MAIN_GRAD_BYTES + optimizer)

    def _candidates(self) -> Iterator[Changes]:
        """Yields changes of the layout, of what saves memory, and of both."""
        train, rollout = self.config.train, self.config.rollout
        per_node = self.assumed.max_gpus_per_node
        wanted: dict[str, list[Any]] = {
            "train.tp": [size for size in SIZES if train.tp < size <= per_node],
            "train.pp": [size for size in SIZES if train.pp < size],
            "rollout.tp": [size for size in SIZES if rollout.tp < size <= per_node],
        }
        if not ENGINES[rollout.engine].is_tensor_parallel:
            del wanted["rollout.tp"]
        layouts: list[Changes] = [{}]
        for key, sizes in wanted.items():
            layouts += [{**found, key: size} for found in layouts for size in sizes]
        longest = self.config.data.max_prompt_tokens + rollout.max_new_tokens
        fewer = max(longest, train.micro_batch_tokens // 4)
        # What takes memory off a rank and costs time, the least first.
        savings: list[Changes] = [
            {},
            {"train.recompute": "selective"},
            {"train.recompute": "full"},
            {"train.offload_optimizer": True},
            {"train.recompute": "full", "train.offload_optimizer": True},
            {"train.recompute": "full", "train.micro_batch_tokens": fewer},
            {
                "train.recompute": "full",
                "train.offload_optimizer": True,
                "train.micro_batch_tokens": fewer,
            },
        ]
        for layout, saving in product(layouts, savings):
            yield {**layout, **saving}


def _estimate(
    config: Config, models: RunModels, family: Family, shape: ModelShape, world_size: int
) -> Memory:
    """Estimates as the report does, but for weights that engine and trainer share, of which only
    those of equal layouts are counted.
    """
    train, tp = config.train, config.rollout.tp
    layout = TrainLayout(world_size, train.tp, train.pp, train.cp, train.ep, train.vpp)
    elements, engine, shared = _sizes(family, shape, train.tp, train.pp, train.vpp, tp)
    if ENGINES[config.rollout.engine].shares_memory and not train.release_weights_in_rollout:
        engine -= shared
    engine_bytes = itemsize_of(config, on_gpu=True) * engine
    sizes = shape, layout, elements, engine_bytes
    return estimate_memory(config, models, *sizes, "packed", on_gpu=True)


@cache
def _sizes(
    family: Family, shape: ModelShape, tp: int, pp: int, vpp: int, rollout_tp: int
) -> tuple[int, int, int]:
    """Returns the elements of the fullest pipeline stage, of an engine's rank, and those of the
    engine's that are the trainer's own memory where both are cut alike.
    """
    layout = TrainLayout(tp * pp, tp, pp, vpp=vpp)
    stages = (layout.rank_at(tp=0, cp=0, dp=0, pp=stage) for stage in range(pp))
    held = [megatron_layout(family, shape, layout, rank) for rank in stages]
    engine = fused_layout(family, shape, rollout_tp, 0)
    shared = 0
    if tp == rollout_tp and pp == 1:
        shared = sum(prod(engine.shapes[name]) for name in shared_names(held[0], engine))
    return max(_elements(stage) for stage in held), _elements(engine), shared


def _elements(layout: RankLayout) -> int:
    return sum(prod(shape) for shape in layout.shapes.values())


def _changed(config: Config, changes: Changes) -> Config:
    sections: dict[str, Changes] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
