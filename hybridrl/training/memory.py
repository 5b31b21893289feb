"""Memory that a trained model needs only during training: gradients and optimizer state.

Gradients are dropped when rollout begins: every update clears them anyway. If an engine lends
memory, the gradient buffers are views of it and nothing is freed or allocated. The optimizer state
(fp32 masters and Adam's moments, 12 bytes per parameter, divided over the data-parallel ranks)
stays on the device, or moves to pinned host memory and is copied back while log-probabilities are
computed.

Order of calls: `release`, then `restore`, alternating; `wait` before anything reads the optimizer.
Only storages are emptied and filled, so tensors and views stay valid. Local to a rank.
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

MOMENT_BYTES = 8  # Adam's two fp32 moments, per parameter that this rank's optimizer owns
ALIGNMENT = 512  # bytes; alignment of each storage in a common buffer

Place: TypeAlias = Callable[[Tensor, int, int], object]
"""Moves a tensor's storage to an address, with a number of bytes (`ops.storage_placer`)."""


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
        weights: Parameters of the model; an fp32 model's optimizer has no other masters.
        offloads: Whether the optimizer state leaves the device during rollout.
        device: Device of the model.
        max_tokens: Maximal number of tokens of a micro-batch.
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
        self._fullest = (0, 0)  # tokens of the largest micro-batch, bytes of its passes
        self._chunks, self._optimizer = chunks, optimizer
        self._weight_storages = {weight.untyped_storage()._cdata for weight in weights}
        self._host = HostMirror(device) if offloads else None
        self._has_stepped = False
        self._lent: LentMemory | None = None
        self._place: Place = _nothing

    def lay_gradients(self, memory: LentMemory, place: Place) -> None:
        """Moves the gradient buffers into memory that an engine lends, from now on.

        Args:
            memory: Lent memory of at least `gradient_bytes`, in the released state.
            place: Result of `ops.storage_placer`.

        Raises:
            RuntimeError: The gradients are not released.
        """
        self._lent, self._place = memory, place
        address = memory.address
        for buffer in self._buffers:
            data = buffer.grad_data
            if data.untyped_storage().nbytes() > 0:
                raise RuntimeError("gradients can be moved only while they are released")
            place(data, address, buffer.grad_data.nbytes)
            buffer.grad_data_size = 0  # tells `restore` to allocate nothing
            address += aligned(buffer.grad_data.nbytes)

    def release(self) -> None:
        """Frees the gradients and, after a copy to the host, the optimizer state."""
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

        Unlike Megatron's `restore_grad_buffers` it does not clear the buffers, since every update
        does (`ParallelModel.accumulate`).
        """
        if self._lent is not None:
            self._lent.restore()
        for buffer in self._buffers:
            if buffer.grad_data_size > 0:  # elements that the release has freed
                buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
                buffer.grad_data_size = 0
        if self._host is not None:
            self._host.restore()

    def wait(self) -> None:
        """Makes later work on the device wait for the optimizer state.

        Raises:
            RuntimeError: The state is on the host, because this is the rollout phase.
        """
        if self._host is None:
            return
        if self._host.is_released:
            raise RuntimeError("the optimizer state is on the host: enter the training phase")
        self._host.wait()

    def gradient_bytes(self) -> int:
        """Returns the size of the gradient buffers during training."""
        return sum(aligned(buffer.grad_data.nbytes) for buffer in self._buffers)

    @property
    def lent_bytes(self) -> int:
        """Part of `gradient_bytes` that is in an engine's memory."""
        return 0 if self._lent is None else self._lent.num_lent_bytes

    @property
    def unseen_bytes(self) -> int:
        """Bytes of gradients on the device that torch's allocator does not count.

        The allocator counts gradients in an engine's memory as the engine's.
        """
        return 0 if self._lent is None else self._lent.own_bytes

    def close(self) -> None:
        """Ends the use of lent memory; the gradient buffers are empty afterwards."""
        if self._lent is not None:
            for buffer in self._buffers:
                self._place(buffer.grad_data, 0, 0)
            self._lent.close()
            self._lent = None

    @property
    def _buffers(self) -> list[Any]:
        return flat_buffers(self._chunks)

    def weight_bytes(self) -> int:
        """Returns the size of the trained parameters' buffers, freed or not."""
        return sum(buffer.param_data.nbytes for buffer in self._buffers)

    def state_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the optimizer state, and the part that the first step allocates."""
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
        """Whether the optimizer's state leaves the device during rollout."""
        return self._host is not None

    def stepped(self) -> None:
        """Records an optimizer step: everything that an update needs is now allocated."""
        self._has_stepped = True

    @property
    def may_stay(self) -> bool:
        """Whether a step was taken since the last release, and the state may stay on the device."""
        return self._host is None and self._has_stepped

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
        """Additional memory that full micro-batches would need.

        It extrapolates from the largest micro-batch since the last release; activations grow
        linearly with the tokens.
        """
        tokens, taken = self._fullest
        return taken * max(0, self._max_tokens - tokens) // tokens if tokens else 0

    def bytes_to_come(self) -> int:
        """Returns how much the optimizer state will grow on the device by the next rollout."""
        return 0 if self._host is not None else self.state_bytes()[1]

    def _adams(self) -> Iterator[Any]:
        for optimizer in self._optimizer.chained_optimizers:
            yield optimizer.optimizer

    def _state_storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages of masters and moments, in a fixed order, each once."""
        found: dict[int, torch.UntypedStorage] = {}
        for optimizer in self._adams():
            for parameter in _parameters(optimizer):
                for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
                    # Step counts are scalars, some of them on the host.
                    if isinstance(tensor, Tensor) and tensor.dim() > 0:
                        storage = tensor.untyped_storage()
                        found.setdefault(storage._cdata, storage)
        return [s for s in found.values() if s._cdata not in self._weight_storages]


@contextmanager
def released(memories: Sequence[Restorable]) -> Iterator[None]:
    """Keeps the memory of training free during the block.

    If the block fails the memory stays free, since restoring it may be collective.
    """
    for memory in memories:
        memory.release()
    yield
    for memory in memories:
        memory.restore()


class HostMirror:
    """Copy of device storages in page-locked host memory, so that transfers are asynchronous.

    There is one buffer for all, since torch's pinned allocator rounds every size up to a power of
    two.
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
        """Size of the storages that are copied here."""
        return sum(part.numel() for _, part in self._moved)

    def release(self, storages: Sequence[torch.UntypedStorage], max_bytes: int = 0) -> None:
        """Copies the storages to the host and frees them.

        Args:
            storages: Device storages; they may differ from call to call.
            max_bytes: Bytes that later calls will need; memory is pinned once for all.
        """
        self.wait()
        sizes = [storage.nbytes() for storage in storages]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += aligned(size)
        if total > self._buffer.numel():  # moments are allocated after the first release
            self._reserve(max(total, max_bytes + 3 * len(storages) * ALIGNMENT))
        self._moved = [
            (storage, self._buffer[start : start + size])
            for storage, start, size in zip(storages, starts, sizes, strict=True)
        ]
        with self._aside():
            for storage, part in self._moved:
                part.copy_(self._bytes_of(storage), non_blocking=True)
        self._synchronize()  # a sync point: memory is freed only after it was read
        for storage, _ in self._moved:
            storage.resize_(0)
        self.is_released = True

    def restore(self) -> None:
        """Allocates the storages again and starts copying; `wait` before they are read.

        Does nothing if nothing was released, for instance at the start of a run.
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
        """Makes later work of the current stream wait for the copies of `restore`."""
        if self._ready is not None:
            self._ready.wait()
            self._ready = None

    def _aside(self) -> Any:
        """Returns a context whose copies run on another stream, after the current stream's work."""
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
            # Also runs when this object is deleted: registered memory must not be freed.
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
