"""Which samples share their prompt's tokens in a micro-batch. No torch.

Samples of one prompt differ in their responses only. A unit holds the prompt once: its last token
aside, which every sample keeps, since the first response token is predicted there, by each sample
for its own response. A unit is packed and dealt to ranks as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby

from hybridrl.training.batches.balance import Schedule, schedule
from hybridrl.training.batches.packing import check_lengths, even_sizes

# Units are at most this part of a micro-batch, so that packs of them are full; and there are this
# many for a data-parallel rank, so that ranks have equal work.
PART_OF_BUDGET = 3
UNITS_A_RANK = 4


@dataclass(frozen=True)
class Unit:
    """Samples that are packed together.

    Args:
        samples: indices, ascending.
        prefix: leading tokens that all of them read and only the first holds; 0 for one sample.
        lengths: tokens of each sample, the prefix counted.
    """

    samples: tuple[int, ...]
    prefix: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Positions that it takes."""
        return self.prefix + sum(length - self.prefix for length in self.lengths)

    @property
    def attended(self) -> int:
        """Twice the pairs of a position and one that it attends to."""
        own = (length * length - self.prefix * self.prefix for length in self.lengths)
        return self.prefix * self.prefix + sum(own)


def shared_prefix(prompt_length: int, count: int) -> int:
    """Returns how many tokens `count` samples of one prompt share."""
    return max(prompt_length - 1, 0) if count > 1 else 0


@dataclass(frozen=True)
class ScheduleInputs:
    """What a schedule follows from, the same on every rank.

    Args:
        lengths: tokens of each sample.
        groups: of each, what is equal exactly where prompts are.
        prompt_lengths: tokens of each sample's prompt, where samples of one share it; None: they do
            not.
        num_parts: mini-batches that the samples are cut into, one after the other; each is dealt
            for itself, so that a rank has its samples of all of them.
        num_ranks, token_budget, multiple, attention_length: as of `balance.schedule`.
    """

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    prompt_lengths: tuple[int, ...] | None
    num_parts: int
    num_ranks: int
    token_budget: int
    multiple: int
    attention_length: int

    def of_samples(self, rows: Sequence[int]) -> ScheduleInputs:
        """Returns the inputs for some samples alone, by their indices, in one part."""
        shared = self.prompt_lengths
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in rows),
            groups=tuple(self.groups[i] for i in rows),
            prompt_lengths=None if shared is None else tuple(shared[i] for i in rows),
            num_parts=1,
        )


@lru_cache(maxsize=8)  # models that lie alike, and a step's lookups and its update, ask the same
def schedule_samples(inputs: ScheduleInputs) -> Schedule:
    """Deals samples to data-parallel ranks and micro-batches (balance.py).

    Returns:
        `[dp_rank][micro_batch]` -> indices of its samples, the first part's micro-batches first.
    """
    sizes = even_sizes(len(inputs.lengths), inputs.num_parts)
    found: Schedule = [[] for _ in range(inputs.num_ranks)]
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        dealt = _schedule_part(inputs.of_samples(range(end - size, end)))
        for rank, micro_batches in enumerate(dealt):
            found[rank] += [tuple(end - size + i for i in indices) for indices in micro_batches]
    return found


@lru_cache(maxsize=8)
def schedule_lookups(inputs: ScheduleInputs) -> Schedule:
    """Deals samples to ranks as `schedule_samples` does, and to micro-batches without regard to
    parts: the same on a rank, in fewer and fuller ones. Returns as there.
    """
    dealt = schedule_samples(inputs)
    if inputs.num_parts == 1:
        return dealt
    rows = [sorted(chain.from_iterable(micro_batches)) for micro_batches in dealt]

    def packed(own: list[int], multiple: int) -> list[tuple[int, ...]]:
        on_rank = replace(inputs.of_samples(own), num_ranks=1, multiple=multiple)
        (found,) = _schedule_part(on_rank)
        return [tuple(own[i] for i in indices) for indices in found]

    # All ranks have the same number, as many as the fullest needs.
    most = max(len(packed(own, inputs.multiple)) for own in rows)
    return [packed(own, most) for own in rows]


def shared_tokens(
    dealt: Schedule, groups: Sequence[int], prompt_lengths: Sequence[int]
) -> list[int]:
    """Returns the leading tokens of each sample that another one of its micro-batch holds, as
    collate.py lays them.

    Args:
        dealt: Schedule of the samples.
        groups, prompt_lengths: Of each sample, as of `ScheduleInputs`.
    """
    found = [0] * len(groups)
    for micro in chain.from_iterable(dealt):
        for _, run in groupby(micro, key=groups.__getitem__):
            first, *others = run
            prefix = shared_prefix(prompt_lengths[first], 1 + len(others))
            for sample in others:
                found[sample] = prefix
    return found


def _schedule_part(inputs: ScheduleInputs) -> Schedule:
    """Deals samples of one part."""
    lengths, attention = inputs.lengths, inputs.attention_length
    given = inputs.num_ranks, inputs.token_budget, inputs.multiple
    if inputs.prompt_lengths is None:
        return schedule(lengths, *given, attention_length=attention)
    check_lengths(lengths, inputs.token_budget)
    units = make_units(inputs.groups, inputs.prompt_lengths, lengths, *given[:2])
    tokens, attended = [unit.tokens for unit in units], [unit.attended for unit in units]
    dealt = schedule(tokens, *given, attended=attended, attention_length=attention)
    return [
        [tuple(chain.from_iterable(units[n].samples for n in pack)) for pack in packs]
        for packs in dealt
    ]


def make_units(
    prompts: Sequence[int],
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    num_ranks: int,
    token_budget: int,
) -> list[Unit]:
    """Groups samples of the same prompt.

    Args:
        prompts: of each sample, what is equal exactly where prompts are.
        prompt_lengths, lengths: tokens of each sample's prompt and of the whole.
        num_ranks: data-parallel size.
        token_budget: most tokens in one micro-batch.
    """
    most = min(token_budget // PART_OF_BUDGET, sum(lengths) // (UNITS_A_RANK * num_ranks))
    by_prompt: dict[int, list[int]] = {}
    for sample, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(sample)
    units = []
    for samples in by_prompt.values():
        prefix = shared_prefix(prompt_lengths[samples[0]], 2)
        members: list[int] = []
        tokens = prefix
        for sample in samples:
            own = lengths[sample] - prefix
            if members and tokens + own > most:
                units.append(_unit(members, prefix, lengths))
                members, tokens = [], prefix
            members.append(sample)
            tokens += own
        units.append(_unit(members, prefix, lengths))
    return units


def _unit(samples: Sequence[int], prefix: int, lengths: Sequence[int]) -> Unit:
    shared = prefix if len(samples) > 1 else 0
    return Unit(tuple(samples), shared, tuple(lengths[sample] for sample in samples))
