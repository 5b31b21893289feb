"""Lets all gloo groups of a process share the thread that serves their connections.

Each of gloo's devices has a thread that wakes up a hundred times a second, and torch makes a device
for each group. Megatron makes nineteen groups for a layout, and a process that builds one model
after the other keeps those of the earlier ones: with four ranks on two cores such threads took most
of the time. Groups on one device are as they were in all else; processes that are started as by a
user, and all with HYBRIDRL_COLD_STARTS=1, have a device for each.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

_given = ProcessGroupGloo.__init__


@cache
def _device(process: int) -> Any:
    """Returns the device of this process: a fork has no thread of its parent's."""
    return ProcessGroupGloo.create_default_device()


def share() -> None:
    """Gives groups that are made from now on one device."""

    def start(
        self: ProcessGroupGloo,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        enable_reconfigure: bool = False,  # torch passes it from 2.15 on
    ) -> None:
        if enable_reconfigure:
            raise NotImplementedError("groups that are reconfigured have a device each")
        options = ProcessGroupGloo._Options()
        options._devices = [_device(os.getpid())]
        options._timeout = timeout
        _given(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = start  # type: ignore[method-assign]


def part() -> None:
    """Gives groups that are made from now on a device each, as torch does."""
    ProcessGroupGloo.__init__ = _given  # type: ignore[method-assign]
