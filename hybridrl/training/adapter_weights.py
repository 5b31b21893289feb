"""Weight sources of a model with LoRA adapters.

An engine that holds adapters receives A and s B; the frozen weights are sent once. Engines that do
not hold adapters, and HF exports, receive W + s B A, which is computed slice by slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from hybridrl.models.adapters.rows import A, B, is_adapter, weight_of
from hybridrl.models.boxes import Box, box_view
from hybridrl.models.sources import SourceTensor, TrainingShard
from hybridrl.models.weights import RankLayout

MAX_ROUNDED = 1 << 22  # number of elements that `MergedTensor.rounding` computes at a time


@dataclass(frozen=True)
class AdapterWeights:
    """A `WeightSource` of frozen weights, A and s B.

    Args:
        parameters: This rank's tensors by local name; B without its factor.
        changing: Local names of tensors that change in addition to the adapters: parameters that
            are trained, and weights into which other adapters are merged.
        shard: Frozen weights that an engine may use instead of a copy.
        room: Memory for s B by the local name of B, if other ranks read it in place; otherwise s B
            is in ordinary memory.
    """

    layouts: Sequence[RankLayout]
    parameters: Mapping[str, SourceTensor]
    scale: float
    changing: frozenset[str] = frozenset()
    shard: TrainingShard | None = None
    room: Mapping[str, Tensor] = field(default_factory=dict)
    _scaled: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            if name.endswith(f".{B}") and isinstance(parameter, Tensor):
                room = self.room.get(name)
                self._scaled[name] = torch.empty_like(parameter) if room is None else room
        self.refresh()

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Parameters by local name; B is multiplied by s."""
        return {**self.parameters, **self._scaled}

    @property
    def frozen(self) -> frozenset[str]:
        """Local names of the weights that never change."""
        names = (name for name in self.parameters if not is_adapter(name))
        return frozenset(names) - self.changing

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes s B from the present B."""
        for name, scaled in self._scaled.items():
            torch.mul(cast(Tensor, self.parameters[name]), self.scale, out=scaled)


@dataclass(frozen=True)
class MergedTensor:
    """The rows and columns of W + s B A that a rank holds; a `ComputedTensor`.

    Args:
        weight: W, (out, in).
        a: A of all projections, stacked: (projections x rank, in).
        b: B, (rows, rank).
        rows: (rows,), the output row of each row of B.
        places: (rows,), the index of the projection of each row of B.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    rows: Tensor
    places: Tensor
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def inputs(self) -> Sequence[Tensor]:
        return self.weight, self.a, self.b

    def compute(self, box: Box) -> Tensor:
        """Returns a rectangle of the merged weight.

        The products are added one LoRA rank at a time, in fp32, so that an element has the same
        bits in every rectangle.
        """
        (first, last), (left, right) = box
        found = box_view(self.weight, box).to(torch.float32, copy=True)
        rank = self.b.size(1)
        a = self.a[:, left:right].float().view(-1, rank, right - left)
        wide = self._wide_b(first, last)
        for projection in range(a.size(0)):
            for r in range(rank):
                found.addcmul_(wide[:, projection, r, None], a[None, projection, r])
        return found.to(self.weight.dtype)

    def _wide_b(self, first: int, last: int) -> Tensor:
        """Returns s B of some output rows, (rows, projections, rank), fp32."""
        rank = self.b.size(1)
        wide = self.b.new_zeros(last - first, self.a.size(0) // rank, rank, dtype=torch.float32)
        is_inside = (self.rows >= first) & (self.rows < last)
        rows, places = self.rows[is_inside] - first, self.places[is_inside]
        wide[rows, places] = self.b[is_inside].float() * self.scale
        return wide

    def rounding(self) -> tuple[float, float]:
        """Returns the squared norms of the rounding error of s B A, and of s B A."""
        lost = total = 0.0
        num_rows, num_columns = self.weight.shape
        step = max(MAX_ROUNDED // num_columns, 1)
        a = self.a.float()
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            update, weight = self._wide_b(first, last).flatten(1) @ a, self.weight[first:last]
            merged = (weight.float() + update).to(self.weight.dtype).float()
            lost += float((merged - weight.float() - update).double().square().sum())
            total += float(update.double().square().sum())
        return lost, total


def merged_tensors(
    parameters: Mapping[str, Tensor], linears: Mapping[str, tuple[Tensor, Tensor]], scale: float
) -> dict[str, SourceTensor]:
    """Returns this rank's weights by local name, with the adapters merged into them.

    Args:
        linears: For each module with an adapter by local name, the output rows and the projections
            of the rows of B.
    """
    found: dict[str, SourceTensor] = {
        name: tensor for name, tensor in parameters.items() if not is_adapter(name)
    }
    for name, (rows, places) in linears.items():
        weight, (a, b) = weight_of(name), (parameters[f"{name}.{part}"] for part in (A, B))
        found[weight] = MergedTensor(parameters[weight], a, b, rows, places, scale)
    return found


@dataclass(frozen=True)
class MergedWeights:
    """A `WeightSource` of weights with the adapters merged into them.

    Args:
        frozen: Local names of weights without an adapter, which are not trained.
    """

    layouts: Sequence[RankLayout]
    tensors: Mapping[str, SourceTensor]
    frozen: frozenset[str] = frozenset()

    @property
    def shard(self) -> None:
        """None, because the engine's weights differ from the trainer's."""

    def refresh(self) -> None:
        """Does nothing, because merged weights are computed when they are sent."""
