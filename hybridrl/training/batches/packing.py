"""Packs samples into micro-batches and assigns these to data-parallel ranks. No torch.

Every rank computes the same schedule from the same lengths, without communication. Invariants: each
sample is scheduled once; each micro-batch is within the token budget; all ranks have the same
number of micro-batches, as Megatron's pipeline schedule and gradient reduction require. Contains
only the arithmetic; collation.py creates the tensors.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.errors import DataError

Schedule = list[list[tuple[int, ...]]]
"""`[dp_rank][micro_batch]` -> ascending sample indices; empty if a micro-batch contains only
padding.
"""

# Maximum number of swaps per rank, and the relative difference between ranks at which swapping
# stops.
SWAPS_A_RANK = 4
EVEN_ENOUGH = 1e-3

DEFAULT_ATTENTION_LENGTH = 24_576
"""Sequence length at which attention costs as much as all matrix products in a layer.

Per token, a layer of width D does about 24 D^2 operations in its matrix products (12 D^2 weights),
and 2 D L in causal attention over L tokens. The two costs are equal at L = 12 D. The value is for D
= 2048.
"""

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


def schedule(
    lengths: Sequence[int],
    num_ranks: int,
    token_budget: int,
    multiple: int = 1,
    *,
    attended: Sequence[int] | None = None,
    attention_length: int = DEFAULT_ATTENTION_LENGTH,
) -> Schedule:
    """Distributes items (samples or units of samples) evenly over ranks and micro-batches.

    Args:
        token_budget: Maximum number of tokens in a micro-batch, excluding padding.
        multiple: Each rank's number of micro-batches is rounded up to a multiple of this (the
            pipeline size for interleaved pipelines).
        attended: For each item, twice the number of token pairs in which one token attends to the
            other; by default the square of its length.

    Returns:
        `[dp_rank][micro_batch]` -> item indices. The number of micro-batches is the smallest that
        best-fit packing finds. Micro-batches are empty only if there are fewer items than
        micro-batches.

    Raises DataError if an item is longer than the budget.
    """
    check_lengths(lengths, token_budget)
    squares = [length * length for length in lengths] if attended is None else attended
    pairs = zip(lengths, squares, strict=True)
    costs = [length * attention_length + square for length, square in pairs]
    packs = pack(lengths, token_budget)
    per_rank = round_up(max(-(-len(packs) // num_ranks), 1), multiple)
    num_packs = per_rank * num_ranks
    balanced = _assign_within_budget(lengths, costs, token_budget, num_packs)
    packs = balanced if balanced is not None else _spread(packs, costs, num_packs)
    pack_costs = [sum(costs[i] for i in members) for members in packs]
    by_rank = _assign_evenly(pack_costs, num_ranks, per_rank)
    return [[packs[number] for number in numbers] for numbers in by_rank]


def schedule_hash(found: Schedule) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def _assign_within_budget(
    lengths: Sequence[int], costs: Sequence[int], budget: int, num_packs: int
) -> list[tuple[int, ...]] | None:
    """Repeatedly adds the costliest remaining item to the cheapest pack that has room for it.

    Returns None if an item fits into no pack. This is the rule "longest processing time first": if
    the budget does not restrict it, the costliest pack costs at most 4/3 of the optimum (Graham
    1969, SIAM J. Appl. Math. 17(2), 416-429).
    """
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    free = [budget] * num_packs
    cheapest = [(0, number) for number in range(num_packs)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        passed = []
        while cheapest and free[cheapest[0][1]] < lengths[sample]:
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, number = heapq.heappop(cheapest)
        packs[number].append(sample)
        free[number] -= lengths[sample]
        for entry in [*passed, (cost + costs[sample], number)]:
            heapq.heappush(cheapest, entry)
    return [tuple(sorted(members)) for members in packs]


def _spread(
    packs: list[tuple[int, ...]], costs: Sequence[int], num_packs: int
) -> list[tuple[int, ...]]:
    single = [members for members in packs if len(members) == 1]
    several = [(-sum(costs[i] for i in members), members) for members in packs if len(members) > 1]
    heapq.heapify(several)
    while several and len(single) + len(several) < num_packs:
        members = heapq.heappop(several)[1]
        halves: tuple[list[int], list[int]] = ([], [])
        weights = [0, 0]
        for sample in sorted(members, key=lambda i: (-costs[i], i)):
            lighter = int(weights[1] < weights[0])
            halves[lighter].append(sample)
            weights[lighter] += costs[sample]
        for half, weight in zip(halves, weights, strict=True):
            if len(half) == 1:
                single.append((half[0],))
            else:
                heapq.heappush(several, (-weight, tuple(sorted(half))))
    filled = single + [members for _, members in several]
    return filled + [()] * (num_packs - len(filled))


def _assign_evenly(costs: Sequence[int], num_ranks: int, per_rank: int) -> list[list[int]]:
    """Assigns `per_rank` items to each rank, costliest first; swaps then even out the ranks."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    cheapest = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, rank = heapq.heappop(cheapest)
        ranks[rank].append(item)
        if len(ranks[rank]) < per_rank:
            heapq.heappush(cheapest, (cost + costs[item], rank))
    loads = [sum(costs[item] for item in items) for items in ranks]
    for _ in range(SWAPS_A_RANK * num_ranks):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[low]
        if gap <= EVEN_ENOUGH * loads[high]:
            break
        pairs = ((one, other) for one in ranks[high] for other in ranks[low])
        left, one, other = min((abs(gap - 2 * (costs[a] - costs[b])), a, b) for a, b in pairs)
        if left >= gap:
            break
        moved = costs[one] - costs[other]
        ranks[high][ranks[high].index(one)], ranks[low][ranks[low].index(other)] = other, one
        loads[high], loads[low] = loads[high] - moved, loads[low] + moved
    return ranks
