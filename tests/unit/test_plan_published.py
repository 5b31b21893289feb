"""Plans of published models: `plan` accepts their config.json, and says memory and time.

The files are in examples/recipes/models. Their sizes are those of the configuration files on the
hub, without weights.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.errors import ModelError
from hybridrl.metrics.flops import matmul_params
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.weights import hf_shapes
from hybridrl.services.planner.hardware import ClusterFile, Host
from hybridrl.services.planner.plan_report import plan_report

ROOT = Path(__file__).parents[2]
MODELS = "examples/recipes/models"
H200 = ClusterFile(gpus_per_node=8, gpu="H200")
# Number of H200, training sizes, and sizes of an engine replica.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    "qwen3.5-0.8b": (1, {}, {}),
    "qwen3.5-4b": (8, {"tp": 2}, {}),
    "qwen3.5-9b": (8, {"tp": 4}, {"tp": 2}),
    "qwen3.5-27b": (16, {"tp": 4, "pp": 2}, {"tp": 4}),
    "qwen3.5-35b-a3b": (16, {"tp": 2, "ep": 8}, {"tp": 4, "ep": 4}),
    "qwen3-next-80b-a3b": (32, {"tp": 2, "pp": 2, "ep": 8}, {"tp": 8, "ep": 8}),
    "glm-4.5-air": (64, {"tp": 2, "pp": 4, "ep": 8}, {"tp": 8, "ep": 8}),
    "glm-4.7": (256, {"tp": 4, "pp": 8, "ep": 8}, {"tp": 16, "ep": 16}),
    "gpt-oss-20b": (8, {"tp": 2, "ep": 4}, {"tp": 2}),
    "gpt-oss-120b": (64, {"tp": 2, "pp": 2, "ep": 8}, {"tp": 8}),
    "kimi-k2": (512, {"tp": 8, "pp": 16, "ep": 8}, {"tp": 32, "ep": 32}),
}
# Billions of parameters, and of those that a token is multiplied with, without embeddings.
WITH_EXPERTS = {"qwen3.5-35b-a3b": (34.66, 2.4), "qwen3-next-80b-a3b": (79.67, 3.3)}


def plan(name: str, changes: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[Any]]:
    num_gpus, train, rollout = LAYOUTS[name]
    config = load_config_dict(
        {
            "run": {"name": "plan"},
            "model": {"path": f"{MODELS}/{name}", "dtype": "bfloat16"},
            "train": {"learning_rate": 1e-6, "recompute": "full", **train},
            "rollout": {"engine": "vllm", "max_new_tokens": 1024, "max_batch": 64, **rollout},
            "algorithm": {"name": "grpo", "kl_coef": 0},
            "data": {"prompts": "data/gsm8k/train.jsonl", "max_prompt_tokens": 256}
            | {"prompt_key": "question", "answer_key": "answer"},
            "reward": {"functions": {"correct": {"function": "gsm8k"}}},
            "steps": {"prompts_per_step": num_gpus, "samples_per_prompt": 8, "num_steps": 10},
        },
        [f"{key}={value}" for key, value in (changes or {}).items()],
    )
    return plan_report(config, num_gpus, H200, Host())


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (size > 16))
        for name, (size, *_) in LAYOUTS.items()
    ],
)
def test_published_model_is_planned_with_memory_and_time(name: str) -> None:
    report, violations = plan(name)
    assert not violations
    assert report["fits"], report["verdict"]
    assert 1 << 30 < report["memory"]["train_peak_bytes"] < 141 << 30
    assert 0 < report["step"]["predicted_s"] < 600


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_hybrid_models_with_experts_have_the_sizes_of_their_names(name: str) -> None:
    family, shape = read_model(None, read_config(ROOT / MODELS / name))
    total = sum(prod(size) for size in hf_shapes(family, shape).values())
    assert (total / 1e9, matmul_params(shape) / 1e9) == pytest.approx(WITH_EXPERTS[name], rel=0.02)
    assert shape.mixer is not None and shape.num_attention_layers == shape.num_layers // 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train.cp": 2}, "train.cp"),
        ({"train.tp": 4}, "at most the model's 2 key-value heads"),
        ({"train.ep": 3}, "train.ep"),
        ({"rollout.tp": 32, "rollout.ep": 1}, "linear_num_key_heads"),
    ],
)
def test_layouts_that_a_hybrid_with_experts_cannot_have_are_refused_by_plan(
    changes: dict[str, Any], named: str
) -> None:
    try:
        _, violations = plan("qwen3.5-35b-a3b", changes)
    except ModelError as error:  # a weight that cannot be divided
        violations = [error]
    assert any(named in str(one) for one in violations), violations


def test_files_of_published_models_are_complete() -> None:
    found = {file.parent.name for file in (ROOT / MODELS).glob("*/config.json")}
    assert LAYOUTS.keys() <= found
    for name in LAYOUTS:
        json.loads((ROOT / MODELS / name / "config.json").read_text())
