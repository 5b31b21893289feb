"""Copies many contiguous blocks by the GPU's copy engines, in one call to the driver.

Over NVLink a copy engine reads in larger packets than multiprocessors do: 370 GB/s a GPU on four
H200 against 330 (benchmarks/results/reshard_h200.json). One call for all blocks matters: block by
block, and in CUDA graphs, the engines stand idle between copies (225 GB/s at 34 MB a block).

The call is cuMemcpyBatchAsync of the driver's API, which drivers for CUDA 12.8 and later have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

FROM_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the order of the stream


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
        pairs: (source, destination) views, contiguous, of equal sizes and types; destinations do
            not overlap, and tensors keep their addresses. Memory of peers is allowed.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        count = len(pairs)
        self._dests = (ctypes.c_void_p * count)(*(dest.data_ptr() for _, dest in pairs))
        self._sources = (ctypes.c_void_p * count)(*(source.data_ptr() for source, _ in pairs))
        self._sizes = (ctypes.c_size_t * count)(*(dest.nbytes for _, dest in pairs))
        self._count = ctypes.c_size_t(count)
        self._attributes = _Attributes(source_access_order=FROM_STREAM)
        self._first = ctypes.c_size_t(0)

    @property
    def num_launches(self) -> int:
        """Calls of the driver that a run makes."""
        return int(self._count.value > 0)

    def run(self, stream: torch.cuda.Stream) -> None:
        """Queues all copies on a stream, which may not be the default one.

        Raises:
            RuntimeError: the driver refused them.
        """
        if self._count.value == 0:
            return
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


def has_copy_engine() -> bool:
    """Whether this host's driver copies in batches."""
    try:
        _batch_call()
    except (OSError, AttributeError):  # no driver, or one from before CUDA 12.8
        return False
    return True


@cache
def _batch_call() -> tuple[Any, tuple[Any, ...]]:
    """Returns the driver's function, and the argument by which its first form tells what failed."""
    driver = ctypes.CDLL("libcuda.so.1")
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        return driver.cuMemcpyBatchAsync_v2, ()
    return driver.cuMemcpyBatchAsync, (ctypes.byref(ctypes.c_size_t()),)
