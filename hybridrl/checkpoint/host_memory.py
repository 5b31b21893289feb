"""Memory that the processes of a job may still take on this host. No torch.

A container or a scheduler's job has limits below what the host has free, and a process that passes
them is killed. The limits are those of control groups, version 2 (Linux, cgroup-v2.rst).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Returns the free bytes of the host within the limits of this process's control groups."""
    return min([psutil.virtual_memory().available, *_free_of_groups()])


def _free_of_groups() -> Iterator[int]:
    """Yields the free bytes of each limited control group of this process and its parents."""
    with suppress(OSError):  # no Linux
        for line in OWN_GROUPS.read_text().splitlines():
            number, _, name = line.split(":", 2)
            if number == "0":  # of version 2
                own = GROUPS / name.strip("/")
                for group in (own, *own.parents):
                    if group.is_relative_to(GROUPS):
                        yield from _free_of(group)


def _free_of(group: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # the root has no limit, and "max" is none
        limit, used = (int((group / f"memory.{what}").read_text()) for what in ("max", "current"))
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel gives back cached file pages that nobody has read lately when memory is needed.
        yield max(limit - used + int(stats.get("inactive_file", 0)), 0)
