"""A Trainer that is closed and dropped, or dropped alone, leaves nothing of it in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import kept_heap
import pytest
from small_runs import small_run

from hybridrl import Trainer


@pytest.fixture
def real_freeze() -> Iterator[None]:
    """Lets runs freeze objects as they do outside of tests."""
    kept_heap.give_back()
    yield
    gc.collect()
    kept_heap.keep()


def trained(folder: Path) -> dict[str, weakref.ref[object]]:
    """Takes a step of a run; returns what its memory is full of, for nobody to hold."""
    with small_run(folder) as trainer:
        trainer.train_step()
        assert gc.get_freeze_count() > 100_000
        return refs(trainer)


def refs(trainer: Trainer) -> dict[str, weakref.ref[object]]:
    weight = next(iter(trainer.policy.model.weights_in_place().values()))
    named = {"trainer": trainer, "policy": trainer.policy, "weight": weight}
    return {name: weakref.ref(one) for name, one in named.items()}


def held(found: dict[str, weakref.ref[object]]) -> list[str]:
    return [name for name, one in found.items() if one() is not None]


@pytest.mark.usefixtures("real_freeze")
def test_another_trainer_frees_the_one_before_it(tmp_path: Path) -> None:
    gc.disable()
    try:
        found = trained(tmp_path / "one")
        assert held(found)  # in circles
        with small_run(tmp_path / "two"):
            assert not held(found)
    finally:
        gc.enable()
