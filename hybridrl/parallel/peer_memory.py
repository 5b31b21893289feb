"""Provides memory on each rank that other ranks on the same host read without messages.

On GPUs, this is torch's symmetric memory, over NVLink or another link. On CPU, it consists of
memory-backed files that all processes map. All ranks have pieces of the same size.

Who waits for whom: all ranks call `allocate` with the same size, and `barrier` in the same order.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROBE_BYTES = 1 << 16
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Members(Protocol):
    """The ranks that share memory, numbered from 0. They are the ranks of a job or of a group."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order; collective."""


class PeerMemory(Protocol):
    """A piece of memory on every rank of a group."""

    def of(self, rank: int) -> Tensor:
        """Returns a rank's piece as a byte tensor. A rank may write only to its own piece."""

    def barrier(self) -> None:
        """Makes later work on every rank wait until the earlier work on all ranks is done.

        The barrier applies to work on the device's current stream, or on the host if the memory is
        on the host.
        """


def host_id() -> str:
    """Returns an id that is the same for all processes on a host and differs between hosts."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()


def why_unreachable(device: torch.device, hosts: Sequence[str]) -> str:
    """Returns why this rank cannot read all other ranks' memory; "" if it can.

    `hosts` has the `host_id` of every rank.
    """
    size, num_hosts = len(hosts), len(set(hosts))
    if num_hosts > 1:
        return f"the {size} ranks are spread over {num_hosts} hosts"
    if device.type == "cpu":
        return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"
    count = torch.cuda.device_count()
    if count < size:
        return f"this process sees {count} of its node's {size} GPUs (CUDA_VISIBLE_DEVICES)"
    others = [other for other in range(size) if other != device.index]
    refused = [o for o in others if not torch.cuda.can_device_access_peer(device.index, o)]
    if refused:
        return f"GPU {device.index} cannot read the memory of GPUs {refused}"
    refused = [o for o in others if not _has_atomics(device.index, o)]
    return f"GPU {device.index} has no atomics on the memory of GPUs {refused}" if refused else ""


def why_unusable(device: torch.device, timeout_s: float, ranks: Members) -> str:
    """Returns why memory cannot be shared with reachable peers; "" if it can. Collective.

    Containers may forbid a system call that sharing requires (pidfd_getfd on another process). On
    CPU, the path to a process in another container may lead to an unrelated file.
    """
    failure = ""
    try:
        memory = allocate(PROBE_BYTES, device, timeout_s, ranks)
    except (OSError, RuntimeError) as error:
        failure = f"sharing memory failed: {error}".splitlines()[0]
    if any(ranks.gather_objects(failure)):
        return failure
    memory.of(ranks.rank).view(torch.int64).fill_(ranks.rank)
    memory.barrier()
    found = [int(memory.of(other).view(torch.int64)[0]) for other in range(ranks.size)]
    memory.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the memory is freed now, but the barrier still uses it
    if found == list(range(ranks.size)):
        return ""
    return f"shared memory holds {found} instead of each rank's number"


def allocate(num_bytes: int, device: torch.device, timeout_s: float, ranks: Members) -> PeerMemory:
    """Allocates a zeroed piece of `num_bytes` on every rank; collective.

    A barrier between GPUs has a timeout in seconds. On GPUs, `ranks` must be all ranks of the job.

    Raises OSError or RuntimeError if the device has no memory left, or the memory cannot be shared.
    A lack of host memory is detected only when the piece is written.
    """
    if device.type == "cpu":
        return _HostMemory(num_bytes, ranks)
    return _SymmetricMemory(num_bytes, device, timeout_s)


class _SymmetricMemory:
    """Torch's symmetric memory over all ranks of the job."""

    def __init__(self, num_bytes: int, device: torch.device, timeout_s: float) -> None:
        # Disable NVLink multicast, because it is not used here and some hosts lack it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric  # fails to load on CPU builds

        group = dist.group.WORLD
        assert group is not None
        torch.cuda.empty_cache()  # symmetric memory cannot use what torch's allocator keeps cached
        self._own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._own.zero_()
        self._handle = symmetric.rendezvous(self._own, group.group_name)
        self._num_bytes, self._timeout_ms = num_bytes, int(timeout_s * 1000)

    def of(self, rank: int) -> Tensor:
        if rank == self._handle.rank:
            return self._own
        return self._handle.get_buffer(rank, (self._num_bytes,), torch.uint8)

    def barrier(self) -> None:
        # If a rank never arrives, the timeout destroys this rank's CUDA context, and later calls
        # raise errors.
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


class _HostMemory:
    """Unnamed memory-backed files, which disappear with their processes."""

    def __init__(self, num_bytes: int, ranks: Members) -> None:
        self._ranks = ranks
        descriptor = os.memfd_create("hybridrl-peer-memory")
        try:
            os.ftruncate(descriptor, num_bytes)
            paths = ranks.gather_objects(f"/proc/{os.getpid()}/fd/{descriptor}")
            try:
                self._pieces = [
                    torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
                    for path in paths
                ]
            finally:
                self.barrier()  # all ranks have mapped it or failed; close the descriptor
        finally:
            os.close(descriptor)

    def of(self, rank: int) -> Tensor:
        return self._pieces[rank]

    def barrier(self) -> None:
        self._ranks.gather_objects(None)  # transfers 8 bytes per rank


def _has_atomics(one: int, other: int) -> bool:
    """Whether a GPU supports the atomics on another GPU's memory that barriers need."""
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(1)
    code = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, one, other)
    return code != 0 or found.value != 0  # assume support if the driver does not say
