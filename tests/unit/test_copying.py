"""What a run does about copies of its state in host memory, with the copies themselves stood in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.loop.copying import Copies


@pytest.mark.parametrize("turns_off", [False, True])
def test_memory_for_checkpoints_is_reserved_once_copies_have_theirs_or_are_given_up(
    turns_off: bool,
) -> None:
    reserved: list[int] = []
    held = SimpleNamespace(is_off=False, num_bytes=0, busy_s=0.0)
    held.start = lambda step, num_bytes: False  # no room for both, it seems

    def take(*_: Any) -> bool:
        held.is_off = turns_off
        held.num_bytes = 0 if turns_off else 120
        return not turns_off

    held.take = take
    copies: Any = Copies.__new__(Copies)
    world = SimpleNamespace(platform=SimpleNamespace(is_cpu=True))
    copies._store = SimpleNamespace(
        reserve=reserved.append,
        lineage=[],
        unfinished=None,
        layout={},
        reserved_bytes=0,
        world=world,
    )
    copies._copies, copies._every = held, 1
    copies._saves_from_copies = copies._is_reported = True
    copies._num_bytes = 100
    copies.start(0, 5)
    assert reserved == []
    timer: Any = SimpleNamespace(phase=lambda name: pytest.MonkeyPatch.context())
    copies.take_due(1, {}, dict, None, timer)
    assert reserved == ([100] if turns_off else [120])
