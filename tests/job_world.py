"""The ranks of a worker's process group, as a run has them."""

from __future__ import annotations

from functools import cache

from hybridrl.parallel.groups import World
from hybridrl.platform import Platform

TIMEOUT_S = 60.0


@cache
def job_world() -> World:
    """Returns all ranks of the process group; collective at the first call."""
    return World(Platform.detect(), TIMEOUT_S)
