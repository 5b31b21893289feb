"""Memory of one rank that the others of its node read directly, without a message.

On GPUs torch's symmetric memory, over NVLink or whatever else joins them; on CPU files in memory
that all processes map. Every rank has a piece of the same size. Collective: `allocate` is called by
all ranks with the same size, `barrier` by all in the same order.
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
    """The ranks that share memory, numbered from 0: a job's or those of a group."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in order; collective."""
        ...


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


def host_id() -> str:
    """Returns what is the same for all processes of a host, and of no other host."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()


def why_unreachable(device: torch.device, hosts: Sequence[str]) -> str:
    """Returns why this rank cannot read all others' memory, "" if it can.

    Args:
        device: this rank's.
        hosts: every rank's `host_id`.
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
    """Returns why memory cannot be shared although peers are in reach, "" if it can; collective.

    Containers may forbid what sharing memory needs (pidfd_getfd of another process), and on CPU a
    path of another container's process may be a file of somebody else.
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
        torch.cuda.synchronize(device)  # the barrier still uses what goes now
    return "" if found == list(range(ranks.size)) else f"what the ranks wrote is read as {found}"


def allocate(num_bytes: int, device: torch.device, timeout_s: float, ranks: Members) -> PeerMemory:
    """Allocates a piece of `num_bytes` on every rank, zeroed; collective.

    Args:
        num_bytes: the same on every rank.
        device: this rank's.
        timeout_s: of a barrier between GPUs, seconds.
        ranks: that share it; between GPUs all of the job's.

    Raises:
        OSError, RuntimeError: the device has no room, or the memory cannot be shared. A host
            that has none says so only when the memory is written.
    """
    if device.type == "cpu":
        return _HostMemory(num_bytes, ranks)
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
    """Files in memory without a name: nothing stays when processes are killed."""

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
                self.barrier()  # all have mapped it, or failed: the descriptor may go
        finally:
            os.close(descriptor)

    def of(self, rank: int) -> Tensor:
        return self._pieces[rank]

    def barrier(self) -> None:
        self._ranks.gather_objects(None)  # 8 bytes a rank


def _has_atomics(one: int, other: int) -> bool:
    """Whether a GPU may change another's memory atomically, as barriers between them do."""
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(1)
    code = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, one, other)
    return code != 0 or found.value != 0  # a driver that does not say is given the benefit
