"""Groups samples with the same prompt, so that a micro-batch stores the prompt only once. No torch.

Samples of one prompt differ only in their responses. A unit of samples with one prompt stores the
prompt once, except for the prompt's last token: each sample keeps its own copy of that token,
because it predicts the sample's first response token. Units are packed and assigned to ranks as a
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, groupby

from hybridrl.training.batches.balance import Schedule, schedule
from hybridrl.training.batches.packing import check_lengths, even_sizes

# A unit fills at most 1 / PART_OF_BUDGET of a micro-batch, so that micro-batches can be filled
# well, and at most 1 / UNITS_A_RANK of a data-parallel rank's tokens, so that work can be divided
# evenly.
PART_OF_BUDGET = 3
UNITS_A_RANK = 4


@dataclass(frozen=True)
class Unit:
    """One or more samples that share a prompt prefix and are packed into the same micro-batch.

    Args:
        samples: Sample indices in ascending order.
        prefix: Number of leading tokens that only the first sample stores, although all samples
            attend to them; 0 if there is only one sample.
        lengths: Number of tokens in each sample, including the prefix.
    """

    samples: tuple[int, ...]
    prefix: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of positions that the unit occupies."""
        return self.prefix + sum(length - self.prefix for length in self.lengths)

    @property
    def attended(self) -> int:
        """Twice the number of position pairs in which one position attends to the other."""
        own = (length * length - self.prefix * self.prefix for length in self.lengths)
        return self.prefix * self.prefix + sum(own)


def shared_prefix(prompt_length: int, count: int) -> int:
    """Returns how many leading tokens `count` samples of one prompt share."""
    return max(prompt_length - 1, 0) if count > 1 else 0


@dataclass(frozen=True)
class ScheduleInputs:
    """Inputs from which a schedule is computed; the same on all ranks.

    Args:
        lengths: Number of tokens in each sample.
        groups: Group of each sample; samples of one prompt have the same group.
        prompt_lengths: Number of tokens in each sample's prompt; None if prompts are not shared.
        num_parts: Number of consecutive mini-batches. Each is scheduled separately, so that every
            rank has samples from each.
        num_ranks, token_budget, multiple, attention_length: See `balance.schedule`.
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
        """Returns the inputs for a subset of the samples, as one mini-batch."""
        shared = self.prompt_lengths
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in rows),
            groups=tuple(self.groups[i] for i in rows),
            prompt_lengths=None if shared is None else tuple(shared[i] for i in rows),
            num_parts=1,
        )


@lru_cache(
    maxsize=8
)  # cached for models with the same layout, and for the lookups and updates in one step
def schedule_samples(inputs: ScheduleInputs) -> Schedule:
    """Assigns samples to data-parallel ranks and micro-batches (balance.py).

    Returns:
        `[dp_rank][micro_batch]` -> sample indices; the micro-batches of the first mini-batch come
        first.
    """
    sizes = even_sizes(len(inputs.lengths), inputs.num_parts)
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
    if inputs.num_parts == 1:
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
    """Returns, for each sample, how many leading tokens another sample in its micro-batch stores.

    Args:
        assignments: Schedule of the samples.
        groups, prompt_lengths: See `ScheduleInputs`.
    """
    found = [0] * len(groups)
    for micro in chain.from_iterable(assignments):
        for _, run in groupby(micro, key=groups.__getitem__):
            first, *others = run
            prefix = shared_prefix(prompt_lengths[first], 1 + len(others))
            for sample in others:
                found[sample] = prefix
    return found


def _schedule_part(inputs: ScheduleInputs) -> Schedule:
    """Assigns the samples of one mini-batch."""
    lengths, attention = inputs.lengths, inputs.attention_length
    given = inputs.num_ranks, inputs.token_budget, inputs.multiple
    if inputs.prompt_lengths is None:
        return schedule(lengths, *given, attention_length=attention)
    check_lengths(lengths, inputs.token_budget)
    units = make_units(inputs.groups, inputs.prompt_lengths, lengths, *given[:2])
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
) -> list[Unit]:
    """Groups samples of the same prompt into units.

    Args:
        prompts: Group of each sample; samples of one prompt have the same group.
        prompt_lengths, lengths: Number of tokens in each sample's prompt, and in the whole sample.
        num_ranks: Data-parallel size.
        token_budget: Maximum number of tokens in a micro-batch.
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
