"""Where the time of a training pass goes: its parts, what the allocator asks of the driver, its
kernels, and what the host did while the GPU had none.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

# How many of a profile's are told, those that take longest.
MAX_KERNELS = 40  # what comes after them is less than a hundredth
MAX_CALLS = 15
MAX_OPERATIONS = 30
MAX_GAPS = 12


class Span(NamedTuple):
    """Something that a profile saw, from `start` to `end` in microseconds."""

    start: float
    end: float
    name: str


def driver_counts() -> dict[str, int]:
    """Returns how often torch's allocator asked the driver for memory and gave some back, how often
    it had to give all back to get some, and the most that it held; nothing without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.memory_stats()
    return {
        "driver_allocations": found["num_device_alloc"],
        "driver_frees": found["num_device_free"],
        "retries": found["num_alloc_retries"],
        "most_reserved_bytes": found["reserved_bytes.all.peak"],
    }


def profiled(run: Callable[[], object]) -> dict[str, Any]:
    """Runs something on a GPU; returns `said_of` it, and the longest `operations` of the host."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        run()
        torch.cuda.synchronize()
    kernels, calls, operations = [], [], []
    for event in seen.events():
        span = Span(event.time_range.start, event.time_range.end, event.name)
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append(span)
        elif event.name.startswith(("cuda", "cu")):  # of the runtime and of the driver
            calls.append(span)
        else:
            operations.append(span)
    # Of operations in others both have the time.
    return said_of(kernels, calls) | {"operations": totals(operations, MAX_OPERATIONS)}


def said_of(kernels: Iterable[Span], calls: Iterable[Span]) -> dict[str, Any]:
    """Returns the longest kernels and calls of the driver, and the longest times without a kernel.

    Returns:
        `span_ms` from the first kernel to the last, `busy_ms` of it with one, `kernels`, `calls`
        and `gaps`, each of these with the kernels around it and the call that took most of it.
    """
    kernels, calls = sorted(kernels), sorted(calls)
    busy_us, until, last = 0.0, kernels[0].start, ""
    gaps: list[tuple[Span, str]] = []
    for kernel in kernels:
        if kernel.start > until:
            gaps.append((Span(until, kernel.start, last), kernel.name))
        busy_us += max(0.0, kernel.end - max(kernel.start, until))
        if kernel.end > until:
            until, last = kernel.end, kernel.name
    longest = sorted(gaps, key=lambda gap: gap[0].start - gap[0].end)[:MAX_GAPS]
    return {
        "span_ms": (until - kernels[0].start) / 1e3,
        "busy_ms": busy_us / 1e3,
        "kernels": totals(kernels, MAX_KERNELS),
        "calls": totals(calls, MAX_CALLS),
        "gaps": [
            {
                "ms": (gap.end - gap.start) / 1e3,
                "at_ms": (gap.start - kernels[0].start) / 1e3,
                "after": gap.name[:120],
                "before": then[:120],
                "call": call_during(gap, calls),
            }
            for gap, then in longest
        ],
    }


def totals(spans: Iterable[Span], most: int) -> list[dict[str, Any]]:
    """Returns milliseconds and number of what has one name, the longest first."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name[:120], []).append(span.end - span.start)
    longest = sorted(times.items(), key=lambda each: -sum(each[1]))[:most]
    return [{"name": name, "ms": sum(us) / 1e3, "times": len(us)} for name, us in longest]


def call_during(gap: Span, calls: Sequence[Span]) -> Mapping[str, Any]:
    """Returns the calls, sorted by start, that took most of a gap, and their milliseconds."""
    within: dict[str, float] = {}
    for call in calls[: bisect.bisect_left(calls, Span(gap.end, -math.inf, ""))]:
        shared = min(call.end, gap.end) - max(call.start, gap.start)
        if shared > 0:
            within[call.name] = within.get(call.name, 0.0) + shared
    if not within:
        return {"name": "", "ms": 0.0}
    name = max(within, key=within.__getitem__)
    return {"name": name, "ms": within[name] / 1e3}
