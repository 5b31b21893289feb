"""Weight sources: the tensors that engines and exports read.

A source stands between the trainer's state and the reshard. It has the layout of every rank, and
this rank's tensors. The planner, transports and verification read rectangles of these tensors; they
do not know whether a tensor is a trained parameter, base plus adapter, or quantised on the fly.

Invariant: names and shapes of the tensors match this rank's layout. A tensor keeps its address
until its memory is freed and allocated again.
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
    """A tensor that is computed slice by slice when it is sent.

    The work is queued on the current stream and may be captured in a CUDA graph. An element must
    have the same bits in every slice that contains it, since verification and transports compute
    different slices.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Tensors in memory from which it is computed."""
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
    """Returns a rectangle of a source's tensor: a view, or a slice still to be computed."""
    if isinstance(tensor, Tensor):
        return box_view(tensor, box)
    return ComputedSlice(tensor, box)


def memory_of(tensors: Iterable[SourceTensor]) -> Iterator[Tensor]:
    """Yields the tensors themselves, and the inputs of computed ones."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield tensor
        else:
            yield from tensor.inputs


@dataclass(frozen=True)
class TrainingShard:
    """The trainer's parameters on this rank, which an engine may use in place of a copy.

    Args:
        layout: Layout of the rank.
        tensors: Parameters by local name, at addresses that stay the same while the model exists.
    """

    layout: RankLayout
    tensors: Mapping[str, Tensor]


class WeightSource(Protocol):
    """Weights that engines and exports read."""

    @property
    def layouts(self) -> Sequence[RankLayout]:
        """Layout of every rank's tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """This rank's tensors by the local names of its layout.

        Compute a small tensor, or one kept in fp32 among 16-bit weights, as a whole in `refresh`
        rather than as a ComputedTensor.
        """
        ...

    @property
    def frozen(self) -> frozenset[str]:
        """Local names of tensors that never change.

        They are sent once, and again only if an engine has lost them or a checkpoint was loaded.
        """
        ...

    @property
    def shard(self) -> TrainingShard | None:
        """Parameters that an engine may use in place of a copy.

        None if they differ from the weights of this source, or are freed during rollout.
        """
        ...

    def refresh(self) -> None:
        """Computes tensors that depend on the newest trained state; called before they are read."""
        ...


@dataclass(frozen=True)
class FullWeights:
    """A `WeightSource` whose tensors are in memory in the form in which they are sent.

    Args:
        layouts: Layout of every rank's tensors. If the optimizer updates only a part of a tensor on
            a rank, the layout has only that part.
        tensors: This rank's tensors by local name.
        frozen: Local names of tensors that never change.
        shard: The same parameters, whole, if they stay in memory during rollout; else None.
    """

    layouts: Sequence[RankLayout]
    tensors: Mapping[str, Tensor]
    frozen: frozenset[str] = frozenset()
    shard: TrainingShard | None = None

    def refresh(self) -> None:
        """Does nothing: no tensor is computed."""
