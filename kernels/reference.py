"""Reference implementations of all kernels in plain PyTorch, with fp32 accumulation and without
launch parameters or collectives.

Shape suffixes: T tokens, D hidden size, V this rank's vocabulary columns, K chosen columns per
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

# Number of tokens in a chunk of logits. With 152k columns a chunk takes 1024 x 152k x 4 bytes = 0.6
# GB.
CHUNK_TOKENS = 1024
# Rows of an output layer that are converted to float32 at a time: a few MB with usual widths.
CHUNK_COLUMNS = 1024
# Bytes in a chunk of gathered fp32 weight rows.
CHUNK_BYTES = 1 << 27
LOWEST = -1e30
RUNS = (512, 256, 128, 64, 32)  # possible numbers of columns per run in `invert_rows`
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 128  # rows and columns of a quantized weight that share a scale
FP8_MAX = 448.0  # largest float8_e4m3fn, 1.75 * 2^8


class VocabStats(NamedTuple):
    """Softmax statistics of each token over one vocabulary shard, each of shape (T,), fp32.

    Args:
        max_T: Largest logit.
        sum_T: Sum of exp(logit - max).
        weighted_T: Sum of exp(logit - max) * (logit - max).
        target_T: Logit of the target token; 0 if the target is in another shard.
    """

    max_T: torch.Tensor
    sum_T: torch.Tensor
    weighted_T: torch.Tensor
    target_T: torch.Tensor


def vocab_stats(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    cap: float = 0.0,
) -> VocabStats:
    """Computes the softmax statistics of one vocabulary shard without storing all of its logits.

    target_T: Column of the target token in this shard, int64; -1 if it is in another shard.
    temperature: Divisor of the logits.
    cap: Soft cap c: logits are c tanh(product / c), then divided by the temperature. 0 for no
        cap.
    """
    if 0 in (hidden_TD.size(0), weight_VD.size(0)):
        zeros = torch.zeros(hidden_TD.size(0), device=hidden_TD.device)
        return VocabStats(zeros + LOWEST, zeros, zeros, zeros)
    parts, weight = [], weight_VD.float()
    for hidden, target in zip(
        hidden_TD.split(CHUNK_TOKENS), target_T.split(CHUNK_TOKENS), strict=True
    ):
        logits = _capped(hidden.float() @ weight.T, cap) / temperature
        largest = logits.amax(-1)
        chosen = logits.gather(1, target.clamp(min=0)[:, None])[:, 0] * (target >= 0)
        shifted = logits - largest[:, None]
        exp = shifted.exp()
        parts.append((largest, exp.sum(-1), (exp * shifted).sum(-1), chosen))
    return VocabStats(*(torch.cat(column) for column in zip(*parts, strict=True)))


def wide_logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Computes logits in float32, (N, V), from hidden states and weights of any type.

    Weights are converted in chunks, which stay in the processor's caches.
    """
    hidden_ND = hidden_ND.float()
    if weight_VD.dtype == torch.float32:
        return hidden_ND @ weight_VD.T
    logits_NV = hidden_ND.new_empty(len(hidden_ND), len(weight_VD))
    wide_CD = hidden_ND.new_empty(min(CHUNK_COLUMNS, len(weight_VD)), weight_VD.size(1))
    for start in range(0, len(weight_VD), CHUNK_COLUMNS):
        part_CD = weight_VD[start : start + CHUNK_COLUMNS]
        columns = slice(start, start + len(part_CD))
        logits_NV[:, columns] = hidden_ND @ wide_CD[: len(part_CD)].copy_(part_CD).T
    return logits_NV


def vocab_backward(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    max_T: torch.Tensor,
    log_sum_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logp_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
    cap: float = 0.0,
    is_trained: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes this shard's contribution to the gradients of log-probability and entropy.

    For logits z, p = softmax(z) and entropy H: d logp / dz_j = [j is target] - p_j and dH / dz_j =
    -p_j (log p_j + H).

    Args:
        hidden_TD, weight_VD, target_T, temperature, cap: See `vocab_stats`.
        max_T, log_sum_T, entropy_T: Largest logit, logarithm of the sum of exp(logit - max), and
            entropy, over all shards, fp32. log p is computed as (logit - max) - log_sum, which
            stays precise for large logits.
        grad_logp_T, grad_entropy_T: Gradients of the loss, fp32; `grad_entropy_T` is None if the
            loss does not depend on the entropy.
        grad_weight_VD: fp32 tensor to which the weight's gradient is added; if None, a new tensor
            of the weight's type is returned.
        is_trained: Whether the weight needs a gradient.

    Returns:
        Gradient of hidden_TD (to be summed over shards), and gradient of weight_VD (None if it is
        not trained).
    """
    grad_hidden = torch.zeros_like(hidden_TD)
    grad_weight = _fp32_gradient(weight_VD, grad_weight_VD, is_trained)
    weight = weight_VD.float()
    for start in range(0, hidden_TD.size(0) if weight.size(0) else 0, CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        hidden, target = hidden_TD[rows].float(), target_T[rows]
        products = hidden @ weight.T
        logits = _capped(products, cap) / temperature
        log_p = logits - max_T[rows, None] - log_sum_T[rows, None]
        p = log_p.exp()
        grad = -p * grad_logp_T[rows, None]
        if grad_entropy_T is not None:
            grad -= p * (log_p + entropy_T[rows, None]) * grad_entropy_T[rows, None]
        mine = (target >= 0).to(grad.dtype) * grad_logp_T[rows]
        grad.scatter_add_(1, target.clamp(min=0)[:, None], mine[:, None])
        if cap:
            grad *= _slope(products, cap)
        grad /= temperature
        grad_hidden[rows] = (grad @ weight).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight += grad.T @ hidden
    if grad_weight is not None and grad_weight_VD is None:
        grad_weight = grad_weight.to(weight_VD.dtype)
    return grad_hidden, grad_weight


def _fp32_gradient(
    weight_VD: torch.Tensor, grad_weight_VD: torch.Tensor | None, is_trained: bool
) -> torch.Tensor | None:
    """Returns the accumulator of a weight's gradient; None if the weight is not trained."""
    if grad_weight_VD is not None or not is_trained:
        return grad_weight_VD
    return torch.zeros_like(weight_VD, dtype=torch.float32)


def vocab_top(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the largest logits of each token in one vocabulary shard.

    Logits are computed in the tensors' type. No cap is applied, because a cap would not change the
    order. If logits are equal, any of their columns may be chosen.

    Returns:
        Logits (fp32) and columns in this shard (int64), each of shape (T, count). If the shard has
        fewer than `count` columns, missing entries are LOWEST and -1.
    """
    shape = hidden_TD.size(0), count
    logits_TK = torch.full(shape, LOWEST, device=hidden_TD.device)
    columns_TK = torch.full(shape, -1, device=hidden_TD.device)
    num = min(count, weight_VD.size(0))
    for start in range(0, hidden_TD.size(0) if num else 0, CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        found = (hidden_TD[rows] @ weight_VD.T).topk(num)
        logits_TK[rows, :num], columns_TK[rows, :num] = found.values.float(), found.indices
    return logits_TK, columns_TK


def vocab_chosen(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    columns_TK: torch.Tensor,
    temperature: float,
    cap: float = 0.0,
) -> torch.Tensor:
    """Returns the logits of given columns, of shape (T, K), fp32.

    Args:
        hidden_TD, weight_VD, temperature, cap: See `vocab_stats`.
        columns_TK: Columns in this shard; -1 for a column in another shard, whose logit is returned
            as 0.
    """
    logits_TK = torch.zeros(columns_TK.shape, device=hidden_TD.device)
    for rows in _chosen_chunks(columns_TK, weight_VD):
        weight_NKD = weight_VD[columns_TK[rows].clamp(min=0)].float()
        products_NK = (weight_NKD @ hidden_TD[rows].float()[..., None])[..., 0]
        logits_TK[rows] = _capped(products_NK, cap)
    return logits_TK.masked_fill_(columns_TK < 0, 0.0) / temperature


def vocab_chosen_backward(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    columns_TK: torch.Tensor,
    temperature: float,
    grad_TK: torch.Tensor,
    grad_weight_VD: torch.Tensor | None,
    cap: float = 0.0,
    is_trained: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes this shard's contribution to the gradients of `vocab_chosen`.

    Args:
        hidden_TD, weight_VD, columns_TK, temperature, cap: See `vocab_chosen`.
        grad_TK: Gradient of the loss with respect to the returned logits, fp32.
        grad_weight_VD, is_trained: See `vocab_backward`.

    Returns: See `vocab_backward`.
    """
    grad_hidden = torch.zeros_like(hidden_TD)
    grad_weight = _fp32_gradient(weight_VD, grad_weight_VD, is_trained)
    grad_TK = grad_TK.masked_fill(columns_TK < 0, 0.0) / temperature
    for rows in _chosen_chunks(columns_TK, weight_VD):
        columns_NK, grad_NK = columns_TK[rows].clamp(min=0), grad_TK[rows]
        weight_NKD = weight_VD[columns_NK].float()
        if cap:
            products_NK = (weight_NKD @ hidden_TD[rows].float()[..., None])[..., 0]
            grad_NK = grad_NK * _slope(products_NK, cap)
        grad_hidden[rows] = (grad_NK[:, None] @ weight_NKD)[:, 0].to(grad_hidden.dtype)
        if grad_weight is not None:
            parts_ND = (grad_NK[..., None] * hidden_TD[rows].float()[:, None]).flatten(0, 1)
            grad_weight.index_put_((columns_NK.flatten(),), parts_ND, accumulate=True)
    if grad_weight is not None and grad_weight_VD is None:
        grad_weight = grad_weight.to(weight_VD.dtype)
    return grad_hidden, grad_weight


def _capped(products: torch.Tensor, cap: float) -> torch.Tensor:
    """Applies the soft cap to logits."""
    return cap * torch.tanh(products / cap) if cap else products


def _slope(products: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns the derivative of `_capped`."""
    return 1 - torch.tanh(products / cap).square()


def _chosen_chunks(columns_TK: torch.Tensor, weight_VD: torch.Tensor) -> Iterator[slice]:
    """Yields ranges of tokens whose gathered weights fit into CHUNK_BYTES; none without a shard."""
    step = max(CHUNK_BYTES // (4 * columns_TK.size(1) * weight_VD.size(1)), 1)
    for start in range(0, columns_TK.size(0) if weight_VD.size(0) else 0, step):
        yield slice(start, start + step)


class BlockCopies:
    """A fixed list of copies of contiguous blocks."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = [(source.flatten(), dest.view(-1)) for source, dest in pairs]

    @property
    def num_launches(self) -> int:
        """Number of batches that one `run()` copies: 1, or 0 without blocks."""
        return int(bool(self._pairs))

    def run(self, stream: object = None, first: object = (), then: object = ()) -> None:
        """Copies all blocks in order; ignores streams."""
        for source, dest in self._pairs:
            dest.copy_(source)


class RectangleCopies:
    """A fixed list of copies between tensors, each cast to its destination's type.

    Args:
        pairs: (source, destination) views of equal shapes; destinations do not overlap.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        lanes: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> None:
        self._pairs = list(pairs)

    def run(self) -> None:
        for source, dest in self._pairs:
            dest.copy_(source)


class Tiles(NamedTuple):
    """A rectangle of a weight, and the scales of the blocks that it touches.

    Args:
        weight: (rows, columns), a view of the rectangle.
        scales: (block rows, block columns), fp32, a view of the scales of these blocks.
        row, column: Position of the rectangle's first element in its block.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    row: int = 0
    column: int = 0


class BlockMaxima:
    """Raises each block's entry to the largest magnitude of the block's elements.

    The magnitudes are compared as the bits of fp32 numbers, so that a NaN is larger than all
    numbers. A block may be spread over several rectangles.

    Args:
        tiles: Rectangles; their scales contain maxima, as the bits of fp32 numbers.
    """

    def __init__(self, tiles: Sequence[Tiles], device: torch.device, block: int = BLOCK) -> None:
        self._tiles, self._block = list(tiles), block

    def run(self) -> None:
        for weight, scales, row, column in self._tiles:
            size, (rows, columns) = self._block, weight.shape
            padding = column, -(column + columns) % size, row, -(row + rows) % size
            bits = F.pad(weight.float().abs(), padding).view(torch.int32)
            found = bits.unflatten(1, (-1, size)).unflatten(0, (-1, size)).amax((1, 3))
            maxima = scales.view(torch.int32)
            torch.maximum(maxima, found, out=maxima)


def power_of_two_scales(maxima: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each block: the smallest power of two for which no element of the block
    divided by it exceeds FP8_MAX. It is 1 for a block of zeros, and NaN for a block with an element
    that is not finite.

    The scale is computed from bits, so that it is the same on all devices.
    """
    bits = maxima.view(torch.int32)
    exponents, fractions = bits >> 23, bits & 0x7FFFFF
    # The magnitude is (1 + fraction) * 2^(exponent - 127), and FP8_MAX is 1.75 * 2^8.
    found = (exponents - 8 + (fractions > 0x600000)).clamp(min=1) << 23
    found = torch.where(bits == 0, 0x3F800000, found)
    return torch.where(exponents == 255, 0x7FC00000, found).view(torch.float32)


def quantize_blocks(tiles: Tiles, block: int = BLOCK) -> torch.Tensor:
    """Returns the bits of weight / scale in float8_e4m3fn, rounded to nearest even, as uint8."""
    weight, scales, row, column = tiles
    rows, columns = weight.shape
    wide = scales.repeat_interleave(block, 0)[row : row + rows]
    wide = wide.repeat_interleave(block, 1)[:, column : column + columns]
    return (weight.float() / wide).to(torch.float8_e4m3fn).view(torch.uint8)


def fp8_product(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, scales: torch.Tensor, block: int = BLOCK
) -> torch.Tensor:
    """Returns x @ W.T, (M, N), in the type of x.

    Args:
        weight_NK: float8_e4m3fn; W is its product with the scales.
        scales: Powers of two, fp32, one for each block of weights.
    """
    outputs, inputs = weight_NK.shape
    wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    return (x_MK.float() @ (weight_NK.float() * wide).T).to(x_MK.dtype)


class QuantizedCopies:
    """A fixed list of copies that quantize blocks.

    Args:
        pairs: Rectangles of weights with their scales, and destinations of equal shapes, uint8.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Tiles, torch.Tensor]],
        device: torch.device,
        programs: int | None = None,
        block: int = BLOCK,
    ) -> None:
        self._pairs, self._block = list(pairs), block

    def run(self) -> None:
        for tiles, dest in self._pairs:
            dest.copy_(quantize_blocks(tiles, self._block))


def draw_rows(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    is_greedy_B: torch.Tensor,
    seed_B: torch.Tensor,
    count_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row from the softmax of the row's logits.

    Args:
        logits_BV: Any float type; computations use fp32.
        temperature_B: fp32, above 0; 1 for greedy rows.
        is_greedy_B: bool; True for rows that take the most probable token.
        seed_B, count_B: int64; determine each row's random number (`row_uniforms`).

    Returns:
        tokens_B (int64), and their log-probabilities logp_B (fp32).
    """
    logp_BV = (logits_BV.float() / temperature_B[:, None]).log_softmax(-1)
    tokens_B = invert_rows(logp_BV, row_uniforms(seed_B, count_B))
    tokens_B = torch.where(is_greedy_B, logp_BV.argmax(-1), tokens_B)
    return tokens_B, logp_BV.gather(-1, tokens_B[:, None])[:, 0]


def add_up(
    y_MN: torch.Tensor,
    down_MR: torch.Tensor,
    bs: Sequence[torch.Tensor],
    slot_M: torch.Tensor,
    slot: int,
) -> None:
    """Adds B (A x) to the rows of y whose tokens use a LoRA adapter, in place.

    Args:
        y_MN: Output of a linear layer for its input x: the outputs of its projections, one after
            another.
        down_MR: A x of every projection, one after another; all have the same rank.
        bs: B of every projection, shape (outputs, rank), already scaled.
        slot_M: Number of the adapter that each token uses; -1 for none.
        slot: Number of this adapter.
    """
    uses_M1 = (slot_M == slot)[:, None]
    sizes = [b.size(0) for b in bs]
    outs, downs = y_MN.split(sizes, dim=1), down_MR.chunk(len(bs), dim=1)
    for out, down, b in zip(outs, downs, bs, strict=True):
        out.add_(torch.where(uses_M1, down @ b.T, 0))


def row_uniforms(seed_B: torch.Tensor, count_B: torch.Tensor) -> torch.Tensor:
    """Returns a uniform fp64 number in [0, 1) for each (seed, count), made from 48 bits of a hash.

    The hash is the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
    number generators, OOPSLA 2014, figure 17) at position `count` of the stream that starts at the
    mixed seed.

    Args:
        seed_B, count_B: int64, interpreted as unsigned numbers.
    """
    start_B = _mixed(seed_B)
    bits_B = _mixed(start_B + (count_B + 1) * _signed(GOLDEN))
    return _shifted(bits_B, 16).double() * 2.0**-48


def invert_rows(logp_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Returns for each row the first token whose cumulative probability exceeds the row's uniform
    number.

    Sums are float64, because the error of a float32 running sum over a large vocabulary exceeds the
    probability of rare tokens. First the sums of runs of columns are accumulated, then the elements
    of only the chosen run. Converting all probabilities to float64 would take longer than the rest
    of sampling.
    """
    num_rows, vocab = logp_BV.shape
    size = next((size for size in RUNS if vocab % size == 0), vocab)
    prob_BRS = logp_BV.exp().view(num_rows, vocab // size, size)
    ends_BR = prob_BRS.sum(-1, dtype=torch.float64).cumsum(-1)
    draw_B1 = (uniform_B * ends_BR[:, -1])[:, None]
    # right=True finds the first entry above the draw, so an entry with probability 0 is never
    # chosen. The index can exceed the last run only in a row of NaNs, whose log-probability the
    # caller rejects.
    run_B1 = torch.searchsorted(ends_BR, draw_B1, right=True).clamp_(max=ends_BR.shape[1] - 1)
    before_B1 = torch.where(run_B1 > 0, ends_BR.gather(-1, (run_B1 - 1).clamp_(min=0)), 0.0)
    of_run_BS = prob_BRS.gather(1, run_B1[:, :, None].expand(-1, 1, size))[:, 0]
    cdf_BS = of_run_BS.double().cumsum(-1)
    # Due to rounding, the remainder may reach the run's total: keep it just below.
    most_B1 = torch.nextafter(cdf_BS[:, -1:], torch.zeros_like(before_B1))
    rest_B1 = torch.minimum((draw_B1 - before_B1).clamp_(min=0), most_B1)
    place_B1 = torch.searchsorted(cdf_BS, rest_B1, right=True).clamp_(max=size - 1)
    return (run_B1 * size + place_B1)[:, 0]


def _mixed(bits_B: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 in int64; products wrap as they do for unsigned numbers."""
    bits_B = (bits_B ^ _shifted(bits_B, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits_B = (bits_B ^ _shifted(bits_B, 27)) * _signed(0x94D049BB133111EB)
    return bits_B ^ _shifted(bits_B, 31)


def _shifted(bits_B: torch.Tensor, places: int) -> torch.Tensor:
    """Shifts right and fills with zeros; a plain int64 shift would copy the sign."""
    return (bits_B >> places) & ((1 << (64 - places)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
