"""Gated delta rule over packed sequences, in torch and fp32.

The rule (Yang et al. 2024, "Gated Delta Networks", eq. 10) keeps a matrix S per value head. For
each token, with key k and query q of length 1, value v, decay g <= 0 and step size beta:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   output = S^T q / sqrt(key size)

This is the reference for faster kernels (delta_kernels.py), and is used where there is none. It
computes chunks of tokens with matrix products (ibid., section 3.3): within a chunk, a triangular
system gives the corrections that each token writes, and S passes from chunk to chunk.

Sequences are rows of batches, one batch for each power of two of their lengths. Rows are padded at
the end with tokens whose decay and step size are 0, which do not change S.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hybridrl.models.mixers import DELTA_CHUNK

# Added to the squared length of queries and keys, as in transformers and engines.
LENGTH_EPS = 1e-6


class Rows(NamedTuple):
    """Sequences of similar length as rows of one batch.

    Args:
        index_NL: Packed index of each token; rows are padded with their last token.
        is_real_NL: False for padding.
        numbers: Index of each row's sequence.
    """

    index_NL: torch.Tensor
    is_real_NL: torch.Tensor
    numbers: tuple[int, ...]


class Chunks(NamedTuple):
    """Chunks of packed sequences, as kernels read them.

    Args:
        start_C: First token of each chunk, int32.
        length_C: Number of tokens of each chunk, int32.
        first_N: First chunk of each sequence, followed by the number of chunks, int32.
    """

    start_C: torch.Tensor
    length_C: torch.Tensor
    first_N: torch.Tensor


class Sequences:
    """Lengths of packed sequences, with tensors that all layers share.

    Args:
        lengths: Number of tokens in each sequence; none is 0.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = tuple(lengths), device
        self.starts = (0, *accumulate(self.lengths))

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Start of each sequence, followed by the number of tokens, int64."""
        return torch.tensor(self.starts, device=self.device)

    @cached_property
    def rows(self) -> list[Rows]:
        by_size: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            by_size.setdefault((length - 1).bit_length(), []).append(number)
        found = []
        for size, numbers in by_size.items():
            chunk = min(DELTA_CHUNK, 1 << size)
            longest = max(self.lengths[number] for number in numbers)
            column_L = torch.arange(-(-longest // chunk) * chunk)
            length_N1 = torch.tensor([self.lengths[number] for number in numbers])[:, None]
            start_N1 = torch.tensor([self.starts[number] for number in numbers])[:, None]
            index_NL = start_N1 + torch.minimum(column_L, length_N1 - 1)
            is_real_NL = column_L < length_N1
            found.append(Rows(index_NL.to(self.device), is_real_NL.to(self.device), tuple(numbers)))
        return found

    @cached_property
    def chunks(self) -> Chunks:
        starts = [range(a, b, DELTA_CHUNK) for a, b in pairwise(self.starts)]
        first = (0, *accumulate(len(one) for one in starts))
        start_C = torch.tensor([start for one in starts for start in one], dtype=torch.int32)
        end_C = torch.tensor([one.stop for one in starts for _ in one], dtype=torch.int32)
        length_C = (end_C - start_C).clamp(max=DELTA_CHUNK)
        first_N = torch.tensor(first, dtype=torch.int32)
        return Chunks(*(one.to(self.device) for one in (start_C, length_C, first_N)))

    @cached_property
    def place_T(self) -> torch.Tensor:
        """Index of each packed token in the concatenated rows."""
        place_T = torch.empty(self.starts[-1], dtype=torch.int64, device=self.device)
        before = 0
        for rows in self.rows:
            flat = torch.arange(rows.index_NL.numel(), device=self.device) + before
            is_real = rows.is_real_NL.flatten()
            place_T[rows.index_NL.flatten()[is_real]] = flat[is_real]
            before += rows.index_NL.numel()
        return place_T

    @cached_property
    def order_N(self) -> torch.Tensor:
        """Index of each sequence in the concatenated rows' sequences."""
        numbers = [number for rows in self.rows for number in rows.numbers]
        return torch.tensor(numbers).argsort().to(self.device)


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule for T packed tokens.

    Args:
        query_THK, key_THK: (T, key heads, key size); the rule itself scales them to length 1.
            Consecutive value heads share a key head.
        value_TGV: (T, value heads, value size).
        decay_TG: Logarithm of the decay, (T, value heads) fp32, at most 0.
        beta_TG: Step size, (T, value heads) fp32, from 0 to 1.
    """

    query_THK: torch.Tensor
    key_THK: torch.Tensor
    value_TGV: torch.Tensor
    decay_TG: torch.Tensor
    beta_TG: torch.Tensor

    def rows(self, index_N: torch.Tensor) -> DeltaInputs:
        return DeltaInputs(*(one.index_select(0, index_N) for one in self))


class DeltaRule(Protocol):
    """Computes the gated delta rule over packed sequences."""

    def __call__(
        self,
        inputs: DeltaInputs,
        sequences: Sequences,
        state_NGKV: torch.Tensor | None = None,
        wants_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns outputs, (T, value heads, value size), and final states or None.

        Args:
            state_NGKV: State before each sequence, (N, value heads, key size, value size) fp32; if
                None, all states are zero.
            wants_states: Whether to return the states after the sequences.
        """


def delta_rule(
    inputs: DeltaInputs,
    sequences: Sequences,
    state_NGKV: torch.Tensor | None = None,
    wants_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the rule in fp32; see `DeltaRule` for arguments and results.

    The backward pass computes each batch of rows again, because its intermediate values are many
    times larger than its inputs.
    """
    query_THK = of_length_1(inputs.query_THK) * inputs.query_THK.size(-1) ** -0.5
    key_THK, value_TGV = of_length_1(inputs.key_THK), at_least_fp32(inputs.value_TGV)
    outputs, states = [], []
    for rows in sequences.rows:
        padding_NL1 = ~rows.is_real_NL[..., None]
        output_NLGV, state = checkpoint(
            _rule_of_rows,
            query_THK[rows.index_NL],
            key_THK[rows.index_NL],
            value_TGV[rows.index_NL],
            inputs.decay_TG[rows.index_NL].masked_fill(padding_NL1, 0),
            inputs.beta_TG[rows.index_NL].masked_fill(padding_NL1, 0),
            None if state_NGKV is None else state_NGKV[list(rows.numbers)],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(output_NLGV.flatten(0, 1))
        states.append(state)
    output_TGV = torch.cat(outputs).index_select(0, sequences.place_T)
    if not wants_states:
        return output_TGV, None
    return output_TGV, torch.cat(states).index_select(0, sequences.order_N)


def of_length_1(heads: torch.Tensor) -> torch.Tensor:
    """Returns queries or keys of length 1, at least in fp32."""
    heads = at_least_fp32(heads)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LENGTH_EPS)


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rule_of_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes rows of equal length L, a multiple of the chunk size.

    Args:
        query, key: (N, L, key heads H, K), fp32 and scaled.
        value: (N, L, H * R, V).
        decay, beta: (N, L, H * R).
        state: (N, H * R, K, V), or None for zeros.

    Returns:
        Outputs, (N, L, H * R, V), and the states after the rows, as `state`.
    """
    num_rows, length, num_keys, key_dim = query.shape
    num_values, value_dim = value.shape[2:]
    chunk, shared = min(DELTA_CHUNK, length), num_values // num_keys

    def in_chunks(tokens: torch.Tensor, per_key: int) -> torch.Tensor:
        """Returns tokens as (N, H, R or 1, chunks, tokens of a chunk, ...)."""
        split = tokens.unflatten(2, (num_keys, per_key)).unflatten(1, (-1, chunk))
        return split.permute(0, 3, 4, 1, 2, *range(5, split.dim()))

    query, key = in_chunks(query, 1), in_chunks(key, 1)
    value, decay, beta = (in_chunks(one, shared) for one in (value, decay, beta))
    total = decay.cumsum(-1)  # decay from the start of the chunk to each token
    between = total[..., :, None] - total[..., None, :]
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    weight = between.masked_fill(is_later, float("-inf")).exp()
    since_start = total.exp()[..., None]
    # Token i writes beta_i (v_i - what the state and the chunk's earlier tokens give for k_i).
    system = beta[..., None] * (key @ key.transpose(-1, -2)) * weight
    given = torch.cat((value, since_start * key), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    from_value, from_state = solved.split((value_dim, key_dim), -1)
    within = (query @ key.transpose(-1, -2)) * weight
    from_start = query * since_start
    at_end = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    if state is None:
        state = value.new_zeros(num_rows, num_values, key_dim, value_dim)
    state = state.unflatten(1, (num_keys, shared))
    outputs = []
    for index in range(value.size(3)):
        written = from_value[..., index, :, :] - from_state[..., index, :, :] @ state
        read = from_start[..., index, :, :] @ state
        outputs.append(read + within[..., index, :, :] @ written)
        added = at_end[..., index, :, :].transpose(-1, -2) @ written
        state = kept[..., index, :, :] * state + added
    output = torch.stack(outputs, 3)  # (N, H, R, chunks, tokens, V)
    output = output.permute(0, 3, 4, 1, 2, 5).reshape(num_rows, length, num_values, value_dim)
    return output, state.flatten(1, 2)


def causal_convolution(channels_EC: torch.Tensor, weight_CK: torch.Tensor) -> torch.Tensor:
    """Convolves each channel with its own kernel, and applies SiLU, in fp32.

    Args:
        channels_EC: E consecutive tokens.
        weight_CK: Kernel of each channel; the last weight is for the current token.

    Returns:
        (E - K + 1, C) fp32, for the tokens from index K - 1.
    """
    wide_EC, kernel = at_least_fp32(channels_EC), weight_CK.size(1)
    count = wide_EC.size(0) - kernel + 1
    total = wide_EC[:count] * weight_CK[:, 0].to(wide_EC)
    for offset in range(1, kernel):
        total = total + wide_EC[offset : offset + count] * weight_CK[:, offset].to(wide_EC)
    return F.silu(total)
