"""Every algorithm's gradients over tensor, pipeline and data parallel ranks against one process.

The checks are in split_worker.py; layouts themselves are tested in test_parity.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import tiny_model

WORKER = str(Path(__file__).with_name("split_worker.py"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
def test_eight_ranks_learn_what_one_process_does(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    run_ranks(1, WORKER, ["reference", str(tmp_path)], timeout_s=200)
    run_ranks(8, WORKER, ["compare", str(tmp_path)], timeout_s=500)
