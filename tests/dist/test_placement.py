"""Models on ranks of their own: the same samples, losses and weights as where all share all ranks.

The checks are in placement_worker.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART
from launch import run_ranks
from transformers import AutoConfig, AutoModelForSequenceClassification

WORKER = str(Path(__file__).with_name("placement_worker.py"))


@pytest.mark.dist
@pytest.mark.slow
def test_where_models_lie_changes_no_number(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(QUICKSTART / "model", num_labels=1, dtype=torch.float32)
    torch.manual_seed(0)
    judge = tmp_path / "judge"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    # As `hybridrl convert` leaves it.
    kept = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps({**kept, "architectures": ["Qwen3ForCausalLM"]}))
    run_ranks(4, WORKER, [str(tmp_path / "runs"), str(judge)], timeout_s=500)
