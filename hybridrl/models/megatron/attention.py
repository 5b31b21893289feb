"""Causal attention over packed sequences, for hosts without transformer-engine.

Megatron's own local attention does not support packed sequences or context parallelism;
`PackedAttention` supports both. It copies the sequences of a micro-batch into buckets of rows of
equal length, one bucket per power of two. Padding therefore at most doubles the work, and one
`scaled_dot_product_attention` call computes each bucket. Rows are padded at the end; causal
attention never reads the padding.

Samples may share the positions of a common prompt (MicroBatch.prefix_sequences). Each response is
then a sequence that attends to the whole prompt, and causally to itself. Agents' sequences continue
the first positions of another sequence, and what that sequence itself continues.

Context parallelism: each rank waits for the keys and values of its context-parallel group; queries
are not sent (context_parallel.py says which rank holds which positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn.utils.rnn import pad_sequence

from hybridrl.errors import ModelError
from hybridrl.models.megatron.context_parallel import chunks_of, context_positions, gathered_rows
from hybridrl.models.megatron.explicit_attention import explicit_attention
from hybridrl.models.megatron.prefix_attention import TwoCalls


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length as rows of one batch; indices refer to the packed tokens.

    Args:
        query_index_NQ: Local positions of the queries.
        key_index_NK: Rows of the keys; with context parallelism, of the gathered keys.
        query_position_NQ: For each query, the index of the last key that it attends to. None if
            queries and keys are the same rows.
    """

    query_index_NQ: torch.Tensor
    key_index_NK: torch.Tensor
    query_position_NQ: torch.Tensor | None


class ContinuedSequence(NamedTuple):
    """A packed sequence, and the whole other sequence that it continues.

    Args:
        prefix_start, prefix_length: Packed positions of the other sequence; the length, without
            padding, is 0 if there is none.
        start, length: Packed positions of the sequence, including its padding.
    """

    prefix_start: int
    prefix_length: int
    start: int
    length: int


@dataclass(frozen=True)
class SharedPrompts:
    """Boundaries of packed sequences, some of which continue another sequence: a prompt, or the
    first positions of another sequence of an agent.

    Args:
        cu_seqlens: Start of each sequence, followed by the total number of positions, before
            context parallelism splits them.
        prefix_sequences: For each sequence, the index of the sequence that it continues, or -1.
        prefix_lengths: For each sequence, the number of its sample's tokens that come before it,
            without padding. The sequence that it continues has the last of them, and may itself
            continue another.
        positions_S: Position of each local token within its sample, on the model's device.
    """

    cu_seqlens: tuple[int, ...]
    prefix_sequences: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    positions_S: torch.Tensor
    cp_size: int = 1
    cp_rank: int = 0

    def path(self, number: int, length: int) -> list[tuple[int, int]]:
        """Returns where the first positions of a sequence's sample are packed: (start, end) pairs.

        Args:
            number: Index of the sequence; if -1, there are no positions.
            length: Number of positions, which do not include padding.
        """
        found: list[tuple[int, int]] = []
        while number >= 0 and length > 0:
            before, start = self.prefix_lengths[number], self.cu_seqlens[number]
            if length > before:
                found.append((start, start + length - before))
                length = before
            number = self.prefix_sequences[number]
        return found[::-1]

    def prefix_rows(self, number: int) -> torch.Tensor:
        """Returns the packed positions that a sequence continues, in the order of its sample."""
        continued = self.path(self.prefix_sequences[number], self.prefix_lengths[number])
        return torch.cat([torch.arange(0), *(torch.arange(*span) for span in continued)])

    @cached_property
    def two_calls(self) -> TwoCalls | None:
        """Boundaries for attention without copies of keys (prefix_attention.py), if possible."""
        if self.cp_size > 1:
            return None
        sequences = self.cu_seqlens, self.prefix_sequences, self.prefix_lengths
        return TwoCalls.of(*sequences, self.positions_S.device)

    @cached_property
    def sequences(self) -> list[ContinuedSequence]:
        """All sequences, in packed order, for layers that know only states at their ends."""
        own = pairwise(self.cu_seqlens)
        pad_each = 2 * self.cp_size if self.cp_size > 1 else 1
        for number, shared in zip(self.prefix_sequences, self.prefix_lengths, strict=True):
            if number >= 0:
                size = self.cu_seqlens[number + 1] - self.cu_seqlens[number]
                if self.prefix_lengths[number] or not size - pad_each < shared <= size:
                    raise RuntimeError(
                        f"recurrent layers cannot continue {shared} tokens that end within "
                        f"sequence {number}"
                    )
        given = zip(own, self.prefix_sequences, self.prefix_lengths, strict=True)
        return [
            ContinuedSequence(self.cu_seqlens[number], shared, start, end - start)
            if number >= 0
            else ContinuedSequence(start, 0, start, end - start)
            for (start, end), number, shared in given
        ]

    @cached_property
    def rows_S(self) -> torch.Tensor:
        """Row of each packed position in the keys that context parallelism gathers."""
        return gathered_rows(self.cu_seqlens, self.cp_size)

    @cached_property
    def angle_positions(self) -> torch.Tensor:
        """Position within its sample for each row of rotary angles, on the model's device."""
        return at_angles(self.positions_S, self.cu_seqlens[-1], self.cp_size, self.cp_rank)

    @cached_property
    def keys(self) -> KeyRows:
        """Keys of each local chunk of a sequence, one chunk after another.

        The keys of a chunk are the positions that the sequence continues and the sequence up to the
        chunk's end, so that causal attention aligned at the last key is right.
        """
        parts, queries, counts = [], [0], [0]
        for number, (start, stop) in enumerate(pairwise(self.cu_seqlens)):
            prefix = self.prefix_rows(number)
            for begin, end in chunks_of(stop - start, self.cp_size, self.cp_rank):
                parts += [prefix, torch.arange(start, start + end)]
                queries.append(queries[-1] + end - begin)
                counts.append(counts[-1] + len(prefix) + end)
        device, index_K = self.positions_S.device, self.rows_S[torch.cat(parts)]
        return KeyRows(
            index_K.to(device),
            Readers.of(index_K, self.cu_seqlens[-1]).to(device),
            torch.tensor(queries, dtype=torch.int32).to(device),
            torch.tensor(counts, dtype=torch.int32).to(device),
            max(end - start for start, end in pairwise(queries)),
            max(end - start for start, end in pairwise(counts)),
        )


def at_angles(
    local_S: torch.Tensor, num_positions: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Returns values of local positions at the rows of the angles that Megatron reads for them.

    Megatron takes all sequences for a single one (PackedSequences). With context parallelism, it
    selects this rank's two chunks of that sequence from the angles; other rows are not read.
    """
    if cp_size == 1:
        return local_S
    found_S = local_S.new_zeros(num_positions)
    place = context_positions((0, num_positions), cp_size, cp_rank)
    found_S[place.to(found_S.device)] = local_S
    return found_S


class Readers(NamedTuple):
    """Gathered rows, grouped by the packed token that they copy.

    Args:
        order_K: Row indices, sorted by token, then ascending.
        start_T: Start of each token's rows in `order_K`.
    """

    order_K: torch.Tensor
    start_T: torch.Tensor

    @staticmethod
    def of(index_K: torch.Tensor, num_tokens: int) -> Readers:
        """Returns, for each of `num_tokens` tokens, the rows that `index_K` gathers from it."""
        sorted_K, order_K = index_K.sort(stable=True)
        token_T = torch.arange(num_tokens, device=index_K.device)
        return Readers(order_K, torch.searchsorted(sorted_K, token_T))

    def to(self, device: torch.device) -> Readers:
        return Readers(self.order_K.to(device), self.start_T.to(device))


class KeyRows(NamedTuple):
    """Arguments of an attention kernel for packed sequences with more keys than queries.

    Args:
        index_K: Position of each key.
        readers: For each position, the keys that copy it.
        cu_seqlens_q, cu_seqlens_k: Boundaries of the sequences, int32. All tensors are on the
            model's device.
    """

    index_K: torch.Tensor
    readers: Readers
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's PackedSeqParams, extended by buckets that are computed once for all layers.

    `cu_seqlens_q` and `cu_seqlens_kv` count padded tokens of whole sequences, before context
    parallelism splits them. With shared prompts, they describe a single sequence of all positions,
    because Megatron needs them only for rotary angles, which heads.py then selects by position.
    Where each position has its own angles, the padded bounds are those of a single sequence, which
    Megatron then rotates in one kernel, without reading the bounds on the host.
    This object contains `model_inputs` so that they reach all layers, even when layers are
    recomputed (inputs.py). `derived` contains what layers other than attention compute once from
    the boundaries.
    """

    shared: SharedPrompts | None = None
    angle_rows: torch.Tensor | None = None
    model_inputs: dict[str, Any] = field(default_factory=dict)
    derived: dict[Any, Any] = field(default_factory=dict)
    _buckets: dict[tuple[int, int], tuple[list[Bucket], torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        shared: SharedPrompts | None = None,
        model_inputs: Mapping[str, Any] | None = None,
        *,
        has_own_angles: bool = False,
        angle_rows: torch.Tensor | None = None,
    ) -> PackedSequences:
        """Builds the parameters from `cu_seqlens`, (sequences + 1,) int32.

        Args:
            has_own_angles: Whether each packed position has its own row of rotary angles.
            angle_rows: Packed position of each row of angles, if context parallelism needs them in
                another order.
        """
        whole = cu_seqlens[[0, -1]] if shared is not None or has_own_angles else None
        bounds = cu_seqlens if shared is None else whole
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=whole if has_own_angles else None,
            cu_seqlens_kv_padded=whole if has_own_angles else None,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            shared=shared,
            angle_rows=angle_rows,
            model_inputs=dict(model_inputs or {}),
        )

    def buckets(self, cp_size: int, cp_rank: int) -> tuple[list[Bucket], torch.Tensor]:
        """Returns the buckets, and each local token's index in their concatenated rows."""
        key = (cp_size, cp_rank)
        if key not in self._buckets:
            if self.shared is not None:
                self._buckets[key] = _shared_buckets(self.shared)
            else:
                self._buckets[key] = _make_buckets(self.cu_seqlens_q.tolist(), cp_size, cp_rank)
        return self._buckets[key]


def _shared_buckets(shared: SharedPrompts) -> tuple[list[Bucket], torch.Tensor]:
    cp_size, cp_rank = shared.cp_size, shared.cp_rank
    by_size: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    prefixes = [shared.prefix_rows(number) for number in range(len(shared.prefix_sequences))]
    for sequence, (begin, end) in enumerate(pairwise(shared.cu_seqlens)):
        if end > begin:
            whole = len(prefixes[sequence]) + end - begin
            size = ((end - begin).bit_length(), whole.bit_length())
            by_size.setdefault(size, []).append((sequence, begin, end - begin))
    buckets, place = [], torch.empty(shared.cu_seqlens[-1] // cp_size, dtype=torch.int64)
    row_start = 0
    for sequences in by_size.values():
        number, start, length = torch.tensor(sequences).T[..., None]
        prefix_NP = pad_sequence([prefixes[n] for n in number.flatten()], batch_first=True)
        before = torch.tensor([len(prefixes[n]) for n in number.flatten()])[:, None]
        local_length = length // cp_size
        column_Q = torch.arange(int(local_length.max()))[None]
        local_NQ = torch.minimum(column_Q, local_length - 1)
        valid = (column_Q < local_length).flatten()
        flat = torch.arange(valid.numel()) + row_start
        query_index_NQ = start // cp_size + local_NQ
        place[query_index_NQ.flatten()[valid]] = flat[valid]
        row_start += valid.numel()
        within_NQ = _within(local_NQ, local_length, cp_size, cp_rank)
        column_K = torch.arange(int((before + length).max()))[None]
        own_NK = start + torch.minimum(column_K - before, length - 1)
        own_NK[:, : prefix_NP.size(1)] = torch.where(
            column_K[:, : prefix_NP.size(1)] < before, prefix_NP, own_NK[:, : prefix_NP.size(1)]
        )
        key_index = shared.rows_S[own_NK]
        is_plain = cp_size == 1 and not bool(before.any())
        buckets.append(Bucket(query_index_NQ, key_index, None if is_plain else before + within_NQ))
    return buckets, place


def _within(
    local_NQ: torch.Tensor, local_length: torch.Tensor, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Returns the position within its sequence of each local query (context_parallel.py)."""
    if cp_size == 1:
        return local_NQ
    half = local_length // 2
    second = (2 * cp_size - 1 - cp_rank) * half + local_NQ - half
    return torch.where(local_NQ < half, cp_rank * half + local_NQ, second)


def _make_buckets(
    cu_seqlens: list[int], cp_size: int, cp_rank: int
) -> tuple[list[Bucket], torch.Tensor]:
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens):
        if end > start:
            by_size.setdefault((end - start - 1).bit_length(), []).append((start, end - start))
    buckets, place = [], torch.empty(cu_seqlens[-1] // cp_size, dtype=torch.int64)
    rows_S = gathered_rows(cu_seqlens, cp_size)
    row_start = 0
    for sequences in by_size.values():
        starts = torch.tensor([start for start, _ in sequences])[:, None]
        lengths = torch.tensor([length for _, length in sequences])[:, None]
        longest = int(lengths.max())
        column_Q = torch.arange(longest // cp_size)[None]
        local_length = lengths // cp_size
        local_NQ = torch.minimum(column_Q, local_length - 1)
        query_index = starts // cp_size + local_NQ
        valid = (column_Q < local_length).flatten()
        flat = torch.arange(valid.numel()) + row_start
        place[query_index.flatten()[valid]] = flat[valid]
        row_start += valid.numel()
        column_K = torch.minimum(torch.arange(longest)[None], lengths - 1)
        position = None if cp_size == 1 else _within(local_NQ, local_length, cp_size, cp_rank)
        buckets.append(Bucket(query_index, rows_S[starts + column_K], position))
    return buckets, place


class PackedAttention(MegatronModule):
    """Causal `core_attention` based on torch's scaled_dot_product_attention.

    Applies the window that Megatron's `window_size` sets for the layer, if any, and sinks if
    `softmax_type` is "learnable": each head's softmax has one more logit, the parameter
    `softmax_offset`, for which there is no value (Agarwal et al. 2025, "gpt-oss-120b & gpt-oss-20b
    Model Card", section 2.2; Megatron's name of the parameter). Accepts packed
    sequences (thd) with `PackedSequences`, and plain [s, b, h, d] batches without context
    parallelism. For grouped queries, torch shares key-value heads without copies.
    """

    takes_shared_prompts = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        """Accepts the arguments of Megatron's `core_attention`; inputs determine head sizes."""
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"attn_mask_type={attn_mask_type}: PackedAttention is causal")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if config.softmax_type not in ("vanilla", "learnable"):
            raise ModelError(
                "softmax_type of the family's transformer_config",
                config.softmax_type,
                "vanilla or learnable with torch's layers",
                "Give the family a layer_spec whose attention supports it.",
            )
        is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # Number of earlier positions that a query attends to; None for all of them.
        self.num_before = int(config.window_size[0]) if is_windowed else None
        # Megatron's value for an unlimited window.
        if self.num_before is not None and self.num_before < 0:
            self.num_before = None
        self.soft_cap = 0.0  # build.py sets the model's value
        # Exact attention on CPU, with the arguments of `exact.by_blocks`, and on GPUs, with packed
        # queries, keys and values, and their boundaries; exact.py sets them.
        self.attend_exactly: Callable[..., torch.Tensor] | None = None
        self.attend_packed: Callable[..., torch.Tensor] | None = None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(
                    num_heads, dtype=config.params_dtype, device=torch.cuda.current_device()
                )
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.cp_group: dist.ProcessGroup | None = None
        if pg_collection is not None and config.context_parallel_size > 1:
            self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """Attends within each sequence.

        Args:
            query: Packed local tokens [t, heads, d], or [s, b, heads, d].
            key, value: Like `query`, but with KV heads; values may have a different d.

        Returns:
            [t, heads * d], or [s, b, heads * d]; d is the head size of the values.
        """
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        if self.attend_packed is not None:
            return self.attend_packed(query, key, value, packed_seq_params)
        cp_size, cp_rank = 1, 0
        width = query.size(-2) * value.size(-1)
        if self.cp_group is not None:
            cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)
                for x in (key, value)
            )
        buckets, place = packed_seq_params.buckets(cp_size, cp_rank)
        rows = []
        for bucket in buckets:
            attended = self._attend(
                _rows(query, bucket.query_index_NQ),
                _rows(key, bucket.key_index_NK),
                _rows(value, bucket.key_index_NK),
                bucket.query_position_NQ,
            )
            rows.append(attended.transpose(1, 2).reshape(-1, width))
        return torch.cat(rows).index_select(0, place.to(query.device))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_position_NQ: torch.Tensor | None,
    ) -> torch.Tensor:
        mask = None
        is_explicit = bool(self.soft_cap) or self.softmax_offset is not None
        has_mask = is_explicit or self.attend_exactly is not None
        if query_position_NQ is not None or self.num_before is not None or has_mask:
            column_K = torch.arange(key.size(2))
            # Without query positions, queries and keys are the same tokens.
            position_NQ = column_K[None] if query_position_NQ is None else query_position_NQ
            position_N1Q1 = position_NQ[:, None, :, None]
            mask = position_N1Q1 >= column_K
            if self.num_before is not None:
                mask &= position_N1Q1 - self.num_before <= column_K
            mask = mask.to(query.device)
        dropout = self.dropout if self.training else 0.0
        if self.attend_exactly is not None and mask is not None:
            return self.attend_exactly(
                query, key, value, mask[:, 0], position_NQ, self.num_before, self.scale
            )
        if is_explicit and mask is not None:
            return explicit_attention(
                query,
                key,
                value,
                mask,
                self.scale,
                cap=self.soft_cap,
                sinks=self.softmax_offset,
                dropout=dropout,
            )
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the sinks, if any, as sharded by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return found


def set_soft_cap(model: torch.nn.Module, cap: float) -> None:
    """Sets the soft cap for products of queries and keys; ModelError if a layer has none."""
    for part in model.modules():
        attention = getattr(part, "core_attention", None)
        if isinstance(attention, PackedAttention):
            attention.soft_cap = cap
        elif attention is not None:
            raise ModelError(
                "attention_cap of the family's shape",
                cap,
                f"0 with {type(attention).__name__}",
                "Give the family's layers hybridrl's PackedAttention.",
            )


class GatherKeys(torch.autograd.Function):
    """Gathers rows of packed keys or values.

    In the backward pass, one kernel sums the gradients of a row in fp32, in the order of its
    readers. `index_add_` would sum them in the order of a GPU's atomic additions, so repeated
    backward passes could give different results.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens_THD: torch.Tensor, index_K: torch.Tensor, readers: Readers | None = None
    ) -> torch.Tensor:
        ctx.save_for_backward(index_K)
        ctx.readers, ctx.num_tokens = readers, tokens_THD.size(0)
        return tokens_THD.index_select(0, index_K)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_KHD: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (index_K,) = ctx.saved_tensors
        readers = ctx.readers
        if readers is None:
            readers = Readers.of(index_K, ctx.num_tokens)
        # The kernel sums the rows of each bag in order, in fp32.
        total_TD = F.embedding_bag(
            readers.order_K, grad_KHD.flatten(1).contiguous(), readers.start_T, mode="sum"
        )
        return total_TD.view(ctx.num_tokens, *grad_KHD.shape[1:]), None, None


def _rows(tokens_THD: torch.Tensor, index_NL: torch.Tensor) -> torch.Tensor:
    """Gathers packed tokens [t, heads, d] into rows [n, heads, l, d]."""
    rows = GatherKeys.apply(tokens_THD, index_NL.flatten().to(tokens_THD.device))
    return rows.view(*index_NL.shape, *tokens_THD.shape[1:]).transpose(1, 2)
