"""Memory that a trained model needs only during training: gradients and optimizer state.

Gradients are discarded when rollout begins, because every update clears them anyway. If an engine
lends memory, the gradient buffers are views of that memory, and nothing is freed or allocated. The
optimizer state is sharded across the data-parallel ranks. It stays where it is in both phases: on
the device or in host memory (`train.optimizer_memory`).

Call `release` and `restore` alternately, `release` first. Only storages are emptied and refilled,
so tensors and views stay valid. Nothing here is collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridrl.hybrid_engine.memory.lending import LentMemory
from hybridrl.hybrid_engine.memory.phases import Restorable
from hybridrl.training.piecewise_adam import PiecewiseAdam
from hybridrl.training.staging import aligned

MOMENT_BYTES = 8  # Adam's two fp32 moments, for each parameter that this rank's optimizer owns

Place: TypeAlias = Callable[[Tensor, int, int], object]
"""Moves a tensor's storage to an address; the last argument is the storage's size in bytes."""


def flat_buffers(chunks: Sequence[Any]) -> list[Any]:
    """Returns the buffers of trained parameters in Megatron's data-parallel wrappers."""
    return [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]


class TrainedModelMemory:
    """Gradient buffers and optimizer state of one model on this rank.

    Args:
        weights: Parameters of the model. In an fp32 model they are also the optimizer's masters.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        weights: Iterable[Tensor],
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self._device, self._max_tokens = device, max_tokens
        self._fullest = (0, 0)  # tokens in the largest micro-batch, and bytes that its passes used
        self._chunks, self._optimizer = chunks, optimizer
        self._weight_storages = {weight.untyped_storage()._cdata for weight in weights}
        self._has_stepped = False
        self._lent: LentMemory | None = None
        self._place: Place  # set by `move_gradients_to`

    def move_gradients_to(self, memory: LentMemory, place: Place) -> None:
        """Moves the gradient buffers permanently into memory that an engine lends.

        Args:
            memory: Memory that the engine lends, at least `gradient_bytes` large. The trainer must
                not be using it yet.
        Raises RuntimeError if the gradient buffers are not released.
        """
        self._lent, self._place = memory, place
        address = memory.address
        for buffer in self._buffers:
            data = buffer.grad_data
            if data.untyped_storage().nbytes() > 0:
                raise RuntimeError("gradient buffers can only be moved while they are released")
            place(data, address, buffer.grad_data.nbytes)
            buffer.grad_data_size = 0  # makes `restore` skip this buffer
            address += aligned(buffer.grad_data.nbytes)

    def release(self) -> None:
        self._has_stepped, self._fullest = False, (0, 0)
        if self._lent is not None:
            self._lent.release()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron reads sizes through torch's TypedStorage
                for chunk in self._chunks:
                    chunk.offload_grad_buffers(synchronize=False, empty_cache=False)

    def restore(self) -> None:
        """Allocates the gradient buffers.

        Unlike Megatron's `restore_grad_buffers`, it does not zero the buffers, because every update
        zeroes them (`ParallelModel.accumulate`).
        """
        if self._lent is not None:
            self._lent.restore()
        for buffer in self._buffers:
            if buffer.grad_data_size > 0:  # number of elements that `release` freed
                buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
                buffer.grad_data_size = 0

    def gradient_bytes(self) -> int:
        return sum(aligned(buffer.grad_data.nbytes) for buffer in self._buffers)

    @property
    def lent_bytes(self) -> int:
        """Number of gradient bytes that are in memory lent by an engine."""
        return 0 if self._lent is None else self._lent.num_lent_bytes

    @property
    def unseen_bytes(self) -> int:
        """Bytes of gradients on the device that torch's allocator does not report.

        Gradients in memory lent by an engine are counted as engine memory.
        """
        return 0 if self._lent is None else self._lent.own_bytes

    def close(self) -> None:
        """Stops using lent memory; the gradient buffers are empty afterwards."""
        if self._lent is not None:
            for buffer in self._buffers:
                self._place(buffer.grad_data, 0, 0)
            self._lent.close()
            self._lent = None

    @property
    def _buffers(self) -> list[Any]:
        return flat_buffers(self._chunks)

    def weight_bytes(self) -> int:
        """Returns the size of the trained parameters' buffers, even if they are currently freed."""
        return sum(buffer.param_data.nbytes for buffer in self._buffers)

    def state_bytes(self) -> tuple[int, int]:
        """Returns the sizes of the complete optimizer device state and of its unallocated part."""
        missing = sum(
            parameter.numel() * MOMENT_BYTES
            for optimizer in self._adams()
            for parameter in _parameters(optimizer)
            if parameter not in optimizer.state
        )
        return sum(storage.nbytes() for storage in self._state_storages()) + missing, missing

    @property
    def host_bytes(self) -> int:
        """Size of the optimizer state in host memory; 0 if the state is on the device."""
        return sum(
            optimizer.state_bytes
            for optimizer in self._adams()
            if isinstance(optimizer, PiecewiseAdam) and optimizer.on_host
        )

    def stepped(self) -> None:
        self._has_stepped = True

    @property
    def may_stay(self) -> bool:
        return self._has_stepped

    @contextmanager
    def watching(self, num_tokens: int) -> Iterator[None]:
        """Measures the peak GPU memory of passes over micro-batches of at most `num_tokens`."""
        if self._device.type == "cpu":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        yield
        taken = torch.cuda.max_memory_allocated(self._device) - before
        self._fullest = max(self._fullest, (num_tokens, taken))

    @property
    def growth_bytes(self) -> int:
        """Additional memory that passes over full micro-batches would need.

        Extrapolates from the largest micro-batch since training memory was last released, because
        activations grow in proportion to the number of tokens.
        """
        tokens, taken = self._fullest
        return taken * max(0, self._max_tokens - tokens) // tokens if tokens else 0

    def bytes_to_come(self) -> int:
        """Returns by how many bytes the optimizer state will grow until the next rollout."""
        return self.state_bytes()[1]

    def _adams(self) -> Iterator[Any]:
        for optimizer in self._optimizer.chained_optimizers:
            yield optimizer.optimizer

    def _state_storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages of masters and moments on the device, without duplicates."""
        found: dict[int, torch.UntypedStorage] = {}
        for optimizer in self._adams():
            if isinstance(optimizer, PiecewiseAdam) and optimizer.on_host:
                continue
            for parameter in _parameters(optimizer):
                for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
                    # Skip step counts, which are scalars.
                    if isinstance(tensor, Tensor) and tensor.dim() > 0:
                        storage = tensor.untyped_storage()
                        found.setdefault(storage._cdata, storage)
        return [s for s in found.values() if s._cdata not in self._weight_storages]


@contextmanager
def released(memories: Sequence[Restorable]) -> Iterator[None]:
    """Context manager: releases training memory until it exits.

    If the block raises, the memory stays released, because restoring it may be collective.
    """
    for memory in memories:
        memory.release()
    yield
    for memory in memories:
        memory.restore()


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
