"""Attention over shared prompts in two calls of a kernel, without copies of the prompts' keys.

Every position attends to its own sequence, causally. The positions of samples that continue a
prompt also attend to the whole prompt; all samples of a prompt are one sequence of queries. The two
outputs are merged by the log-sum-exps of their logits. In the backward pass, each call gets the
merged output and log-sum-exp, from which it computes its part of the gradients (Dao et al. 2022,
"FlashAttention", algorithm 4; ring attention merges and divides in the same way).

On GPUs, the kernel is cuDNN's, called through transformer-engine. Its sequences may be anywhere in
the packed tokens, so both calls read them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any, NamedTuple, Protocol

import torch

from hybridrl.models.prompt_attention import LEAST_SHARED

# Packed sequences of the check at the start, and for each, the sequence that it continues or -1.
CHECKED_LENGTHS = (70, 1, 65, 130, 40, 200, 90, 3, 17)
CHECKED_PROMPTS = (-1, 0, 0, 0, -1, -1, 5, 5, -1)
# Largest norm of an error, relative to the norm of the reference. bf16 rounds inputs and products
# to 3 digits; a missing key or a wrong log-sum-exp changes the first or second digit.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Call:
    """Sequences of queries and their keys, for one call of a kernel.

    Args:
        query_starts, query_lengths: Packed positions of each sequence's queries.
        key_starts, key_lengths: Packed positions of each sequence's keys.
        is_causal: Whether each query attends only to keys up to its own position. Queries and keys
            are then the same positions.
    """

    query_starts: tuple[int, ...]
    query_lengths: tuple[int, ...]
    key_starts: tuple[int, ...]
    key_lengths: tuple[int, ...]
    is_causal: bool
    device: torch.device

    @cached_property
    def boundaries(self) -> Boundaries:
        """Boundaries as a kernel for packed sequences needs them."""
        return Boundaries(
            self._sums(self.query_lengths),
            self._sums(self.key_lengths),
            self._offsets(self.query_starts, self.query_lengths),
            self._offsets(self.key_starts, self.key_lengths),
            max(self.query_lengths),
            max(self.key_lengths),
        )

    def _sums(self, lengths: Sequence[int]) -> torch.Tensor:
        sums = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
        return sums.to(self.device, non_blocking=True)

    def _offsets(self, starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        offsets = torch.tensor((*starts, starts[-1] + lengths[-1]), dtype=torch.int32)
        return offsets.to(self.device, non_blocking=True)


class Boundaries(NamedTuple):
    """Boundaries of packed sequences, int32, (sequences + 1,).

    Args:
        queries, keys: Sums of the lengths of the sequences before each one.
        query_offsets, key_offsets: Packed position at which each sequence starts.
        max_queries, max_keys: Length of the longest sequence.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class TwoCalls:
    """The two calls that attend to shared prompts, the same for all layers.

    Args:
        own: Each position attends to its own sequence.
        prompts: The positions of samples attend to the prompt that they continue.
        continued_C: Packed positions of these samples, int64.
    """

    own: Call
    prompts: Call
    continued_C: torch.Tensor

    @staticmethod
    def of(
        cu_seqlens: Sequence[int],
        prefix_sequences: Sequence[int],
        prefix_lengths: Sequence[int],
        device: torch.device,
        least_shared: int = LEAST_SHARED,
    ) -> TwoCalls | None:
        """Returns the calls for packed sequences, or None if one call with copies must be used.

        That is the case if prompts are short, or if a sequence continues only part of another
        sequence, a sequence that itself continues one, or a sequence that is not packed directly
        before its continuations.

        Args:
            cu_seqlens, prefix_sequences, prefix_lengths: See attention.py, SharedPrompts.
            least_shared: Least mean number of prompt tokens that sequences continue.
        """
        spans = list(pairwise(cu_seqlens))
        groups: list[tuple[int, int, int]] = []  # prompt, start and end of its samples
        lengths: list[int] = []  # of the prompts that sequences continue
        for number, (prompt, shared) in enumerate(
            zip(prefix_sequences, prefix_lengths, strict=True)
        ):
            if prompt < 0:
                continue
            start, end = spans[prompt]
            own_start, own_end = spans[number]
            if prefix_sequences[prompt] >= 0 or shared != end - start:
                return None
            lengths.append(shared)
            if groups and groups[-1][0] == prompt and groups[-1][2] == own_start:
                groups[-1] = (prompt, groups[-1][1], own_end)
            elif own_start == end:
                groups.append((prompt, own_start, own_end))
            else:
                return None
        if not groups or mean(lengths) < least_shared:
            return None
        whole = [(start, end - start) for start, end in spans if end > start]
        starts, sizes = (tuple(column) for column in zip(*whole, strict=True))
        prompts = [spans[prompt] for prompt, *_ in groups]
        continued = [torch.arange(start, end) for _, start, end in groups]
        return TwoCalls(
            Call(starts, sizes, starts, sizes, True, device),
            Call(
                tuple(start for _, start, _ in groups),
                tuple(end - start for _, start, end in groups),
                tuple(start for start, _ in prompts),
                tuple(end - start for start, end in prompts),
                False,
                device,
            ),
            torch.cat(continued).to(device, non_blocking=True),
        )


class Kernel(Protocol):
    """Attention that returns and takes log-sum-exps. T packed tokens, N heads, G KV heads, H sizes.

    Rows outside a call's sequences are zero or undefined in outputs, and zero in gradients.
    """

    def forward(
        self, query_TNH: torch.Tensor, key_TGH: torch.Tensor, value_TGH: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, like the queries, and the log-sum-exps of the logits, (T, N) fp32."""

    def backward(
        self,
        grad_TNH: torch.Tensor,
        query_TNH: torch.Tensor,
        key_TGH: torch.Tensor,
        value_TGH: torch.Tensor,
        output_TNH: torch.Tensor,
        lse_TN: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the gradients of queries, keys and values through this call's pairs.

        Args:
            output_TNH, lse_TN: Output and log-sum-exp over the pairs of all calls.
        """


class PrefixAttention(torch.autograd.Function):
    """Attends with two calls of a kernel; inputs and output are as in `Kernel`."""

    @staticmethod
    def forward(
        ctx: Any,
        query_TNH: torch.Tensor,
        key_TGH: torch.Tensor,
        value_TGH: torch.Tensor,
        calls: TwoCalls,
        kernel: Kernel,
    ) -> torch.Tensor:
        # Megatron's values are a view of the projection's output.
        query_TNH, key_TGH, value_TGH = (
            one.contiguous() for one in (query_TNH, key_TGH, value_TGH)
        )
        output_TNH, lse_TN = kernel.forward(query_TNH, key_TGH, value_TGH, calls.own)
        prompts_TNH, prompts_lse_TN = kernel.forward(query_TNH, key_TGH, value_TGH, calls.prompts)
        at_C = calls.continued_C
        parts = [(output_TNH[at_C], lse_TN[at_C]), (prompts_TNH[at_C], prompts_lse_TN[at_C])]
        lse_CN = torch.logaddexp(parts[0][1], parts[1][1])
        merged_CNH = sum(
            part_CNH * (part_lse_CN - lse_CN).exp()[..., None] for part_CNH, part_lse_CN in parts
        )
        output_TNH[at_C] = merged_CNH.to(output_TNH.dtype)  # type: ignore[union-attr]  # no int
        lse_TN[at_C] = lse_CN
        ctx.save_for_backward(query_TNH, key_TGH, value_TGH, output_TNH, lse_TN)
        ctx.calls, ctx.kernel = calls, kernel
        return output_TNH

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_TNH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        saved, calls = ctx.saved_tensors, ctx.calls
        grad_TNH = grad_TNH.contiguous()
        found = ctx.kernel.backward(grad_TNH, *saved, calls.own)
        for one, other in zip(
            found, ctx.kernel.backward(grad_TNH, *saved, calls.prompts), strict=True
        ):
            one.add_(other)
        query, key, value = found
        return query, key, value, None, None


class CudnnKernel:
    """cuDNN's fused attention, called through transformer-engine; bf16 on Hopper or later GPUs.

    Args:
        is_deterministic: Whether the gradients must be the same bits every time.
    """

    def __init__(self, scale: float, is_deterministic: bool = False) -> None:
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        self._te, self._dtypes = fused_attn, TE_DType
        self.scale, self.is_deterministic = scale, is_deterministic

    def forward(
        self, query_TNH: torch.Tensor, key_TGH: torch.Tensor, value_TGH: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounds = call.boundaries
        output, (lse, rng_state, *_), *_ = self._te.fused_attn_fwd(
            True,
            bounds.max_queries,
            bounds.max_keys,
            bounds.queries,
            bounds.keys,
            query_TNH,
            key_TGH,
            value_TGH,
            query_TNH.dtype,
            self._te.FusedAttnBackend["F16_arbitrary_seqlen"],
            **self._arguments(call, bounds),
        )
        self._rng_state = rng_state
        return output.view(*query_TNH.shape[:2], -1), lse.view(query_TNH.shape[:2])

    def backward(
        self,
        grad_TNH: torch.Tensor,
        query_TNH: torch.Tensor,
        key_TGH: torch.Tensor,
        value_TGH: torch.Tensor,
        output_TNH: torch.Tensor,
        lse_TN: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bounds = call.boundaries
        query, key, value, *_ = self._te.fused_attn_bwd(
            bounds.max_queries,
            bounds.max_keys,
            bounds.queries,
            bounds.keys,
            query_TNH,
            key_TGH,
            value_TGH,
            output_TNH,
            grad_TNH,
            grad_TNH.dtype,
            self._dtypes[grad_TNH.dtype],
            [lse_TN[..., None], self._rng_state],
            self._te.FusedAttnBackend["F16_arbitrary_seqlen"],
            deterministic=self.is_deterministic,
            **self._arguments(call, bounds),
        )
        return query, key, value

    def _arguments(self, call: Call, bounds: Boundaries) -> dict[str, Any]:
        return {
            "cu_seqlens_q_padded": bounds.query_offsets,
            "cu_seqlens_kv_padded": bounds.key_offsets,
            "attn_scale": self.scale,
            "fast_zero_fill": False,  # rows between the sequences must be zero, too
            "qkv_layout": "thd_thd_thd",
            "attn_mask_type": "padding_causal" if call.is_causal else "padding",
        }


def gradient_fault(
    kernel: Kernel, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> str | None:
    """Compares outputs and gradients of bf16 attention in two calls with plain attention in fp32.

    Args:
        kernel: Kernel to check, whose scale is 1 / sqrt(head_dim).

    Returns:
        The first result that differs, and by how much; None if all agree.
    """
    generator = torch.Generator().manual_seed(0)
    bounds = [0, *accumulate(CHECKED_LENGTHS)]
    continued = [0 if p < 0 else CHECKED_LENGTHS[p] for p in CHECKED_PROMPTS]
    calls = TwoCalls.of(bounds, CHECKED_PROMPTS, continued, device, least_shared=0)
    assert calls is not None
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    query, key, value, grad = (
        torch.randn(bounds[-1], n, head_dim, generator=generator).bfloat16().to(device)
        for n in heads
    )

    def results(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [one.to(dtype).requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            output = attend(*inputs)
            return [output.detach(), *torch.autograd.grad(output, inputs, grad.to(dtype))]

    expected = results(
        lambda q, k, v: plain_attention(q, k, v, bounds, CHECKED_PROMPTS), torch.float32
    )
    found = results(lambda *qkv: PrefixAttention.apply(*qkv, calls, kernel), torch.bfloat16)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, one, reference in zip(names, found, expected, strict=True):
        error = float((one.float() - reference).norm() / reference.norm())
        if not error <= TOLERANCE:  # true for NaN, too
            return f"the {name} differs by {error:.1%}, more than {TOLERANCE:.0%}"
    return None


def plain_attention(
    query_TNH: torch.Tensor,
    key_TGH: torch.Tensor,
    value_TGH: torch.Tensor,
    cu_seqlens: Sequence[int],
    prefix_sequences: Sequence[int],
) -> torch.Tensor:
    """Returns attention over shared prompts, (T, N, H), from one product of all positions.

    Args:
        cu_seqlens, prefix_sequences: Boundaries of the sequences, and for each, the whole sequence
            that it continues, or -1.
    """
    allowed_TT = torch.zeros(len(query_TNH), len(query_TNH), dtype=torch.bool)
    spans = [slice(*span) for span in pairwise(cu_seqlens)]
    for own, prompt in zip(spans, prefix_sequences, strict=True):
        allowed_TT[own, own] = torch.ones(own.stop - own.start, own.stop - own.start).tril().bool()
        if prompt >= 0:
            allowed_TT[own, spans[prompt]] = True
    scale, groups = query_TNH.size(-1) ** -0.5, query_TNH.size(1) // key_TGH.size(1)
    key, value = (one.transpose(0, 1).repeat_interleave(groups, 0) for one in (key_TGH, value_TGH))
    logits = query_TNH.transpose(0, 1) @ key.transpose(1, 2) * scale
    weights = logits.masked_fill(~allowed_TT.to(logits.device), float("-inf")).softmax(-1)
    return (weights @ value).transpose(0, 1)
