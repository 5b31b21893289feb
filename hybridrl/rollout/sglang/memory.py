"""Allocates SGLang's weights and KV cache in memory that can be released and lent.

By default, SGLang releases memory with torch_memory_saver, which does not expose driver handles. If
csrc/ was compiled, this module makes SGLang allocate in memory pools with this package's allocator
(csrc/engine_pool.cpp) instead, and common/engine_memory.py releases the pieces of these pools.
Without csrc/, torch_memory_saver releases the memory, and the engine cannot lend any.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybridrl.hybrid_engine.memory.lending import Mapping, Piece
from hybridrl.ops import compiled_library, compiled_operations
from hybridrl.parallel.device_mapping import DeviceMapping
from hybridrl.rollout.common.engine_memory import (
    KV_CACHE,
    WEIGHTS,
    EnginePiece,
    SleepingMemory,
    blocks_in_use,
    blocks_of,
    check_caches,
    give_back,
    own_memory,
)
from hybridrl.rollout.common.process_state import keep_generators, replaced
from hybridrl.rollout.sglang.version import NAME

# Attributes of SGLang's KV pools; each has one tensor per layer.
BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")


@dataclass
class PoolPiece:
    """Implements `EnginePiece` with csrc/engine_pool.cpp, which releases the last set handle."""

    address: int
    num_bytes: int
    tag: str
    handle: int
    tell: Callable[[int, int], object]

    def gone(self) -> None:
        self.set_handle(0)

    def set_handle(self, handle: int) -> None:
        self.handle = handle
        self.tell(self.address, handle)


class EnginePools:
    """An engine's memory pools, one per tag. `make_pool` creates a torch.cuda.MemPool."""

    def __init__(self, operations: Any, make_pool: Callable[[], Any], mapping: Mapping) -> None:
        self._operations, self._mapping = operations, mapping
        self._pools = {tag: make_pool() for tag in (WEIGHTS, KV_CACHE)}
        self._closed: set[str] = set()

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Allocates new tensors in this tag's pool: once for weights, often for the KV cache.

        When the region for weights ends, memory that only loading needed is released, because
        SGLang then measures free memory to size its KV cache. Raises RuntimeError if the pool was
        closed, because torch would reuse pieces that were released.
        """
        if tag in self._closed:
            raise RuntimeError(f"SGLang allocates {tag} after its pool was closed")
        with _without_expandable_segments(), torch.cuda.use_mem_pool(self._pools[tag]):
            yield
        if tag == WEIGHTS:
            self._closed.add(tag)
            blocks = blocks_in_use()
            self._mapping.wait()  # a sync point: loading may still use the memory
            for piece in self._pieces():
                if piece.tag == tag and not blocks_of(piece, blocks):
                    give_back(piece, self._mapping)

    def close(self) -> list[PoolPiece]:
        """Closes both pools to new tensors, and returns their mapped pieces in order of address."""
        self._closed.update(self._pools)
        return self._pieces()

    def _pieces(self) -> list[PoolPiece]:
        tags = {tuple(pool.id): tag for tag, pool in self._pools.items()}
        tag_of = {
            segment["address"]: tags[tuple(segment["segment_pool_id"])]
            for segment in torch.cuda.memory_snapshot(include_traces=False)
            if tuple(segment["segment_pool_id"]) in tags
        }
        tell = self._operations.set_engine_piece
        table = self._operations.engine_pieces()  # address, size and handle of each piece
        return [
            PoolPiece(address, num_bytes, tag_of[address], handle, tell)
            for address, num_bytes, handle in zip(table[::3], table[1::3], table[2::3], strict=True)
            if address in tag_of and handle
        ]


def engine_pools(device: torch.device) -> EnginePools | None:
    """Returns pools for a new engine; None on CPU, or if csrc/ was not compiled."""
    operations = compiled_operations() if device.type == "cuda" else None
    if operations is None:
        return None
    allocator = _allocator()
    mapping = DeviceMapping(device)
    return EnginePools(operations, lambda: torch.cuda.MemPool(allocator), mapping)


@cache
def _allocator() -> Any:
    names = "hybridrl_make_engine_memory", "hybridrl_end_engine_memory"
    found = torch.cuda.memory.CUDAPluggableAllocator(compiled_library(), *names).allocator()
    # In torch 2.11, a pool keeps no reference to its allocator, but calls the allocator when the
    # pool is destroyed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found


@contextlib.contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Disables expandable segments, with which torch would bypass the pool's allocator."""
    names = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    is_set = any("expandable_segments:True" in os.environ.get(name, "") for name in names)
    if is_set:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        if is_set:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


@contextlib.contextmanager
def allocated_in(pools: EnginePools | None, device: torch.device) -> Iterator[None]:
    """Makes a starting engine allocate in `pools`, or on GPUs with torch_memory_saver."""
    if pools is None:
        if device.type != "cpu":
            _choose_memory_saver()
        yield
        return
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    create = TorchMemorySaverAdapter.create

    def adapter(enable: bool) -> Any:
        found: Any = create(enable=False)  # does nothing; CUDA graphs are captured as usual
        if enable:
            found.region = pools.region
        return found

    with replaced(TorchMemorySaverAdapter, "create", staticmethod(adapter)):
        yield


def sleeping_memory(
    live: Any,
    device: torch.device,
    whole: Sequence[Tensor],
    in_part: Sequence[Tensor],
    cache_bytes: int,
) -> SleepingMemory:
    """Returns the object that releases and restores a started engine's memory; `whole` and
    `in_part` are the parameters that an update writes completely, and only in part. Raises
    UserError if the KV cache is outside the pools.
    """
    if live.pools is None:
        return SaverMemory(live.scheduler, device)
    caches, pieces = caches_of(live.scheduler), live.pools.close()
    check_caches(caches, cache_bytes, pieces, NAME, live.version)
    return own_memory(device, pieces, [*whole, *caches], in_part)


def caches_of(scheduler: Any) -> list[Tensor]:
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return [one for name in BUFFERS for one in getattr(pool, name, None) or ()]


class SaverMemory:
    """Implements `SleepingMemory` with SGLang's own functions for releasing and resuming memory."""

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        self._scheduler, self._device = scheduler, device
        self.pieces: Sequence[EnginePiece] = ()  # SGLang does not expose its pieces
        self.is_asleep = False
        self.released_bytes, self.lends_weights = 0, False

    def sleep(self) -> None:
        if not self.is_asleep:
            free, _ = torch.cuda.mem_get_info()
            self._call("release", [KV_CACHE, WEIGHTS])
            self.released_bytes = max(0, torch.cuda.mem_get_info()[0] - free)
            self.is_asleep = True

    def wake_up(self, tag: str) -> None:
        """Maps the memory for `tag` again; the KV cache must be mapped last."""
        if not self.is_asleep:
            return
        self._call("resume", [tag])
        if tag == KV_CACHE:
            # Padding rows of a captured batch read row 0, and newly mapped memory has arbitrary
            # content.
            self._scheduler.req_to_token_pool.req_to_token.zero_()
            self.is_asleep, self.released_bytes = False, 0

    def clear_lent(self) -> None:
        """Does nothing, because no memory is lent."""

    def lend(self, num_bytes: int, keeps_weights: bool = False) -> list[Piece]:
        return []

    def _call(self, what: str, tags: list[str]) -> None:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, f"{what.capitalize()}MemoryOccupationReqInput")(tags=tags)
        with self._scheduler.active(), keep_generators(self._device), torch.no_grad():
            getattr(self._scheduler.weight_updater, f"{what}_memory_occupation")(request)


def _choose_memory_saver() -> None:
    """Selects torch_memory_saver's mode with torch's own pools, which may then be freed at any
    time.

    The other mode needs a library that is loaded before Python starts. In this mode, the package
    aborts the process if a pool is freed outside of a region, and torch frees pools at exit. This
    thread therefore stays inside a region, which affects only allocations in these pools.
    """
    from torch_memory_saver import torch_memory_saver as saver

    with contextlib.suppress(AttributeError, AssertionError):  # already chosen
        saver.hook_mode = "torch"
    saver._ensure_initialized()
    saver._impl._binary_wrapper.cdll.tms_set_interesting_region(True)
