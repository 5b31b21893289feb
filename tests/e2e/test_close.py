"""A closed trainer leaves nothing behind: another can follow in the same process. One rank."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from small_runs import small_run


def test_a_closed_trainer_frees_its_models(tmp_path: Path) -> None:
    with small_run(tmp_path, "steps.num_steps=1", "algorithm.kl_coef=0.1") as trainer:
        trainer.fit()
        models = list(trainer.models.values())
        parts = [trainer, trainer.world, *models, *(model.chunks[0] for model in models)]
        left = [(type(part).__name__, weakref.ref(part)) for part in parts]
    del trainer, models, parts
    gc.collect()
    assert [name for name, part in left if part() is not None] == []


def test_what_the_first_step_leaves_is_collected_no_more_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: done.append(name))
    with small_run(tmp_path) as trainer:
        assert done == ["unfreeze"]  # an earlier Trainer may not have been closed
        for _ in range(2):
            trainer.train_step()
        assert done == ["unfreeze", "freeze"]
    assert done == ["unfreeze", "freeze", "unfreeze"]
