"""FP8 rollouts: layouts with scales, refusals, the engine's settings, and default weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.config.rules_quantization import quantization_rules
from hybridrl.config.schema import Config, RolloutConfig, TrainConfig
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.hybrid_engine.planning.wire_elements import wire_itemsize
from hybridrl.models.family import Family, ModelShape, resolve_family
from hybridrl.models.quantized import (
    element_sizes,
    engine_scales,
    quantized_shapes,
    trainer_scales,
    unquantized_modules,
)
from hybridrl.models.weights import (
    check_layout,
    fused_layout,
    fused_layouts,
    megatron_layout,
    megatron_layouts,
)
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.model_rules import cpu_rules, quantized_model_rules
from hybridrl.rollout.vllm.arguments import LINEAR_BACKEND, engine_arguments
from hybridrl.services.planner import times
from hybridrl.services.planner.hardware import ClusterFile
from hybridrl.services.planner.plan_report import plan_report

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def model(name: str, layers: int = 2) -> tuple[Family, ModelShape, dict[str, Any]]:
    config = json.loads((MODELS / f"{name}.json").read_text()) | {"num_hidden_layers": layers}
    config.pop("layer_types", None)
    family = resolve_family(None, config)
    return family, family.shape(config), config


def test_scales_have_their_place_next_to_fused_and_interleaved_weights() -> None:
    family, shape, _ = model("qwen2.5-7b")
    quantized = quantized_shapes(family, shape)
    engine = engine_scales(fused_layout(family, shape, 4, 1), quantized)
    check_layout(engine)
    qkv, gate_up = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj"
    assert engine.shapes[f"{qkv}_scale_inv"] == ((896 + 2 * 128) // 128, 28)
    assert engine.shapes[f"{gate_up}.weight_scale_inv"] == (2 * 37, 28)
    sizes = element_sizes(engine)
    assert sizes[qkv] == 1 and sizes[f"{qkv}_scale_inv"] == 4
    assert not {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} & sizes.keys()
    trainer, parts = trainer_scales(
        megatron_layout(family, shape, TrainLayout(2, tp=2), 1, te=True), quantized
    )
    check_layout(trainer)
    # Queries of 2 heads of keys are in 2 places, and have one tensor of scales.
    in_qkv = parts["0/decoder.layers.0.self_attention.linear_qkv.weight"]
    assert len(in_qkv) == 6 and len({part.scales for part in in_qkv}) == 3


def test_fp8_plans_send_half_of_the_weights_and_are_proven() -> None:
    family, shape, _ = model("qwen2.5-7b")
    quantized = quantized_shapes(family, shape)
    sources = megatron_layouts(family, shape, TrainLayout(2, tp=2))
    targets = fused_layouts(family, shape, 1) * 2
    plain = plan_reshard(sources, targets, 2)
    held = [trainer_scales(layout, quantized)[0] for layout in sources]
    wanted = [engine_scales(layout, quantized) for layout in targets]
    assert wire_itemsize(wanted, 2) == 1 and wire_itemsize(targets, 2) == 2
    plan = plan_reshard(held, wanted, 1, weight_itemsize=2)
    prove(plan, held, wanted)
    elements = sum(rows * columns for rows, columns in quantized.values())
    saved = elements // 2 - elements // 2 // 128**2 * 4
    for rank in range(2):
        assert plan.receive_bytes[rank] == plain.receive_bytes[rank] - saved
    with pytest.raises(ModelError, match="whole blocks of 128 x 128"):
        engine_scales(fused_layout(family, replace(shape, ffn_size=18944 + 64), 1, 0), quantized)


@pytest.mark.parametrize(
    ("name", "rollout", "train", "refused"),
    [
        ("qwen2.5-7b", {"tp": 4}, {"tp": 4}, None),
        ("qwen2.5-0.5b", {}, {}, None),
        ("qwen3-30b-a3b", {"tp": 4, "ep": 4}, {"tp": 4, "ep": 4, "etp": 1}, None),
        ("qwen2.5-1.5b", {}, {"tp": 4}, "train.tp"),
        ("qwen2.5-0.5b", {}, {"tp": 2}, "train.tp"),
        ("qwen2.5-0.5b", {"tp": 2}, {}, "rollout.tp"),
        ("qwen3-30b-a3b", {"tp": 4}, {}, "rollout.tp"),
        ("deepseek-v3", {}, {}, "latent attention"),
        ("qwen2.5-0.5b", {}, {"fp8": "blockwise"}, None),
        ("qwen2.5-0.5b", {}, {"fp8": "blockwise", "tp": 2}, "train.fp8 blockwise"),
    ],
)
def test_cuts_through_blocks_are_refused(
    name: str, rollout: dict[str, int], train: dict[str, Any], refused: str | None
) -> None:
    family, shape, _ = model(name, 4)
    if "fp8" in train:
        section = RolloutConfig()
    else:
        section = RolloutConfig(engine="vllm", quantization="fp8", **rollout)
    found = list(quantized_model_rules(section, TrainConfig(**train), family, shape))
    said = [f"{error.name} {error.value} {error.allowed} {error.remedy}" for error in found]
    assert len(found) == (refused is not None), said
    assert refused is None or refused in said[0]


def config(**changes: Any) -> Config:
    content: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"init": str(MODELS / "qwen2.5-7b.json"), "dtype": "bfloat16"},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 8},
        "rollout": {"engine": "vllm", "quantization": "fp8"},
    }
    for key, value in changes.items():
        content[key] = {**content.get(key, {}), **value}
    return load_config_dict(content, [])


@pytest.mark.parametrize(
    ("changes", "key", "match"),
    [
        ({"rollout": {"engine": "sglang"}}, "rollout.quantization", "none with rollout.engine"),
        ({"rollout": {"engine": "hf"}}, "rollout.quantization", "none with rollout.engine=hf"),
        (
            {"rollout": {"engine": "hf", "quantization": "none", "kv_cache_dtype": "fp8"}},
            "rollout.kv_cache_dtype",
            "auto with rollout.engine=hf",
        ),
        ({"lora": {"rank": 8}}, "rollout.quantization", "none with lora"),
        ({"model": {"dtype": "float32"}}, "model.dtype", "bfloat16 with"),
        ({"train": {"fuse_param_gather": True}}, "train.fuse_param_gather", "whole 128 x 128"),
        ({"rollout": {"transport": "peer"}}, "rollout.transport", "auto or packed"),
    ],
)
def test_knobs_that_do_not_go_with_fp8_are_named(
    changes: dict[str, Any], key: str, match: str
) -> None:
    (error,) = quantization_rules(config(**changes), "bfloat16")
    assert error.name == key and match in error.allowed


def test_fp8_needs_gpus_and_turns_importance_weights_on() -> None:
    assert not list(quantization_rules(config(), "bfloat16"))
    (error,) = cpu_rules("fp8", "auto", is_cpu=True)
    assert "without GPUs" in error.allowed and not list(cpu_rules("fp8", "fp8", is_cpu=False))
    assert config().algorithm.correction.weight == "token"
    kept = {"correction": {"weight": "none"}}
    assert config(algorithm=kept).algorithm.correction.weight == "none"
    off = {"quantization": "none"}
    assert config(rollout=off).algorithm.correction.weight == "none"
    cache = {**off, "kv_cache_dtype": "fp8"}
    assert config(rollout=cache).algorithm.correction.weight == "token"


def test_the_engine_is_told_of_blocks_and_of_what_stays_in_16_bits() -> None:
    family, shape, hf_config = model("qwen3-30b-a3b")
    kept = tuple(unquantized_modules(family, shape))
    assert set(kept) == {
        "model.embed_tokens",
        "lm_head",
        *(f"model.layers.{layer}.mlp.gate" for layer in range(2)),
    }
    settings = EngineSettings(
        hf_config,
        family.architectures,
        "bfloat16",
        8,
        64,
        quantization="fp8",
        unquantized=kept,
        kv_cache_dtype="fp8",
    )
    told = settings.config_json()["quantization_config"]
    assert told["weight_block_size"] == [128, 128] and told["activation_scheme"] == "dynamic"
    assert told["modules_to_not_convert"] == list(kept) and told["quant_method"] == "fp8"
    memory = 100 << 30, 140 << 30
    given = engine_arguments(settings, shape, 1, 1 << 30, memory)
    assert given["linear_backend"] == LINEAR_BACKEND and given["moe_backend"] == "triton"
    assert given["kv_cache_dtype"] == "fp8"
    plain = replace(settings, quantization="none", kv_cache_dtype="auto")
    assert "quantization_config" not in plain.config_json()
    other = engine_arguments(plain, shape, 1, 1 << 30, memory)
    assert not {"linear_backend", "kv_cache_dtype"} & other.keys()
    assert other["kv_cache_memory_bytes"] == 2 * given["kv_cache_memory_bytes"]


def test_a_plan_counts_a_byte_per_weight_more_where_weights_were_shared() -> None:
    cluster = ClusterFile(gpu="H200", gpus_per_node=8)
    found = {}
    for quantization in ("none", "fp8"):
        sizes = {"quantization": quantization, "max_batch": 64, "transport": "packed"}
        report, violations = plan_report(config(rollout=sizes), 8, cluster)
        assert not violations, violations
        found[quantization] = report
    in_qkv = 28 * 3584 * (3584 + 2 * 512)
    elements = in_qkv + 28 * (3584 * 3584 + 3 * 3584 * 18944)
    more = {
        name: found["fp8"]["memory"][name] - found["none"]["memory"][name]
        for name in ("train_peak_bytes", "rollout_peak_bytes")
    }
    # Queries, keys and values were not shared, because Megatron interleaves them.
    assert more["rollout_peak_bytes"] == elements + elements // 128**2 * 4 - 2 * in_qkv


@pytest.mark.parametrize(
    ("layer_s", "quantization", "advice"),
    [
        (0.0, "none", "with rollout.quantization=fp8 a step would take"),
        (0.0, "fp8", None),
        (1e-3, "none", None),
        (1e-3, "fp8", "does not pay here"),
    ],
)
def test_a_plan_advises_fp8_where_it_pays(
    layer_s: float, quantization: str, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "FP8_STEP_S", layer_s)
    sizes = {"quantization": quantization, "max_batch": 32, "max_new_tokens": 2048}
    changes: dict[str, Any] = {"rollout": sizes, "train": {"micro_batch_tokens": 4096}}
    report, _ = plan_report(config(**changes), 8, ClusterFile(gpu="H200", gpus_per_node=8))
    note = report["step"]["note"]
    assert note is None if advice is None else advice in note
    changes["rollout"] = {**sizes, "engine": "sglang", "quantization": "none"}
    report, _ = plan_report(config(**changes), 8, ClusterFile(gpu="H200", gpus_per_node=8))
    assert "rollout.quantization" not in (report["step"]["note"] or "")
