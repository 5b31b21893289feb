"""Other ways of filling an engine, by gathering full tensors: after what verl and slime do.

Written after them, not taken from them; they know neither weight table nor plan. A way is made once
a case, collectively, and run any number of times; it writes the engine's own parameters, as loaders
of engines do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.family import ModelShape
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.layout import TrainLayout


@dataclass(frozen=True)
class Place:
    """What such a way knows of a case, on one rank; only names and shapes of `sources` are read."""

    rank: int
    shape: ModelShape
    train: TrainLayout
    sources: Sequence[RankLayout]
    trained: Mapping[str, Tensor]
    engine: Mapping[str, Tensor]
    tp: int
    tp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(iter(self.trained.values())).dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.trained.values())).device


class FullTensors:
    """Makes full tensors on each rank; `counts_staging` keeps `staging_bytes` and takes time."""

    def __init__(self, place: Place, counts_staging: bool = False) -> None:
        self.place, self.engine, self._counts_staging = place, place.engine, counts_staging
        self.aliased_bytes, self.staging_bytes = 0, 0

    def hold(self, *tensors: Tensor) -> None:
        """Notes what lies in memory at once beside the model and the engine."""
        if not self._counts_staging:
            return
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        for tensor in self.place.trained.values():
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        held = sum(storage.nbytes() for storage in storages.values())
        self.staging_bytes = max(self.staging_bytes, held)

    def load(self, name: str, tensor: Tensor) -> None:
        """Writes this rank's part of an HF tensor, as loaders of engines do."""
        shape, tp, rank = self.place.shape, self.place.tp, self.place.tp_rank
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
    def numel(self) -> int:
        return int(np.prod(self.shape))


class AllGatherWay(FullTensors):
    """Parameters to all stages, gathered, converted, loaded: one after the other (verl's way), or
    buckets of full tensors of at most `bucket_bytes` at once (slime's).
    """

    def __init__(self, place: Place, bucket_bytes: int = 0, **keywords: Any) -> None:
        super().__init__(place, **keywords)
        train = place.train
        self._own_stage = train.coordinates(place.rank).pp
        self._buckets: list[list[Parameter]] = []
        stage, size = -1, 0
        for parameter in self._parameters():
            full = parameter.numel * place.dtype.itemsize * train.tp
            if parameter.stage != stage or size + full > bucket_bytes:
                self._buckets.append([])
                stage, size = parameter.stage, 0
            self._buckets[-1].append(parameter)
            size += full

    def _parameters(self) -> Iterator[Parameter]:
        train, sources = self.place.train, self.place.sources
        layers = self.place.shape.num_layers // train.pp
        for stage in range(train.pp):
            first = train.rank_at(tp=0, cp=0, dp=0, pp=stage)
            for name, shape in sources[first].shapes.items():
                index = re.search(r"layers\.(\d+)", name)
                yield Parameter(name, stage, int(index[1]) + stage * layers if index else 0, shape)

    def run(self) -> None:
        for bucket in self._buckets:
            self._run_bucket(bucket)

    def _run_bucket(self, bucket: Sequence[Parameter]) -> None:
        place, train, stage = self.place, self.place.train, bucket[0].stage
        dtype, device = place.dtype, place.device
        counts = [parameter.numel for parameter in bucket]
        if stage == self._own_stage:
            own = [place.trained[p.name].flatten() for p in bucket]
            flat = own[0] if len(own) == 1 else torch.cat(own)
        else:
            flat = torch.empty(sum(counts), dtype=dtype, device=device)
        if train.pp > 1:
            source = train.coordinates(place.rank)
            first = train.rank_at(tp=source.tp, cp=source.cp, dp=source.dp, pp=stage)
            dist.broadcast(flat.view(torch.uint8), first, place.pp_group)
        whole = flat[None]
        if train.tp > 1 and any(p.is_cut for p in bucket):
            whole = torch.empty((train.tp, len(flat)), dtype=dtype, device=device)
            as_bytes = whole.view(-1).view(torch.uint8), flat.view(torch.uint8)
            dist.all_gather_into_tensor(*as_bytes, place.tp_group)
        pieces = whole.split(counts, dim=1)
        made: list[tuple[str, Tensor]] = []
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
        shape, name = self.place.shape, parameter.name.partition("/")[2]
        layer, kind = f"model.layers.{parameter.layer}.", name.rpartition(".")[2]
        # transformer-engine's layers hold the norm of their input.
        fused = {"linear_qkv": "input_layernorm", "linear_fc1": "post_attention_layernorm"}
        if kind == "layer_norm_weight":
            yield f"{layer}{fused[name.split('.')[-2]]}.weight", parts[0]
        elif "linear_qkv" in name:
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
            norms = {
                "decoder.final_layernorm": "model.norm",
                "input_layernorm": f"{layer}input_layernorm",
                "pre_mlp_layernorm": f"{layer}post_attention_layernorm",
            }
            short = name.rpartition(".")[0]
            yield f"{norms.get(short) or norms[short.split('.')[-1]]}.{kind}", parts[0]
