"""Memory that a trained model needs only during training: gradients and optimizer state.

Gradients are discarded when rollout begins, because every update clears them anyway. If an engine
lends memory, the gradient buffers are views of that memory, and nothing is freed or allocated. The
optimizer state (fp32 masters and Adam's moments, 12 bytes per parameter, sharded across the
data-parallel ranks) either stays on the device, or moves to pinned host memory and is copied back
while log-probabilities are computed.

Call `release` and `restore` alternately, `release` first; call `wait` before anything reads the
optimizer state. Only storages are emptied and refilled, so tensors and views stay valid. Nothing
here is collective.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridrl.hybrid_engine.memory.lending import LentMemory
from hybridrl.hybrid_engine.memory.phases import Restorable

MOMENT_BYTES = 8  # Adam's two fp32 moments, for each parameter that this rank's optimizer owns
ALIGNMENT = 512  # bytes; alignment of each storage within the shared buffer

Place: TypeAlias = Callable[[Tensor, int, int], object]
"""Moves a tensor's storage to an address; the last argument is the storage's size in bytes."""


def flat_buffers(chunks: Sequence[Any]) -> list[Any]:
    """Returns the buffers of trained parameters and their gradients.

    Args:
        chunks: Megatron's data-parallel wrappers.
    """
    return [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]


class TrainedModelMemory:
    """Gradient buffers and optimizer state of one model on this rank.

    Args:
        chunks: Megatron's data-parallel wrappers.
        optimizer: Megatron's optimizer.
        weights: Parameters of the model. In an fp32 model they are also the optimizer's masters.
        offloads: Whether the optimizer state moves to host memory during rollout.
        device: Device that holds the model.
        max_tokens: Maximum number of tokens in a micro-batch.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        weights: Iterable[Tensor],
        offloads: bool,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self._device, self._max_tokens = device, max_tokens
        self._fullest = (0, 0)  # tokens in the largest micro-batch, and bytes that its passes used
        self._chunks, self._optimizer = chunks, optimizer
        self._weight_storages = {weight.untyped_storage()._cdata for weight in weights}
        self._host = HostMirror(device) if offloads else None
        self._has_stepped = False
        self._lent: LentMemory | None = None
        self._place: Place = _nothing

    def move_gradients_to(self, memory: LentMemory, place: Place) -> None:
        """Moves the gradient buffers permanently into memory that an engine lends.

        Args:
            memory: Memory that the engine lends, at least `gradient_bytes` large. The trainer must
                not be using it yet.
            place: Function that `ops.storage_placer` returned.

        Raises:
            RuntimeError: The gradient buffers are not released.
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
        """Frees the gradients and, with offload, moves the optimizer state to the host."""
        self._has_stepped, self._fullest = False, (0, 0)
        if self._lent is not None:
            self._lent.release()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron reads sizes through torch's TypedStorage
                for chunk in self._chunks:
                    chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        if self._host is not None:
            self._host.release(self._state_storages(), self.state_bytes()[0])

    def restore(self) -> None:
        """Allocates the gradient buffers and starts copying the optimizer state back.

        Unlike Megatron's `restore_grad_buffers`, it does not zero the buffers, because every update
        zeroes them (`ParallelModel.accumulate`).
        """
        if self._lent is not None:
            self._lent.restore()
        for buffer in self._buffers:
            if buffer.grad_data_size > 0:  # number of elements that `release` freed
                buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
                buffer.grad_data_size = 0
        if self._host is not None:
            self._host.restore()

    def wait(self) -> None:
        """Makes the current stream wait until the optimizer state is back on the device.

        Raises:
            RuntimeError: The optimizer state is on the host, because this is the rollout phase.
        """
        if self._host is None:
            return
        if self._host.is_released:
            raise RuntimeError("the optimizer state is on the host: enter the training phase first")
        self._host.wait()

    def gradient_bytes(self) -> int:
        """Returns the size that the gradient buffers have during training."""
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
        """Returns the size of the complete optimizer state, and of its unallocated part."""
        missing = sum(
            parameter.numel() * MOMENT_BYTES
            for optimizer in self._adams()
            for parameter in _parameters(optimizer)
            if parameter not in optimizer.state
        )
        present = sum(storage.nbytes() for storage in self._state_storages())
        if self._host is not None and self._host.is_released:
            present = self._host.num_bytes
        return present + missing, missing

    @property
    def offloads(self) -> bool:
        """Whether the optimizer state moves to host memory during rollout."""
        return self._host is not None

    def stepped(self) -> None:
        """Records that an optimizer step was taken. From then on, all memory that an update needs
        is allocated.
        """
        self._has_stepped = True

    @property
    def may_stay(self) -> bool:
        """Whether the state is never offloaded and an optimizer step was taken since the last
        `release`.
        """
        return self._host is None and self._has_stepped

    @contextmanager
    def watching(self, num_tokens: int) -> Iterator[None]:
        """Context manager: measures the peak GPU memory of passes over micro-batches of at most
        `num_tokens` tokens.
        """
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
        """Returns how many bytes the optimizer state on the device will grow by until the next
        rollout.
        """
        return 0 if self._host is not None else self.state_bytes()[1]

    def _adams(self) -> Iterator[Any]:
        for optimizer in self._optimizer.chained_optimizers:
            yield optimizer.optimizer

    def _state_storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages of masters and moments without duplicates, in a fixed order."""
        found: dict[int, torch.UntypedStorage] = {}
        for optimizer in self._adams():
            for parameter in _parameters(optimizer):
                for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
                    # Skip step counts: they are scalars, and some are on the host.
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


class HostMirror:
    """Copies device storages asynchronously to page-locked host memory and back.

    All storages share one buffer, because torch's pinned allocator would round each size up to a
    power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._ready: Any = None
        self._unpin: Callable[[], object] = _nothing
        self.is_released = False

    @property
    def num_bytes(self) -> int:
        """Total size of the storages that were copied to the host."""
        return sum(part.numel() for _, part in self._moved)

    def release(self, storages: Sequence[torch.UntypedStorage], max_bytes: int = 0) -> None:
        """Copies the storages to the host and frees them.

        Args:
            storages: Device storages; each call may pass different storages.
            max_bytes: Largest size that a later call will need, so that memory is pinned only once.
        """
        self.wait()
        sizes = [storage.nbytes() for storage in storages]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += aligned(size)
        if total > self._buffer.numel():  # Adam allocates its moments after the first release
            self._reserve(max(total, max_bytes + 3 * len(storages) * ALIGNMENT))
        self._moved = [
            (storage, self._buffer[start : start + size])
            for storage, start, size in zip(storages, starts, sizes, strict=True)
        ]
        with self._aside():
            for storage, part in self._moved:
                part.copy_(self._bytes_of(storage), non_blocking=True)
        self._synchronize()  # a sync point: storages may be freed only once they have been copied
        for storage, _ in self._moved:
            storage.resize_(0)
        self.is_released = True

    def restore(self) -> None:
        """Reallocates the storages and starts copying them back; call `wait` before reading them.

        Does nothing if nothing was released, as at the start of a run.
        """
        if not self.is_released:
            return
        for storage, part in self._moved:
            storage.resize_(part.numel())
        with self._aside():
            for storage, part in self._moved:
                self._bytes_of(storage).copy_(part, non_blocking=True)
        if self._stream is not None:
            self._ready = self._stream.record_event()
        self.is_released = False

    def wait(self) -> None:
        """Makes the current stream wait for the copies that `restore` started."""
        if self._ready is not None:
            self._ready.wait()
            self._ready = None

    def _aside(self) -> Any:
        """Returns a context in which copies run on a separate stream, after all queued work."""
        if self._stream is None:
            return torch.no_grad()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # type: ignore[call-overload]

    def _reserve(self, num_bytes: int) -> None:
        self._synchronize()
        self._unpin()
        # The old buffer is freed before the new one is allocated.
        self._moved, self._buffer = [], torch.empty(0, dtype=torch.uint8)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if self._stream is not None:
            runtime, address = torch.cuda.cudart(), self._buffer.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
            # Also unregister the memory when this object is deleted, because registered memory must
            # not be freed.
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _nothing(*_: object) -> None:
    """Does nothing."""


def aligned(num_bytes: int) -> int:
    """Returns a size rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
