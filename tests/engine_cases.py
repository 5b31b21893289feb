"""Engines of tiny models for the contract suites, and what their responses must be.

A new engine joins by a line in ENGINES; one that samples from a model also by its models in MODELS.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cache
from typing import Any

import kept_heap
import numpy as np
import pytest
import torch
import vllm_kernels
from packaged import CLASSES, REFUSED_KEYS, engine_class, needs
from tiny_models import GLM4_MOE, GPT_OSS_ROPE, LATENT
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.models.family import Family, is_kept_in_fp32, resolve_family
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.sources import TrainingShard
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate, request_seed
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.scripted import ScriptedEngine, uniform_script

VOCAB = 24
STOP = 1
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HF_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**TINY, "model_type": "qwen3"},
    "qwen2-tied": {**TINY, "model_type": "qwen2", "tie_word_embeddings": True},
    "llama-rope-scaling": {**TINY, "model_type": "llama", "rope_parameters": LLAMA3_ROPE},
}
# vLLM's attention on CPU has no smaller heads, and Qwen2 of vLLM and SGLang derives them from the
# hidden size.
WIDE = {"hidden_size": 128, "head_dim": 32}
# Windows that responses outgrow: of some layers, and of all.
WINDOW = {"sliding_window": 4}
WINDOWED_MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied-windows": {
        **HF_MODELS["qwen2-tied"],
        **WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "mistral-window": {**TINY, **WINDOW, "model_type": "mistral"},
}
# Norms with 1 + weight, also after attention and feed-forward layers; two kinds of layers.
GEMMA3: dict[str, Any] = {
    **TINY,
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
}
# Recurrent states in all layers but one.
HYBRID_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **TINY,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
# The same with experts, and with projections that are grouped by heads.
HYBRID_EXPERT_MODELS: dict[str, dict[str, Any]] = {
    name: {
        **HYBRID_MODELS["qwen3_5"],
        "model_type": model_type,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    for name, model_type in (("qwen3_5-moe", "qwen3_5_moe_text"), ("qwen3-next", "qwen3_next"))
}
# What vLLM's kernels for gated delta nets have on CPU; their weights and inputs are in bfloat16.
WIDE_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
# Mixtures of experts, which tests of their own look at (test_expert_engines.py).
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        **TINY,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek-v3": {
        **TINY,
        **LATENT,
        "model_type": "deepseek_v3",
        "head_dim": LATENT["qk_rope_head_dim"],
    },
}
# As Moonlight: queries without a latent, plain positions, one group of experts.
EXPERT_MODELS["deepseek-v3-plain"] = {
    **EXPERT_MODELS["deepseek-v3"],
    "q_lora_rank": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
}
# Families made of parts that the models above have, except for the gate of a shared expert.
COMBINED_MODELS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {
        **TINY,
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "olmoe": {**TINY, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "glm4-moe": {**TINY, **GLM4_MOE, "model_type": "glm4_moe", "moe_intermediate_size": 24},
}
EXPERT_MODELS |= COMBINED_MODELS
# Windows that responses outgrow, and a gate that is clamped.
EXPERT_MODELS["gpt-oss"] = {
    **TINY,
    "model_type": "gpt_oss",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": GPT_OSS_ROPE,
}
# What vLLM's kernel for latent attention has on CPU.
WIDE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}


def of_packages(models: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the models as engines of packages take them, by `<engine>-<model>`."""
    return {
        f"{engine}-{name}": {
            **{key: value for key, value in model.items() if key not in REFUSED_KEYS[engine]},
            **WIDE,
            **(WIDE_LATENT if "kv_lora_rank" in model else {}),
            **(WIDE_DELTA if "linear_key_head_dim" in model else {}),
        }
        for engine in CLASSES
        for name, model in models.items()
        # SGLang refuses windows, and norms over the heads of all ranks.
        if not (engine == "sglang" and name in ("gpt-oss", "olmoe"))
    }


def with_marks(names: dict[str, Any]) -> list[Any]:
    """Returns `<engine>-<model>` as parameters, skipped where the engine is not installed."""

    def marks(engine: str, model: str) -> tuple[Any, ...]:
        is_rare = model in COMBINED_MODELS and model != "qwen2-moe"
        return (*needs(engine), *([pytest.mark.full] * is_rare))

    return [pytest.param(name, marks=marks(*name.split("-", 1))) for name in names]


PACKAGED_MODELS = of_packages(HF_MODELS)
PACKAGED_EXPERT_MODELS = of_packages(EXPERT_MODELS)
EXPERTS = {**EXPERT_MODELS, **PACKAGED_EXPERT_MODELS}
# By tests of their own (test_hybrid_engines.py), in bfloat16; SGLang refuses recurrent layers.
PACKAGED_HYBRID_MODELS = {
    name: model
    for name, model in of_packages(HYBRID_MODELS | HYBRID_EXPERT_MODELS).items()
    if name.startswith("vllm")
}
MISTRAL = {"mistral-window": WINDOWED_MODELS["mistral-window"]}
PACKAGED_OTHERS = of_packages({**MISTRAL, "gemma3": GEMMA3})  # of test_exact.py
PACKAGED_ALL = {
    **PACKAGED_MODELS,
    **PACKAGED_EXPERT_MODELS,
    **PACKAGED_HYBRID_MODELS,
    **PACKAGED_OTHERS,
}
ALL_MODELS = {
    **HF_MODELS,
    **WINDOWED_MODELS,
    **HYBRID_MODELS,
    **HYBRID_EXPERT_MODELS,
    **PACKAGED_ALL,
    **EXPERTS,
}
FUSED = with_marks(PACKAGED_MODELS)
FUSED_EXPERTS = with_marks(PACKAGED_EXPERT_MODELS)
MODELS = [*HF_MODELS, *WINDOWED_MODELS, *HYBRID_MODELS, *FUSED]
ENGINES = [*MODELS, "scripted"]

# float32 rounding through three layers, in other summation orders; measured up to 4e-6.
LOGP_TOLERANCE = 1e-4

opened: list[Any] = []
idle: dict[tuple[str, int], list[Any]] = {}
lent: list[tuple[tuple[str, int], Any]] = []


def make_reference(name: str, seed: int = 0) -> Any:
    """Returns a transformers model whose weights are random and large enough to have opinions."""
    fields = dict(ALL_MODELS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 * (TINY["hidden_size"] / config.hidden_size) ** 0.5
            # Decays of larger logarithms would forget a prompt within a few tokens.
            mean = -2 if parameter_name.endswith("A_log") else 1
            parameter.copy_(scale * noise if parameter.ndim > 1 else mean + 0.1 * noise)
        if config.model_type == "gpt_oss":
            for layer in model.model.layers:
                layer.mlp.experts.gate_up_proj *= 4  # so that many gates are clamped
        for buffer_name, buffer in model.named_buffers():
            if is_kept_in_fp32(buffer_name):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def write_weights(engine: Any, model: Any, version: int) -> None:
    """Copies a transformers model into the engine, by the engine's own layout."""
    engine.begin_update()
    source, tensors = checkpoint_tensors(model, model.config.to_dict()), engine.tensors()
    for region in engine.layout().regions:
        part = source[region.hf].detach()[tuple(slice(*span) for span in region.hf_box)]
        tensors[region.local][tuple(slice(*span) for span in region.local_box)] = part
    engine.finish_update(version)


class Letters:
    """A tokenizer of one letter a token, "a" for 0."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(ord("a") + token) for token in tokens)


def make_engine(
    name: str, max_batch: int = 8, version: int = 0, records_experts: bool = False
) -> Any:
    """Returns the engine of a name with the weights of `make_reference`."""
    engine: Any
    if name == "scripted":
        shapes = {"lm_head.weight": (VOCAB, 32)}
        engine = ScriptedEngine(uniform_script(VOCAB), shapes=shapes, max_batch=max_batch)
        engine.begin_update()
        engine.finish_update(version)
        return engine
    if name in PACKAGED_ALL:
        engine = start_packaged(name, max_batch, records_experts=records_experts)
    else:
        parts = ALL_MODELS[name], "float32", "cpu", max_batch
        engine = HfEngine(*parts, records_experts=records_experts)
    write_weights(engine, make_reference(name), version)
    return engine


reference_of = cache(make_reference)  # of tests that do not change it


def lend_engine(name: str, max_batch: int = 8, version: int = 0) -> Any:
    """Returns what `make_engine` returns: an engine that earlier tests have used, if there is one.

    `give_back` takes all that are lent; `close_engines` ends them.
    """
    key = name, max_batch
    if waiting := idle.get(key):
        engine = waiting.pop()
        engine.clear()
        write_weights(engine, reference_of(name), version)
    else:
        engine = make_engine(name, max_batch, version)
    if name != "scripted":
        lent.append((key, engine))
    return engine


def give_back() -> None:
    """Lets later tests use the engines that are lent."""
    while lent:
        key, engine = lent.pop()
        idle.setdefault(key, []).append(engine)


def start_packaged(
    name: str,
    max_batch: int = 8,
    shard: TrainingShard | None = None,
    family: Family | None = None,
    **changes: Any,
) -> Any:
    """Starts the engine `<engine>-<model>` without weights; `close_engines` ends it."""
    engine_name, config = name.partition("-")[0], PACKAGED_ALL[name]
    if engine_name == "vllm":
        vllm_kernels.register()
    family = family or resolve_family(None, config)
    fields: dict[str, Any] = {
        "hf_config": family.for_engines(config),
        "architectures": family.architectures,
        "dtype": "float32",
        "max_batch": max_batch,
        "max_tokens": 300,
        "kv_cache_bytes": 8 << 20,
    }
    settings = EngineSettings(**{**fields, **changes})
    layout = RolloutLayout.consecutive(1, 1)
    engine = engine_class(engine_name)(settings, family, layout, rank=0, shard=shard)
    opened.append(engine)
    return engine


def close_engines() -> None:
    """Closes what `start_packaged` opened."""
    lent.clear()
    idle.clear()
    if opened:
        while opened:
            opened.pop().close()
        keep_imports()


@cache
def keep_imports() -> None:
    """Takes what the first engine of the process has imported out of the collector's rounds."""
    gc.collect()
    kept_heap.keep()


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[tuple[int, ...]]:
    """Returns prompts of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [
        tuple(int(t) for t in rng.integers(2, VOCAB, rng.integers(1, longest + 1)))
        for _ in range(count)
    ]


def make_requests(
    count: int, sampling: SamplingParams | list[SamplingParams], seed: int = 0
) -> list[Request]:
    """Returns requests with ids from 100 on, taking turns in how they sample."""
    each = sampling if isinstance(sampling, list) else [sampling]
    return [
        Request(100 + i, prompt, request_seed(seed, 0, i), each[i % len(each)])
        for i, prompt in enumerate(prompts(count, seed))
    ]


MIXED = [
    SamplingParams(temperature=0.0, max_new_tokens=9, stop_token_ids=(STOP,)),
    SamplingParams(temperature=0.7, top_k=5, max_new_tokens=14),
    SamplingParams(temperature=1.3, top_p=0.8, max_new_tokens=5, stop_token_ids=(STOP, 3)),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.6, max_new_tokens=1),
    SamplingParams(temperature=1.0, max_new_tokens=20, stop_token_ids=(STOP,)),
]


# What depends on the tokens before: of the response, of the prompt too, and all of it together.
PENALIZED = [
    SamplingParams(0.9, max_new_tokens=14, repetition_penalty=1.5, stop_token_ids=(STOP,)),
    SamplingParams(1.2, max_new_tokens=14, presence_penalty=1.1, stop_token_ids=(STOP,)),
    SamplingParams(max_new_tokens=14, min_new_tokens=6, stop_token_ids=(STOP,)),
    SamplingParams(max_new_tokens=14, stop_token_ids=(STOP,)),
    SamplingParams(
        0.0,
        1.0,
        0,
        20,
        (STOP, 3),
        (),
        min_new_tokens=9,
        repetition_penalty=1.3,
        presence_penalty=0.8,
    ),
]


def penalized_logps(model: Any, request: Request, done: Completion) -> Tensor:
    """By the formulas, token after token, with transformers' logits."""
    sampling, ids = request.sampling, [*request.prompt, *done.tokens]
    with torch.no_grad():
        logits_LV = model(torch.tensor([ids])).logits[0].double()
    found = []
    for place, token in enumerate(done.tokens):
        end = len(request.prompt) + place
        logits = logits_LV[end - 1].tolist()
        for one in range(len(logits)):
            if one in sampling.stop_token_ids and place < sampling.min_new_tokens:
                logits[one] = float("-inf")
            if one in ids[:end]:
                penalty = sampling.repetition_penalty
                logits[one] = logits[one] / penalty if logits[one] > 0 else logits[one] * penalty
            if one in ids[len(request.prompt) : end]:
                logits[one] -= sampling.presence_penalty
        scaled = torch.tensor(logits) / (sampling.temperature or 1.0)
        found.append(scaled.log_softmax(-1)[token])
        assert sampling.temperature or token == int(scaled.argmax())
    return torch.stack(found)


def full_logits(model: Any, request: Request, completion: Completion) -> Tensor:
    """Returns, for each response token, the logits from one uncached forward of the whole text."""
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt + completion.tokens])).logits[0]
    return logits[len(request.prompt) - 1 : -1]


def worst_logp(engine: Any, model: Any, requests: Sequence[Request]) -> float:
    """Returns the largest difference of greedy responses to the model; inf if a token differs."""
    worst = 0.0
    for request, done in zip(requests, generate(engine, requests), strict=True):
        logp_LV = full_logits(model, request, done).log_softmax(-1)
        if logp_LV.argmax(-1).tolist() != list(done.tokens):
            return float("inf")
        logps = logp_LV[range(len(done.tokens)), list(done.tokens)]
        worst = max(worst, float((logps - torch.tensor(done.logps)).abs().max()))
    return worst


def expected_logps(model: Any, request: Request, completion: Completion) -> Tensor:
    """Computes the log-probabilities token by token, by the definition of top-k and top-p."""
    sampling, rows = request.sampling, []
    for logits, token in zip(
        full_logits(model, request, completion), completion.tokens, strict=True
    ):
        prob = (logits / (sampling.temperature or 1.0)).softmax(-1)
        if sampling.temperature > 0:
            order = prob.argsort(descending=True)
            kept = order[: sampling.top_k or VOCAB]
            total = prob[kept].sum()
            nucleus, mass = [], 0.0
            for candidate in kept.tolist():
                nucleus.append(candidate)
                mass += float(prob[candidate] / total)
                if mass >= sampling.top_p:
                    break
            assert token in nucleus
            prob = prob / prob[nucleus].sum()
        rows.append(prob[token].log())
    return torch.stack(rows)


def close(left: Completion, right: Completion) -> bool:
    """Whether two completions are the same but for rounding."""
    return (
        left.tokens == right.tokens
        and left.finish_reason == right.finish_reason
        and np.allclose(left.logps, right.logps, rtol=0, atol=LOGP_TOLERANCE)
    )
