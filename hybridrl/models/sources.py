"""Weight sources: what an engine's parameters are written from.

A source stands between trained state and the reshard. For each rank it has a layout, and for this
rank the tensors that the layout describes. Planner, transports and verification read them by
rectangles and do not know what is behind them: a trained parameter, base plus adapter, or weights
that are quantised before they are sent. Invariant: names and shapes of the tensors are those of
this rank's layout, and tensors keep their addresses until one of them is freed and made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from hybridrl.models.boxes import Box
from hybridrl.models.hf.shards import box_view
from hybridrl.models.weights import RankLayout


class ComputedTensor(Protocol):
    """A tensor that is computed slice by slice, at the time it is sent.

    The work is queued on the current stream and may be recorded in a CUDA graph. An element has the
    same bits in every slice that contains it: verification computes other slices than transports.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def inputs(self) -> Sequence[Tensor]:
        """The tensors that it is computed from."""
        ...

    def compute(self, box: Box) -> Tensor:
        """Returns the rectangle `box` of the tensor."""
        ...


SourceTensor: TypeAlias = Tensor | ComputedTensor


@dataclass(frozen=True)
class ComputedSlice:
    """A rectangle of a computed tensor."""

    tensor: ComputedTensor
    box: Box

    def compute(self) -> Tensor:
        """Returns the rectangle."""
        return self.tensor.compute(self.box)


def slice_of(tensor: SourceTensor, box: Box) -> Tensor | ComputedSlice:
    """Returns a rectangle of a source's tensor: a view, or what computes it."""
    if isinstance(tensor, Tensor):
        return box_view(tensor, box)
    return ComputedSlice(tensor, box)


def memory_of(tensors: Iterable[SourceTensor]) -> Iterator[Tensor]:
    """Yields the tensors in memory that are read for these."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield tensor
        else:
            yield from tensor.inputs


@dataclass(frozen=True)
class TrainingShard:
    """The trainer's own memory on this rank, which an engine may use as its parameters.

    Args:
        layout: What of the HF checkpoint the tensors hold.
        tensors: Parameters at addresses that they keep for the life of the model.
    """

    layout: RankLayout
    tensors: Mapping[str, Tensor]


class WeightSource(Protocol):
    """Has the weights that engines and exports are written from."""

    @property
    def layouts(self) -> Sequence[RankLayout]:
        """The layout of every rank's tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """This rank's tensors by its layout's names. A tensor that is small, or kept in fp32 beside
        narrower weights, is better computed as a whole in `refresh`.
        """
        ...

    @property
    def frozen(self) -> frozenset[str]:
        """Names of this rank's tensors that never change: they are sent once, and again where an
        engine has lost them or a checkpoint was loaded.
        """
        ...

    @property
    def shard(self) -> TrainingShard | None:
        """The memory that an engine may use as its parameters; None if it is not the same weights,
        or is freed during rollout.
        """
        ...

    def refresh(self) -> None:
        """Computes what depends on the newest trained state; called before the tensors are read."""
        ...


@dataclass(frozen=True)
class FullWeights:
    """A `WeightSource` of tensors that lie in memory as they are sent: a model's parameters.

    Args:
        layouts: The layout of every rank's tensors. Where a step has updated only a part of each
            tensor on this rank, that part.
        tensors: This rank's tensors by its layout's names.
        frozen: Names of the tensors that never change.
        shard: The same parameters, whole, if they stay in memory during rollout.
    """

    layouts: Sequence[RankLayout]
    tensors: Mapping[str, Tensor]
    frozen: frozenset[str] = frozenset()
    shard: TrainingShard | None = None

    def refresh(self) -> None:
        """Does nothing: the tensors are read where they lie."""
