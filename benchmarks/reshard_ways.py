"""Cases of the reshard benchmark, and the ways of filling an engine that it compares.

A `Job` is one case on one rank. A way is made once a case, collectively, and run any number of
times; `engine` is what it fills. The ways beside the hybrid engine's own are written after what
verl, slime and OpenRLHF do, not taken from them, and know neither weight table nor plan, but for
hf_stream's gather.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from weight_cases import Case, minimum_receive_elements  # noqa: E402

from hybridrl.hybrid_engine.alias import TrainingShard, shared_views  # noqa: E402
from hybridrl.hybrid_engine.assign import assign  # noqa: E402
from hybridrl.hybrid_engine.export import gather_tensors  # noqa: E402
from hybridrl.hybrid_engine.packed import PackedTransport  # noqa: E402
from hybridrl.hybrid_engine.plan import plan_reshard  # noqa: E402
from hybridrl.models.family import ModelShape, resolve_family  # noqa: E402
from hybridrl.models.weights import fused_layout, hf_shapes, megatron_layout  # noqa: E402
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
STAGING_BYTES = 256 << 20  # `rollout.staging_mib`, of the real model
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
    rank: int
    device: torch.device
    groups: Callable[[Sequence[int]], dist.ProcessGroup]
    shape: ModelShape = field(default_factory=small_shape)

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

    @cached_property
    def tp_group(self) -> dist.ProcessGroup:
        return self.groups(next(g for g in self.train.groups("tp") if self.rank in g))

    @cached_property
    def pp_group(self) -> dist.ProcessGroup:
        return self.groups(next(g for g in self.train.groups("pp") if self.rank in g))


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
        args = (self.plan, job.rank, job.trained, self.engine, staging, DTYPE)
        self._transport = PackedTransport(*args)
        self.staging_bytes = 0

    def run(self) -> None:
        traffic = self._transport.run()
        self.staging_bytes = traffic.staging_bytes
        planned = self.plan.receive_bytes[self._job.rank], self.plan.send_bytes[self._job.rank]
        assert (traffic.received_bytes, traffic.sent_bytes) == planned


class _FullTensors:
    """A way that makes full tensors on each rank, for an engine's loader to cut its part out."""

    def __init__(self, job: Job) -> None:
        self.job, self.engine = job, job.empty_engine()
        self.aliased_bytes, self.staging_bytes = 0, 0

    def hold(self, *tensors: Tensor) -> None:
        """Notes what lies in memory at once beside the model and the engine."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        for tensor in self.job.trained.values():
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        held = sum(storage.nbytes() for storage in storages.values())
        self.staging_bytes = max(self.staging_bytes, held)

    def load(self, name: str, tensor: Tensor) -> None:
        """Writes this rank's part of an HF tensor, as loaders of engines do."""
        shape, tp, rank = self.job.shape, self.job.tp, self.job.tp_rank
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            heads = shape.num_heads if kind == "q_proj" else shape.num_kv_heads
            queries = shape.num_heads // tp * shape.head_dim
            size = max(heads // tp, 1) * shape.head_dim
            first = rank * heads // tp * shape.head_dim
            offset = {"q_proj": 0, "k_proj": queries, "v_proj": queries + size}[kind]
            dest = self.engine[name.replace(kind, "qkv_proj")]
            dest[offset : offset + size] = tensor[first : first + size]
        elif kind in ("gate_proj", "up_proj"):
            size = shape.ffn_size // tp
            dest = self.engine[name.replace(kind, "gate_up_proj")]
            offset = size * (kind == "up_proj")
            dest[offset : offset + size] = tensor[rank * size : (rank + 1) * size]
        elif kind in ("o_proj", "down_proj"):
            self.engine[name].copy_(tensor.chunk(tp, 1)[rank])
        elif kind in ("embed_tokens", "lm_head"):
            dest = self.engine[name]
            part = tensor[rank * len(dest) : (rank + 1) * len(dest)]
            dest[: len(part)] = part
        else:
            self.engine[name].copy_(tensor)


@dataclass(frozen=True)
class Parameter:
    """A parameter of one pipeline stage, of the same shape on all tensor-parallel ranks."""

    name: str
    stage: int
    layer: int  # in the whole model
    shape: tuple[int, ...]

    @property
    def is_cut(self) -> bool:
        return "norm" not in self.name

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPE.itemsize


class AllGatherWay(_FullTensors):
    """One parameter after the other: to all stages, gathered, converted, loaded."""

    bucket_bytes = 0

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._own_stage = job.train.coordinates(job.rank).pp
        self._buckets: list[list[Parameter]] = []
        stage, size = -1, 0
        for parameter in self._parameters():
            full = parameter.nbytes * job.train.tp
            if parameter.stage != stage or size + full > self.bucket_bytes:
                self._buckets.append([])
                stage, size = parameter.stage, 0
            self._buckets[-1].append(parameter)
            size += full

    def _parameters(self) -> Iterator[Parameter]:
        train, layers = self.job.train, self.job.shape.num_layers // self.job.train.pp
        for stage in range(train.pp):
            for name, shape in self.job.sources[
                train.rank_at(tp=0, cp=0, dp=0, pp=stage)
            ].shapes.items():
                index = re.search(r"layers\.(\d+)", name)
                yield Parameter(name, stage, int(index[1]) + stage * layers if index else 0, shape)

    def run(self) -> None:
        for bucket in self._buckets:
            self._run_bucket(bucket)

    def _run_bucket(self, bucket: Sequence[Parameter]) -> None:
        job, train, stage = self.job, self.job.train, bucket[0].stage
        counts = [int(np.prod(p.shape)) for p in bucket]
        if stage == self._own_stage:
            own = [job.trained[p.name].flatten() for p in bucket]
            flat = own[0] if len(own) == 1 else torch.cat(own)
        else:
            flat = torch.empty(sum(counts), dtype=DTYPE, device=job.device)
        if train.pp > 1:
            source = job.train.coordinates(job.rank)
            first = train.rank_at(tp=source.tp, cp=source.cp, dp=source.dp, pp=stage)
            dist.broadcast(flat.view(torch.uint8), first, job.pp_group)
        whole = flat[None]
        if train.tp > 1 and any(p.is_cut for p in bucket):
            whole = torch.empty((train.tp, len(flat)), dtype=DTYPE, device=job.device)
            dist.all_gather_into_tensor(
                whole.view(-1).view(torch.uint8), flat.view(torch.uint8), job.tp_group
            )
        pieces = whole.split(counts, dim=1)
        made = []
        for parameter, piece in zip(bucket, pieces, strict=True):
            parts = [part.view(parameter.shape) for part in piece]
            made += self._converted(parameter, parts if parameter.is_cut else parts[:1])
        self.hold(flat, whole, *(tensor for _, tensor in made))
        for name, tensor in made:
            self.load(name, tensor)

    def _converted(
        self, parameter: Parameter, parts: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Turns the parts of a Megatron parameter, one a rank, into HF tensors."""
        shape, name = self.job.shape, parameter.name.partition("/")[2]
        layer, kind = f"model.layers.{parameter.layer}.", name.rpartition(".")[2]
        if "linear_qkv" in name:
            whole = torch.cat(list(parts))
            groups = whole.view(shape.num_kv_heads, -1, shape.head_dim, *whole.shape[1:])
            queries = shape.num_heads // shape.num_kv_heads
            for letter, part in zip("qkv", groups.split([queries, 1, 1], dim=1), strict=True):
                key = f"{layer}self_attn.{letter}_proj.{kind}"
                yield key, part.reshape(-1, *whole.shape[1:])
        elif "linear_fc1" in name:
            halves = zip(*(part.chunk(2) for part in parts), strict=True)
            for key, half in zip(("gate", "up"), halves, strict=True):
                yield f"{layer}mlp.{key}_proj.{kind}", torch.cat(half)
        elif "linear_proj" in name or "linear_fc2" in name:
            key = "self_attn.o_proj" if "linear_proj" in name else "mlp.down_proj"
            yield f"{layer}{key}.{kind}", torch.cat(list(parts), dim=1)
        elif name.startswith(("embedding", "output_layer")):
            key = "model.embed_tokens" if name.startswith("embedding") else "lm_head"
            yield f"{key}.{kind}", torch.cat(list(parts))[: shape.vocab_size]
        else:
            key = {
                "decoder.final_layernorm": "model.norm",
                "input_layernorm": f"{layer}input_layernorm",
                "pre_mlp_layernorm": f"{layer}post_attention_layernorm",
            }
            short = name.rpartition(".")[0]
            yield f"{key.get(short) or key[short.split('.')[-1]]}.{kind}", parts[0]


class BucketsWay(AllGatherWay):
    """The same, a bucket of parameters at once."""

    bucket_bytes = shrunken(BUCKET_BYTES)


class HfStreamWay(_FullTensors):
    """One HF tensor after the other: gathered on rank 0, sent to all, loaded by name."""

    def run(self) -> None:
        job = self.job
        for name, array in job.hf.items():
            shapes = {name: array.shape}
            made = [t for _, t in gather_tensors(job.sources, job.trained, shapes, DTYPE, job.rank)]
            tensor = made[0] if made else torch.empty(array.shape, dtype=DTYPE, device=job.device)
            self.hold(tensor)
            dist.broadcast(tensor.view(torch.uint8), 0)
            self.load(name, tensor)


WAYS: dict[str, Callable[[Job], Any]] = {
    "hybrid_engine": HybridEngineWay,
    "all_gather": AllGatherWay,
    "buckets": BucketsWay,
    "hf_stream": HfStreamWay,
}
