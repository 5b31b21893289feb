"""Makes vLLM on CPU compute the same bits as the trainer, whatever the batch.

Replaces products, norms, activations, rotary positions and logits by the operations of the trainer
(models/megatron/exact.py). The trainer, in turn, attends with vLLM's kernel (`attend`).

The kernel chooses the sizes of its blocks by the number of a request's queries, and may split the
keys of a request over threads. Both sides therefore pass every token as a separate request, and
never split keys. The bits of a token then depend only on its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl import ops
from hybridrl.errors import ModelError
from hybridrl.rollout.vllm.arguments import CPU_BLOCK_SIZE


def compute_exactly(model: torch.nn.Module) -> None:
    """Replaces the operations of a vLLM model.

    Raises:
        ModelError: A module has no such operation.
    """
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules():
        part: Any = module
        if isinstance(part, LinearBase):
            part.quant_method.apply = linear
        elif isinstance(part, RMSNorm | GemmaRMSNorm):
            part.forward = partial(norm, part, isinstance(part, GemmaRMSNorm))
        elif isinstance(part, SiluAndMul):
            part.forward = ops.invariant_swiglu
        elif isinstance(part, GeluAndMul):
            part.forward = partial(_gelu_and_mul, part.approximate)
        elif isinstance(part, RotaryEmbedding):
            part.forward = partial(rotate, part)
        elif isinstance(part, LogitsProcessor):
            part._apply_head = logits
        elif isinstance(part, Attention):
            part.impl.forward = partial(_attend_by_tokens, part.impl.forward)
        elif not isinstance(part, VocabParallelEmbedding) and [*part.parameters(recurse=False)]:
            raise ModelError(
                "numerics.match",
                "exact",
                f"close with vLLM's {type(part).__name__} ({name})",
                "Set numerics.match=close.",
            )


def linear(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Takes the place of a linear layer's product."""
    rows = ops.invariant_linear(x.reshape(-1, x.size(-1)), layer.weight, bias)
    return rows.view(*x.shape[:-1], -1)


def norm(layer: Any, is_centered: bool, x: Tensor, residual: Tensor | None = None) -> Any:
    """Takes the place of a norm's `forward`."""
    arguments = layer.weight.data, layer.variance_epsilon, is_centered
    if residual is not None:
        return ops.invariant_add_rms_norm(x, residual, *arguments)
    return ops.invariant_rms_norm(x, *arguments)[0]


def _gelu_and_mul(approximate: str, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def rotate(
    rotary: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotates by the formula of Megatron and transformers, which round every product."""
    table_LD, row_T = rotary._match_cos_sin_cache_dtype(query), positions.flatten()

    def turned(x: Tensor) -> Tensor:
        heads = x.view(len(row_T), -1, rotary.head_size)
        return ops.invariant_rotate(heads, table_LD, row_T).view(x.shape)

    return turned(query), None if key is None else turned(key)


def logits(lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Takes the place of the product with the output layer."""
    return ops.invariant_logits(hidden, lm_head.weight)


def _attend_by_tokens(
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
    """Takes the place of the `forward` of vLLM's attention; each token becomes a request."""
    if (given := attn_metadata) is not None:  # None while vLLM measures memory
        starts, lengths = given.query_start_loc, given.seq_lens
        count = starts.diff()
        num_tokens = int(starts[-1])
        own = (lengths - starts[1:]).repeat_interleave(count) + torch.arange(1, num_tokens + 1)
        attn_metadata = replace(
            given,
            query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32),
            seq_lens=own.int(),
            block_table=given.block_table.repeat_interleave(count, dim=0),
            scheduler_metadata=_plan(
                own.int(),
                (layer.num_heads, layer.num_kv_heads, layer.head_size),
                query.dtype,
                layer.impl.sliding_window,
            ),
        )
    return forward(layer, query, key, value, kv_cache, attn_metadata, *arguments, **keywords)


def _plan(length_R: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype, window: int) -> Tensor:
    """Returns the kernel's plan for requests of one query each.

    Args:
        length_R: Number of tokens up to the query.
        sizes: Number of heads, number of key heads, and size of a head.
        window: Number of positions that a query attends to; -1 for all of them.
    """
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_heads, num_kv_heads, size = sizes
    plan: Tensor = _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(length_R),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        seq_lens=length_R,
        dtype=dtype,
        query_start_loc=torch.arange(len(length_R) + 1, dtype=torch.int32),
        causal=True,
        sliding_window_size=window,
        isa=_get_attn_isa(dtype, CPU_BLOCK_SIZE, size),
        enable_kv_split=False,
    )
    return plan


def attend(
    query_NHQD: Tensor,
    key_NHSD: Tensor,
    value_NHSD: Tensor,
    is_seen_NQS: Tensor,
    position_NQ: Tensor,
    num_before: int | None,
    scale: float,
) -> Tensor:
    """Attends as the engine does, with vLLM's kernel: (N, H, Q, D).

    Args:
        key_NHSD, value_NHSD: Keys from position 0 on.
        is_seen_NQS: Ignored, because the kernel computes the mask from the following arguments.
        position_NQ: Position of each query in its sequence; one row if all sequences have the same
            positions.
        num_before: Number of earlier positions that a query attends to; None for all of them.
        scale: Factor of the products.
    """
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_rows, num_heads, num_queries, size = query_NHQD.shape
    num_kv_heads, dtype = key_NHSD.size(1), query_NHQD.dtype
    window = -1 if num_before is None else num_before + 1
    num_blocks = -(-key_NHSD.size(2) // CPU_BLOCK_SIZE)
    cache = query_NHQD.new_zeros(num_rows * num_blocks, num_kv_heads, 2 * CPU_BLOCK_SIZE, size)
    keys, values = cache.chunk(2, dim=2)
    table = torch.arange(num_rows * num_blocks, dtype=torch.int32).view(num_rows, num_blocks)
    slot_NS = torch.arange(num_rows)[:, None] * (num_blocks * CPU_BLOCK_SIZE)
    slot_NS = slot_NS + torch.arange(key_NHSD.size(2))
    tokens = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (key_NHSD, value_NHSD))
    isa = _get_attn_isa(dtype, CPU_BLOCK_SIZE, size)
    _custom_ops.cpu_attn_reshape_and_cache(*tokens, keys, values, slot_NS.flatten(), isa)
    length_R = (position_NQ.expand(num_rows, num_queries).flatten() + 1).int()
    query = query_NHQD.transpose(1, 2).flatten(0, 1).contiguous()
    found = torch.empty_like(query)
    _custom_ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=found,
        query_start_loc=torch.arange(len(query) + 1, dtype=torch.int32),
        seq_lens=length_R,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=window,
        block_table=table.repeat_interleave(num_queries, dim=0),
        softcap=0,
        scheduler_metadata=_plan(length_R, (num_heads, num_kv_heads, size), dtype, window),
        s_aux=None,
    )
    return found.view(num_rows, num_queries, num_heads, size).transpose(1, 2)
