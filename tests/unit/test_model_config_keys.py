"""Families take published config.json files, but none with keys that may change numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, OlmoConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from windowed_family import FAMILY as WINDOWED

from hybridrl.config.load import load_config_dict
from hybridrl.errors import ModelError
from hybridrl.loop import preflight as validate
from hybridrl.models.families import FAMILIES
from hybridrl.models.family import Scales, read_model, resolve_family
from hybridrl.models.megatron.rotary_positions import rotary_frequencies
from hybridrl.rollout.registry import EnginePackage
from hybridrl.versions import Support

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **SIZES}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}


def test_table_of_architectures_is_that_of_the_families() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    cells = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    rows = [row for row in cells if "For" in row[0]]  # the first table
    # A wrapper stands before the text model that it contains.
    said = {tuple(cell.split(",", -1)[-1].strip(" `") for cell in row[:2]) for row in rows}
    families = [resolve_family(name, {}) for name in FAMILIES]
    engines = {row[1].strip(" `"): row[2].strip() for row in rows}
    assert engines == {one.name: "hf, vllm" if one.is_served_fused else "hf" for one in families}
    assert said == {
        (architecture, one.name) for one in families for architecture in one.architectures
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_taken(name: str) -> None:
    family, shape = read_model(None, PUBLISHED[name]["config"])
    assert family.name == PUBLISHED[name]["config"]["model_type"]
    assert [shape.num_layers, shape.num_kv_heads, shape.head_dim] == PUBLISHED[name]["shape"]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        LlamaConfig(**SIZES, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES),
    ],
)
def test_what_transformers_writes_is_taken(config: Any, tmp_path: Path) -> None:
    config.architectures = [{"llama": "Llama", "qwen2": "Qwen2"}.get(config.model_type, "Qwen3")]
    config.architectures[0] += "ForCausalLM"
    config.save_pretrained(tmp_path)
    for written in (
        json.loads((tmp_path / "config.json").read_text()),  # what differs from the defaults
        json.loads(config.to_json_string(use_diff=False)),
    ):
        _, shape = read_model(None, written)
        assert (shape.num_layers, shape.num_kv_heads) == (2, 2)
    without = {key: value for key, value in written.items() if key != "num_key_value_heads"}
    if config.model_type != "llama":  # transformers' default, which is no divisor of these heads
        with pytest.raises(ModelError, match="num_key_value_heads: got 32"):
            read_model(None, without)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAMA, "sliding_window": 4096}, "sliding_window: got 4096; allowed: null"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping: got 30.0"),
        ({**LLAMA, "query_pre_attn_scalar": 144}, "query_pre_attn_scalar: got 144"),
        ({**LLAMA, "logit_scale": 0.0625}, "logit_scale: got 0.0625; allowed: 1 or null"),
        ({**LLAMA, "embedding_multiplier": 12}, "embedding_multiplier: got 12"),
        ({**LLAMA, "residual_multiplier": 0.22}, "residual_multiplier: got 0.22"),
        ({**LLAMA, "attention_chunk_size": 8192}, "attention_chunk_size: got 8192"),
        ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout: got 0.1; allowed: 0 or null"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config: got"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts: got 8; allowed: 0 or null"),
        ({**LLAMA, "qk_norm": True}, "qk_norm: got true"),
        ({**LLAMA, "auto_map": {"AutoModel": "x.X"}}, "auto_map: got"),
        ({**LLAMA, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act: got gelu_pytorch_tanh"),
        ({**LLAMA, "my_scale": 0.5}, "my_scale: got 0.5; allowed: keys that family llama handles"),
        ({**MISTRAL, "attention_dropout": 0.1}, "attention_dropout: got 0.1; allowed: 0"),
        ({**MISTRAL, "llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling: got"),
        ({**QWEN2, "dual_chunk_attention_config": {"chunk_size": 9}}, "dual_chunk_attention_conf"),
        ({**QWEN2, "mlp_bias": True}, "mlp_bias: got true"),
        ({**QWEN2, "attention_bias": False}, "attention_bias: got false; allowed: True"),
        ({**QWEN2, "use_mrope": True}, "use_mrope: got true; allowed: false or null"),
        ({**QWEN3, "partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ({**QWEN3, "rope_scaling": {"rope_type": "longrope"}}, "rope_type: got longrope"),
    ],
)
def test_key_that_changes_numbers_is_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(None, config)
    assert f"config.json: {key}" in str(caught.value) or key in str(caught.value)
    assert "family" in str(caught.value)


def test_granite_is_taken_with_its_multipliers_and_the_dropout_it_was_pretrained_with() -> None:
    own = {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
    }
    family, _ = read_model(None, {**SIZES, **own})
    keywords = family.transformer_config({**SIZES, **own})
    assert (keywords["softmax_scale"], keywords["attention_dropout"]) == (0.015625, 0.0)
    assert family.model_keywords({**SIZES, **own})["scales"] == Scales(12.0, 0.22, 8.0)


def test_family_of_ones_own_answers_for_the_keys_that_it_names() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    family, shape = read_model("windowed_family:FAMILY", {**QWEN2, **windows})
    assert family is WINDOWED and shape.qkv_bias
    keywords = family.transformer_config({**QWEN2, **windows})
    assert keywords["window_size"] == (4, 0) and keywords["window_attn_skip_freq"] == [0, 1]
    with pytest.raises(ModelError, match="attn_logit_softcapping: got 50.0"):
        read_model("windowed_family:FAMILY", {**QWEN2, **windows, "attn_logit_softcapping": 50.0})
    olmo = OlmoConfig(**SIZES, eos_token_id=1).to_dict() | {"architectures": ["OlmoForCausalLM"]}
    assert read_model("olmo_family:FAMILY", olmo)[0].name == "olmo"
    with pytest.raises(ModelError, match="clip_qkv: got 8.0; allowed: null"):
        read_model("olmo_family:FAMILY", {**olmo, "clip_qkv": 8.0})


def test_engine_without_code_for_a_family_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package = EnginePackage(
        lambda: True, lambda is_cpu: "1", lambda *sizes: (), {}, lambda is_cpu: Support("1", ("1",))
    )
    monkeypatch.setattr(validate, "engine_package", lambda name: package)
    config = load_config_dict(
        {
            "run": {"name": "a", "dir": "runs"},
            "model": {"init": "model"},
            "algorithm": {"name": "grpo"},
            "steps": {"samples_per_prompt": 2},
            "rollout": {"engine": "vllm"},
        }
    )
    smollm3 = {**SIZES, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    (error,) = validate._engine(config, smollm3)
    assert error.name == "rollout.engine" and "family smollm3" in str(error)
    assert not list(validate._engine(config, LLAMA))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "original_max_position_embeddings": 1000, "low_freq_factor": 2.0},
        YARN,
        {**YARN, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    ],
)
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """Bit for bit; what sines and cosines are multiplied by is in the softmax's scale, squared."""
    sizes = {**SIZES, "hidden_size": 256}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    config = {**LLAMA, **sizes, "rope_parameters": rope}
    family, shape = read_model(None, config)
    rotary = family.model_keywords(config)["rotary"]
    assert torch.equal(rotary_frequencies(rotary, shape.head_dim), theirs.inv_freq)
    scale = family.transformer_config(config).get("softmax_scale", shape.head_dim**-0.5)
    assert scale == pytest.approx(theirs.attention_scaling**2 * shape.head_dim**-0.5)
    assert (theirs.attention_scaling > 1) == (rope == YARN or "beta_fast" in rope)
