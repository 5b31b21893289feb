"""Sizes of an update's micro-batches for `hybridrl plan`: the usual ones and the largest.

The usual ones come from packing samples of usual length as training does. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import ceil

from hybridrl.config.schema import Config
from hybridrl.metrics.flops import attention_length
from hybridrl.models.family import ModelShape
from hybridrl.parallel.layout import TrainLayout
from hybridrl.training.batches.balance import schedule
from hybridrl.training.batches.packing import FP8_TOKENS, even_sizes, round_up
from hybridrl.training.batches.prompt_sharing import PART_OF_BUDGET, Unit, make_units, shared_prefix

KEPT = 4096  # cached packings; a search uses some hundred


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens of usual samples.

    Args:
        prompt, response: Means.
        longest: Longest response.
    """

    prompt: int
    response: int
    longest: int

    @classmethod
    def of(cls, config: Config) -> Lengths:
        """Returns the lengths that the section `layout` gives, else the longest."""
        given, most = config.layout, config.rollout.max_new_tokens
        needs = config.algorithm.needs
        if config.data.max_response_tokens is not None and needs and not needs.rollouts:
            most = config.data.max_response_tokens
        longest = config.data.max_prompt_tokens
        prompt = min(given.mean_prompt_tokens or longest, longest)
        return cls(prompt, min(given.mean_response_tokens or most, most), most)


@dataclass(frozen=True)
class MicroBatchSize:
    """Size of a micro-batch, over all its context-parallel ranks.

    Args:
        positions: Tokens, a shared prompt's once, and padding.
        key_rows: Rows of keys and of values that attention keeps. One a position, but a shared
            prompt's are copied for each sample that reads them (attention.py:GatherKeys).
    """

    positions: int
    key_rows: int


def shares_prompts(config: Config, cp: int) -> bool:
    """Whether samples of one prompt store its tokens once.

    Decided as in training with transformer-engine's layers.
    """
    share = config.train.share_prompts
    return cp == 1 and config.train.layers != "torch" if share is None else share


def samples_of_update(config: Config) -> int:
    """Returns the number of samples in an update, over all replicas."""
    steps = config.steps
    samples = steps.prompts_per_step * steps.samples_per_prompt
    return even_sizes(samples, steps.updates_per_step)[0]


def usual_micro_batches(
    config: Config, shape: ModelShape, layout: TrainLayout
) -> set[MicroBatchSize]:
    """Returns the micro-batches of an update whose samples all have usual length.

    Samples are distributed and packed as in training. If a row of data may be several sequences,
    returns the largest micro-batch instead.
    """
    if not _has_samples(config):
        return {largest_micro_batch(config, layout)}
    lengths, per_prompt = Lengths.of(config), config.steps.samples_per_prompt
    pad_each = 2 * layout.cp if layout.cp > 1 else 1
    packed = _packed(
        prompt=lengths.prompt,
        response=lengths.response,
        num_samples=samples_of_update(config),
        per_prompt=per_prompt,
        shares=shares_prompts(config, layout.cp),
        num_ranks=layout.dp,
        token_budget=config.train.micro_batch_tokens,
        multiple=layout.pp if layout.vpp > 1 else 1,
        pad_each=pad_each,
        attention=attention_length(shape),
    )
    pad_total = layout.tp * pad_each * (1 if config.train.fp8 == "none" else FP8_TOKENS)
    found = set()
    for positions, key_rows in packed:
        padding = round_up(positions, pad_total) - positions
        found.add(MicroBatchSize(positions + padding, key_rows + padding))
    return found


def largest_micro_batch(config: Config, layout: TrainLayout) -> MicroBatchSize:
    """Returns the largest possible micro-batch, whatever the lengths of responses.

    Positions: the token budget, or the longest possible samples of a replica's share of an update
    if that is less. Samples are distributed by length, so a replica has at most one more than its
    equal share. Rows of keys: those of a replica's share of samples, with responses so short that
    all are in one micro-batch.
    """
    budget = config.train.micro_batch_tokens
    if not _has_samples(config):
        return MicroBatchSize(budget, budget)
    prompt = config.data.max_prompt_tokens
    longest = prompt + config.rollout.max_new_tokens
    share = -(-samples_of_update(config) // layout.dp) + 1
    # A sample of a user's own algorithm may be more than one sequence.
    positions = budget if config.algorithm.needs is None else min(budget, share * longest)
    per_prompt = config.steps.samples_per_prompt
    if not shares_prompts(config, layout.cp) or per_prompt == 1:
        return MicroBatchSize(positions, positions)
    # Each sample has the prompt's last token and at least one token of its response.
    own = 2 * per_prompt
    prefix = min(shared_prefix(prompt, per_prompt), max(0, budget // PART_OF_BUDGET - own))
    num_prompts = min(positions / (prefix + own), share / per_prompt)
    copied = ceil(num_prompts * (per_prompt - 1) * prefix)
    return MicroBatchSize(positions, positions + copied)


def _has_samples(config: Config) -> bool:
    """Whether an update learns only from samples: prompts with several responses.

    Otherwise it learns from rows of data, each of which may be several sequences.
    """
    needs = config.algorithm.needs
    return (needs is None or needs.rollouts) and not config.terms()


@lru_cache(KEPT)
def _packed(
    *,
    prompt: int,
    response: int,
    num_samples: int,
    per_prompt: int,
    shares: bool,
    num_ranks: int,
    token_budget: int,
    multiple: int,
    pad_each: int,
    attention: int,
) -> set[tuple[int, int]]:
    """Returns positions and rows of keys of micro-batches whose samples are all alike.

    See `ScheduleInputs` for the arguments.
    """
    length = round_up(prompt + response, pad_each)
    # The rules refuse samples that exceed the budget; the plan then packs one sample alone.
    token_budget = max(token_budget, length)
    if shares:
        units = make_units(
            [sample // per_prompt for sample in range(num_samples)],
            [prompt] * num_samples,
            [length] * num_samples,
            num_ranks,
            token_budget,
        )
    else:
        units = [Unit((sample,), 0, (length,)) for sample in range(num_samples)]
    dealt = schedule(
        [unit.tokens for unit in units],
        num_ranks,
        token_budget,
        multiple,
        attended=[unit.attended for unit in units],
        attention_length=attention,
    )
    found = set()
    for members in (members for micros in dealt for members in micros if members):
        samples = [sample for number in members for sample in units[number].samples]
        positions = key_rows = 0
        for _, run in groupby(samples, key=lambda sample: sample // per_prompt):
            count = len(list(run))  # as collate.py places them, from one unit or several
            prefix = shared_prefix(prompt, count) if shares else 0
            positions += prefix + count * (length - prefix)
            key_rows += count * length
        found.add((positions, key_rows))
    return found
