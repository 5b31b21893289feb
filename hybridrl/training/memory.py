"""What a trained model keeps on the device only while it trains: gradients and optimizer state.

Gradients are given up when rollout begins: every update clears them and makes them anew. Where an
engine lends memory they lie in that, and nothing is freed or allocated for them. The
optimizer's state (fp32 masters and Adam's moments, 12 bytes a parameter over the data-parallel
ranks) stays, or goes to pinned host memory, from where it comes back while log-probabilities are
computed.

Order of calls: `release`, then `restore`, and again; `wait` before anything reads the optimizer.
Only storages are emptied and filled again: tensors and views stay what they are. Local to a rank.
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

MOMENT_BYTES = 8  # Adam's two, fp32, for each parameter that this rank's optimizer owns
ALIGNMENT = 512  # bytes, of a storage's place in a buffer for several

Place: TypeAlias = Callable[[Tensor, int, int], object]
"""Lets a tensor's storage lie at an address, with so many bytes (`ops.storage_placer`)."""


def flat_buffers(chunks: Sequence[Any]) -> list[Any]:
    """Returns the buffers that hold the trained parameters and their gradients.

    Args:
        chunks: Megatron's data-parallel wrappers.
    """
    return [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]


class TrainedModelMemory:
    """Gradient buffers and optimizer state of one model on this rank.

    Args:
        chunks: Megatron's data-parallel wrappers.
        optimizer: Megatron's.
        weights: the model's parameters, which an optimizer of an fp32 model shares.
        offloads: whether the optimizer's state leaves the device during rollout.
        device: of the model.
        most_tokens: of a micro-batch.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        weights: Iterable[Tensor],
        offloads: bool,
        device: torch.device,
        most_tokens: int,
    ) -> None:
        self._device, self._most_tokens = device, most_tokens
        self._fullest = (0, 0)  # tokens of a micro-batch, and bytes that its passes took
        self._chunks, self._optimizer = chunks, optimizer
        self._weight_storages = {_key(weight) for weight in weights}
        self._host = HostMirror(device) if offloads else None
        self._has_stepped = False
        self._lent: LentMemory | None = None
        self._place: Place = _nothing

    def lay_gradients(self, memory: LentMemory, place: Place) -> None:
        """Lets the gradients lie in memory that an engine lends, from now on; they are released

        Args:
            memory: of `gradient_bytes` at least; released.
            place: `ops.storage_placer`.
        """
        self._lent, self._place = memory, place
        address = memory.address
        for buffer in self._buffers:
            data = buffer.grad_data
            if data.untyped_storage().nbytes() > 0:
                raise RuntimeError("gradients are laid anew only while they are released")
            place(data, address, buffer.grad_data.nbytes)
            buffer.grad_data_size = 0  # of what a release has noted nothing is left to be made
            address += _aligned(buffer.grad_data.nbytes)

    def release(self) -> None:
        """Frees the gradients, and the optimizer's state once it is copied away."""
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
        """Allocates the gradient buffers and starts to copy the state back.

        The buffers are not cleared, as Megatron's own `restore_grad_buffers` does: every update
        clears them before its first backward (`ParallelModel.accumulate`).
        """
        if self._lent is not None:
            self._lent.restore()
        for buffer in self._buffers:
            if buffer.grad_data_size > 0:  # elements that a release has noted
                buffer.grad_data.untyped_storage().resize_(buffer.grad_data.nbytes)
                buffer.grad_data_size = 0
        if self._host is not None:
            self._host.restore()

    def wait(self) -> None:
        """Makes later work on the device wait for the state.

        Raises:
            RuntimeError: it is away, since this is the rollout phase.
        """
        if self._host is None:
            return
        if self._host.is_released:
            raise RuntimeError("the optimizer's state is on the host: enter the training phase")
        self._host.wait()

    def gradient_bytes(self) -> int:
        """Returns the size of the gradient buffers while training."""
        return sum(_aligned(buffer.grad_data.nbytes) for buffer in self._buffers)

    @property
    def lent_bytes(self) -> int:
        """Of `gradient_bytes`, those that are in an engine's memory."""
        return 0 if self._lent is None else self._lent.num_lent_bytes

    @property
    def unseen_bytes(self) -> int:
        """Bytes of gradients on the device that torch's allocator does not count. It counts those
        in an engine's memory, as the engine's.
        """
        return 0 if self._lent is None else self._lent.own_bytes

    def close(self) -> None:
        """Ends the use of memory that an engine has lent; there are no gradients afterwards."""
        if self._lent is not None:
            for buffer in self._buffers:
                self._place(buffer.grad_data, 0, 0)
            self._lent.close()
            self._lent = None

    @property
    def _buffers(self) -> list[Any]:
        return flat_buffers(self._chunks)

    def weight_bytes(self) -> int:
        """Returns the size of the trained parameters' buffers, be they freed or not."""
        return sum(buffer.param_data.nbytes for buffer in self._buffers)

    def state_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the optimizer's state and, of these, those that are not allocated
        before the first step.
        """
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
        """The optimizer has taken a step: all that an update takes has been allocated."""
        self._has_stepped = True

    @property
    def may_stay(self) -> bool:
        """Whether there was a step since the last release, and the state may stay on the device."""
        return self._host is None and self._has_stepped

    @contextmanager
    def watching(self, num_tokens: int) -> Iterator[None]:
        """Takes in what passes over micro-batches of so many tokens at most take, on GPUs."""
        if self._device.type == "cpu":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        yield
        taken = torch.cuda.max_memory_allocated(self._device) - before
        self._fullest = max(self._fullest, (num_tokens, taken))

    @property
    def growth_bytes(self) -> int:
        """What full micro-batches would take beyond the fullest since the last release: activations
        grow as their tokens do.
        """
        tokens, taken = self._fullest
        return taken * max(0, self._most_tokens - tokens) // tokens if tokens else 0

    def bytes_to_come(self) -> int:
        """Returns what the optimizer will hold during rollout beyond what it holds now."""
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
                    # Step counts are single numbers, of which torch keeps some on the host.
                    if isinstance(tensor, Tensor) and tensor.dim() > 0:
                        storage = tensor.untyped_storage()
                        found.setdefault(storage._cdata, storage)
        return [s for s in found.values() if s._cdata not in self._weight_storages]


@contextmanager
def released(memories: Sequence[Restorable]) -> Iterator[None]:
    """Keeps the memory of training free during the block.

    If the block fails it stays free: to restore it may take all ranks.
    """
    for memory in memories:
        memory.release()
    yield
    for memory in memories:
        memory.restore()


class HostMirror:
    """A place in host memory for device storages, page-locked so that copies run by themselves.

    One buffer for all: torch's own pinned allocator rounds every size up to a power of two.
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
        """Size of the storages that are here."""
        return sum(part.numel() for _, part in self._moved)

    def release(self, storages: Sequence[torch.UntypedStorage], most_bytes: int = 0) -> None:
        """Copies the storages here and frees them.

        Args:
            storages: may be others, and of other sizes, each time.
            most_bytes: that there will be later; pages are pinned once.
        """
        self.wait()
        sizes = [storage.nbytes() for storage in storages]
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += _aligned(size)
        if total > self._buffer.numel():  # a master's two moments come later
            self._reserve(max(total, most_bytes + 3 * len(storages) * ALIGNMENT))
        self._moved = [
            (storage, self._buffer[start : start + size])
            for storage, start, size in zip(storages, starts, sizes, strict=True)
        ]
        with self._aside():
            for storage, part in self._moved:
                part.copy_(self._bytes_of(storage), non_blocking=True)
        self._synchronize()  # a sync point: memory may be freed only after it was read
        for storage, _ in self._moved:
            storage.resize_(0)
        self.is_released = True

    def restore(self) -> None:
        """Allocates the storages again and starts to fill them; `wait` says when they may be read.

        Without a release before, for instance at the start of a run, nothing is to be done.
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
        """Makes later work of the current stream wait for what `restore` started."""
        if self._ready is not None:
            self._ready.wait()
            self._ready = None

    def _aside(self) -> Any:
        """Returns a context whose copies run beside the current stream, after what it queued."""
        if self._stream is None:
            return torch.no_grad()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # type: ignore[call-overload]

    def _reserve(self, num_bytes: int) -> None:
        self._synchronize()
        self._unpin()
        self._moved, self._buffer = [], torch.empty(0, dtype=torch.uint8)  # before there is another
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if self._stream is not None:
            runtime, address = torch.cuda.cudart(), self._buffer.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
            # Also when this object goes: the memory must not be freed while it is registered.
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _nothing(*_: object) -> None:
    """There is nothing to be done yet."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
