"""Optimizer steps that cannot be trusted, over two ranks; the checks are in the worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("skipped_worker.py"))


@pytest.mark.dist
def test_untrusted_steps_change_nothing_and_are_replayed(tmp_path: Path) -> None:
    run_ranks(2, WORKER, [str(tmp_path)], timeout_s=300)
    assert (tmp_path / "done.json").exists()
