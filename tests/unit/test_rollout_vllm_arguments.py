"""How much memory a vLLM engine is started with, judged without vLLM and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.config.load import load_config_dict
from hybridrl.errors import UserError
from hybridrl.loop import rollout_setup
from hybridrl.models.family import resolve_family
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.vllm.adapter import VllmEngine
from hybridrl.rollout.vllm.arguments import CPU_BLOCK_SIZE, engine_arguments, prefill_tokens

GIB = 1 << 30
QWEN_7B: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "models" / "qwen2.5-7b.json").read_text()
)
FAMILY = resolve_family(None, QWEN_7B)
KV_BYTES_PER_TOKEN = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads, head size, bfloat16


def arguments(
    free: int | None, max_batch: int = 256, max_tokens: int = 768, tp: int = 1, **settings: Any
) -> dict[str, Any]:
    made = EngineSettings(
        QWEN_7B, FAMILY.architectures, "bfloat16", max_batch, max_tokens, **settings
    )
    memory = None if free is None else (free * GIB, 140 * GIB)
    return engine_arguments(made, FAMILY.shape(QWEN_7B), tp, 15 * GIB // tp, memory)


def test_the_kv_cache_is_no_larger_than_its_requests() -> None:
    for tp in (1, 2, 4):
        found = arguments(120, tp=tp)["kv_cache_memory_bytes"]
        needed = 256 * 768 * KV_BYTES_PER_TOKEN // tp
        assert needed <= found < 1.01 * needed
    few = arguments(120, max_batch=8)["kv_cache_memory_bytes"]
    assert few < found


def test_vllm_measures_where_requests_want_more_than_there_is() -> None:
    found = arguments(120, max_batch=4096, max_tokens=4096)
    assert "kv_cache_memory_bytes" not in found
    usable = 120 - 0.03 * 140
    assert found["gpu_memory_utilization"] == pytest.approx(usable / 140, rel=1e-6)


def test_memory_that_the_trainer_takes_later_is_left_alone() -> None:
    plain = arguments(120, max_batch=4096)["gpu_memory_utilization"]
    reserving = arguments(120, max_batch=4096, reserved_bytes=42 * GIB)["gpu_memory_utilization"]
    assert plain - reserving == pytest.approx(42 / 140, rel=1e-6)
    with pytest.raises(UserError, match="20.0 GiB, of which 42.0 GiB are reserved"):
        arguments(20, reserved_bytes=42 * GIB)


def prefill(model: dict[str, Any], tp: int = 1, dtype: str = "bfloat16") -> int:
    family = resolve_family(None, model)
    settings = EngineSettings(model, family.architectures, dtype, max_batch=512, max_tokens=33)
    return prefill_tokens(settings, family.shape(model), tp)


def test_small_models_take_the_prompts_of_more_requests_into_a_step() -> None:
    assert arguments(120)["max_num_batched_tokens"] == 2048  # vLLM's own
    assert arguments(120, max_batch=4096)["max_num_batched_tokens"] == 4096  # a token of each
    small = {**QWEN_7B, "hidden_size": 896, "intermediate_size": 4864}
    tokens = prefill(small)
    assert 2048 < tokens < 8192 and tokens % 256 == 0
    assert tokens * (3 * 4864 + 4 * 896) * 2 <= 256 << 20
    assert prefill(small, tp=2) > tokens
    mixture = {
        **small,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 768,
        "num_attention_heads": 12,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
    }
    assert prefill(mixture) == 512 * 16  # the arithmetic example's requests begin together
    assert prefill(mixture, dtype="float32") < 8192


@pytest.mark.parametrize("eager", [False, True])
def test_an_eager_engine_is_asked_for_on_gpus_too(eager: bool) -> None:
    assert arguments(120, eager=eager)["enforce_eager"] is eager
    assert arguments(None)["enforce_eager"] is True


def test_on_cpu_the_cache_is_bounded_but_holds_one_request() -> None:
    bounded = arguments(None)["kv_cache_memory_bytes"]
    assert bounded <= GIB + 2 * CPU_BLOCK_SIZE * KV_BYTES_PER_TOKEN
    one = arguments(None, max_tokens=32768)["kv_cache_memory_bytes"]
    assert one >= 32768 * KV_BYTES_PER_TOKEN > GIB


def test_the_trainer_tells_the_engine_what_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineSettings] = []

    def keep(engine: VllmEngine, settings: EngineSettings, **others: Any) -> None:
        made.append(settings)

    monkeypatch.setattr(VllmEngine, "__init__", keep)
    config = load_config_dict(
        {
            "run": {"name": "x"},
            "model": {"init": "x"},
            "algorithm": {"name": "grpo"},
            "rollout": {"engine": "vllm", "eager": True},
        }
    )
    model: Any = SimpleNamespace(
        source=SimpleNamespace(
            computed_config=QWEN_7B,
            family=FAMILY,
            shape=FAMILY.shape(QWEN_7B),
            dtype=torch.bfloat16,
            directory=None,
        ),
        world=SimpleNamespace(rank=0, platform=SimpleNamespace(device=torch.device("cpu"))),
        layout=lambda: None,
        weights_in_place=dict,
    )
    rollout_setup.build_engine(config, model, RolloutLayout.consecutive(1, 1), reserved_bytes=7)
    assert (made[0].reserved_bytes, made[0].eager) == (7, True)


def test_logits_are_fp32_as_in_the_trainer() -> None:
    assert arguments(120)["hf_overrides"] == {"head_dtype": "float32"}
    plain = EngineSettings(QWEN_7B, FAMILY.architectures, "float32", 8, 64)
    found = engine_arguments(plain, FAMILY.shape(QWEN_7B), 1, GIB, None)
    assert "hf_overrides" not in found
