"""SGLang's own arguments, made of an engine's settings.

Owns how much memory the KV cache gets. No SGLang here, so that it can be judged without one.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.models.family import ModelShape
from hybridrl.rollout.common.settings import (
    CPU_MAX_KV_CACHE_BYTES,
    EngineSettings,
    kv_cache_blocks,
    token_bytes,
    usable_bytes,
)

CPU_ATTENTION = "torch_native"
# Of the memory that generation may use, what weights and KV cache may take; the rest is for its
# activations, its sampler's copies of logits and CUDA graphs.
GPU_STATIC_SHARE = 0.85
GPU_CHUNK = 8192  # tokens of prompts in one pass
# SGLang ends requests a few tokens before the length that it is told; what lies above the longest
# request is never reached.
SPARE_TOKENS = 16


def server_arguments(
    settings: EngineSettings,
    shape: ModelShape,
    tp: int,
    weight_bytes: int,
    device_memory: tuple[int, int] | None,
) -> dict[str, Any]:
    """Returns the keywords of SGLang's ServerArgs, which mean the same in all supported versions.
    `device_memory`: least free bytes of all engines' GPUs, since all must choose alike, and total
    bytes; None on CPU.
    """
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": settings.dtype,
        "tp_size": tp,
        "ep_size": settings.ep,
        "context_length": settings.max_tokens + SPARE_TOKENS,
        "max_running_requests": settings.max_batch,
        "random_seed": 0,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "log_level": "error",
        "enable_metrics": False,
        # Experts that all tokens pass through stay parameters of their own.
        "disable_shared_experts_fusion": True,
    }
    per_token = token_bytes(shape, tp, getattr(torch, settings.dtype).itemsize)
    if device_memory is None:
        return arguments | _of_cpu(settings, per_token)
    if shape.moe is not None:
        # Other kernels keep experts transposed, packed, or gate and up in another order.
        arguments["moe_runner_backend"] = "triton"
    return arguments | {
        "device": "cuda",
        "enable_memory_saver": True,
        "disable_cuda_graph": settings.eager,
        "cuda_graph_max_bs": settings.max_batch,
        # Graphs of prompts are compiled for every size, minutes at a start that a run does not get
        # back: prompts take a small part of a rollout.
        "disable_piecewise_cuda_graph": True,
        # SGLang (0.5.16) has some mixtures on Hopper all-reduce and normalize in one kernel, which
        # is compiled at the first start and needs memory that NVLink multicasts. On two H200 whose
        # multicast was off such a start had not ended after four minutes. Where it is on, nobody
        # has looked yet.
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "chunked_prefill_size": max(GPU_CHUNK, 2 * settings.max_batch),
        "max_total_tokens": _tokens(settings, per_token),
        "mem_fraction_static": _static_share(settings, weight_bytes, *device_memory),
    }


def _of_cpu(settings: EngineSettings, per_token: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": CPU_ATTENTION,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": max(GPU_CHUNK, settings.max_tokens + SPARE_TOKENS),
        "max_total_tokens": _tokens(settings, per_token, CPU_MAX_KV_CACHE_BYTES),
        "mem_fraction_static": 0.9,  # bounds nothing: `max_total_tokens` does
    }


def longest_pass(arguments: dict[str, Any]) -> int:
    """Returns the most tokens that the model computes at once with these arguments."""
    names = "chunked_prefill_size", "max_prefill_tokens", "max_running_requests"
    return max(arguments.get(name, 0) for name in names)


def longest_request(num_tokens: int) -> int:
    """Returns how many tokens a request may have in a KV cache of `num_tokens`."""
    return num_tokens - SPARE_TOKENS


def _tokens(settings: EngineSettings, per_token: int, most: int | None = None) -> int:
    """Returns the tokens of the KV cache: no more than requests can fill, so that it is quickly
    mapped.
    """
    if settings.kv_cache_bytes:
        return max(1, settings.kv_cache_bytes // per_token)
    block = settings.max_tokens + SPARE_TOKENS  # a request; tokens are counted one by one
    return block * kv_cache_blocks(settings, block * per_token, block, most)


def _static_share(settings: EngineSettings, weight_bytes: int, free: int, total: int) -> float:
    """Returns which part of the memory that is free now weights and KV cache may take.

    SGLang measures what is free once the weights are there, and takes of that no more than leaves
    the rest; `max_total_tokens` bounds it from above.
    """
    usable = usable_bytes(settings, free, total, least=weight_bytes)
    return round(GPU_STATIC_SHARE * usable / free, 4)
