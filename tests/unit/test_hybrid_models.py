"""Models with recurrent layers in engines: rules, adapters and vLLM's cache, without vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import adapted
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.mixers import MixerShape
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.model_rules import held_family, hybrid_rules, merging_notice
from hybridrl.rollout.vllm.arguments import engine_arguments
from hybridrl.rollout.vllm.hybrid_cache import HybridCache, hybrid_request_bytes

MODELS = Path(__file__).parents[2] / "examples" / "recipes" / "models"
CONFIG = read_config(MODELS / "qwen3.5-4b")
FAMILY, SHAPE = read_model(None, CONFIG)
# Of Qwen3.5-4B: 32 value heads of 128 x 128 in float32, and 3 inputs of 8,192 channels.
STATE = 32 * 128 * 128 * 4 + 3 * 8192 * 2
PER_POSITION = 2 * 4 * 256 * 2  # keys and values of a layer
GIB = 1 << 30


def arguments(is_cpu: bool, **settings: Any) -> dict[str, Any]:
    made = EngineSettings(CONFIG, FAMILY.architectures, "bfloat16", 8, 3000, **settings)
    return engine_arguments(made, SHAPE, 1, 9 * GIB, None if is_cpu else (120 * GIB, 140 * GIB))


def test_blocks_of_vllms_cache_hold_a_state_and_layers_share_them() -> None:
    cache = HybridCache.of(SHAPE, 1, 16, 2, 2)
    assert cache.block_size == 528 and 512 * PER_POSITION < STATE <= 528 * PER_POSITION
    # 8 layers with attention are one group, 24 with states three.
    assert (cache.attention_groups, cache.recurrent_groups) == (1, 3)
    assert cache.block_bytes == 8 * 528 * PER_POSITION
    assert cache.blocks_per_request(528, caches_prefixes=False) == 1 + 3
    assert cache.blocks_per_request(529, caches_prefixes=True) == 2 + 2 * 3
    # With more tensor parallelism, states and keys are divided alike.
    assert HybridCache.of(SHAPE, 2, 16, 2, 2).block_size == 528
    assert HybridCache.of(SHAPE, 1, 16, 1, 2).block_size == 1056  # keys in FP8
    assert SHAPE.mixer is not None
    alone = replace(SHAPE, mixer=replace(SHAPE.mixer, layers=tuple(range(32))))
    assert HybridCache.of(alone, 1, 16, 2, 2).recurrent_groups == 1  # no layer has attention
    least = 3000 * PER_POSITION * 8 + 24 * STATE
    assert least < hybrid_request_bytes(SHAPE, 3000, 1, 2, 2) < 2 * least


def test_vllm_is_started_with_a_cache_for_all_requests() -> None:
    on_gpu, on_cpu = arguments(is_cpu=False), arguments(is_cpu=True)
    assert on_gpu["mamba_ssm_cache_dtype"] == on_cpu["mamba_ssm_cache_dtype"] == "float32"
    assert (on_gpu["enable_prefix_caching"], on_cpu["enable_prefix_caching"]) == (True, False)
    assert on_gpu["gdn_prefill_backend"] == "triton" and "gdn_prefill_backend" not in on_cpu
    block = 8 * 528 * PER_POSITION
    assert on_gpu["kv_cache_memory_bytes"] == block * (8 * (6 + 6) + 1)
    assert on_cpu["kv_cache_memory_bytes"] <= GIB + block * 2


@pytest.mark.parametrize(
    ("engine", "records", "named"),
    [
        ("sglang", False, "rollout.engine: got sglang; allowed: hf or vllm with a model"),
        ("vllm", True, "algorithm.router_replay: got rollout; allowed: off with vllm"),
        ("vllm", False, None),
        ("hf", True, None),
    ],
)
def test_engines_and_options_that_a_hybrid_model_cannot_have_are_refused(
    engine: str, records: bool, named: str | None
) -> None:
    found = [str(one) for one in hybrid_rules(engine, records, SHAPE)]
    assert len(found) == (named is not None)
    assert named is None or named in found[0]
    own = replace(SHAPE, mixer=MixerShape(layers=(0,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MixerShape, "name", "own layers", raising=False)
        said = [str(one) for one in hybrid_rules(engine, records, own)]
    assert len(said) == (engine != "hf") and all("allowed: hf with" in one for one in said)
    _, dense = read_model(None, read_config(MODELS / "qwen3-8b"))
    assert not list(hybrid_rules(engine, records, dense))


def test_vllm_receives_a_hybrid_models_weights_with_adapters_merged_into_them() -> None:
    family = adapted(FAMILY, Lora(rank=8, alpha=16.0))
    assert held_family("vllm", family, SHAPE).lora is None
    assert held_family("hf", family, SHAPE).lora is not None
    assert "merged weights" in str(merging_notice("vllm", family, SHAPE))
