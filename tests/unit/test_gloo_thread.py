"""Gloo groups of a process share the thread that serves them, and keep bounds of their own."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import fork_starts
import pytest
import torch
import torch.distributed as dist


def num_serving() -> int:
    """Returns how many of this process's threads serve gloo's connections."""
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return sum(name.read_text().startswith("gloo_tcp_loop") for name in names)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted there")
@pytest.mark.skipif(os.environ.get(fork_starts.COLD) == "1", reason="groups are torch's own")
def test_groups_share_the_thread_that_serves_them() -> None:
    """Torch's own would have one each."""
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # the first one may start the thread
    before = num_serving()
    bounds = [timedelta(seconds=60), timedelta(seconds=90)]
    groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=bound) for bound in bounds]
    assert num_serving() == before > 0
    assert [group.options._timeout for group in groups] == bounds
    for value, group in enumerate(groups):
        summed = torch.tensor([float(value)])
        group.allreduce([summed]).wait()
        assert summed.tolist() == [value]
