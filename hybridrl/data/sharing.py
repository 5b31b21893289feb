"""Which samples share their prompt's tokens in a micro-batch. No torch.

Samples of one prompt differ in their responses only. A unit holds the prompt once: its last token
aside, which every sample keeps, since the first response token is predicted there, by each sample
for its own response. A unit is packed and dealt to ranks as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
