"""Lists vLLM's pieces of memory for weights and KV cache (common/engine_memory.py)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS


@dataclass(frozen=True)
class Allocation:
    """Implements `EnginePiece` with a record of vLLM's allocator. When vLLM shuts down, it releases
    the handle stored at address `handle_address`, unless `record.is_asleep` is true.
    """

    address: int
    num_bytes: int
    tag: str
    handle_address: int
    record: Any

    @property
    def handle(self) -> int:
        return ctypes.c_uint64.from_address(self.handle_address).value

    def gone(self) -> None:
        self.record.is_asleep = True

    def set_handle(self, handle: int) -> None:
        ctypes.c_uint64.from_address(self.handle_address).value = handle
        self.record.is_asleep = False


def allocations() -> list[Allocation]:
    """Returns vLLM's pieces for weights and KV cache, in order of addresses."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = []
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        _, num_bytes, address, handle_address = data.handle
        if data.tag in (WEIGHTS, KV_CACHE):
            found.append(Allocation(address, num_bytes, data.tag, handle_address, data))
    return sorted(found, key=lambda piece: piece.address)
