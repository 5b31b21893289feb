"""vLLM's own arguments, made of an engine's settings.

Owns how much memory the KV cache gets. No vLLM here, so that it can be judged without one.
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

# Positions in one block of the CPU's KV cache; 128 if not told, longer than many whole responses.
CPU_BLOCK_SIZE = 32
CPU_LATENT_BLOCK_SIZE = 16  # the only one of vLLM's kernel for latent attention
CPU_PREFILL_TOKENS = 8192
# Tokens that a step computes. The least is vLLM's own number for an engine inside a process (2,048,
# arg_utils.py, 0.26). Of short prompts it takes only some of the requests into a step, which then
# begin and end in turn, and each step with a prompt or a last token is scheduled the long way. A
# small model takes more, as long as what it holds of them is little beside its cache.
GPU_MIN_PREFILL_TOKENS, GPU_MAX_PREFILL_TOKENS, GPU_PREFILL_BYTES = 2048, 8192, 256 << 20
GPU_BLOCK_SIZE = 64  # the largest that vLLM's attention kernels for dense models take
# How much of the memory that generation may use weights and the KV cache take together before vLLM
# is asked to measure what is left; the rest is for its activations and CUDA graphs.
GPU_KNOWN_SHARE = 0.8


def engine_arguments(
    settings: EngineSettings,
    shape: ModelShape,
    tp: int,
    weight_bytes: int,
    device_memory: tuple[int, int] | None,
) -> dict[str, Any]:
    """Returns the keywords of vLLM's EngineArgs, which mean the same in all supported versions.
    `device_memory`: least free bytes of all engines' GPUs, since all must choose alike, and total
    bytes; None on CPU.
    """
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": settings.dtype,
        "generation_config": "vllm",
        "tensor_parallel_size": tp,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_batch,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": 0,
        "enforce_eager": device_memory is None or settings.eager,
    }
    if settings.ep > 1:
        arguments["enable_expert_parallel"] = True
    if shape.moe is not None and device_memory is not None:
        # Other kernels for GPUs keep gate and up in another order, or packed.
        arguments["moe_backend"] = "triton"
    if settings.timeout_s is not None:
        arguments["distributed_timeout_seconds"] = max(1, int(settings.timeout_s))
        arguments["cpu_distributed_timeout_seconds"] = max(1, int(settings.timeout_s))
    if device_memory is None:
        block_size = CPU_BLOCK_SIZE
        if shape.latent is not None:
            block_size = CPU_LATENT_BLOCK_SIZE
            # The other one packs the projection up once and for all (common/latent_copies.py).
            arguments["attention_backend"] = "CPU_MLA"
        arguments |= {
            "block_size": block_size,
            # A prompt in several pieces takes back the draws of seeded requests by moving their
            # generators' offset, which CPU generators do not have.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_PREFILL_TOKENS, settings.max_tokens),
            "kv_cache_memory_bytes": settings.kv_cache_bytes
            or _kv_cache_bytes(settings, shape, tp, block_size, CPU_MAX_KV_CACHE_BYTES),
        }
    else:
        arguments["max_num_batched_tokens"] = prefill_tokens(settings, shape, tp)
        arguments |= {"enable_sleep_mode": True} | _gpu_memory(
            settings, shape, tp, weight_bytes, *device_memory
        )
    return arguments


def prefill_tokens(settings: EngineSettings, shape: ModelShape, tp: int) -> int:
    """Returns the most tokens that a step of a GPU's engine computes, mostly of prompts; a token of
    each request at least.
    """
    width, copies = shape.ffn_size, 1
    if (moe := shape.moe) is not None:
        width = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        copies += moe.experts_per_token
    # The feed-forward layer's halves and their product, and hidden states.
    itemsize = getattr(torch, settings.dtype).itemsize
    of_token = itemsize * (3 * width // tp + (3 + copies) * shape.hidden_size)
    most = min(GPU_PREFILL_BYTES // of_token // 256 * 256, GPU_MAX_PREFILL_TOKENS)
    return max(most, GPU_MIN_PREFILL_TOKENS, settings.max_batch)


def _gpu_memory(
    settings: EngineSettings, shape: ModelShape, tp: int, weight_bytes: int, free: int, total: int
) -> dict[str, Any]:
    """Returns vLLM's keywords about memory: no larger a KV cache than requests can fill, so that it
    is quickly mapped, and no more than the trainer leaves.
    """
    usable = usable_bytes(settings, free, total, least=0)
    needed = settings.kv_cache_bytes or _kv_cache_bytes(settings, shape, tp, GPU_BLOCK_SIZE)
    known = needed + weight_bytes
    if settings.kv_cache_bytes or known <= GPU_KNOWN_SHARE * usable:
        return {"kv_cache_memory_bytes": needed, "gpu_memory_utilization": known / total}
    return {"gpu_memory_utilization": usable / total}


def _kv_cache_bytes(
    settings: EngineSettings, shape: ModelShape, tp: int, block_size: int, most: int | None = None
) -> int:
    """Returns what `max_batch` longest requests need, at most `most` bytes but one such request."""
    block = block_size * token_bytes(shape, tp, getattr(torch, settings.dtype).itemsize)
    # Block 0 is never handed out.
    return block * (kv_cache_blocks(settings, block, block_size, most) + 1)
