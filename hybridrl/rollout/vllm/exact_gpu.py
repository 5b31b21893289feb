"""Makes vLLM on GPUs compute the same bits as the trainer, whatever the batch.

Products, norms, SwiGLU, rotary positions and logits are the trainer's (ops.py, `invariant_*`). The
trainer, in turn, attends and computes log-probabilities with vLLM's kernels (`KERNELS`).

FlashAttention 3 processes the keys of a row in blocks of one size from the row's first key on,
whether the row is part of a prompt or a decode step, unless it splits keys over multiprocessors. It
therefore must never split them. vLLM's own batch-invariant mode makes the same choices, but also
replaces torch's operations in the whole process, and thus the trainer's backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import ModelError
from hybridrl.models.family import Rotary
from hybridrl.models.megatron.packed_exactly import Bounds, EngineKernels, rotary_table
from hybridrl.models.megatron.rotary_positions import rotary_frequencies
from hybridrl.rollout.vllm.exact import linear, logits, norm, rotate

# The smallest length that the kernel is given for the longest sequence of queries. With one query,
# it drops the causal mask and chooses other blocks. With heads of up to 64 it does so for up to 64
# rows of queries.
LEAST_QUERIES, LEAST_QUERIES_OF_SMALL_HEADS = 2, 65
SMALL_HEAD = 64


def compute_exactly(model: torch.nn.Module, rotary: Rotary) -> None:
    """Replaces the operations of a vLLM model.

    Raises:
        ModelError: A module has no such operation.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules():
        part: Any = module
        if isinstance(part, LinearBase):
            part.quant_method.apply = linear
        elif isinstance(part, RMSNorm):
            part.forward = partial(norm, part, False)
        elif isinstance(part, SiluAndMul):
            part.forward = ops.invariant_swiglu
        elif isinstance(part, RotaryEmbedding):
            part.cos_sin_cache = _table(rotary, part.cos_sin_cache)
            part.forward = partial(rotate, part)
        elif isinstance(part, LogitsProcessor):
            part._apply_head = logits
        elif isinstance(part, Attention):
            part.impl.forward = partial(_attend_unsplit, part.impl.forward)
        elif not isinstance(part, VocabParallelEmbedding) and any(
            True for _ in part.parameters(recurse=False)
        ):
            raise ModelError(
                "numerics.match",
                "exact",
                f"close with vLLM's {type(part).__name__} ({name})",
                "Set numerics.match=close.",
            )


def _table(rotary: Rotary, cache_LD: Tensor) -> Tensor:
    """Returns cosines and sines of the trainer's frequencies, which differ in a bit from vLLM's."""
    frequencies = rotary_frequencies(rotary, cache_LD.size(1)).to(cache_LD.device)
    position_L = torch.arange(len(cache_LD), device=cache_LD.device, dtype=torch.float32)
    return rotary_table(torch.outer(position_L, frequencies), cache_LD.dtype)


def announced(num_queries: int, head_size: int) -> int:
    """Returns the length of the longest sequence of queries that either side tells the kernel."""
    least = LEAST_QUERIES_OF_SMALL_HEADS if head_size <= SMALL_HEAD else LEAST_QUERIES
    return max(num_queries, least)


def _attend_unsplit(
    forward: Callable[..., Tensor],
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    *arguments: Any,
    **keywords: Any,
) -> Tensor:
    """Takes the place of the `forward` of vLLM's attention. Batches without a CUDA graph would let
    the kernel choose the number of splits.
    """
    if (given := attn_metadata) is not None:
        longest = announced(given.max_query_len, query.size(-1))
        if (given.max_num_splits, given.max_query_len) != (1, longest):
            # The given schedule was computed for the old values; without one, the kernel computes
            # its own.
            attn_metadata = replace(
                given, max_num_splits=1, max_query_len=longest, scheduler_metadata=None
            )
    return forward(layer, query, key, value, kv_cache, attn_metadata, *arguments, **keywords)


def _attend(
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    bounds: Bounds,
    scale: float,
    num_before: int | None,
) -> tuple[Tensor, Tensor]:
    """Attends with vLLM's kernel; see `EngineKernels.attend`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    found, log_sum = flash_attn_varlen_func(
        query_THD,
        key_KHD,
        value_KHD,
        announced(bounds.max_seqlen_q, query_THD.size(-1)),
        bounds.cu_seqlens_q,
        bounds.max_seqlen_k,
        cu_seqlens_k=bounds.cu_seqlens_k,
        softmax_scale=scale,
        causal=True,
        window_size=[-1, -1] if num_before is None else [num_before, 0],
        return_softmax_lse=True,
        fa_version=3,
        num_splits=1,
    )
    return found, log_sum


def _attend_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    found_THD: Tensor,
    log_sum_HT: Tensor,
    bounds: Bounds,
    scale: float,
    num_before: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of attention, with torch's kernel; see `EngineKernels.attend_backward`."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_THD,
        query_THD,
        key_KHD,
        value_KHD,
        found_THD,
        log_sum_HT,
        bounds.cu_seqlens_q,
        bounds.cu_seqlens_k,
        bounds.max_seqlen_q,
        bounds.max_seqlen_k,
        0.0,
        True,
        no_dropout,
        no_dropout[0],
        scale=scale,
        window_size_left=num_before,
        window_size_right=None if num_before is None else 0,
    )
    return found


def _logps(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """Computes log-probabilities as vLLM's second model runner does."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    divisor = torch.full((1,), temperature, dtype=torch.float32, device=logits_NV.device)
    apply_temperature(logits_NV, torch.zeros_like(target_N, dtype=torch.int32), divisor)
    return compute_token_logprobs(logits_NV, target_N[:, None])[:, 0]


KERNELS = EngineKernels(_attend, _attend_backward, _logps)
