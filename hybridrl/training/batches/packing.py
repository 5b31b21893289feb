"""Packs samples into micro-batches: the pack of each sample, and its position there. No torch.

Owns the arithmetic of packing; balance.py assigns packs to ranks and collation.py makes the
tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.errors import DataError

FP8_TOKENS = 16  # FP8 matrix products take multiples of this many positions


@dataclass(frozen=True)
class PackedBounds:
    """Bounds of the sequences of a micro-batch, in positions.

    Args:
        starts: Start of each sample.
        cu_seqlens: Start of each padded sequence, trailing padding included, then the total.
        max_seqlen: Length of the longest padded sequence.
    """

    starts: tuple[int, ...]
    cu_seqlens: tuple[int, ...]
    max_seqlen: int

    @property
    def total(self) -> int:
        """Number of positions of the micro-batch."""
        return self.cu_seqlens[-1]


def round_up(length: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def packed_bounds(lengths: Sequence[int], pad_each: int, pad_total: int) -> PackedBounds:
    """Lays samples of these lengths one after the other.

    Args:
        lengths: Tokens of each sample; if empty, the micro-batch is one sequence of padding.
        pad_each: Multiple to which each sample is padded.
        pad_total: Multiple to which a trailing sequence of padding fills the total; itself a
            multiple of `pad_each`.
    """
    if pad_each < 1 or pad_total < 1 or pad_total % pad_each:
        raise ValueError(f"pad_total={pad_total} must be a multiple of pad_each={pad_each}")
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + round_up(length, pad_each))
    total = max(round_up(cu_seqlens[-1], pad_total), pad_total)
    starts = tuple(cu_seqlens[:-1])
    if total > cu_seqlens[-1]:
        cu_seqlens.append(total)
    longest = max(b - a for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False))
    return PackedBounds(starts, tuple(cu_seqlens), longest)


def check_lengths(lengths: Sequence[int], budget: int) -> None:
    """Raises DataError for the first sample that is longer than the token budget."""
    for sample, length in enumerate(lengths):
        if length > budget:
            raise DataError(
                "train.micro_batch_tokens",
                f"{budget}, but sample {sample} has {length} tokens",
                "at least the longest prompt and response together",
                "Raise train.micro_batch_tokens, or lower data.max_prompt_tokens, "
                "data.max_response_tokens or rollout.max_new_tokens.",
            )


def pack(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Packs samples into few packs of at most `budget` tokens: best fit, longest sample first.

    Best fit decreasing needs at most 11/9 of the fewest possible packs, plus four (Johnson et al.
    1974, SIAM J. Comput. 3(4), 299-325).

    Returns:
        Sample indices of each pack, ascending.

    Raises:
        DataError: A sample is longer than the budget.
    """
    check_lengths(lengths, budget)
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that still fit, pack), ascending
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[sample]
        at = bisect_left(room, (length, -1))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = budget, len(packs)
            packs.append([])
        packs[number].append(sample)
        insort(room, (free - length, number))
    return [tuple(sorted(members)) for members in packs]


def even_sizes(total: int, parts: int) -> list[int]:
    """Returns sizes of parts that differ by at most one, the larger first, none of them empty."""
    return [(total + parts - 1 - i) // parts for i in range(min(parts, total))]
