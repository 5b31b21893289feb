"""Why an engine's memory takes longer to make than its bytes: one cause at a time, no engine.

Each case makes memory in pieces, writes to it, unmaps and releases it, and makes it again. Cases
differ in one thing from `plain`; numbers are milliseconds a GiB.

* plain: the device has memory that was never used beside it, so the driver may take that.
* rdma: the flag gpuDirectRDMACapable, which some versions of vLLM set.
* no room: another piece holds all other memory, so what was released is what is made again. The
  driver clears released memory; `after N ms` is how long it had, `unwritten` that nothing was
  written. If these fall with N, making memory waits for the clearing.
* as vLLM's: pieces of the sizes of a 7B engine's weights and caches.
* by vLLM: the same by its compiled functions, called one by one.
* kept: handles are not released but mapped again, what a pool of handles would cost.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hybridrl.parallel.device_mapping import GRANULARITY, DeviceMapping

GIB, MIB = 1 << 30, 1 << 20
PLAIN = (256 * MIB,) * 44  # 11 GiB
CACHES = (404 * MIB,) * 28
# Embedding and head, and of 28 layers queries, keys and values; output; gate and up; down.
WEIGHTS = (1040 * MIB,) * 2 + (32 * MIB, 26 * MIB, 260 * MIB, 130 * MIB) * 28


def causes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases; at most 15 s."""
    device = torch.device("cuda", torch.cuda.current_device())
    plain, rdma = DeviceMapping(device), DeviceMapping(device)
    rdma._properties.flags[1] = 1
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "plain": lambda: again(plain, PLAIN),
        "plain, after 100 ms": lambda: again(plain, PLAIN, wait_s=0.1),
        "rdma": lambda: again(rdma, PLAIN),
        "as vLLM's caches": lambda: again(plain, CACHES),
        "as vLLM's caches, rdma": lambda: again(rdma, CACHES),
        "as vLLM's weights": lambda: again(plain, WEIGHTS),
        "as vLLM's weights, rdma": lambda: again(rdma, WEIGHTS),
        "no room": lambda: again(plain, PLAIN, has_room=False),
        "no room, unwritten": lambda: again(plain, PLAIN, has_room=False, writes=False),
        "no room, after 20 ms": lambda: again(plain, PLAIN, wait_s=0.02, has_room=False),
        "no room, after 100 ms": lambda: again(plain, PLAIN, wait_s=0.1, has_room=False),
        "no room, after 500 ms": lambda: again(plain, PLAIN, wait_s=0.5, has_room=False),
        "no room, rdma": lambda: again(rdma, PLAIN, has_room=False),
        "kept": lambda: kept(plain, PLAIN),
        "kept, as vLLM's weights": lambda: kept(plain, WEIGHTS),
    }
    if (functions := vllm_functions()) is not None:
        for name, sizes in (("caches", CACHES), ("weights", WEIGHTS)):
            cases[f"as vLLM's {name}, by vLLM"] = partial(by_vllm, plain, *functions, sizes)
    found: dict[str, Any] = {}
    for name, run in cases.items():
        rounds = [run() for _ in range(3)]
        found[name] = {
            key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]
        }
    return found


def again(
    mapping: DeviceMapping,
    sizes: Sequence[int],
    wait_s: float = 0.0,
    has_room: bool = True,
    writes: bool = True,
) -> dict[str, float]:
    """Makes memory, releases it and makes it again; ms a GiB of the second time."""
    places, start, total = laid_out(mapping, sizes)
    handles = make(mapping, places, sizes)[0]
    blocker = 0
    if not has_room:
        blocker = mapping.create((torch.cuda.mem_get_info()[0] - GIB) // GRANULARITY * GRANULARITY)
    if writes:
        mapping.tensor(start, total).fill_(1)
    torch.cuda.synchronize()
    found = {"unmap": clock(lambda: unmap(mapping, places, sizes))}
    found["release"] = clock(lambda: release(mapping, handles))
    time.sleep(wait_s)
    handles, parts = make(mapping, places, sizes)
    found |= parts
    torch.cuda.synchronize()
    found["first write"] = clock(lambda: written(mapping, start, total))
    mapping.unmap(start, total)
    release(mapping, [*handles, *([blocker] if blocker else [])])
    mapping.free(start, total)
    return {name: ms / (total / GIB) for name, ms in found.items()}


def kept(mapping: DeviceMapping, sizes: Sequence[int]) -> dict[str, float]:
    """Maps handles again that were only unmapped."""
    places, start, total = laid_out(mapping, sizes)
    handles, _ = make(mapping, places, sizes)
    written(mapping, start, total)
    found = {"unmap": clock(lambda: mapping.unmap(start, total))}

    def map_all() -> None:
        for place, size, handle in zip(places, sizes, handles, strict=True):
            mapping.map(place, size, handle)

    found["map"] = clock(map_all)
    found["allow"] = clock(lambda: mapping.allow(start, total))
    mapping.unmap(start, total)
    release(mapping, handles)
    mapping.free(start, total)
    return {name: ms / (total / GIB) for name, ms in found.items()}


def by_vllm(
    mapping: DeviceMapping, create: Any, give_back: Any, sizes: Sequence[int]
) -> dict[str, float]:
    """Makes memory, releases it and makes it again by vLLM's own functions."""
    places, start, total = laid_out(mapping, sizes)
    handles = (ctypes.c_uint64 * len(sizes))()
    index, first = mapping.device.index or 0, ctypes.addressof(handles)
    pieces = [
        (index, size, place, first + 8 * number)
        for number, (place, size) in enumerate(zip(places, sizes, strict=True))
    ]

    def each(function: Any) -> None:
        for piece in pieces:
            function(*piece)

    each(create)
    written(mapping, start, total)
    found = {"unmap and release": clock(lambda: each(give_back))}
    found["create and map"] = clock(lambda: each(create))
    each(give_back)
    mapping.free(start, total)
    return {name: ms / (total / GIB) for name, ms in found.items()}


def vllm_functions() -> tuple[Any, Any] | None:
    """Returns vLLM's functions that make and give back a piece; None without vLLM."""
    try:
        from vllm.cumem_allocator import python_create_and_map, python_unmap_and_release
    except ImportError:
        return None
    return python_create_and_map, python_unmap_and_release


def laid_out(mapping: DeviceMapping, sizes: Sequence[int]) -> tuple[list[int], int, int]:
    """Reserves addresses for pieces in a row; returns each one's, the first, and all bytes."""
    total = sum(sizes)
    start = mapping.reserve(total)
    places = [start + sum(sizes[:number]) for number in range(len(sizes))]
    return places, start, total


def make(
    mapping: DeviceMapping, places: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], dict[str, float]]:
    """Makes, maps and allows pieces, one after the other; returns handles and each call's ms."""
    handles, ms = [], {"create": 0.0, "map": 0.0, "allow": 0.0}
    for place, size in zip(places, sizes, strict=True):
        times = [time.perf_counter()]
        handles.append(mapping.create(size))
        times.append(time.perf_counter())
        mapping.map(place, size, handles[-1])
        times.append(time.perf_counter())
        mapping.allow(place, size)
        times.append(time.perf_counter())
        for name, began, ended in zip(ms, times, times[1:], strict=False):
            ms[name] += 1e3 * (ended - began)
    return handles, ms


def unmap(mapping: DeviceMapping, places: Sequence[int], sizes: Sequence[int]) -> None:
    for place, size in zip(places, sizes, strict=True):
        mapping.unmap(place, size)


def release(mapping: DeviceMapping, handles: Sequence[int]) -> None:
    for handle in handles:
        mapping.release(handle)


def written(mapping: DeviceMapping, start: int, total: int) -> None:
    mapping.tensor(start, total).fill_(2)
    torch.cuda.synchronize()


def clock(run: Callable[[], object]) -> float:
    """Returns the milliseconds until a call returns."""
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)
