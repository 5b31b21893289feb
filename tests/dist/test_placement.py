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
from packaged import PACKAGED
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForSequenceClassification

WORKER = str(Path(__file__).with_name("placement_worker.py"))
ENGINE_WORKER = str(Path(__file__).with_name("placement_engine_worker.py"))


@pytest.mark.dist
@pytest.mark.slow
def test_where_models_lie_changes_no_number(tmp_path: Path) -> None:
    run_ranks(4, WORKER, [str(tmp_path / "runs"), str(reward_model(tmp_path))], timeout_s=500)


@pytest.mark.dist
@pytest.mark.full  # four ranks above have each of these beside others
@pytest.mark.slow
def test_every_role_on_ranks_of_its_own(tmp_path: Path) -> None:
    run_ranks(8, WORKER, [str(tmp_path / "runs"), str(reward_model(tmp_path))], timeout_s=500)


def reward_model(folder: Path) -> Path:
    config = AutoConfig.from_pretrained(QUICKSTART / "model", num_labels=1, dtype=torch.float32)
    torch.manual_seed(0)
    judge = folder / "judge"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    # As `hybridrl convert` leaves it.
    kept = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps({**kept, "architectures": ["Qwen3ForCausalLM"]}))
    return judge


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
def test_engine_generates_on_ranks_without_the_policy(engine: str, tmp_path: Path) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    run_ranks(
        3, ENGINE_WORKER, [engine, str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=300
    )
