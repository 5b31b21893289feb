"""Metrics and diagnosis of a mismatch over several processes; the checks are in the worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from packaged import PACKAGED, needs
from tiny_models import tiny_model

WORKER = str(Path(__file__).with_name("mismatch_worker.py"))


@pytest.mark.dist
@pytest.mark.full
def test_metrics_do_not_depend_on_how_a_step_is_split(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    run_ranks(4, WORKER, ["splits", str(tmp_path / "model")], timeout_s=300)


@pytest.mark.dist
@pytest.mark.full
def test_diagnosis_names_what_was_planted_in_the_hf_engine(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    run_ranks(4, WORKER, ["hf", str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=300)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("_", [pytest.param("vllm", marks=needs("vllm"))])
def test_two_ranks_of_engine_and_trainer_compute_the_same_bits(_: str, tmp_path: Path) -> None:
    worker = str(Path(__file__).with_name("exact_worker.py"))
    run_ranks(2, worker, ["examples/quickstart/model", str(tmp_path)], timeout_s=300)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("engine", PACKAGED)
def test_diagnosis_names_what_was_planted_in_a_packaged_engine(engine: str, tmp_path: Path) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    run_ranks(4, WORKER, [engine, str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=400)
