"""Gated delta rule over packed sequences, forward and backward.

Terms and formulas are those of hybridrl/models/megatron/delta_rule.py. Tokens are computed in
chunks of 64. All products within chunks run in parallel; only the state passes from chunk to chunk,
in one program per sequence, head and block of values. The backward pass computes intermediate
values of the forward pass again, so that only the inputs are kept between the passes.

With chunk-local decay b_i (the sum of decays up to token i) and D_ij = exp(b_i - b_j):

    A_ij = beta_i (k_i . k_j) D_ij for j < i;   T = (I + A)^-1
    U = T (beta v);   W = T (beta exp(b) k);   v' = U - W S
    output = exp(b) q S + tril((q k^T) D) v';   S <- exp(b_last) S + (exp(b_last - b) k)^T v'

Ideal for T tokens, G value heads and heads of K and V: about T G (4 K V + 64 (2 K + 2 V)) FLOPs
forward and three times as many backward; inputs and outputs are read and written once, and a state
of K V values for every 64 tokens is written once and read twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 64
SIZES = (16, 32, 64, 128, 256)  # sizes of heads
# Values that one program of the recurrence holds: its state has to stay in registers.
STATE_BLOCK = {16: 16, 32: 32, 64: 64, 128: 32, 256: 16}
BLOCK = 64  # block of keys or values elsewhere


class Chunks(NamedTuple):
    """Chunks of packed sequences.

    Args:
        start_C, length_C: First token of each chunk, and its number of tokens, int32.
        first_N: First chunk of each sequence, followed by the number of chunks, int32.
    """

    start_C: torch.Tensor
    length_C: torch.Tensor
    first_N: torch.Tensor


def fault(key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Returns why the kernels cannot compute such heads, or None."""
    if key_dim not in SIZES or value_dim not in SIZES:
        return f"heads of {key_dim} and {value_dim} are not among {SIZES}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels need a model in bf16 or fp16, not {dtype}"
    return None


def delta_rule(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_TGV: torch.Tensor,
    decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    chunks: Chunks,
    state_NGKV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the rule; differentiable with respect to all tensors.

    Args:
        query_THK: Queries of length 1, divided by sqrt(K).
        key_THK: Keys of length 1, in the type of the queries, as the values.
        value_TGV: Values; G is a multiple of H.
        decay_TG: Logarithm of the decay, fp32.
        state_NGKV: State before each sequence, fp32; None for zeros.

    Returns:
        Outputs, (T, G, V) in the type of the values, and the states after the sequences, fp32.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _DeltaRule.apply(
        query_THK.contiguous(),
        key_THK.contiguous(),
        value_TGV.contiguous(),
        decay_TG.contiguous(),
        beta_TG.contiguous(),
        chunks,
        None if state_NGKV is None else state_NGKV.contiguous(),
    )
    return found


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        chunks: Chunks,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pass_ = _Pass(query, key, value, decay, beta, chunks, state)
        output = pass_.outputs()
        ctx.save_for_backward(query, key, value, decay, beta, state)
        ctx.chunks = chunks
        return output, pass_.final

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_output: torch.Tensor, grad_final: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, decay, beta, state = ctx.saved_tensors
        pass_ = _Pass(query, key, value, decay, beta, ctx.chunks, state)
        *of_tokens, of_state = pass_.gradients(
            grad_output.to(value.dtype).contiguous(),
            None if grad_final is None else grad_final.contiguous(),
        )
        return *of_tokens, None, None if state is None else of_state


class _Pass:
    """Intermediate values of the forward pass.

    Attributes:
        total_TG: Decay from the start of the chunk to each token.
        inverse_CG: T of each chunk, (C, G, 64, 64).
        keys_TGK, written_TGV: W, and v'.
        states_CG: State before each chunk, (C, G, K, V).
        final: States after the sequences.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        chunks: Chunks,
        state: torch.Tensor | None,
    ) -> None:
        self.query, self.key, self.value, self.beta, self.chunks = query, key, value, beta, chunks
        num_tokens, self.heads, self.key_dim = key.shape
        self.groups, self.value_dim = value.shape[1:]
        self.num_chunks = chunks.start_C.numel()
        self.num_sequences = chunks.first_N.numel() - 1
        num_chunks, groups = self.num_chunks, self.groups
        self.grid = (num_chunks, groups)
        self.total_TG = torch.empty_like(decay)
        system = decay.new_empty(num_chunks, groups, CHUNK, CHUNK)
        _systems[self.grid](
            key, decay, beta, self.total_TG, system, *chunks[:2], **self.sizes(), num_warps=4
        )
        self.inverse_CG = torch.empty_like(system, dtype=value.dtype)
        _inverses[self.grid](system, self.inverse_CG, groups, num_warps=1)
        self.keys_TGK = key.new_empty(num_tokens, groups, self.key_dim)
        changes = torch.empty_like(value)
        _changes[self.grid](
            key,
            value,
            beta,
            self.total_TG,
            self.inverse_CG,
            self.keys_TGK,
            changes,
            *chunks[:2],
            **self.sizes(),
            **self.blocks(),
            num_warps=4,
        )
        self.states_CG = value.new_empty(num_chunks, groups, self.key_dim, self.value_dim)
        self.final = decay.new_empty(self.num_sequences, groups, self.key_dim, self.value_dim)
        self.written_TGV = torch.empty_like(value)
        _states[self.state_grid()](
            key,
            self.keys_TGK,
            changes,
            self.total_TG,
            self.final if state is None else state,
            self.states_CG,
            self.written_TGV,
            self.final,
            *chunks,
            HAS_STATE=state is not None,
            BLOCK_V=STATE_BLOCK[self.key_dim],
            **self.sizes(),
            num_warps=4,
        )

    def sizes(self) -> dict[str, int]:
        return {
            "H": self.heads,
            "G": self.groups,
            "K": self.key_dim,
            "V": self.value_dim,
            "CHUNK": CHUNK,
        }

    def blocks(self) -> dict[str, int]:
        return {"BLOCK_K": min(BLOCK, self.key_dim), "BLOCK_V": min(BLOCK, self.value_dim)}

    def state_grid(self) -> tuple[int]:
        """Returns a grid of one axis, because the others are limited to 65,535 programs."""
        num_blocks: int = triton.cdiv(self.value_dim, STATE_BLOCK[self.key_dim])
        return (num_blocks * self.num_sequences * self.groups,)

    def outputs(self) -> torch.Tensor:
        """Returns the outputs."""
        output = torch.empty_like(self.value)
        block = min(BLOCK, self.value_dim)
        _outputs[(self.value_dim // block, *self.grid)](
            self.query,
            self.key,
            self.written_TGV,
            self.total_TG,
            self.states_CG,
            output,
            *self.chunks[:2],
            BLOCK_V=block,
            **self.sizes(),
            num_warps=4,
        )
        return output

    def gradients(
        self, grad_TGV: torch.Tensor, grad_final: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of queries, keys, values, decays, step sizes and states."""
        of_written, of_states, of_initial = self._of_states(grad_TGV, grad_final)
        sizes, blocks = self.sizes(), self.blocks()
        kept_CG = self.total_TG.new_empty(self.num_chunks, self.groups)
        _kept[self.grid](
            self.states_CG, of_states, self.total_TG, kept_CG, *self.chunks[:2], **sizes
        )
        num_blocks = self.key_dim // blocks["BLOCK_K"]
        of_query = self.total_TG.new_empty(self.keys_TGK.shape)
        of_key, of_keys = torch.empty_like(of_query), torch.empty_like(self.keys_TGK)
        of_total = self.total_TG.new_empty(num_blocks, *self.total_TG.shape)
        _of_keys[(num_blocks, *self.grid)](
            self.query,
            self.key,
            self.written_TGV,
            self.total_TG,
            self.states_CG,
            grad_TGV,
            of_written,
            of_states,
            of_query,
            of_key,
            of_keys,
            of_total,
            self.total_TG.size(0),
            *self.chunks[:2],
            **sizes,
            **blocks,
            num_warps=4,
        )
        of_value, of_beta = torch.empty_like(self.value), torch.empty_like(self.beta)
        of_decay = torch.empty_like(self.beta)
        _of_systems[self.grid](
            self.key,
            self.value,
            self.beta,
            self.total_TG,
            self.inverse_CG,
            of_keys,
            of_written,
            of_total.sum(0),
            kept_CG,
            of_key,
            of_value,
            of_beta,
            of_decay,
            *self.chunks[:2],
            **sizes,
            **blocks,
            num_warps=4,
        )
        shared = self.groups // self.heads
        of_query, of_key = (
            one.unflatten(1, (self.heads, shared)).sum(2).to(self.query.dtype)
            for one in (of_query, of_key)
        )
        return of_query, of_key, of_value, of_decay, of_beta, of_initial

    def _of_states(
        self, grad_TGV: torch.Tensor, grad_final: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the gradients of v', of the state after each chunk, and of the initial states."""
        sizes, block = self.sizes(), min(BLOCK, self.value_dim)
        of_written = torch.empty_like(self.value)
        _of_written[(self.value_dim // block, *self.grid)](
            self.query,
            self.key,
            self.total_TG,
            grad_TGV,
            of_written,
            *self.chunks[:2],
            BLOCK_V=block,
            **sizes,
            num_warps=4,
        )
        of_states, of_initial = torch.empty_like(self.states_CG), torch.empty_like(self.final)
        _of_states[self.state_grid()](
            self.query,
            self.key,
            self.keys_TGK,
            self.total_TG,
            grad_TGV,
            self.final if grad_final is None else grad_final,
            of_written,
            of_states,
            of_initial,
            *self.chunks,
            HAS_STATE=grad_final is not None,
            BLOCK_V=STATE_BLOCK[self.key_dim],
            **sizes,
            num_warps=4,
        )
        return of_written, of_states, of_initial


@triton.jit
def _differences(total, i, j, is_pair):  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    """Returns exp(b_i - b_j) where `is_pair`, else 0; `total` is b, once by i and once by j."""
    between = tl.minimum(total[:, None] - total[None, :], 0.0)
    return tl.where(is_pair, tl.exp(between), 0.0)


@triton.jit
def _systems(  # type: ignore[no-untyped-def]
    key_ptr,
    decay_ptr,
    beta_ptr,
    total_ptr,
    system_ptr,
    start_ptr,
    length_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes b and A of a chunk and head."""
    c, g = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    is_real = i < length
    of_token = (start + i) * G + g
    total = tl.cumsum(tl.load(decay_ptr + of_token, mask=is_real, other=0.0), 0)
    tl.store(total_ptr + of_token, total, mask=is_real)
    beta = tl.load(beta_ptr + of_token, mask=is_real, other=0.0)
    rows = ((start + i) * H + g // (G // H)) * K
    key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    products = tl.dot(key, tl.trans(key))
    system = products * _differences(total, i, i, i[:, None] > i[None, :]) * beta[:, None]
    place = (c * G + g).to(tl.int64) * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    tl.store(system_ptr + place, system)


@triton.jit
def _block(base_ptr, row: tl.constexpr, column: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads a block of 16 x 16 of a chunk's matrix."""
    i = tl.arange(0, 16)
    return tl.load(base_ptr + (row * 16 + i[:, None]) * 64 + column * 16 + i[None, :])


@triton.jit
def _put(base_ptr, block, row: tl.constexpr, column: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 16)
    place = base_ptr + (row * 16 + i[:, None]) * 64 + column * 16 + i[None, :]
    tl.store(place, block.to(base_ptr.dtype.element_ty))


@triton.jit
def _inverse_of_block(lower):  # type: ignore[no-untyped-def]
    """Returns (I + L)^-1 of a strictly lower block of 16 x 16, by forward substitution."""
    i = tl.arange(0, 16)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, 16):
        weights = tl.sum(tl.where(i[:, None] == row, lower, 0.0), 0)
        taken = tl.sum(weights[:, None] * inverse, 0)
        inverse -= tl.where(i[:, None] == row, taken[None, :], 0.0)
    return inverse


@triton.jit
def _times(one, other):  # type: ignore[no-untyped-def]
    return tl.dot(one, other, input_precision="ieee")


@triton.jit
def _inverses(system_ptr, inverse_ptr, G):  # type: ignore[no-untyped-def]
    """Writes T = (I + A)^-1 of a chunk and head, in blocks of 16 x 16 and fp32.

    Similar keys make powers of A large, so a series of powers would not be accurate.
    """
    place = (tl.program_id(0) * G + tl.program_id(1)).to(tl.int64) * 4096
    a, t = system_ptr + place, inverse_ptr + place
    t00 = _inverse_of_block(_block(a, 0, 0))
    t11 = _inverse_of_block(_block(a, 1, 1))
    t22 = _inverse_of_block(_block(a, 2, 2))
    t33 = _inverse_of_block(_block(a, 3, 3))
    a10, a21, a32 = _block(a, 1, 0), _block(a, 2, 1), _block(a, 3, 2)
    a20, a31, a30 = _block(a, 2, 0), _block(a, 3, 1), _block(a, 3, 0)
    t10 = -_times(t11, _times(a10, t00))
    t21 = -_times(t22, _times(a21, t11))
    t32 = -_times(t33, _times(a32, t22))
    t20 = -_times(t22, _times(a20, t00) + _times(a21, t10))
    t31 = -_times(t33, _times(a31, t11) + _times(a32, t21))
    t30 = -_times(t33, _times(a30, t00) + _times(a31, t10) + _times(a32, t20))
    zero = tl.zeros((16, 16), tl.float32)
    _put(t, t00, 0, 0)
    _put(t, zero, 0, 1)
    _put(t, zero, 0, 2)
    _put(t, zero, 0, 3)
    _put(t, t10, 1, 0)
    _put(t, t11, 1, 1)
    _put(t, zero, 1, 2)
    _put(t, zero, 1, 3)
    _put(t, t20, 2, 0)
    _put(t, t21, 2, 1)
    _put(t, t22, 2, 2)
    _put(t, zero, 2, 3)
    _put(t, t30, 3, 0)
    _put(t, t31, 3, 1)
    _put(t, t32, 3, 2)
    _put(t, t33, 3, 3)


@triton.jit
def _changes(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    beta_ptr,
    total_ptr,
    inverse_ptr,
    keys_ptr,
    changes_ptr,
    start_ptr,
    length_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Writes U and W of a chunk and head."""
    c, g = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
    i = tl.arange(0, CHUNK)
    is_real = i < length
    of_token = (start + i) * G + g
    beta = tl.load(beta_ptr + of_token, mask=is_real, other=0.0)
    total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
    place = (c * G + g).to(tl.int64) * CHUNK * CHUNK
    inverse = tl.load(inverse_ptr + place + i[:, None] * CHUNK + i[None, :])
    for block in range(0, V, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        where = of_token[:, None] * V + v[None, :]
        value = tl.load(value_ptr + where, mask=is_real[:, None], other=0.0)
        scaled = (value * beta[:, None]).to(value.dtype)
        change = tl.dot(inverse, scaled)
        tl.store(changes_ptr + where, change.to(value.dtype), mask=is_real[:, None])
    scale = beta * tl.exp(total)
    rows = ((start + i) * H + g // (G // H)) * K
    for block in range(0, K, BLOCK_K):
        k = block + tl.arange(0, BLOCK_K)
        key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
        scaled = (key * scale[:, None]).to(key.dtype)
        found = tl.dot(inverse, scaled)
        where = of_token[:, None] * K + k[None, :]
        tl.store(keys_ptr + where, found.to(key.dtype), mask=is_real[:, None])


@triton.jit
def _place_of_state(G: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the sequence, head and block of values of a program of `state_grid`."""
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(0) // num_blocks
    return row // G, row % G, tl.program_id(0) % num_blocks


@triton.jit
def _states(  # type: ignore[no-untyped-def]
    key_ptr,
    keys_ptr,
    changes_ptr,
    total_ptr,
    initial_ptr,
    states_ptr,
    written_ptr,
    final_ptr,
    start_ptr,
    length_ptr,
    first_ptr,
    HAS_STATE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Passes the state of a sequence, head and block of values from chunk to chunk."""
    n, g, block = _place_of_state(G, V, BLOCK_V)
    first, last = tl.load(first_ptr + n), tl.load(first_ptr + n + 1)
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = v < V
    in_state = k[:, None] * V + v[None, :]
    of_sequence = (n * G + g).to(tl.int64) * K * V + in_state
    if HAS_STATE:
        state = tl.load(initial_ptr + of_sequence, mask=is_value[None, :], other=0.0)
    else:
        state = tl.zeros((K, BLOCK_V), tl.float32)
    for c in range(first, last):
        start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
        rounded = state.to(states_ptr.dtype.element_ty)
        place = (c * G + g).to(tl.int64) * K * V
        tl.store(states_ptr + place + in_state, rounded, mask=is_value[None, :])
        is_real = i < length
        of_token = (start + i) * G + g
        total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
        at_end = tl.load(total_ptr + (start + length - 1) * G + g)
        where = of_token[:, None] * K + k[None, :]
        keys = tl.load(keys_ptr + where, mask=is_real[:, None], other=0.0)
        where = of_token[:, None] * V + v[None, :]
        is_both = is_real[:, None] & is_value[None, :]
        change = tl.load(changes_ptr + where, mask=is_both, other=0.0)
        written = change.to(tl.float32) - tl.dot(keys, rounded)
        tl.store(written_ptr + where, written.to(change.dtype), mask=is_both)
        left = tl.where(is_real, tl.exp(tl.minimum(at_end - total, 0.0)), 0.0)
        written = (written * left[:, None]).to(change.dtype)
        rows = ((start + i) * H + g // (G // H)) * K
        key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
        state = state * tl.exp(at_end) + tl.dot(tl.trans(key), written)
    tl.store(final_ptr + of_sequence, state, mask=is_value[None, :])


@triton.jit
def _outputs(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    written_ptr,
    total_ptr,
    states_ptr,
    output_ptr,
    start_ptr,
    length_ptr,
    BLOCK_V: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the outputs of a chunk, head and block of values."""
    c, g = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_real = i < length
    of_token = (start + i) * G + g
    total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
    rows = ((start + i) * H + g // (G // H)) * K
    query = tl.load(query_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    place = (c * G + g).to(tl.int64) * K * V
    state = tl.load(states_ptr + place + k[:, None] * V + v[None, :])
    output = tl.dot(query, state) * tl.exp(total)[:, None]
    within = tl.dot(query, tl.trans(key)) * _differences(total, i, i, i[:, None] >= i[None, :])
    where = of_token[:, None] * V + v[None, :]
    written = tl.load(written_ptr + where, mask=is_real[:, None], other=0.0)
    output += tl.dot(within.to(written.dtype), written)
    tl.store(output_ptr + where, output.to(written.dtype), mask=is_real[:, None])


@triton.jit
def _of_written(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    total_ptr,
    grad_ptr,
    of_written_ptr,
    start_ptr,
    length_ptr,
    BLOCK_V: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the gradients of v' that come from the chunk's own outputs."""
    c, g = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_real = i < length
    of_token = (start + i) * G + g
    total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
    rows = ((start + i) * H + g // (G // H)) * K
    query = tl.load(query_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    # The transpose: row j, column i.
    decays = tl.exp(tl.minimum(total[None, :] - total[:, None], 0.0))
    within = tl.where(i[None, :] >= i[:, None], tl.dot(key, tl.trans(query)) * decays, 0.0)
    where = of_token[:, None] * V + v[None, :]
    grad = tl.load(grad_ptr + where, mask=is_real[:, None], other=0.0)
    found = tl.dot(within.to(grad.dtype), grad)
    tl.store(of_written_ptr + where, found.to(grad.dtype), mask=is_real[:, None])


@triton.jit
def _of_states(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    keys_ptr,
    total_ptr,
    grad_ptr,
    of_final_ptr,
    of_written_ptr,
    of_states_ptr,
    of_initial_ptr,
    start_ptr,
    length_ptr,
    first_ptr,
    HAS_STATE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Passes the gradient of the state back from chunk to chunk, and completes that of v'."""
    n, g, block = _place_of_state(G, V, BLOCK_V)
    first, last = tl.load(first_ptr + n), tl.load(first_ptr + n + 1)
    i, k = tl.arange(0, CHUNK), tl.arange(0, K)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = v < V
    in_state = k[:, None] * V + v[None, :]
    of_sequence = (n * G + g).to(tl.int64) * K * V + in_state
    if HAS_STATE:
        state = tl.load(of_final_ptr + of_sequence, mask=is_value[None, :], other=0.0)
    else:
        state = tl.zeros((K, BLOCK_V), tl.float32)
    for step in range(0, last - first):
        c = last - 1 - step
        start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
        rounded = state.to(of_states_ptr.dtype.element_ty)
        place = (c * G + g).to(tl.int64) * K * V
        tl.store(of_states_ptr + place + in_state, rounded, mask=is_value[None, :])
        is_real = i < length
        of_token = (start + i) * G + g
        total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
        at_end = tl.load(total_ptr + (start + length - 1) * G + g)
        rows = ((start + i) * H + g // (G // H)) * K
        key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
        where = of_token[:, None] * V + v[None, :]
        is_both = is_real[:, None] & is_value[None, :]
        own = tl.load(of_written_ptr + where, mask=is_both, other=0.0)
        left = tl.where(is_real, tl.exp(tl.minimum(at_end - total, 0.0)), 0.0)
        of_written = own.to(tl.float32) + tl.dot(key, rounded) * left[:, None]
        tl.store(of_written_ptr + where, of_written.to(own.dtype), mask=is_both)
        query = tl.load(query_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
        grad = tl.load(grad_ptr + where, mask=is_both, other=0.0)
        scaled = (grad * tl.exp(total)[:, None]).to(grad.dtype)
        keys = tl.load(
            keys_ptr + of_token[:, None] * K + k[None, :], mask=is_real[:, None], other=0.0
        )
        state = state * tl.exp(at_end) + tl.dot(tl.trans(query), scaled)
        state -= tl.dot(tl.trans(keys), of_written.to(own.dtype))
    tl.store(of_initial_ptr + of_sequence, state, mask=is_value[None, :])


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    states_ptr,
    of_states_ptr,
    total_ptr,
    kept_ptr,
    start_ptr,
    length_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the gradient of the chunk's whole decay that comes from the state it keeps."""
    c, g = tl.program_id(0), tl.program_id(1)
    end = tl.load(start_ptr + c).to(tl.int64) + tl.load(length_ptr + c) - 1
    base = (c * G + g).to(tl.int64) * K * V
    v = tl.arange(0, V)
    products = tl.zeros((16, V), tl.float32)
    for block in range(0, K, 16):
        where = base + (block + tl.arange(0, 16))[:, None] * V + v[None, :]
        state, of_state = tl.load(states_ptr + where), tl.load(of_states_ptr + where)
        products += state.to(tl.float32) * of_state.to(tl.float32)
    kept = tl.sum(tl.sum(products, 1), 0) * tl.exp(tl.load(total_ptr + end * G + g))
    tl.store(kept_ptr + c * G + g, kept)


@triton.jit
def _of_keys(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    written_ptr,
    total_ptr,
    states_ptr,
    grad_ptr,
    of_written_ptr,
    of_states_ptr,
    of_query_ptr,
    of_key_ptr,
    of_keys_ptr,
    of_total_ptr,
    num_tokens,
    start_ptr,
    length_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Writes, for a chunk, head and block of keys, the gradients of queries and of W, and that part
    of the gradients of keys and decays that does not come from W and U.
    """
    block, c, g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
    i = tl.arange(0, CHUNK)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    is_real = i < length
    of_token = (start + i) * G + g
    place = (c * G + g).to(tl.int64) * K * V
    of_within = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    of_key = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    of_keys = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for part in range(0, V, BLOCK_V):
        v = part + tl.arange(0, BLOCK_V)
        where = of_token[:, None] * V + v[None, :]
        grad = tl.load(grad_ptr + where, mask=is_real[:, None], other=0.0)
        written = tl.load(written_ptr + where, mask=is_real[:, None], other=0.0)
        of_written = tl.load(of_written_ptr + where, mask=is_real[:, None], other=0.0)
        in_state = place + k[None, :] * V + v[:, None]  # transposed
        state = tl.load(states_ptr + in_state)
        of_state = tl.load(of_states_ptr + in_state)
        of_within += tl.dot(grad, tl.trans(written))
        of_query += tl.dot(grad, state)
        of_key += tl.dot(written, of_state)
        of_keys -= tl.dot(of_written, state)
    total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
    at_end = tl.load(total_ptr + (start + length - 1) * G + g)
    rows = ((start + i) * H + g // (G // H)) * K
    query = tl.load(query_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
    of_query *= tl.exp(total)[:, None]
    of_key *= tl.where(is_real, tl.exp(tl.minimum(at_end - total, 0.0)), 0.0)[:, None]
    from_key = tl.sum(key * of_key, 1)
    of_total = tl.sum(query * of_query, 1) - from_key
    of_total += tl.where(i == length - 1, tl.sum(from_key, 0), 0.0)
    of_within *= _differences(total, i, i, i[:, None] >= i[None, :])
    pairs = of_within * tl.dot(query, tl.trans(key))
    of_total += tl.sum(pairs, 1) - tl.sum(pairs, 0)
    rounded = of_within.to(key.dtype)
    of_query += tl.dot(rounded, key)
    of_key += tl.dot(tl.trans(rounded), query)
    where = of_token[:, None] * K + k[None, :]
    tl.store(of_query_ptr + where, of_query, mask=is_real[:, None])
    tl.store(of_key_ptr + where, of_key, mask=is_real[:, None])
    tl.store(of_keys_ptr + where, of_keys.to(key.dtype), mask=is_real[:, None])
    tl.store(of_total_ptr + block.to(tl.int64) * num_tokens * G + of_token, of_total, mask=is_real)


@triton.jit
def _of_systems(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    beta_ptr,
    total_ptr,
    inverse_ptr,
    of_keys_ptr,
    of_written_ptr,
    of_total_ptr,
    kept_ptr,
    of_key_ptr,
    of_value_ptr,
    of_beta_ptr,
    of_decay_ptr,
    start_ptr,
    length_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Writes gradients of values, step sizes and decays, and completes those of keys."""
    c, g = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(start_ptr + c).to(tl.int64), tl.load(length_ptr + c)
    i = tl.arange(0, CHUNK)
    is_real = i < length
    of_token = (start + i) * G + g
    beta = tl.load(beta_ptr + of_token, mask=is_real, other=0.0)
    total = tl.load(total_ptr + of_token, mask=is_real, other=0.0)
    place = (c * G + g).to(tl.int64) * CHUNK * CHUNK
    transposed = tl.load(inverse_ptr + place + i[None, :] * CHUNK + i[:, None])
    of_inverse = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_beta = tl.zeros((CHUNK,), tl.float32)
    for block in range(0, V, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        where = of_token[:, None] * V + v[None, :]
        value = tl.load(value_ptr + where, mask=is_real[:, None], other=0.0)
        of_change = tl.load(of_written_ptr + where, mask=is_real[:, None], other=0.0)
        scaled = (value * beta[:, None]).to(value.dtype)
        of_inverse += tl.dot(of_change, tl.trans(scaled))
        of_scaled = tl.dot(transposed, of_change)
        of_beta += tl.sum(of_scaled * value, 1)
        of_value = (of_scaled * beta[:, None]).to(value.dtype)
        tl.store(of_value_ptr + where, of_value, mask=is_real[:, None])
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_total = tl.load(of_total_ptr + of_token, mask=is_real, other=0.0)
    of_total += tl.where(i == length - 1, tl.load(kept_ptr + c * G + g), 0.0)
    since_start = tl.exp(total)
    rows = ((start + i) * H + g // (G // H)) * K
    for block in range(0, K, BLOCK_K):
        k = block + tl.arange(0, BLOCK_K)
        key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
        where = of_token[:, None] * K + k[None, :]
        of_keys = tl.load(of_keys_ptr + where, mask=is_real[:, None], other=0.0)
        scaled = (key * (beta * since_start)[:, None]).to(key.dtype)
        of_inverse += tl.dot(of_keys, tl.trans(scaled))
        of_scaled = tl.dot(transposed, of_keys) * since_start[:, None]
        in_row = tl.sum(of_scaled * key, 1)
        of_beta += in_row
        of_total += in_row * beta
        products += tl.dot(key, tl.trans(key))
        of_key = tl.load(of_key_ptr + where, mask=is_real[:, None], other=0.0)
        of_key += of_scaled * beta[:, None]
        tl.store(of_key_ptr + where, of_key, mask=is_real[:, None])
    half = tl.dot(transposed, of_inverse.to(transposed.dtype))
    of_system = -tl.dot(half.to(transposed.dtype), transposed)
    of_system *= _differences(total, i, i, i[:, None] > i[None, :])
    pairs = of_system * products
    in_row = tl.sum(pairs, 1)
    of_beta += in_row
    of_total += in_row * beta - tl.sum(pairs * beta[:, None], 0)
    of_products = (of_system * beta[:, None]).to(transposed.dtype)
    tl.debug_barrier()  # rows of keys' gradients that other threads have written
    for block in range(0, K, BLOCK_K):
        k = block + tl.arange(0, BLOCK_K)
        key = tl.load(key_ptr + rows[:, None] + k[None, :], mask=is_real[:, None], other=0.0)
        where = of_token[:, None] * K + k[None, :]
        of_key = tl.load(of_key_ptr + where, mask=is_real[:, None], other=0.0)
        of_key += tl.dot(of_products, key) + tl.dot(tl.trans(of_products), key)
        tl.store(of_key_ptr + where, of_key, mask=is_real[:, None])
    tl.store(of_beta_ptr + of_token, of_beta, mask=is_real)
    of_total = tl.where(is_real, of_total, 0.0)
    of_decay = tl.cumsum(of_total, 0, reverse=True)
    tl.store(of_decay_ptr + of_token, of_decay, mask=is_real)
