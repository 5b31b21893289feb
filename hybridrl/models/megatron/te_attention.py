"""transformer-engine's attention, extended to samples that share the positions of a prompt.

Long prompts are attended to in two calls that read each key in place (prefix_attention.py). If that
is not possible, one call reads copies of the keys, one for each sample that continues the prompt:
for short prompts, sequences that continue a part of another one, windows, sinks, latent attention
and context parallelism, and if the two calls fail the check at the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from hybridrl.models.family import ModelShape
from hybridrl.models.megatron.attention import GatherKeys, SharedPrompts
from hybridrl.models.megatron.prefix_attention import (
    CudnnKernel,
    Kernel,
    PrefixAttention,
    gradient_fault,
)
from hybridrl.models.prompt_attention import reads_in_place


def transformer_engine_attention() -> type:
    """Returns Megatron's transformer-engine attention, extended to support shared prompts."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from transformer_engine.pytorch import DotProductAttention

    class Attention(TEDotProductAttention):  # type: ignore[misc, valid-type]
        takes_shared_prompts = True
        prefix_kernel: Kernel | None = None  # `set_prefix_kernel` sets it

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # They are for rotary angles only (PackedSequences).
            self.kept_packed_seq_params -= {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}

        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            packed = kwargs.get("packed_seq_params")
            if packed is None or packed.shared is None:
                return super().forward(query, key, value, *args, **kwargs)
            shared: SharedPrompts = packed.shared
            if self.prefix_kernel is not None and shared.two_calls is not None:
                attended = PrefixAttention.apply(
                    query, key, value, shared.two_calls, self.prefix_kernel
                )
                return attended.flatten(1)
            keys, group = shared.keys, self.cp_group  # type: ignore[has-type]
            if shared.cp_size > 1:
                key, value = (
                    gather_from_sequence_parallel_region(x.contiguous(), group=group)
                    for x in (key, value)
                )
            # Each rank has all keys that its queries need, so the kernel must not split anything.
            self.cp_group = None
            try:
                return DotProductAttention.forward(
                    self,
                    query,
                    GatherKeys.apply(key, keys.index_K, keys.readers),
                    GatherKeys.apply(value, keys.index_K, keys.readers),
                    None,
                    qkv_format="thd",
                    cu_seqlens_q=keys.cu_seqlens_q,
                    cu_seqlens_kv=keys.cu_seqlens_k,
                    max_seqlen_q=keys.max_seqlen_q,
                    max_seqlen_kv=keys.max_seqlen_k,
                    attn_mask_type="padding_causal_bottom_right",
                )
            finally:
                self.cp_group = group

    return Attention


# micro_batch_sizes.py counts no copies of such prompts, because plans cannot run the check on a
# GPU.
MORE_MEMORY = "With prompts of 4,096 tokens or more, training needs more memory than planned."


@dataclass(frozen=True)
class ChosenCalls:
    """How transformer-engine's layers attend to long shared prompts; the same on all ranks.

    Args:
        uses_two: Whether they use two calls that read each key in place.
        said: Log line that says why not; empty if they do, or if there was nothing to choose.
    """

    uses_two: bool
    said: str = ""


def choose_calls(shape: ModelShape, tp: int, cp: int, device: torch.device) -> ChosenCalls:
    """Checks two calls on this device, if the model can use them."""
    if not reads_in_place(shape, cp):
        return ChosenCalls(False)
    sizes = shape.num_heads // tp, max(shape.num_kv_heads // tp, 1), shape.head_dim
    fault = _cudnn_fault(*sizes, device)
    if fault is None:
        return ChosenCalls(True)
    said = f"shared prompts: keys are copied for each sample, since {fault}."
    return ChosenCalls(False, f"{said} {MORE_MEMORY}")


@lru_cache(8)  # the models of a run have the same attention
def _cudnn_fault(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> str | None:
    try:
        return gradient_fault(
            CudnnKernel(head_dim**-0.5), num_heads, num_kv_heads, head_dim, device
        )
    # transformer-engine and cuDNN raise many kinds of errors for what they do not support.
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"cuDNN failed: {first[0][:200]}"


def set_prefix_kernel(chunks: Iterable[torch.nn.Module], uses_two: bool = True) -> None:
    """Makes all layers attend to long shared prompts in two calls, or else copy keys again."""
    for chunk in chunks:
        for part in chunk.modules():
            attention = getattr(part, "core_attention", None)
            if attention is None or not hasattr(attention, "prefix_kernel"):
                continue
            attention.prefix_kernel = None
            if uses_two:
                scale = attention.fused_attention.softmax_scale
                attention.prefix_kernel = CudnnKernel(scale, attention.deterministic)
