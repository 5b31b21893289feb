"""Families: HF configs read into sizes and Megatron keywords, and refusals that name the key."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from hybridrl.errors import ModelError
from hybridrl.models.cuts import megatron_cut
from hybridrl.models.families.deepseek_v3 import FAMILY
from hybridrl.models.family import MoeShape, Rotary, read_model, resolve_family
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.headers import HfHeaders
from hybridrl.models.hf.stored_slices import stored_shapes
from hybridrl.models.megatron.rotary_positions import rotary_frequencies
from hybridrl.models.weights import hf_shapes

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BOUNDS = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SIZES),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=16),
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        MistralConfig(**SIZES, head_dim=16),
        SmolLM3Config(**SIZES, pad_token_id=0),
        GraniteConfig(**SIZES),
        Phi3Config(**SIZES, pad_token_id=0),
        Olmo2Config(**SIZES),
        Glm4Config(**SIZES, pad_token_id=0),
        Glm4Config(**SIZES, pad_token_id=0, attention_bias=False),
        Qwen3_5TextConfig(**SIZES, **HYBRID),
        Qwen3_5TextConfig(**SIZES, **HYBRID, tie_word_embeddings=True),
    ],
)
def test_family_table_has_the_tensors_that_transformers_has(config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config)
    hf_config = {**config.to_dict(), "architectures": [type(model).__name__]}
    family = resolve_family(None, hf_config)
    assert family.name == config.model_type
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert hf_shapes(family, family.shape(hf_config)) == shapes


GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK: dict[str, Any] = {
    **GLM,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("config", "moe"),
    [
        (Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16), MoeShape(8, 2, 24)),
        (Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0]), MoeShape(8, 2, 24, 0, (0,))),
        (Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2), MoeShape(8, 2, 24, 0, (0,))),
        (MixtralConfig(**SIZES, num_local_experts=4, rms_norm_eps=1e-6), MoeShape(4, 2, 48)),
        (GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), MoeShape(4, 2, 48)),
        (
            Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40),
            MoeShape(8, 2, 24, shared_ffn_size=40, has_shared_gate=True),
        ),
        (
            OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, eos_token_id=1),
            MoeShape(8, 2, 48),
        ),
        (
            Glm4MoeConfig(**SIZES, **GLM, attention_bias=True, use_qk_norm=True),
            MoeShape(8, 4, 24, shared_ffn_size=48, dense_layers=(0,), has_bias=True),
        ),
        (
            Glm4MoeConfig(**SIZES, **GLM, head_dim=16),
            MoeShape(8, 4, 24, shared_ffn_size=48, dense_layers=(0,), has_bias=True),
        ),
        (
            DeepseekV3Config(**(SIZES | DEEPSEEK)),
            MoeShape(8, 4, 24, shared_ffn_size=48, dense_layers=(0,), has_bias=True),
        ),
        (
            DeepseekV3Config(**(SIZES | DEEPSEEK | {"q_lora_rank": None})),
            MoeShape(8, 4, 24, shared_ffn_size=48, dense_layers=(0,), has_bias=True),
        ),
    ],
)
def test_family_table_has_the_experts_that_transformers_writes(
    config: PreTrainedConfig, moe: MoeShape, tmp_path: Path
) -> None:
    """Files hold single experts, except GPT-OSS's; transformers 5 stacks them in memory."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    hf_config = read_config(tmp_path)
    family, shape = read_model(None, hf_config)
    assert (family.name, shape.moe) == (config.model_type, moe)
    assert stored_shapes(hf_shapes(family, shape)) == dict(HfHeaders(tmp_path).shapes)
    keywords = family.transformer_config(hf_config)
    layers = [int(layer not in moe.dense_layers) for layer in range(2)]
    assert (keywords["num_moe_experts"], keywords["moe_layer_freq"]) == (moe.num_experts, layers)
    if moe.has_bias:
        assert keywords["moe_router_score_function"] == "sigmoid"
        return
    if family.name == "olmoe":  # which refuses norm_topk_prob
        assert keywords["moe_router_pre_softmax"] is True
        return
    # Mixtral's weights of a token's experts add up to 1, Qwen's where norm_topk_prob says so.
    is_renormalized = family.name in ("mixtral", "gpt_oss")
    assert keywords["moe_router_pre_softmax"] is not is_renormalized
    renormalized = family.transformer_config({**hf_config, "norm_topk_prob": True})
    assert renormalized["moe_router_pre_softmax"] is False


def test_family_reads_the_defaults_of_transformers() -> None:
    dense = (
        MistralConfig(),
        SmolLM3Config(),
        GraniteConfig(),
        Phi3Config(),
        Olmo2Config(),
        Glm4Config(),
    )
    mixtures = (
        Qwen3MoeConfig(),
        MixtralConfig(),
        DeepseekV3Config(),
        Qwen2MoeConfig(),
        OlmoeConfig(),
        GptOssConfig(),
        Glm4MoeConfig(num_attention_heads=32),  # the default does not divide the hidden size
    )
    for config in (*mixtures, *dense):
        whole = config.to_dict()
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        least = {key: whole[key] for key in (*needed, "intermediate_size", "hidden_act")}
        least["max_position_embeddings"] = whole["max_position_embeddings"]
        family = resolve_family(config.model_type, {})
        assert family.shape(least) == family.shape(whole)
        assert family.transformer_config(least) == family.transformer_config(whole)
        assert family.model_keywords(least) == family.model_keywords(whole)


def test_family_reads_new_and_old_rope_keys() -> None:
    family = resolve_family("llama", {})
    old_rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    new = family.model_keywords({**SIZES, "rope_parameters": LLAMA3_ROPE})
    old = family.model_keywords({**SIZES, "rope_theta": 500000.0, "rope_scaling": old_rope})
    assert new == old
    assert new["rotary"] == Rotary(500000.0, "llama3", 32.0, 8192, low=1.0, high=4.0)
    plain = family.model_keywords({**SIZES, "rope_scaling": None})
    assert plain["rotary"] == Rotary(10000.0)
    written = LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3_ROPE)).to_dict()
    assert family.model_keywords(written) == new


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.original_max_position_embeddings is missing",
        ),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "rope_parameters.truncate"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor"),
        ("llama", {"rope_parameters": {**YARN, "mscale": 1.0}}, "mscale_all_dim"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_type: got ntk"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "high_freq_factor"),
        (
            "llama",
            {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("llama", {"vocab_size": None}, "vocab_size"),
        ("llama", {"hidden_size": "32"}, "hidden_size"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (
            "mistral",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "layer_typ",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: got \\[1\\]; allowed: 2 values"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ("smollm3", {"rope_parameters": YARN}, "rope_type: got yarn"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("granite", {"residual_multiplier": "0.22"}, "residual_multiplier"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier"),
        ("phi3", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type: got dynamic"),
        ("phi3", {"rope_scaling": YARN}, "rope_type: got yarn"),
        ("phi3", {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
        ("olmo2", {"attention_bias": True}, "attention_bias"),
        ("glm4", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ("glm4", {"rope_scaling": YARN}, "rope_type: got yarn; allowed: default"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: got gelu"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("gemma2", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma2", {"rope_scaling": YARN}, "rope_type: got yarn"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {"attention_bias": True}, "attention_bias"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_5_text", {"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_next", {"mlp_only_layers": [0, 1]}, "mlp_only_layers"),
        ("qwen3_next", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_next", {"rope_scaling": {"mrope_section": [1, 1, 1]}}, "rope"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, "num_local_experts"),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 3}, "decoder_sparse_step"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias"),
        ("qwen2_moe", {"head_dim": 16}, "head_dim: got 16; allowed: 8"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps: got 1e-06; allowed: 1e-05"),
        ("olmoe", {"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ("glm4_moe", {"rope_scaling": YARN}, "rope_type: got yarn; allowed: default"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("glm4_moe", {"n_group": 8, "topk_group": 2}, "topk_group"),
        ("glm4_moe", {"use_qk_norm": "yes"}, "use_qk_norm"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("gpt_oss", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, "rope_type: got default"),
        ("gpt_oss", {"rope_scaling": YARN}, "rope_scaling.beta_fast is missing"),
        ("gpt_oss", {"rope_parameters": {**BOUNDS, "truncate": 1}}, "truncate"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quant_method: got fp8"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ],
)
def test_family_refuses_what_it_does_not_offer(name: str, change: dict[str, Any], key: str) -> None:
    hf_config = {**SIZES, **change}
    family = resolve_family(name, {})
    with pytest.raises(ModelError, match=f"config.json: .*{key}"):
        family.transformer_config(hf_config)
        family.model_keywords(hf_config)


def test_family_deepseek_v3_describes_kimi_k2_whose_type_transformers_does_not_know() -> None:
    root = Path(__file__).parents[2] / "examples" / "recipes" / "models"
    kimi = read_config(root / "kimi-k2")
    family, shape = read_model(None, kimi)
    assert (family.name, kimi["model_type"]) == ("deepseek_v3", "kimi_k2")
    assert (shape.num_layers, shape.moe and shape.moe.num_experts) == (61, 384)
    assert resolve_family(None, {"model_type": "kimi_k2"}) is family
    told = family.for_engines(kimi)
    assert told == {**kimi, **family.stated, "model_type": "deepseek_v3"}
    with pytest.raises(ModelError, match="'deepseek_v3' or 'kimi_k2', from architectures"):
        read_model(None, {**kimi, "model_type": "kimi_k25"})
    with pytest.raises(ModelError, match="quantization_config"):
        read_model(None, {**kimi, "quantization_config": {"quant_method": "fp8"}})


def test_family_phi3_needs_the_longest_sequence_only_for_a_window() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    family = resolve_family("phi3", sizes)
    assert family.shape(sizes).window is None
    with pytest.raises(ModelError, match="max_position_embeddings is missing"):
        family.shape({**sizes, "sliding_window": 8})


def test_family_gemma3_reads_both_forms_of_its_positions() -> None:
    gemma, scaled = resolve_family("gemma3_text", {}), {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaled}
    newer = {
        "rope_parameters": {
            "full_attention": {**scaled, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    for said in (older, newer):
        rotary = gemma.model_keywords({**SIZES, **said})["rotary"]
        assert (rotary.kind, rotary.base, rotary.factor) == ("linear", 1e6, 8.0)
        assert (rotary.local.kind, rotary.local.base) == ("default", 1e4)
    keywords = gemma.transformer_config({**SIZES, "num_hidden_layers": 7, **older})
    assert keywords["window_attn_skip_freq"] == [1, 1, 1, 1, 1, 0, 1]


def test_family_smollm3_has_no_positions_in_every_fourth_layer() -> None:
    smollm3, sizes = resolve_family("smollm3", {}), {**SIZES, "num_hidden_layers": 8}
    for said in ({}, {"no_rope_layers": [1, 1, 1, 0] * 2}, {"no_rope_layer_interval": 4}):
        keywords = smollm3.transformer_config({**sizes, **said})
        assert keywords["no_rope_freq"] == [0, 0, 0, 1] * 2
    assert smollm3.shape(sizes).tied_embeddings


def test_a_norm_over_all_key_heads_is_cut_between_heads() -> None:
    hf_config = Olmo2Config(**SIZES, eos_token_id=1).to_dict()
    config = {**hf_config, "architectures": ["Olmo2ForCausalLM"]}
    family, shape = read_model(None, config)
    norm = next(row for row in family.rows(shape) if row.kind == "kv_heads")
    (run,) = megatron_cut(norm, shape, 2, 1).runs
    assert (run.start, run.stop) == (shape.head_dim, 2 * shape.head_dim)
    with pytest.raises(ModelError, match="got 4; allowed: a size that divides 2"):
        megatron_cut(norm, shape, 4, 0)  # half of each head


def test_family_is_loaded_from_a_users_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_models")
    own = replace(resolve_family("qwen3", {}), name="own", architectures=("OwnForCausalLM",))
    module.FAMILY, module.OTHER = own, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_models", module)
    assert resolve_family("my_models:FAMILY", {"architectures": ["OwnForCausalLM"]}) is own
    with pytest.raises(ModelError, match="my_models:OTHER.*It is a int"):
        resolve_family("my_models:OTHER", {})
    with pytest.raises(ModelError, match="no attribute 'MISSING'"):
        resolve_family("my_models:MISSING", {})
    with pytest.raises(ModelError, match="No module named 'not_there'"):
        resolve_family("not_there.models:FAMILY", {})


def test_family_deepseek_v3_computes_the_frequencies_of_transformers() -> None:
    """Bit for bit, and the magnitudes that come with them."""
    for mscale in (
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1},
    ):
        # Equal betas as in Kimi K2.
        beta = 1.0 if mscale.get("mscale") == 1 else 8
        rope = {**YARN, "rope_theta": 10000.0, "beta_fast": beta, "beta_slow": 1.0, **mscale}
        sizes = SIZES | DEEPSEEK | {"qk_rope_head_dim": 32, "rope_parameters": rope}
        config = DeepseekV3Config(**sizes)
        rotary = DeepseekV3RotaryEmbedding(config)
        keywords = FAMILY.transformer_config(config.to_dict())
        found = FAMILY.model_keywords(config.to_dict())["rotary"]
        assert torch.equal(rotary_frequencies(found, 32), rotary.inv_freq)
        assert found.magnitude == pytest.approx(rotary.attention_scaling)
        attention = DeepseekV3Attention(config, 0)
        assert keywords["softmax_scale"] == pytest.approx(attention.scaling)
