"""Where vLLM keeps the memory of weights and KV cache, piece by piece (common/engine_memory.py)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS


@dataclass(frozen=True)
class Allocation:
    """Implements `EnginePiece` as vLLM keeps it: vLLM releases the handle at `handle_place` when it
    ends, and `record`'s `is_asleep` is kept true.
    """

    address: int
    num_bytes: int
    tag: str
    handle_place: int
    record: Any

    @property
    def handle(self) -> int:
        """The driver's handle of the memory that is mapped."""
        return ctypes.c_uint64.from_address(self.handle_place).value

    def gone(self) -> None:
        """Tells vLLM that there is no memory."""
        self.record.is_asleep = True

    def set_handle(self, handle: int) -> None:
        """Lets vLLM keep the handle of other memory, which is mapped now."""
        ctypes.c_uint64.from_address(self.handle_place).value = handle
        self.record.is_asleep = False


def allocations() -> list[Allocation]:
    """Returns what vLLM's allocator has for weights and KV caches, by address."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = []
    for data in CuMemAllocator.get_instance().pointer_to_data.values():
        _, num_bytes, address, handle_place = data.handle
        if data.tag in (WEIGHTS, KV_CACHE):
            found.append(Allocation(address, num_bytes, data.tag, handle_place, data))
    return sorted(found, key=lambda one: one.address)
