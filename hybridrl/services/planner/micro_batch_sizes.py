"""Sizes of an update's micro-batches, for `hybridrl plan`: of usual samples, packed as training
packs them, and at most. No torch.
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

KEPT = 4096  # packings that are kept; a search asks for some hundred


@dataclass(frozen=True)
class Lengths:
    """Tokens of usual samples.

    Args:
        prompt, response: means.
        longest: response.
    """

    prompt: int
    response: int
    longest: int

    @classmethod
    def of(cls, config: Config) -> Lengths:
        """Returns those of a configuration: as `layout` says, else the longest."""
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
    """Whether samples of one prompt hold its tokens once, as training decides with
    transformer-engine's layers.
    """
    told = config.train.share_prompts
    return cp == 1 and config.train.layers != "torch" if told is None else told


def samples_of_update(config: Config) -> int:
    """Returns the samples that an update learns from, all replicas together."""
    steps = config.steps
    samples = steps.prompts_per_step * steps.samples_per_prompt
    return even_sizes(samples, steps.updates_per_step)[0]


def usual_micro_batches(
    config: Config, shape: ModelShape, layout: TrainLayout
) -> set[MicroBatchSize]:
    """Returns the micro-batches of an update whose samples are all of usual length, dealt and
    packed as training does; the largest where a row of data may be several sequences.

    Args:
        config: Configuration of the run.
        shape: Sizes of the model.
        layout: How it is trained.
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
    """Returns the most that a micro-batch may hold, whatever the lengths of responses.

    Positions: the budget, or all samples of an update that a replica may get, each as long as it
    may be, where those are fewer. They are dealt by length, so that a replica has at most one
    sample more than its share. Rows of keys: those of a replica's share of samples, with responses
    so short that they are in one micro-batch.
    """
    budget = config.train.micro_batch_tokens
    if not _has_samples(config):
        return MicroBatchSize(budget, budget)
    prompt = config.data.max_prompt_tokens
    longest = prompt + config.rollout.max_new_tokens
    share = -(-samples_of_update(config) // layout.dp) + 1
    # Nothing says that a sample of the user's own algorithm is one sequence.
    positions = budget if config.algorithm.needs is None else min(budget, share * longest)
    per_prompt = config.steps.samples_per_prompt
    if not shares_prompts(config, layout.cp) or per_prompt == 1:
        return MicroBatchSize(positions, positions)
    # Each sample has the prompt's last token and one of its response at least.
    own = 2 * per_prompt
    prefix = min(shared_prefix(prompt, per_prompt), max(0, budget // PART_OF_BUDGET - own))
    num_prompts = min(positions / (prefix + own), share / per_prompt)
    copied = ceil(num_prompts * (per_prompt - 1) * prefix)
    return MicroBatchSize(positions, positions + copied)


def _has_samples(config: Config) -> bool:
    """Whether an update learns from samples alone, prompts with several responses; else from rows
    of data, which may be several sequences each.
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
    """Returns positions and rows of keys of micro-batches of samples that are all alike; arguments
    as of `ScheduleInputs`.
    """
    length = round_up(prompt + response, pad_each)
    # What does not fit is refused by the rules; a plan of it is of one sample alone.
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
            count = len(list(run))  # as collate.py lays them, of one unit or of several
            prefix = shared_prefix(prompt, count) if shares else 0
            positions += prefix + count * (length - prefix)
            key_rows += count * length
        found.add((positions, key_rows))
    return found
