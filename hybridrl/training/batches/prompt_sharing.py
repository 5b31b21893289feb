"""Groups samples with the same prompt, so that a micro-batch stores the prompt only once. No torch.

Samples of one prompt differ only in their responses. A unit of samples with one prompt stores the
prompt once, except for the prompt's last token: each sample keeps its own copy of that token,
because it predicts the sample's first response token. Units are packed and assigned to ranks as a
whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby
from typing import Protocol, TypeVar

from hybridrl.training.batches.branches import Branches, BranchGroup, BranchUnit
from hybridrl.training.batches.packing import (
    DEFAULT_ATTENTION_LENGTH,
    Schedule,
    check_lengths,
    round_up,
    schedule,
)

# A unit usually fills at most 1 / PART_OF_BUDGET of a micro-batch, so that micro-batches can be
# filled well, and at most 1 / UNITS_A_RANK of a data-parallel rank's tokens, so that work can be
# divided evenly. Units of long prompts may be larger, up to a whole micro-batch, if a larger unit
# makes the costliest rank cheaper by at least LEAST_GAIN.
PART_OF_BUDGET = 3
UNITS_A_RANK = 4
LEAST_GAIN = 0.1
# Attention may copy the keys and values of a prompt for each sample of its unit (attention.py). A
# unit may have at most this many rows of keys per token of the budget (divided by the
# context-parallel size), so that the copies need less memory than the activations. A
# context-parallel rank copies the prompt for each of its two chunks of a sample, so it may have
# twice as many.
KEY_ROWS_OF_BUDGET = 8


@dataclass(frozen=True)
class Unit:
    """One or more samples that share a prompt prefix and are packed into the same micro-batch.

    Args:
        prefix: Number of leading tokens that only the first sample stores, although all samples
            attend to them; 0 if there is only one sample. Includes padding.
        lengths: Number of tokens in each sample, including the prefix and padding.
    """

    samples: tuple[int, ...]
    prefix: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prefix + sum(length - self.prefix for length in self.lengths)

    @property
    def key_rows(self) -> int:
        """Number of rows of keys that attention reads: the prefix counts once per sample."""
        return sum(self.lengths)

    @property
    def attended(self) -> int:
        """Twice the number of position pairs in which one position attends to the other."""
        own = (length * length - self.prefix * self.prefix for length in self.lengths)
        return self.prefix * self.prefix + sum(own)


AnyUnit = Unit | BranchUnit
U = TypeVar("U", Unit, BranchUnit)


class _Divided(Protocol[U]):
    """Samples that can be divided into units. The methods are documented where implemented."""

    def filled_units(self, most: int, most_key_rows: int) -> list[U]: ...

    def even_units(self, most: int, most_key_rows: int) -> list[U]: ...


def shared_prefix(prompt_length: int, count: int) -> int:
    """Returns how many leading tokens `count` samples of one prompt share."""
    return max(prompt_length - 1, 0) if count > 1 else 0


@dataclass(frozen=True)
class ScheduleInputs:
    """Inputs from which a schedule is computed; the same on all ranks.

    Args:
        lengths: Number of tokens in each sample, padded to a multiple of `pad_each`.
        prompt_lengths: Number of tokens in each sample's prompt; None if prompts are not shared.
        part_sizes: Number of samples in each of the consecutive mini-batches. Each mini-batch is
            scheduled separately, so that every rank has samples from each.
        pad_each: Each sequence of a micro-batch is padded to a multiple of this. A shared prompt is
            a separate sequence.
        branches: Branches of the batch; None if sequences share no branches. With branches,
            `prompt_lengths` is None.
    """

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    prompt_lengths: tuple[int, ...] | None
    part_sizes: tuple[int, ...]
    num_ranks: int
    token_budget: int
    multiple: int
    attention_length: int
    pad_each: int = 1
    branches: Branches | None = None

    def of_samples(self, rows: Sequence[int]) -> ScheduleInputs:
        shared = self.prompt_lengths
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in rows),
            groups=tuple(self.groups[i] for i in rows),
            prompt_lengths=None if shared is None else tuple(shared[i] for i in rows),
            part_sizes=(len(rows),),
            branches=None if self.branches is None else self.branches.of_rows(rows),
        )


# Cached for models with the same layout, and for the lookups and updates in one step.
@lru_cache(maxsize=8)
def schedule_samples(inputs: ScheduleInputs) -> Schedule:
    """Assigns samples to data-parallel ranks and micro-batches, those of the first part first."""
    sizes = inputs.part_sizes
    found: Schedule = [[] for _ in range(inputs.num_ranks)]
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        assignments = _schedule_part(inputs.of_samples(range(end - size, end)))
        for rank, micro_batches in enumerate(assignments):
            found[rank] += [tuple(end - size + i for i in indices) for indices in micro_batches]
    return found


@lru_cache(maxsize=8)
def schedule_lookups(inputs: ScheduleInputs) -> Schedule:
    """Assigns samples to the same ranks as `schedule_samples`, in fewer, fuller micro-batches.

    Fewer micro-batches suffice, because in a lookup of log-probabilities, one micro-batch may
    contain samples from several mini-batches.
    """
    assignments = schedule_samples(inputs)
    if len(inputs.part_sizes) == 1:
        return assignments
    rows = [sorted(chain.from_iterable(micro_batches)) for micro_batches in assignments]

    def packed(own: list[int], multiple: int) -> list[tuple[int, ...]]:
        on_rank = replace(inputs.of_samples(own), num_ranks=1, multiple=multiple)
        (found,) = _schedule_part(on_rank)
        return [tuple(own[i] for i in indices) for indices in found]

    # All ranks must have as many micro-batches as the rank that needs the most.
    most = max(len(packed(own, inputs.multiple)) for own in rows)
    return [packed(own, most) for own in rows]


def shared_tokens(
    assignments: Schedule, groups: Sequence[int], prompt_lengths: Sequence[int]
) -> list[int]:
    """Returns how many leading tokens of each sample another sample of its micro-batch stores."""
    found = [0] * len(groups)
    for micro in chain.from_iterable(assignments):
        for _, run in groupby(micro, key=groups.__getitem__):
            first, *others = run
            prefix = shared_prefix(prompt_lengths[first], 1 + len(others))
            for sample in others:
                found[sample] = prefix
    return found


def _schedule_part(inputs: ScheduleInputs) -> Schedule:
    lengths, attention = inputs.lengths, inputs.attention_length
    given = inputs.num_ranks, inputs.token_budget, inputs.multiple
    if inputs.prompt_lengths is None and inputs.branches is None:
        return schedule(lengths, *given, attention_length=attention)
    check_lengths(lengths, inputs.token_budget)
    units: Sequence[AnyUnit]
    if inputs.branches is not None:
        branches = inputs.branches
        by_root = _by_key(branches.roots)
        groups = [BranchGroup(own, branches, lengths, inputs.pad_each) for own in by_root]
        units = _best_units(groups, lengths, *given[:2], attention, inputs.pad_each)
    else:
        assert inputs.prompt_lengths is not None
        units = make_units(
            inputs.groups, inputs.prompt_lengths, lengths, *given[:2], attention, inputs.pad_each
        )
    tokens, attended = [unit.tokens for unit in units], [unit.attended for unit in units]
    assignments = schedule(tokens, *given, attended=attended, attention_length=attention)
    return [
        [tuple(chain.from_iterable(units[n].samples for n in pack)) for pack in packs]
        for packs in assignments
    ]


def make_units(
    prompts: Sequence[int],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    num_ranks: int,
    token_budget: int,
    attention_length: int = DEFAULT_ATTENTION_LENGTH,
    pad_each: int = 1,
) -> list[Unit]:
    """Groups samples of the same prompt into units.

    A larger unit computes its prompt once for more samples, but leaves fewer units to divide among
    the ranks. Tries unit sizes from a part of the micro-batch up to a whole one, and takes the size
    whose costliest rank is the cheapest.
    """
    groups = [_Group.of(own, prompt_lengths[own[0]], lengths, pad_each) for own in _by_key(prompts)]
    return _best_units(groups, lengths, num_ranks, token_budget, attention_length, pad_each)


def _by_key(keys: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for sample, key in enumerate(keys):
        found.setdefault(key, []).append(sample)
    return list(found.values())


def _best_units(
    groups: Sequence[_Divided[U]],
    lengths: Sequence[int],
    num_ranks: int,
    token_budget: int,
    attention_length: int,
    pad_each: int,
) -> list[U]:
    """Returns the units of `make_units` for groups that can be divided into units."""
    most = min(token_budget // PART_OF_BUDGET, sum(lengths) // (UNITS_A_RANK * num_ranks))

    def costliest_rank(units: Sequence[U]) -> int:
        costs = [unit.tokens * attention_length + unit.attended for unit in units]
        loads = [0] * num_ranks
        for cost in sorted(costs, reverse=True):
            heapq.heapreplace(loads, loads[0] + cost)
        return max(loads)

    most_key_rows = KEY_ROWS_OF_BUDGET * token_budget // max(pad_each // 2, 1)
    best = [unit for group in groups for unit in group.filled_units(most, most_key_rows)]
    least = costliest_rank(best)
    while most < token_budget and len(best) > len(groups):
        most = min(max(2 * most, 1), token_budget)
        units = [unit for group in groups for unit in group.even_units(most, most_key_rows)]
        cost = costliest_rank(units)
        if cost < (1 - LEAST_GAIN) * least:
            best, least = units, cost
    return best


@dataclass(frozen=True)
class _Group:
    """The samples of one prompt. All numbers of tokens include padding.

    Args:
        prefix: Number of tokens that the samples can share.
        own: For each sample, number of tokens after the prefix.
        alone: For each sample, number of tokens if it shares nothing.
    """

    samples: Sequence[int]
    prefix: int
    own: dict[int, int]
    alone: dict[int, int]

    @classmethod
    def of(
        cls, samples: Sequence[int], prompt_length: int, lengths: Sequence[int], pad_each: int
    ) -> _Group:
        prefix = shared_prefix(prompt_length, 2)
        own = {sample: round_up(lengths[sample] - prefix, pad_each) for sample in samples}
        alone = {sample: lengths[sample] for sample in samples}
        return cls(samples, round_up(prefix, pad_each), own, alone)

    def filled_units(self, most: int, most_key_rows: int) -> list[Unit]:
        """Fills one unit after another, up to both limits."""
        units: list[Unit] = []
        members: list[int] = []
        tokens, key_rows = self.prefix, 0
        for sample in self.samples:
            own = self.own[sample]
            is_full = tokens + own > most or key_rows + self.prefix + own > most_key_rows
            if members and is_full:
                units.append(self._unit(members))
                members, tokens, key_rows = [], self.prefix, 0
            members.append(sample)
            tokens, key_rows = tokens + own, key_rows + self.prefix + own
        return [*units, self._unit(members)]

    def even_units(self, most: int, most_key_rows: int) -> list[Unit]:
        """Divides the samples into few units of similar size within both limits."""
        by_length = sorted(self.samples, key=lambda sample: (-self.own[sample], sample))
        own = sum(self.own.values())
        key_rows = own + self.prefix * len(self.samples)
        fewest = max(-(-own // max(most - self.prefix, 1)), -(-key_rows // most_key_rows), 1)
        count = min(fewest, len(self.samples))
        while True:  # ends at the latest with units of one sample
            bins = [(0, number) for number in range(count)]
            members: list[list[int]] = [[] for _ in bins]
            for sample in by_length:
                tokens, number = bins[0]
                heapq.heapreplace(bins, (tokens + self.own[sample], number))
                members[number].append(sample)
            units = [self._unit(sorted(unit)) for unit in members]
            is_within = all(
                unit.tokens <= most and unit.key_rows <= most_key_rows
                for unit in units
                if len(unit.samples) > 1
            )
            if is_within:
                return sorted(units, key=lambda unit: unit.samples)
            count = min(count + 1 + count // 8, len(self.samples))

    def _unit(self, samples: Sequence[int]) -> Unit:
        if len(samples) == 1:
            return Unit(tuple(samples), 0, (self.alone[samples[0]],))
        return Unit(
            tuple(samples), self.prefix, tuple(self.prefix + self.own[one] for one in samples)
        )
