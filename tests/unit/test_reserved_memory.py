"""Page-locked memory that is made beside training; CUDA's part is a stub."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.checkpoint import host_copies, reserved_memory
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.reading import reading_threads
from hybridrl.checkpoint.reserved_memory import ReservedMemory, threads_beside_training
from hybridrl.parallel.host_cores import cores_of_rank

MIB = 1 << 20
SIZE = 9 * MIB + 4096  # of some chunks, and a part of one


def resident_bytes(address: int) -> int:
    """Returns how much of the mapping at an address has pages; 0: nothing is mapped there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first, _, last = line.split(" ")[0].partition("-")
        if last and int(first, 16) <= address < int(last, 16):
            return next(int(one.split()[1]) << 10 for one in lines if one.startswith("Rss:"))
    return 0


def test_pages_are_there_before_they_are_locked_and_until_they_are_unlocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserved_memory, "CHUNK_BYTES", 2 * MIB)
    advice: list[int] = []
    locked: list[tuple[int, int, int]] = []
    unlocked: list[int] = []

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            advice.append(option)
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(22, "a kernel without large pages")
            super().madvise(option, *place)

    def lock(address: int, num_bytes: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        locked.append((address, num_bytes, resident_bytes(address)))

    def unlock(address: int) -> None:
        unlocked.append(resident_bytes(address))

    monkeypatch.setattr(mmap, "mmap", Mapping)
    memory = ReservedMemory(SIZE, 3, lock, unlock)
    found = memory.tensor()
    assert found is not None and (found.dtype, len(found)) == (torch.uint8, SIZE)
    [(address, num_bytes, resident)] = locked
    assert memory.num_taken == SIZE
    assert (address, num_bytes) == (found.data_ptr(), SIZE) and resident >= SIZE
    assert mmap.MADV_DONTFORK in advice
    del found
    assert not unlocked
    del memory
    gc.collect()
    assert len(unlocked) == 1 and unlocked[0] >= SIZE and resident_bytes(address) < SIZE


class OnDevice:
    """A tensor of a GPU, of which there is none."""

    is_cuda = True

    def __init__(self, content: torch.Tensor) -> None:
        self.content, self.shape, self.dtype = content, content.shape, content.dtype

    def detach(self) -> torch.Tensor:
        return self.content


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is asked of CUDA, and of the memory that it makes."""
    asked = SimpleNamespace(device=None, locked=[], made=[], fails=False)

    def register(address: int, num_bytes: int, flags: int) -> int:
        assert asked.device == 3 and flags == 0
        time.sleep(0.2)  # the first copy waits for it
        asked.locked.append((address, num_bytes))
        return int(asked.fails)

    def check(error: int) -> None:
        if error:
            raise RuntimeError("CUDA error: out of memory")

    def made(num_bytes: int) -> torch.Tensor:
        asked.made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: None)
    for name, stub in {
        "is_available": lambda: True,
        "current_device": lambda: 3,
        "set_device": lambda index: setattr(asked, "device", index),
        "cudart": lambda: runtime,
        "check_error": check,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(host_copies, "FIRST_BYTES", MIB)
    monkeypatch.setattr(host_copies, "locked_memory", made)
    return asked


@pytest.mark.parametrize("fails", [False, True])
def test_copies_lie_in_what_was_reserved_for_them(fails: bool, device: SimpleNamespace) -> None:
    device.fails = fails
    copies: Any = HostCopies()
    content = [torch.arange(300_000.0) + number for number in range(8)]
    copies.reserve(sum(one.nbytes for one in content), 1)
    copies.reserve(1 << 40, 1)  # once
    taken = [copies.take(number, OnDevice(one)) for number, one in enumerate(content)]
    [(address, num_bytes)] = device.locked
    places = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in taken]
    are_inside = [address <= begin and end <= address + num_bytes for begin, end in places]
    assert all(are_inside) != fails and any(are_inside) != fails
    assert bool(device.made) == fails  # what torch locks, and the step waits for
    assert all(torch.equal(one, other) for one, other in zip(taken, content, strict=True))
    assert copies.take("more", OnDevice(torch.ones(MIB))).sum() == MIB
    assert device.made and copies.take(0, OnDevice(content[1])) is taken[0]


def test_memory_is_not_reserved_where_it_would_be_short(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "available_bytes", lambda: 64 * MIB)
    made: list[tuple[int, int]] = []

    def reserved(num_bytes: int, num_threads: int, *locks: object) -> object:
        made.append((num_bytes, num_threads))
        return object()

    monkeypatch.setattr(host_copies, "ReservedMemory", reserved)
    copies = HostCopies()
    copies.reserve(9 * MIB, 4)
    copies.reserve(MIB - 1, 1)  # as little as torch's first segment
    assert not made
    copies.reserve(8 * MIB, 4)
    assert made == [(9 * MIB, threads_beside_training(4))]


def test_threads_take_half_of_a_rank_s_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, allowed, num_ranks, num_threads in (
        (32, 32, 2, 8),
        (64, 64, 8, 4),
        (128, 12, 8, 6),  # ranks are bound to processors of their own
        (2, 2, 2, 2),
        (192, 192, 1, 8),
    ):
        monkeypatch.setattr(os, "cpu_count", lambda found=num_cores: found)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=allowed: set(range(n)))
        assert threads_beside_training(num_ranks) == num_threads
        own = min(num_cores // num_ranks, allowed)
        assert cores_of_rank(num_ranks) == own and reading_threads(num_ranks) == max(
            4, min(own, 16)
        )
