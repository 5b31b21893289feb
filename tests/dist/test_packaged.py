"""Packages' engines over several processes; the checks are in packaged_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks
from packaged import CLASSES, PACKAGED, REFUSED_KEYS, needs
from tiny_models import FAMILIES, HYBRID_EXPERTS, tiny_model

# Cases of experts: `some` has experts that are dealt out of order, where the engine takes them so,
# `latent` deepseek_v3, `sinks` gpt_oss, `more` the rest.
EXPERT_CASES = [
    pytest.param(engine, cases, marks=(*needs(engine), *([pytest.mark.full] * (cases == "more"))))
    for engine in CLASSES
    for cases in ("some", "latent", "more")
]
EXPERT_CASES.append(pytest.param("vllm", "sinks", marks=(*needs("vllm"), pytest.mark.full)))
MODELS_OF_CASES = {"latent": ("deepseek_v3",), "sinks": ("gpt_oss",)}
OTHERS = ("mistral", "granite", "phi3", "phi35", "phi4mini", "glm4", "gemma2", "gemma3_text")
WORKER = str(Path(__file__).with_name("packaged_worker.py"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
@pytest.mark.parametrize("cases", ["some", pytest.param("more", marks=pytest.mark.full)])
def test_packaged_engine_equals_transformers_after_each_reshard_in_every_layout(
    engine: str, cases: str, tmp_path: Path
) -> None:
    """`some` has each family and each layout; all pairs of both are there with `more`."""
    for name in (*FAMILIES, *OTHERS):
        for seed in range(2):
            tiny_model(name, seed, wide=True).save_pretrained(tmp_path / f"{name}_{seed}")
    run_ranks(4, WORKER, [engine, str(tmp_path), cases], timeout_s=540)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=needs("vllm"))])
def test_packaged_engine_with_recurrent_layers_follows_each_reshard(
    engine: str, tmp_path: Path
) -> None:
    for name in ("qwen3_5_text", *HYBRID_EXPERTS):
        for seed in range(2):
            model = tiny_model(name, seed, wide=True).to(torch.bfloat16)
            model.save_pretrained(tmp_path / f"{name}_{seed}")
    run_ranks(4, WORKER, [engine, str(tmp_path), "hybrid"], timeout_s=540)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
def test_faults_between_trainer_and_engine_are_found_before_the_first_step(
    engine: str, tmp_path: Path
) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    worker = str(Path(__file__).with_name("first_sync_worker.py"))
    run_ranks(2, worker, [engine, str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=300)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
def test_what_an_engine_cannot_serve_is_an_error_on_all_ranks(engine: str, tmp_path: Path) -> None:
    tiny_model("qwen2", wide=True).save_pretrained(tmp_path / "model")
    worker = str(Path(__file__).with_name("bad_requests_worker.py"))
    run_ranks(2, worker, [engine, str(tmp_path / "model"), str(tmp_path / "runs")], timeout_s=200)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("engine", PACKAGED)
def test_the_hybrid_engine_writes_what_the_engines_own_loader_writes(
    engine: str, tmp_path: Path
) -> None:
    for name in FAMILIES:
        tiny_model(name, wide=True).save_pretrained(tmp_path / name)
    worker = str(Path(__file__).with_name("packaged_loader_worker.py"))
    run_ranks(4, worker, [engine, str(tmp_path)], timeout_s=400)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "cases"), EXPERT_CASES)
def test_packaged_engine_with_experts_cut_or_dealt_equals_transformers_after_each_reshard(
    engine: str, cases: str, tmp_path: Path
) -> None:
    for name in MODELS_OF_CASES.get(cases, ("qwen3_moe", "mixtral")):
        for seed in range(2):
            dense = () if "mlp_only_layers" in REFUSED_KEYS[engine] else (1,)
            model = tiny_model(name, seed, wide=True, dense_layers=dense)
            model.save_pretrained(tmp_path / f"{name}_{seed}")
    worker = str(Path(__file__).with_name("experts_worker.py"))
    run_ranks(2, worker, [engine, str(tmp_path), cases], timeout_s=540)
