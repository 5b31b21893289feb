"""What `numerics.match=exact` refuses, each by its name."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import QUICKSTART

from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import check
from hybridrl.config.rules_numerics import gpu_numerics_rules
from hybridrl.config.schema import Config
from hybridrl.services.planner.plan_report import plan_report

LLAMA = {"model_type": "llama"}


def config(*overrides: str, algorithm: str = "grpo") -> Config:
    content = {"run": {"name": "x"}, "model": {"init": "x"}, "algorithm": {"name": algorithm}}
    return load_config_dict(content, ["numerics.match=exact", *overrides])


def refusals(found: Config, shape: dict[str, Any]) -> dict[str, str]:
    errors = check(found, 2, shape)
    return {error.name: str(error) for error in errors if "numerics.match" in str(error)}


def test_exact_mode_uses_torchs_layers_and_refuses_nothing_that_it_supports() -> None:
    assert config().train.layers == "torch"
    for kind in ("llama", "qwen3", "gemma3_text"):
        assert refusals(config("steps.updates_per_step=2"), {"model_type": kind}) == {}
    close = config("numerics.match=close", "train.tp=2")
    assert close.train.layers == "auto"
    assert refusals(close, {"model_type": "gpt_oss"}) == {}


@pytest.mark.parametrize(
    "override",
    [
        "train.tp=4",
        "train.cp=2",
        "train.ep=2",
        "rollout.tp=2",
        "rollout.engine=sglang",
        "train.layers=transformer_engine",
        "train.fp8=hybrid",
        "train.fp32_residual=true",
        "rollout.quantization=fp8",
        "rollout.kv_cache_dtype=fp8",
        "rollout.top_p=0.9",
        "rollout.top_k=20",
    ],
)
def test_exact_mode_refuses_a_knob_by_its_name(override: str) -> None:
    key, _, value = override.partition("=")
    found = refusals(config(override), LLAMA)
    assert value in found[key].lower()
    assert "numerics.match=close" in found[key]


def test_exact_mode_refuses_models_adapters_and_algorithms() -> None:
    for found in (
        refusals(config(), {"model_type": "gpt_oss"}),
        refusals(config(), {"model_type": "gemma2"}),
        refusals(config("lora.rank=8"), LLAMA),
        refusals(config(algorithm="sft"), LLAMA),
    ):
        assert set(found) == {"numerics.match"}


def test_mixtures_need_the_hf_engine() -> None:
    shape = {"model_type": "qwen3_moe"}
    assert refusals(config("rollout.engine=hf"), shape) == {}
    assert "experts" in refusals(config("rollout.engine=vllm"), shape)["rollout.engine"]


def test_two_ranks_sum_in_either_order_if_engine_and_trainer_have_the_same_parts() -> None:
    assert refusals(config("train.tp=2", "rollout.tp=2", "rollout.engine=vllm"), LLAMA) == {}
    assert "rollout.tp" in refusals(config("train.tp=2", "rollout.engine=vllm"), LLAMA)
    assert "train.tp" in refusals(config("train.tp=4", "rollout.tp=4"), LLAMA)


def test_a_plan_for_gpus_refuses_what_is_not_compared_there() -> None:
    """The quickstart's model has heads of another size."""
    model = f"model.init={QUICKSTART / 'model'}"
    _, violations = plan_report(config("rollout.engine=vllm", model), 1)
    (said,) = [str(one) for one in violations if one.name == "numerics.match"]
    assert "heads of size" in said


QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "sliding_window": 32768,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("overrides", "changes", "name", "text"),
    [
        ([], {}, "", ""),
        ([], {"rope_scaling": {"rope_type": "llama3"}}, "", ""),
        ([], {"rope_scaling": {"rope_type": "yarn"}}, "numerics.match", "yarn"),
        ([], {"model_type": "gemma3_text"}, "numerics.match", "gemma3_text"),
        ([], {"head_dim": 256}, "numerics.match", "256"),
        ([], {"model_type": "mistral"}, "numerics.match", "windows"),
        ([], {"use_sliding_window": True}, "numerics.match", "windows"),
        (["rollout.engine=hf"], {}, "rollout.engine", "vllm"),
        (["train.tp=2", "rollout.tp=2"], {}, "train.tp", "on GPUs"),
        (["model.dtype=float32"], {}, "model.dtype", "bfloat16"),
    ],
)
def test_what_exact_mode_cannot_do_on_gpus_is_refused_by_name(
    overrides: list[str], changes: dict[str, Any], name: str, text: str
) -> None:
    given = QWEN2 | changes
    if changes.get("model_type") == "mistral":
        del given["use_sliding_window"]
    found = list(gpu_numerics_rules(config("rollout.engine=vllm", *overrides), given))
    assert [error.name for error in found] == ([name] if name else [])
    assert not found or text in str(found[0])
