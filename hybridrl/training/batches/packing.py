"""Computes which micro-batch each sample is packed into, and its position there. No torch.

Contains only the arithmetic; balance.py assigns micro-batches to ranks, and collation.py creates
the tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.errors import DataError

FP8_TOKENS = 16  # FP8 matrix products require a multiple of this many positions


@dataclass(frozen=True)
class PackedBounds:
    """Sequence boundaries in a micro-batch, in positions.

    Args:
        cu_seqlens: Start of each padded sequence, including trailing padding, followed by the total
            length.
    """

    starts: tuple[int, ...]
    cu_seqlens: tuple[int, ...]
    max_seqlen: int

    @property
    def total(self) -> int:
        return self.cu_seqlens[-1]


def round_up(length: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def packed_bounds(lengths: Sequence[int], pad_each: int, pad_total: int) -> PackedBounds:
    """Returns the bounds of samples of these lengths, packed one after another.

    Args:
        lengths: Number of tokens in each sample; if empty, the micro-batch is one sequence of
            padding.
        pad_total: A trailing sequence of padding fills the total up to a multiple of this, which
            must be a multiple of `pad_each`.
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
    """Packs samples into few packs of at most `budget` tokens, by best fit, longest sample first.

    Best fit decreasing needs at most 11/9 times the minimum number of packs, plus four (Johnson et
    al. 1974, SIAM J. Comput. 3(4), 299-325).

    Returns:
        For each pack, its sample indices in ascending order.

    Raises DataError if a sample is longer than the budget.
    """
    check_lengths(lengths, budget)
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (number of tokens that still fit, pack), ascending
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
    """Returns sizes of nonempty parts that differ by at most one, larger sizes first."""
    return [(total + parts - 1 - i) // parts for i in range(min(parts, total))]
