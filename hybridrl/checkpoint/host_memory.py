"""Determines how much memory a job's processes may allocate and page-lock on this host. No torch.

A container or a scheduler may set a limit below the host's free memory, and kills processes that
exceed it. The limits are those of control groups, version 2 (Linux, cgroup-v2.rst).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Returns the free memory of the host in bytes, or less if a control group has a limit."""
    return min([psutil.virtual_memory().available, *_free_of_groups()])


def _free_of_groups() -> Iterator[int]:
    with suppress(OSError):  # not Linux
        for line in OWN_GROUPS.read_text().splitlines():
            number, _, name = line.split(":", 2)
            if number == "0":  # version 2
                own = GROUPS / name.strip("/")
                for group in (own, *own.parents):
                    if group.is_relative_to(GROUPS):
                        yield from _free_of(group)


def _free_of(group: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # the root group has no limit, and "max" means no limit
        limit, used = (int((group / f"memory.{what}").read_text()) for what in ("max", "current"))
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # When memory is needed, the kernel frees cached file pages that were not read recently.
        yield max(limit - used + int(stats.get("inactive_file", 0)), 0)


FIRST_BYTES = 64 << 20
MAX_BYTES = 1 << 30


def next_segment_bytes(taken: int) -> int:
    """Returns the size of the next segment, a power of two, about that of all earlier ones. Small
    models therefore lock little memory, and large models need few segments.
    """
    doubled = 1 << max(taken, 1).bit_length() - 1
    return min(max(doubled, FIRST_BYTES), MAX_BYTES)


def locked_bytes(num_bytes: int) -> int:
    """Returns the total size of the segments for tensors placed one after another."""
    taken = 0
    while taken < num_bytes:
        taken += next_segment_bytes(taken)
    return taken
