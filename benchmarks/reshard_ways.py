"""Cases of the reshard benchmark, and the ways of filling an engine that it compares.

A `Job` is one case on one rank. A way is made once a case, collectively, and run any number of
times; `engine` is what it fills. The ways beside the hybrid engine's own are written after what
verl and slime (reshard_rivals.py) and OpenRLHF do, not taken from them, and know neither weight
table nor plan, but for hf_stream's gather.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from reshard_rivals import AllGatherWay, FullTensors, Place
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from weight_cases import Case, minimum_receive_elements  # noqa: E402

from hybridrl.hybrid_engine.export import gather_tensors  # noqa: E402
from hybridrl.hybrid_engine.memory.alias import shared_views  # noqa: E402
from hybridrl.hybrid_engine.planning.assign import assign  # noqa: E402
from hybridrl.hybrid_engine.planning.plan import plan_reshard  # noqa: E402
from hybridrl.hybrid_engine.transports.packed import PackedTransport  # noqa: E402
from hybridrl.models.family import ModelShape, resolve_family  # noqa: E402
from hybridrl.models.sources import FullWeights, TrainingShard  # noqa: E402
from hybridrl.models.weights import fused_layout, hf_shapes, megatron_layout  # noqa: E402
from hybridrl.parallel.groups import World  # noqa: E402
from hybridrl.parallel.layout import RolloutLayout, TrainLayout  # noqa: E402

WORLD = 4
DTYPE = torch.bfloat16
CASES = (
    *(f"tp4/tp{tp}" for tp in (1, 2, 4)),
    *(f"tp2pp2/tp{tp}" for tp in (1, 2, 4)),
    *(f"tp2dp2/tp{tp}" for tp in (1, 2, 4)),
    "dp4/tp4",
)
NARROWER = 16
LAYERS, VOCABULARY = 4, 1536  # 28 and 152064; the share of the vocabulary's weights is kept
STAGING_BYTES = 248 << 20  # `rollout.staging_mib`, of the real model
BUCKET_BYTES = 512 << 20


def real_shape() -> ModelShape:
    config = json.loads((ROOT / "benchmarks" / "models" / "qwen2.5-7b.json").read_text())
    return resolve_family(None, config).shape(config)


def small_shape() -> ModelShape:
    real = real_shape()
    return replace(
        real,
        num_layers=LAYERS,
        hidden_size=real.hidden_size // NARROWER,
        head_dim=real.head_dim // NARROWER,
        ffn_size=real.ffn_size // NARROWER,
        vocab_size=VOCABULARY,
    )


def model_bytes(shape: ModelShape) -> int:
    sizes = hf_shapes(resolve_family("qwen2", {}), shape).values()
    return sum(int(np.prod(size)) for size in sizes) * DTYPE.itemsize


def shrunken(real_bytes: int) -> int:
    """Returns a buffer's size, smaller by the same factor as the model."""
    return real_bytes * model_bytes(small_shape()) // model_bytes(real_shape())


@dataclass
class Job:
    """One case on one rank: layouts, weights, and what the engine must hold in the end."""

    name: str
    world: World
    device: torch.device
    groups: Callable[[Sequence[int]], dist.ProcessGroup]
    shape: ModelShape = field(default_factory=small_shape)

    @property
    def rank(self) -> int:
        return self.world.rank

    def __post_init__(self) -> None:
        train, _, rollout = self.name.partition("/")
        sizes = {axis: int(size) for axis, size in re.findall(r"(tp|pp|cp)(\d+)", train)}
        self.train, self.tp = TrainLayout(WORLD, **sizes), int(rollout.removeprefix("tp"))
        family = resolve_family("qwen2", {})
        self.sources = [megatron_layout(family, self.shape, self.train, r) for r in range(WORLD)]
        parts = [fused_layout(family, self.shape, self.tp, tp_rank) for tp_rank in range(self.tp)]
        self.rollout: RolloutLayout = assign(self.sources, parts).layout
        self.targets = [parts[tp_rank] for _, tp_rank in self.rollout.assignment]
        self.tp_rank = self.rollout.assignment[self.rank][1]
        self.case = Case(self.shape, self.train, self.rollout, "fused")
        drawn = np.random.default_rng(0)
        shapes = hf_shapes(family, self.shape)
        # Bit patterns of finite bfloat16 numbers.
        self.hf = {n: drawn.integers(0, 0x7F00, s).astype(np.int16) for n, s in shapes.items()}
        self.trained = self._tensors(self.case.trained(self.hf, self.rank))

    def _tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array.copy()).view(DTYPE).to(self.device)
            for name, array in arrays.items()
        }

    def empty_engine(self) -> dict[str, Tensor]:
        """Returns the engine's parameters, every element one that no weight is."""
        shapes = self.targets[self.rank].shapes
        return {
            name: torch.full(shape, -1, dtype=torch.int16, device=self.device).view(DTYPE)
            for name, shape in shapes.items()
        }

    def check(self, engine: Mapping[str, Tensor]) -> None:
        """Compares the engine's parameters with HF's slices, bit by bit."""
        expected = self.case.generating(self.hf, self.rank)
        assert engine.keys() == expected.keys()
        for name, array in expected.items():
            if not np.array_equal(engine[name].view(torch.int16).cpu().numpy(), array):
                raise AssertionError(f"{self.name}, rank {self.rank}: {name} is wrong")

    def minimum_bytes(self) -> int:
        """Returns what this rank needs and does not train, found by numbering every element."""
        numbered = self.case.weights()
        held = self.case.trained(numbered, self.rank)
        needed = self.case.generating(numbered, self.rank)
        return DTYPE.itemsize * minimum_receive_elements(numbered, held, needed)

    def place(self) -> Place:
        """Returns what ways know that gather full tensors, with an engine of their own."""
        return Place(
            rank=self.rank,
            shape=self.shape,
            train=self.train,
            sources=self.sources,
            trained=self.trained,
            engine=self.empty_engine(),
            tp=self.tp,
            tp_rank=self.tp_rank,
            tp_group=self._group("tp"),
            pp_group=self._group("pp"),
        )

    def _group(self, axis: str) -> dist.ProcessGroup:
        return self.groups(next(g for g in self.train.groups(axis) if self.rank in g))


# Ways of filling the engine. Each is made once a case, collectively, and run any number of times.


class HybridEngineWay:
    """What the hybrid engine does."""

    def __init__(self, job: Job) -> None:
        self._job = job
        target = job.targets[job.rank]
        shard = TrainingShard(job.sources[job.rank], job.trained)
        views = shared_views(shard, target, DTYPE)
        self.engine = job.empty_engine() | views
        self.aliased_bytes = sum(view.nbytes for view in views.values())
        self.plan = plan_reshard(job.sources, job.targets, DTYPE.itemsize)
        staging = shrunken(STAGING_BYTES)
        args = (self.plan, job.world, job.trained, self.engine, staging, DTYPE)
        self._transport = PackedTransport(*args)
        self.staging_bytes = 0

    def run(self) -> None:
        traffic = self._transport.run()
        self.staging_bytes = traffic.staging_bytes
        planned = self.plan.receive_bytes[self._job.rank], self.plan.send_bytes[self._job.rank]
        assert (traffic.received_bytes, traffic.sent_bytes) == planned


class HfStreamWay(FullTensors):
    """One HF tensor after the other: gathered on rank 0, sent to all, loaded by name."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.place(), counts_staging=True)
        self._job = job

    def run(self) -> None:
        job = self._job
        for name, array in job.hf.items():
            shapes = {name: array.shape}
            made = [
                t
                for _, t in gather_tensors(
                    FullWeights(job.sources, job.trained), shapes, DTYPE, job.world
                )
            ]
            tensor = made[0] if made else torch.empty(array.shape, dtype=DTYPE, device=job.device)
            self.hold(tensor)
            dist.broadcast(tensor.view(torch.uint8), 0)
            self.load(name, tensor)


WAYS: dict[str, Callable[[Job], Any]] = {
    "hybrid_engine": HybridEngineWay,
    "all_gather": lambda job: AllGatherWay(job.place(), counts_staging=True),
    "buckets": lambda job: AllGatherWay(job.place(), shrunken(BUCKET_BYTES), counts_staging=True),
    "hf_stream": HfStreamWay,
}
