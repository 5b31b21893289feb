"""Before they end, ranks (threads here) complete a checkpoint that their threads still write."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybridrl.checkpoint import store as checkpoint_store
from hybridrl.checkpoint.manifest import Ancestor
from hybridrl.checkpoint.model_state import _adopt_learning_rates
from hybridrl.checkpoint.store import CheckpointStore, _Pending

COMPLETE = "is complete"


class Rank:
    """One rank with a checkpoint that a thread writes until `has_written` is set."""

    def __init__(self, folder: Path, rank: int, size: int, grace_s: float, number: int) -> None:
        self.said, self.has_written, self.is_lost = list[str](), threading.Event(), False
        heartbeat = SimpleNamespace(part=lambda what: nullcontext())
        parts = {"rank": rank, "size": size, "heartbeat": heartbeat}
        world: Any = SimpleNamespace(**parts, has_lost=lambda: self.is_lost)
        self.store = CheckpointStore(folder, world, 3, self.said.append, grace_s=grace_s)
        writing = threading.Thread(target=self.has_written.wait, daemon=True)
        writing.start()
        begun: Any = SimpleNamespace(folder=folder / "step_1", complete=lambda: None)
        self.store._pending = _Pending(begun, [Ancestor(step=1, order=1)], writing, number)

    def end(self, after_s: float, **how: bool) -> None:
        time.sleep(after_s)
        self.store.complete_at_end(**how)


def end(ranks: Sequence[Rank], after_s: Sequence[float], **how: bool) -> list[str]:
    """Lets each rank come so many seconds later; returns what they said."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        for call in [
            pool.submit(rank.end, late_s, **how)
            for rank, late_s in zip(ranks, after_s, strict=True)
        ]:
            call.result()
    return [rank.said[-1].partition("being written, ")[2] for rank in ranks]


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(checkpoint_store, "COME_S", 0.2)
    yield


def two_ranks(folder: Path, grace_s: float, number: int = 0) -> list[Rank]:
    return [Rank(folder, rank, 2, grace_s, number) for rank in range(2)]


def test_what_was_not_written_in_time_is_completed_by_the_next_call(tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path, 0.3)
    ranks[0].has_written.set()
    unready = "is not complete: not all ranks had written their files within run.grace_s=0.3"
    assert end(ranks, (0, 0), is_after_error=True) == [unready] * 2
    assert all(rank.store.unfinished for rank in ranks)
    ranks[1].has_written.set()
    assert end(ranks, (0, 0)) == [COMPLETE] * 2
    assert not any(rank.store.unfinished for rank in ranks)


def test_a_rank_that_comes_late_is_waited_for_but_after_an_error(tmp_path: Path) -> None:
    for is_after_error, said in (
        (False, COMPLETE),
        (True, "is not complete: not all ranks were ready to complete it within 0.2 s of an error"),
    ):
        ranks = two_ranks(tmp_path, 20.0, number=int(is_after_error))
        for rank in ranks:
            rank.has_written.set()
        assert end(ranks, (0, 0.6), is_after_error=is_after_error) == [said] * 2


def test_ranks_that_do_not_come_are_told_apart(tmp_path: Path) -> None:
    late, lost = (two_ranks(tmp_path, 0.3, number)[0] for number in range(2))
    lost.is_lost = True
    why = "is not complete: not all ranks were ready to complete it within run.grace_s=0.3"
    assert end([late], [0]) == [why]
    assert end([lost], [0]) == ["is not complete: a rank is lost"]


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_saved_groups_take_the_learning_rates_of_the_configuration(num_optimizers: int) -> None:
    """Newer Megatron-Core finds the saved state of a group by them."""
    group = {"max_lr": 0.5, "min_lr": 0.1}
    optimizers = [SimpleNamespace(param_groups=[dict(group), dict(group)])] * num_optimizers
    states = [
        {"optimizer": {"param_groups": [{"max_lr": 1e-4, "min_lr": 0.0, "step": 7}]}}
        for _ in optimizers
    ]
    _adopt_learning_rates(optimizers, states[0] if num_optimizers == 1 else dict(enumerate(states)))
    assert all(s["optimizer"]["param_groups"] == [group | {"step": 7}] for s in states)
