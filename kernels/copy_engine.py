"""Copies many contiguous blocks with the GPU's copy engines, in one call.

Copy engines are faster than multiprocessors over NVLink, because they read in larger packets: 370
GB/s per GPU on four H200, instead of 330 (benchmarks/results/reshard_h200.json). All blocks must be
passed in one call. With one call per block, or in CUDA graphs, the engines idle between copies (225
GB/s for blocks of 34 MB).

`CompiledBlockCopies` makes a single call to csrc/block_copies.cpp, which also enqueues waits
between streams. `BlockCopies` needs no compiled code: it uses torch's waits and calls the driver's
cuMemcpyBatchAsync (CUDA 12.8 and later) through ctypes. Both classes enqueue the same operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import torch

FROM_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order


Stream: TypeAlias = Any
"""`torch.cuda.Stream`; None on CPU."""

Waits: TypeAlias = Sequence[tuple[Stream, Stream]]
"""(waiting, awaited): operations enqueued later on the first stream wait for all operations
enqueued so far on the second.
"""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("dest_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BlockCopies:
    """A fixed list of copies of contiguous blocks.

    Args:
        pairs: (source, destination) views, contiguous and of equal sizes and types. Destinations
            must not overlap, and tensors must not move. Views may be in peers' memory.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        count = len(pairs)
        dests, sources, sizes = block_table(pairs).tolist()
        self._dests = (ctypes.c_void_p * count)(*dests)
        self._sources = (ctypes.c_void_p * count)(*sources)
        self._sizes = (ctypes.c_size_t * count)(*sizes)
        self._count = ctypes.c_size_t(count)
        self._attributes = _Attributes(source_access_order=FROM_STREAM)
        self._first = ctypes.c_size_t(0)

    @property
    def num_launches(self) -> int:
        return int(self._count.value > 0)

    def run(self, stream: Stream, first: Waits = (), then: Waits = ()) -> None:
        """Enqueues all copies on a stream, which must not be the default stream.

        Args:
            stream: Stream on the current device.
            first, then: Stream waits to enqueue before and after the copies.

        Raises:
            RuntimeError: The driver rejects the copies.
        """
        for waiting, awaited in first:
            waiting.wait_stream(awaited)
        if self._count.value > 0:
            self._queue(stream)
        for waiting, awaited in then:
            waiting.wait_stream(awaited)

    def _queue(self, stream: Stream) -> None:
        call, failure = _batch_call()
        code = call(
            self._dests,
            self._sources,
            self._sizes,
            self._count,
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            *failure,
            ctypes.c_void_p(stream.cuda_stream),
        )
        if code != 0:
            raise RuntimeError(
                f"cuMemcpyBatchAsync of {self._count.value} blocks: CUDA error {code}"
            )


class CompiledBlockCopies:
    """Like `BlockCopies`, but calls csrc/block_copies.cpp."""

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], queue_blocks: Any
    ) -> None:
        self._table, self._queue_blocks = block_table(pairs), queue_blocks

    @property
    def num_launches(self) -> int:
        return int(self._table.size(1) > 0)

    def run(self, stream: Stream, first: Waits = (), then: Waits = ()) -> None:
        """Enqueues all copies on a stream; see `BlockCopies.run`."""
        self._queue_blocks(self._table, stream.cuda_stream, _handles(first), _handles(then))


def block_table(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns a table of copies, int64 of shape (3, len(pairs)) on the CPU, with rows for
    destination addresses, source addresses and sizes in bytes.

    Raises:
        ValueError: A view is not contiguous, or a pair's views differ in size.
    """
    for source, dest in pairs:
        if source.nbytes != dest.nbytes or not (source.is_contiguous() and dest.is_contiguous()):
            raise ValueError(
                f"a copy from shape {tuple(source.shape)} with strides {source.stride()} to shape "
                f"{tuple(dest.shape)} with strides {dest.stride()}: both must be contiguous and "
                "of equal size"
            )
    dests = [dest.data_ptr() for _, dest in pairs]
    sources = [source.data_ptr() for source, _ in pairs]
    sizes = [dest.nbytes for _, dest in pairs]
    return torch.tensor([dests, sources, sizes], dtype=torch.int64).view(3, len(pairs))


def _handles(waits: Waits) -> list[int]:
    return [stream.cuda_stream for stream in chain.from_iterable(waits)]


def has_copy_engine() -> bool:
    """Whether the host's driver supports batched copies."""
    try:
        _batch_call()
    except (OSError, AttributeError):  # no driver, or a driver older than CUDA 12.8
        return False
    return True


@cache
def _batch_call() -> tuple[Any, tuple[Any, ...]]:
    """Returns the driver's function for batched copies, and its first version's extra argument."""
    driver = ctypes.CDLL("libcuda.so.1")
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        return driver.cuMemcpyBatchAsync_v2, ()
    return driver.cuMemcpyBatchAsync, (ctypes.byref(ctypes.c_size_t()),)
