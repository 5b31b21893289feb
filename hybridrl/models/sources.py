"""Weight sources: the tensors that engines and exports read.

A source is the interface between the trainer's state and the reshard. It provides the layouts of
all ranks, and this rank's tensors. The planner, transports and verification read rectangles of
these tensors; they do not know whether a tensor is a trained parameter, base plus adapter, or
quantized on the fly.

Invariant: names and shapes of the tensors match this rank's layout. A tensor's address does not
change until its memory is freed and reallocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.models.boxes import Box, box_view
from hybridrl.models.weights import RankLayout


class ComputedTensor(Protocol):
    """A tensor that is computed slice by slice when it is sent.

    The computation is enqueued on the current stream and may be captured in a CUDA graph. An
    element must be bitwise identical in every slice that contains it, because verification and
    transports compute different slices.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Tensors in memory from which this tensor is computed."""

    def compute(self, box: Box) -> Tensor:
        """Returns the rectangle `box` of the tensor."""


@runtime_checkable
class BatchedTensor(ComputedTensor, Protocol):
    """A computed tensor of which many slices, of many tensors, are computed by few kernels."""

    @staticmethod
    def copies(
        slices: Sequence[tuple[ComputedSlice, Tensor]], device: torch.device, programs: int | None
    ) -> ops.Copies:
        """Returns copies that write slices of tensors of this class to their places.

        Args:
            programs: Maximum number of Triton programs; None for the whole device.
        """


SourceTensor: TypeAlias = Tensor | ComputedTensor


@dataclass(frozen=True)
class ComputedSlice:
    """A rectangle of a computed tensor."""

    tensor: ComputedTensor
    box: Box

    def compute(self) -> Tensor:
        return self.tensor.compute(self.box)


def slice_of(tensor: SourceTensor, box: Box) -> Tensor | ComputedSlice:
    """Returns a rectangle of a source tensor: a view, or a slice that can be computed later."""
    if isinstance(tensor, Tensor):
        return box_view(tensor, box)
    return ComputedSlice(tensor, box)


def memory_of(tensors: Iterable[SourceTensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield tensor
        else:
            yield from tensor.inputs


@dataclass(frozen=True)
class TrainingShard:
    """The trainer's parameters on this rank, which an engine may use instead of a copy.

    Args:
        tensors: Parameters by local name; their addresses do not change while the model exists.
    """

    layout: RankLayout
    tensors: Mapping[str, Tensor]


class WeightSource(Protocol):
    """Weights that engines and exports read."""

    @property
    def layouts(self) -> Sequence[RankLayout]:
        """Layout of every rank's tensors."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """This rank's tensors by the local names of its layout.

        `refresh` should compute a small tensor, or an fp32 tensor among 16-bit weights, completely,
        so that it need not be a ComputedTensor.
        """

    @property
    def frozen(self) -> frozenset[str]:
        """Local names of tensors that never change.

        Frozen tensors are sent once, and again only if an engine has lost them or a checkpoint has
        been loaded.
        """

    @property
    def shard(self) -> TrainingShard | None:
        """Parameters that an engine may use instead of a copy.

        None if the trainer's parameters differ from this source's weights, or are freed during
        rollout.
        """

    def refresh(self) -> None:
        """Updates tensors that depend on the trained state; called before they are read."""


@dataclass(frozen=True)
class FullWeights:
    """A `WeightSource` whose tensors are already in memory in the form in which they are sent.

    Args:
        layouts: Layout of every rank's tensors. If the optimizer updates only part of a tensor on a
            rank, the layout contains only that part.
        shard: The trainer's complete parameters, if they stay in memory during rollout; otherwise
            None.
    """

    layouts: Sequence[RankLayout]
    tensors: Mapping[str, Tensor]
    frozen: frozenset[str] = frozenset()
    shard: TrainingShard | None = None

    def refresh(self) -> None:
        """Does nothing, because no tensor is computed."""
