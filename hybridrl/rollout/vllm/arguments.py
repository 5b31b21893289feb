"""Computes vLLM's arguments from an engine's settings, without importing vLLM."""

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
from hybridrl.rollout.registry import ENGINES
from hybridrl.rollout.vllm.hybrid_cache import GPU_LEAST_BLOCK_SIZE, HybridCache
from hybridrl.rollout.vllm.images import image_arguments

# Positions per block of the KV cache on CPU; vLLM's default, 128, exceeds the length of many
# responses.
CPU_BLOCK_SIZE = 32
CPU_LATENT_BLOCK_SIZE = 16  # the only size that vLLM's kernel for latent attention supports
CPU_PREFILL_TOKENS = 8192
# Number of tokens that a step computes. The minimum is vLLM's default for an engine inside a
# process (2,048, arg_utils.py, 0.26). So few tokens let only some of the requests with short
# prompts start in the same step. The requests then end in different steps, and vLLM's slow
# scheduler runs in each of these steps. For small models, the number is therefore raised until
# activations take GPU_PREFILL_BYTES, up to the maximum.
GPU_MIN_PREFILL_TOKENS, GPU_MAX_PREFILL_TOKENS, GPU_PREFILL_BYTES = 2048, 8192, 256 << 20
GPU_BLOCK_SIZE = 64  # the largest size that vLLM's attention kernels for dense models support
# Maximum share of usable memory for weights and a KV cache of the size that we compute; the rest is
# for activations and CUDA graphs. If they need more, vLLM measures how large a cache fits.
GPU_KNOWN_SHARE = 0.8

# For exact mode on GPUs. Nothing is compiled, because Inductor would fuse operations and round in
# its own way. Decode steps are captured as a whole; prompts run eagerly.
EXACT_ARGUMENTS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "attention_config": {
        "backend": "FLASH_ATTN",
        "flash_attn_version": 3,
        "flash_attn_max_num_splits_for_cuda_graph": 1,
    },
    "disable_cascade_attn": True,
}

# Type of the logits, as in the trainer. Logits of about 20 that are rounded to bfloat16 are wrong
# by up to 0.06 nats.
HEAD_DTYPE = "float32"

# vLLM's kernels for FP8 weights. CUTLASS's are compiled in vLLM's wheels, and one kernel computes
# batches of all sizes. vLLM's own choice depends on which other packages and compilers a machine
# has.
LINEAR_BACKEND = "cutlass"


def engine_arguments(
    settings: EngineSettings,
    shape: ModelShape,
    tp: int,
    weight_bytes: int,
    device_memory: tuple[int, int] | None,
) -> dict[str, Any]:
    """Returns keywords of vLLM's EngineArgs, which mean the same in all supported versions.

    Args:
        weight_bytes: Bytes of this rank's parameters.
        device_memory: Minimum free bytes over all engines' GPUs (because all engines must choose
            the same sizes), and a GPU's total bytes; None on CPU.
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
        "enable_prefix_caching": _caches_prefixes(shape, is_cpu=device_memory is None),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": ENGINES["vllm"].max_likely,
        "disable_log_stats": True,
        "seed": 0,
        "enforce_eager": device_memory is None or settings.eager,
    }
    if shape.vision is not None:
        arguments |= image_arguments()
    if settings.dtype != HEAD_DTYPE:
        arguments["hf_overrides"] = {"head_dtype": HEAD_DTYPE}
    if shape.mixer is not None:
        # The type in training. vLLM's default is the model's type unless config.json has a key for
        # it.
        arguments["mamba_ssm_cache_dtype"] = "float32"
        if device_memory is not None:
            # FlashInfer's kernel, vLLM's choice on Hopper, is compiled at its first call by nvcc.
            arguments["gdn_prefill_backend"] = "triton"
    if settings.ep > 1:
        arguments["enable_expert_parallel"] = True
    if settings.records_experts and shape.window is not None:
        # Otherwise, layers with windows would have other slots, and lose them during a request, so
        # that the slots could not index the recorded experts (routing.py).
        arguments["disable_hybrid_kv_cache_manager"] = True
    if shape.moe is not None and device_memory is not None:
        # Other GPU kernels would pack or reorder gate and up.
        arguments["moe_backend"] = "triton"
    if settings.quantization == "fp8":
        arguments["linear_backend"] = LINEAR_BACKEND
    if settings.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = settings.kv_cache_dtype
    if settings.timeout_s is not None:
        arguments["distributed_timeout_seconds"] = max(1, int(settings.timeout_s))
        arguments["cpu_distributed_timeout_seconds"] = max(1, int(settings.timeout_s))
    if device_memory is None:
        block_size = CPU_BLOCK_SIZE
        if shape.latent is not None:
            block_size = CPU_LATENT_BLOCK_SIZE
            # The other backend packs the up-projection permanently (common/weight_copies.py).
            arguments["attention_backend"] = "CPU_MLA"
        arguments |= {
            "block_size": block_size,
            # For a prompt in several chunks, vLLM resets the generators of seeded requests by their
            # offset, which CPU generators do not have.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_PREFILL_TOKENS, settings.max_tokens),
            "kv_cache_memory_bytes": settings.kv_cache_bytes
            or _kv_cache_bytes(settings, shape, tp, block_size, CPU_MAX_KV_CACHE_BYTES),
        }
    else:
        arguments["max_num_batched_tokens"] = prefill_tokens(settings, shape, tp)
        if settings.is_exact:
            arguments |= EXACT_ARGUMENTS
        arguments |= {"enable_sleep_mode": True} | _gpu_memory(
            settings, shape, tp, weight_bytes, *device_memory
        )
    return arguments


def prefill_tokens(settings: EngineSettings, shape: ModelShape, tp: int) -> int:
    """Returns the maximum number of tokens, mostly of prompts, that a step on a GPU computes."""
    width, copies = shape.ffn_size, 1
    if (moe := shape.moe) is not None:
        width = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
        copies += moe.experts_per_token
    # Gate, up and their product in the feed-forward layer, and hidden states.
    itemsize = getattr(torch, settings.dtype).itemsize
    token_size = itemsize * (3 * width // tp + (3 + copies) * shape.hidden_size)
    most = min(GPU_PREFILL_BYTES // token_size // 256 * 256, GPU_MAX_PREFILL_TOKENS)
    return max(most, GPU_MIN_PREFILL_TOKENS, settings.max_batch)


def _gpu_memory(
    settings: EngineSettings, shape: ModelShape, tp: int, weight_bytes: int, free: int, total: int
) -> dict[str, Any]:
    """Returns vLLM's keywords for memory. The KV cache is no larger than requests can fill, so that
    it is mapped quickly, and no larger than the trainer allows.
    """
    usable = usable_bytes(settings, free, total, least=0)
    block_size = GPU_BLOCK_SIZE if shape.mixer is None else GPU_LEAST_BLOCK_SIZE
    needed = settings.kv_cache_bytes or _kv_cache_bytes(settings, shape, tp, block_size)
    known = needed + weight_bytes
    if settings.kv_cache_bytes or known <= GPU_KNOWN_SHARE * usable:
        return {"kv_cache_memory_bytes": needed, "gpu_memory_utilization": known / total}
    return {"gpu_memory_utilization": usable / total}


def _caches_prefixes(shape: ModelShape, is_cpu: bool) -> bool:
    """Whether vLLM caches the keys, values and states of prompts. With recurrent layers, this needs
    chunked prefill (models/config.py, MambaModelConfig, 0.26), which CPUs do not have.
    """
    return shape.mixer is None or not is_cpu


def _kv_cache_bytes(
    settings: EngineSettings, shape: ModelShape, tp: int, block_size: int, most: int | None = None
) -> int:
    model_itemsize = getattr(torch, settings.dtype).itemsize
    itemsize = settings.kv_cache_itemsize(model_itemsize)
    if shape.mixer is not None:
        hybrid = HybridCache.of(shape, tp, block_size, itemsize, model_itemsize)
        caches_prefixes = _caches_prefixes(shape, is_cpu=most is not None)
        per_request = hybrid.blocks_per_request(settings.max_tokens, caches_prefixes)
        block = hybrid.block_bytes
    else:
        block = block_size * shape.token_bytes(tp, itemsize)
        per_request = -(-settings.max_tokens // block_size)
    # One more block, because vLLM never assigns block 0.
    return block * (kv_cache_blocks(settings, block, per_request, most) + 1)
