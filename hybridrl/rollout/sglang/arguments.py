"""Computes SGLang's arguments from an engine's settings, without importing SGLang."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.models.family import ModelShape
from hybridrl.rollout.common.settings import (
    CPU_MAX_KV_CACHE_BYTES,
    EngineSettings,
    kv_cache_blocks,
    usable_bytes,
)
from hybridrl.rollout.sglang.images import image_arguments

CPU_ATTENTION = "torch_native"
# Share of usable memory for weights and KV cache; the rest is for activations, the sampler's copies
# of logits, and CUDA graphs.
GPU_STATIC_SHARE = 0.85
GPU_CHUNK = 8192  # prompt tokens in one pass
# SGLang ends requests a few tokens before its context length, which must therefore exceed the
# longest request.
SPARE_TOKENS = 16


def server_arguments(
    settings: EngineSettings,
    shape: ModelShape,
    tp: int,
    weight_bytes: int,
    device_memory: tuple[int, int] | None,
) -> dict[str, Any]:
    """Returns keywords for SGLang's ServerArgs that mean the same in all supported versions.

    Args:
        weight_bytes: Bytes of this rank's parameters.
        device_memory: Lowest number of free bytes on any engine's GPU (all engines must choose the
            same sizes), and a GPU's total bytes; None on CPU.
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
        # Shared experts stay separate parameters.
        "disable_shared_experts_fusion": True,
    }
    if shape.vision is not None:
        arguments |= image_arguments()
    per_token = shape.token_bytes(tp, getattr(torch, settings.dtype).itemsize)
    if device_memory is None:
        return arguments | _cpu_arguments(settings, per_token)
    if shape.moe is not None:
        # Other kernels would transpose or pack the experts' weights, or swap gate and up.
        arguments["moe_runner_backend"] = "triton"
    return arguments | {
        "device": "cuda",
        "enable_memory_saver": True,
        "disable_cuda_graph": settings.eager,
        "cuda_graph_max_bs_decode": settings.max_batch,
        # SGLang would compile graphs for prompts in every size, which takes minutes at the start.
        # The graphs would not save that much time later, because prompts take a small part of a
        # rollout.
        "disable_prefill_cuda_graph": True,
        # For some mixtures on Hopper, SGLang (0.5.16) fuses all-reduce and normalization into a
        # kernel that is compiled at the first start and needs NVLink multicast memory. On two H200
        # with multicast off, the start had not ended after four minutes. Not tested with multicast
        # on.
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "chunked_prefill_size": max(GPU_CHUNK, 2 * settings.max_batch),
        "max_total_tokens": _tokens(settings, per_token),
        "mem_fraction_static": _static_share(settings, weight_bytes, *device_memory),
    }


def _cpu_arguments(settings: EngineSettings, per_token: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": CPU_ATTENTION,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": max(GPU_CHUNK, settings.max_tokens + SPARE_TOKENS),
        "max_total_tokens": _tokens(settings, per_token, CPU_MAX_KV_CACHE_BYTES),
        "mem_fraction_static": 0.9,  # no effect: `max_total_tokens` is the limit
    }


def longest_pass(arguments: dict[str, Any]) -> int:
    names = "chunked_prefill_size", "max_prefill_tokens", "max_running_requests"
    return max(arguments.get(name, 0) for name in names)


def longest_request(num_tokens: int) -> int:
    return num_tokens - SPARE_TOKENS


def _tokens(settings: EngineSettings, per_token: int, most: int | None = None) -> int:
    """Returns the KV cache's size in tokens: only what requests can fill, so it is mapped fast."""
    if settings.kv_cache_bytes:
        return max(1, settings.kv_cache_bytes // per_token)
    # Tokens of one request. SGLang allocates single tokens, not blocks.
    block = settings.max_tokens + SPARE_TOKENS
    return block * kv_cache_blocks(settings, block * per_token, 1, most)


def _static_share(settings: EngineSettings, weight_bytes: int, free: int, total: int) -> float:
    """Returns the share of the currently free memory that weights and KV cache may occupy.

    SGLang measures free memory after loading the weights, and sizes the cache so that the rest
    stays free. `max_total_tokens` limits the cache as well.
    """
    usable = usable_bytes(settings, free, total, least=weight_bytes)
    return round(GPU_STATIC_SHARE * usable / free, 4)
