"""Tiny HF models of random weights, one of each kind that the families have to get right."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers as hf

from hybridrl.models.hf.stored_slices import StoredSlice, stored_name

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # fewer than TP 4
    "intermediate_size": 96,
    "vocab_size": 199,  # divisible by nothing
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # as below: what tests compute goes on beyond it
}
# Of dense models; engines have positions up to 16 * 16.
YARN_16 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 0.5,
}
CENTERED = ("gemma", "qwen3_5", "qwen3_next")  # norms that multiply by 1 + their weight
FAMILIES = ("llama", "qwen2", "qwen3")
HYBRID_EXPERTS = ("qwen3_5_moe_text", "qwen3_next")
WITH_EXPERTS = (
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    *HYBRID_EXPERTS,
)
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.22,
}
# Caps that bend: products and logits of tiny models are near them.
GEMMA = {
    "sliding_window": 7,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 2.0,
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
# The longest sequence that models with longrope are computed for: beyond phi35's original length,
# within phi4mini's.
LONGEST = 96
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
}
# Gated delta nets with other sizes of keys and values, and attention in every second layer. A
# smaller epsilon would magnify rounding where a first query and key are nearly orthogonal.
HYBRID = {
    "rms_norm_eps": 1e-3,
    "head_dim": 24,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
# Features are added after the layers of the first of two stages.
WITH_IMAGES = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
    "tie_word_embeddings": False,
    "text_config": {
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [4, 4, 4],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
}
# Windows of 2 x 2 tokens in all but the second of the tower's layers.
WITH_WINDOWS = {
    **{key: value for key, value in WITH_IMAGES.items() if key.endswith("token_id")},
    "text_config": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [2, 3, 3],
        },
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}
# Five frequencies of a quarter of each head, which three positions share unevenly.
HYBRID_WITH_IMAGES = {
    **HYBRID,
    "head_dim": 40,
    "rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [2, 2, 1]},
    "tie_word_embeddings": False,
}
# What vLLM's kernels have on CPU.
WIDE_HYBRID = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
# Attention heads of 32 or more, which vLLM's kernels have on CPU.
WIDE = {"hidden_size": 128}
# SGLang knows Qwen2.5-VL's own patches only, and rounds the size of feed-forward layers up to a
# multiple of 8.
WIDE_WINDOWS = {"patch_size": 14, "window_size": 56, "intermediate_size": 44}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
LATENT = {
    "rms_norm_eps": 1e-3,  # but of the norms of latents
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_parameters": YARN,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GLM4_MOE = {
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
# What vLLM's kernels for latent attention have on CPU.
WIDE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def longrope(num_pairs: int) -> dict[str, object]:
    """Returns the scaling of a config, with other short and long factors for each pair."""
    short, long = ([1 + step * i for i in range(num_pairs)] for step in (0.05, 1.5))
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def as_long(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the tokens, padded at their end to LONGEST for a model with longrope: transformers
    turns all positions of a forward by its longest row.
    """
    ropes = getattr(model.config, "rope_parameters", None) or {}
    missing = LONGEST - len(tokens) if ropes.get("rope_type") == "longrope" else 0
    return torch.nn.functional.pad(tokens, (0, missing))


def tiny_model(
    name: str, seed: int = 0, wide: bool = False, dense_layers: Sequence[int] = (1,)
) -> torch.nn.Module:
    """Returns llama (tied, scaled rope), qwen2 (biases), qwen3 (q/k norm, own head size, YaRN),
    windowed (qwen2 whose last layers attend within 5 tokens), olmo, mistral (windows, own head
    size), smollm3 (layers without positions), granite (multipliers), phi3 (fused on disk), phi35
    (longrope), phi4mini (the same of a part of each head, tied), olmo2 (norms afterwards), glm4 (a
    part of each head turns), gemma2 (soft caps, windows in turn), gemma3_text (two kinds of
    positions), qwen3_vl (a vision tower), qwen3_vl_moe (the same with `dense_layers` among those
    with experts), qwen2_5_vl (a tower with windows, biases), qwen3_5_text
    (gated delta nets and gated attention), qwen3_5 and qwen3_5_moe (qwen3_5_text and
    qwen3_5_moe_text with a tower), qwen3_5_halves (the same, delta nets first),
    qwen3_5_moe_text (as qwen3_5_text with experts, and a shared expert with its gate), qwen3_next
    (the same, with `dense_layers`; projections of delta nets are grouped by heads),
    qwen3_moe (with `dense_layers` among those with experts), mixtral, qwen2_moe (biases, a shared
    expert with its gate), olmoe (norms of queries and keys over all heads), glm4_moe (a part of
    each head turns, a dense first layer, a shared expert), deepseek_v3 (latent attention, scaled
    rope, a dense first layer, experts in groups), or gpt_oss (sinks, windows in turn, experts with
    biases and a clamped activation that bends).

    Every weight is random, norms and biases too, so that a swap of any two shows.
    """
    sizes = SIZES | WIDE if wide else SIZES
    if name == "llama":
        config = hf.LlamaConfig(**sizes, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
        model = hf.LlamaForCausalLM(config)
    elif name == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, tie_word_embeddings=False))
    elif name == "windowed":
        windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, **windows))
    elif name == "qwen3":
        head_dim = 64 if wide else 24
        own = {"head_dim": head_dim, "rope_parameters": YARN_16, "tie_word_embeddings": False}
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**(sizes | own)))
    elif name == "qwen3_moe":
        own = {"head_dim": 64 if wide else 24, "moe_intermediate_size": 32}
        own["mlp_only_layers"] = list(dense_layers)
        config = hf.Qwen3MoeConfig(**sizes, **EXPERTS, **own, norm_topk_prob=True)
        model = hf.Qwen3MoeForCausalLM(config)
    elif name == "qwen2_moe":
        own = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}
        own["mlp_only_layers"] = list(dense_layers)
        own |= {"num_experts": 8, "num_experts_per_tok": 2}
        model = hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**sizes, **own))
    elif name == "olmoe":
        model = hf.OlmoeForCausalLM(hf.OlmoeConfig(**sizes, **EXPERTS))
    elif name == "glm4_moe":
        own = GLM4_MOE | {"head_dim": 64 if wide else 24}
        model = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**sizes, **own))
    elif name == "deepseek_v3":
        own = LATENT | WIDE_LATENT if wide else LATENT
        model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**(sizes | own)))
    elif name == "mistral":
        own = {"head_dim": 64 if wide else 24, "sliding_window": 7}
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, **own))
    elif name == "smollm3":
        model = hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**sizes, no_rope_layers=[1, 0, 1, 0]))
    elif name == "granite":
        model = hf.GraniteForCausalLM(
            hf.GraniteConfig(**sizes, **GRANITE, tie_word_embeddings=True)
        )
    elif name == "phi3":
        model = hf.Phi3ForCausalLM(hf.Phi3Config(**sizes, sliding_window=9))
    elif name in ("phi35", "phi4mini"):
        pairs = (32 if wide else 16) // 2
        own = {"sliding_window": 262144, "original_max_position_embeddings": 16}
        if name == "phi4mini":
            pairs = pairs * 3 // 4
            own |= {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}
            own["original_max_position_embeddings"] = 128
        model = hf.Phi3ForCausalLM(hf.Phi3Config(**sizes, **own, rope_parameters=longrope(pairs)))
    elif name == "olmo2":
        model = hf.Olmo2ForCausalLM(hf.Olmo2Config(**sizes))
    elif name == "glm4":
        own = {"head_dim": 64 if wide else 24, "rms_norm_eps": 1e-5, "attention_bias": True}
        model = hf.Glm4ForCausalLM(hf.Glm4Config(**sizes, **own))
    elif name == "gemma2":
        own = GEMMA | {"head_dim": 64 if wide else 24}
        model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, **own))
    elif name == "gemma3_text":
        own = {"head_dim": 64 if wide else 24, "rope_parameters": copy.deepcopy(TWO_ROPES)}
        own |= {"sliding_window": 7, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}
        model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, **own))
    elif name == "gpt_oss":
        # As wide as the model: only the numbers show whether a matrix is transposed.
        own = {"head_dim": 64 if wide else 24, "intermediate_size": sizes["hidden_size"]}
        own |= {"sliding_window": 7, "rope_parameters": dict(GPT_OSS_ROPE)}
        model = hf.GptOssForCausalLM(hf.GptOssConfig(**(sizes | EXPERTS | own)))
    elif name in ("qwen3_5_text", "qwen3_5_halves"):
        own = copy.deepcopy(HYBRID) | (WIDE_HYBRID if wide else {})
        if name == "qwen3_5_halves":
            own["layer_types"] = ["linear_attention"] * 2 + ["full_attention"] * 2
        model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**sizes, **own))
    elif name in HYBRID_EXPERTS:
        own = copy.deepcopy(HYBRID) | SHARED_EXPERT | (WIDE_HYBRID if wide else {})
        if name == "qwen3_next":
            own["rope_parameters"] = own["rope_parameters"] | {"partial_rotary_factor": 0.5}
            for key in ("mrope_section", "mrope_interleaved"):
                del own["rope_parameters"][key]
            dense = {"mlp_only_layers": list(dense_layers)}
            model = hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**sizes, **own, **dense))
        else:
            model = hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**sizes, **own))
    elif name == "qwen3_vl":
        own = copy.deepcopy(WITH_IMAGES) | {"text_config": sizes | WITH_IMAGES["text_config"]}
        if wide:
            rope = WITH_IMAGES["text_config"]["rope_parameters"] | {"mrope_section": [12, 10, 10]}
            own["text_config"] |= {"head_dim": 64, "rope_parameters": rope}
        own["vision_config"]["out_hidden_size"] = sizes["hidden_size"]
        model = hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(**own))
    elif name == "qwen3_vl_moe":
        own = copy.deepcopy(WITH_IMAGES) | {"text_config": sizes | WITH_IMAGES["text_config"]}
        own["text_config"] |= EXPERTS | {
            "tie_word_embeddings": False,
            "moe_intermediate_size": 32,
            "mlp_only_layers": list(dense_layers),
        }
        if wide:
            rope = WITH_IMAGES["text_config"]["rope_parameters"] | {"mrope_section": [12, 10, 10]}
            own["text_config"] |= {"head_dim": 64, "rope_parameters": rope}
        own["vision_config"]["out_hidden_size"] = sizes["hidden_size"]
        model = hf.Qwen3VLMoeForConditionalGeneration(hf.Qwen3VLMoeConfig(**own))
    elif name in ("qwen3_5", "qwen3_5_moe"):
        own = copy.deepcopy(WITH_IMAGES)
        text = own["text_config"] = sizes | copy.deepcopy(HYBRID_WITH_IMAGES)
        if wide:
            text |= WIDE_HYBRID
            text["rope_parameters"]["mrope_section"] = [3, 3, 2]
        own["vision_config"]["out_hidden_size"] = sizes["hidden_size"]
        del own["vision_config"]["deepstack_visual_indexes"]
        if name == "qwen3_5":
            model = hf.Qwen3_5ForConditionalGeneration(hf.Qwen3_5Config(**own))
        else:
            text |= SHARED_EXPERT
            model = hf.Qwen3_5MoeForConditionalGeneration(hf.Qwen3_5MoeConfig(**own))
    elif name == "qwen2_5_vl":
        own = copy.deepcopy(WITH_WINDOWS) | {"text_config": sizes | WITH_WINDOWS["text_config"]}
        if wide:
            rope = WITH_WINDOWS["text_config"]["rope_parameters"] | {"mrope_section": [4, 6, 6]}
            own["text_config"] |= {"rope_parameters": rope}
            own["vision_config"] |= WIDE_WINDOWS
        own["vision_config"]["out_hidden_size"] = sizes["hidden_size"]
        model = hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(**own))
    elif name == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **EXPERTS))
    else:
        model = hf.OlmoForCausalLM(hf.OlmoConfig(**sizes, tie_word_embeddings=False))
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in parameter_name or "ln_q" in parameter_name
        if name.startswith(CENTERED):  # but no norm of a vision tower
            is_norm = is_norm and ".visual." in parameter_name
        # The norm in a gated delta net is not centered. Larger decays would forget too soon.
        shift = 1.0 if is_norm or "linear_attn.norm" in parameter_name else 0.0
        shift = -1.5 if parameter_name.endswith("A_log") else shift
        scale = 0.1
        if hasattr(model.config.get_text_config(), "linear_key_head_dim"):
            # Smaller keys and embeddings are so short that their normalization magnifies rounding.
            is_embedding = parameter_name.endswith("embed_tokens.weight")
            scale = 0.45 if "conv1d" in parameter_name else 0.3 if is_embedding else scale
        parameter.data = noise * scale + shift
        if name == "gpt_oss" and ("gate_up_proj" in parameter_name or "sinks" in parameter_name):
            parameter.data *= 5  # so that many gates are clamped, and sinks take part
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def save_tiny_models(folder: Path, names: tuple[str, ...]) -> None:
    """Writes each model to `folder/name`; qwen2 in several files."""
    for name in names:
        size = "100KB" if name == "qwen2" else "5GB"
        tiny_model(name).save_pretrained(folder / name, max_shard_size=size)


def slices_of(stored: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Returns tensors of a checkpoint as the weight table names them, which may be slices."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        place = StoredSlice.of(name)
        part = stored[place.name] if place.index is None else stored[place.name][place.index]
        found[name] = part.T if place.is_transposed else part
    assert {stored_name(name) for name in found} == stored.keys()
    return found


@contextmanager
def chosen_by(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yields the experts, (T, K), that routers of a transformers model choose, by layer."""
    found: list[torch.Tensor] = []
    gates = [
        part for name, part in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))
    ]
    hooks = [gate.register_forward_hook(lambda *given: found.append(given[2][2])) for gate in gates]
    yield found
    for hook in hooks:
        hook.remove()
