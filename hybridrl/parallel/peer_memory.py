"""Memory of one rank that the others of its node read directly, without a message.

On GPUs torch's symmetric memory, over NVLink or PCIe; on CPU files in memory that all processes
map. Every rank has a piece of the same size. Collective: `allocate` is called by all ranks of the
group with the same size, `barrier` by all in the same order.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SHARED_FILES = Path("/dev/shm")


class PeerMemory(Protocol):
    """A piece of memory on every rank of a group."""

    def of(self, rank: int) -> Tensor:
        """Returns a rank's piece as bytes, readable from here; writable where it is one's own."""
        ...

    def barrier(self) -> None:
        """Lets later work of any rank begin after earlier work of all ranks: on the device's
        current stream, or on the host where the memory is the host's.
        """
        ...


def why_unreachable(device: torch.device, ranks_per_node: int) -> str:
    """Returns why this rank cannot read all others' memory, "" if it can."""
    size = dist.get_world_size()
    if ranks_per_node < size:
        return f"the {size} ranks are spread over nodes of {ranks_per_node}"
    if device.type == "cpu":
        return "" if SHARED_FILES.is_dir() else f"this host has no {SHARED_FILES}"
    count = torch.cuda.device_count()
    if count < size:
        return f"this process sees {count} of its node's {size} GPUs (CUDA_VISIBLE_DEVICES)"
    others = [other for other in range(size) if other != device.index]
    refused = [o for o in others if not torch.cuda.can_device_access_peer(device.index, o)]
    return f"GPU {device.index} cannot read the memory of GPUs {refused}" if refused else ""


def allocate(num_bytes: int, device: torch.device, timeout_s: float) -> PeerMemory:
    """Allocates a piece of `num_bytes` on every rank of the world, zeroed; collective.

    Raises:
        OSError, RuntimeError: there is no room, or the memory cannot be shared.
    """
    if device.type == "cpu":
        return _HostMemory(num_bytes)
    return _SymmetricMemory(num_bytes, device, timeout_s)


class _SymmetricMemory:
    """torch's symmetric memory, over the world."""

    def __init__(self, num_bytes: int, device: torch.device, timeout_s: float) -> None:
        # Multicast is another feature of NVLink; nothing here uses it, and not all hosts offer it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric  # fails to load on CPU builds

        group = dist.group.WORLD
        assert group is not None
        self._own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._own.zero_()
        self._handle = symmetric.rendezvous(self._own, group.group_name)
        self._num_bytes, self._timeout_ms = num_bytes, int(timeout_s * 1000)

    def of(self, rank: int) -> Tensor:
        if rank == self._handle.rank:
            return self._own
        return self._handle.get_buffer(rank, (self._num_bytes,), torch.uint8)

    def barrier(self) -> None:
        # A rank that never comes ends this one's context: the next look at the device raises.
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


class _HostMemory:
    """Files that have no name once all processes map them."""

    def __init__(self, num_bytes: int) -> None:
        descriptor, path = tempfile.mkstemp(prefix="hybridrl-", dir=SHARED_FILES)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # says so now if there is no room
            paths: list[str] = [""] * dist.get_world_size()
            dist.all_gather_object(paths, path)
            self._pieces = [
                torch.from_file(one, shared=True, size=num_bytes, dtype=torch.uint8)
                for one in paths
            ]
            dist.barrier()
        finally:
            os.close(descriptor)
            os.unlink(path)

    def of(self, rank: int) -> Tensor:
        return self._pieces[rank]

    def barrier(self) -> None:
        dist.barrier()
