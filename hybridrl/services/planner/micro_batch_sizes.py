"""Estimates an update's micro-batches by packing usual lengths with training's code. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import ceil, inf

from hybridrl.config.data import DataConfig
from hybridrl.config.needs import Needs
from hybridrl.config.schema import Config
from hybridrl.metrics.flops import attention_length
from hybridrl.models.family import ModelShape
from hybridrl.models.prompt_attention import LEAST_SHARED, reads_in_place
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.image_costs import image_tokens, response_image_tokens
from hybridrl.training.batches.branches import KEY_ROWS_PER_POSITION, most_copied_rows
from hybridrl.training.batches.packing import FP8_TOKENS, even_sizes, round_up, schedule
from hybridrl.training.batches.prompt_sharing import (
    KEY_ROWS_OF_BUDGET,
    Unit,
    make_units,
    shared_prefix,
)

KEPT = 4096  # number of cached packings; a search uses a few hundred


@dataclass(frozen=True)
class Lengths:
    """Mean lengths of prompts and responses, and the longest response's length, in tokens."""

    prompt: int
    response: int
    longest: int

    @classmethod
    def of(cls, config: Config) -> Lengths:
        """Returns the mean lengths set in the section `layout`, or else the maximum lengths."""
        given, most = config.layout, config.rollout.max_new_tokens
        needs = config.algorithm.needs
        if config.data.max_response_tokens is not None and needs and not needs.rollouts:
            most = config.data.max_response_tokens
        longest = config.data.max_prompt_tokens
        prompt = min(given.mean_prompt_tokens or longest, longest)
        return cls(prompt, min(given.mean_response_tokens or most, most), most)


@dataclass(frozen=True)
class MicroBatchSize:
    """Size of a micro-batch, summed over its context-parallel ranks.

    Args:
        positions: Number of tokens, counting a shared prompt once, plus padding.
        key_rows: Rows of keys (and of values) that attention stores; a shared prompt's rows are
            copied for each sample (attention.py:GatherKeys).
        image_tokens: Number of tokens of different images.
    """

    positions: int
    key_rows: int
    image_tokens: int = 0


def shares_prompts(config: Config, shape: ModelShape) -> bool:
    """Whether samples of one prompt store its tokens only once, as layers.py decides on GPUs."""
    if shape.has_mtp:
        return False
    if config.train.share_prompts is not None:
        return config.train.share_prompts
    return _uses_transformer_engine(config, shape)


def _uses_transformer_engine(config: Config, shape: ModelShape) -> bool:
    is_able = not shape.torch_only and config.model.dtype != "float32"
    return config.train.layers != "torch" and is_able


def samples_of_update(config: Config) -> int:
    """Returns the number of samples in an update, summed over replicas."""
    steps = config.steps
    samples = steps.prompts_per_step * steps.samples_per_prompt
    return even_sizes(samples, steps.updates_per_step)[0]


def usual_micro_batches(
    config: Config, shape: ModelShape, layout: TrainLayout
) -> set[MicroBatchSize]:
    """Returns the micro-batch sizes of an update whose samples all have the usual length.

    If a row of data may become several sequences, only the largest size is returned.
    """
    if not _has_samples(config):
        return {largest_micro_batch(config, shape, layout)}
    lengths, per_prompt = Lengths.of(config), config.steps.samples_per_prompt
    pad_each = 2 * layout.cp if layout.cp > 1 else 1
    packed = _packed(
        prompt=lengths.prompt,
        response=lengths.response,
        num_samples=samples_of_update(config),
        per_prompt=per_prompt,
        shares=shares_prompts(config, shape),
        num_ranks=layout.dp,
        token_budget=config.train.micro_batch_tokens,
        multiple=layout.pp if layout.vpp > 1 else 1,
        pad_each=pad_each,
        attention=attention_length(shape),
    )
    pad_total = layout.tp * pad_each * (1 if config.train.fp8 == "none" else FP8_TOKENS)
    found, images = set(), image_tokens(config, shape.vision)
    shown = response_image_tokens(config, shape.vision)
    is_copied = lengths.prompt - 1 <= _longest_copied(config, shape, layout.cp)
    for positions, key_rows, num_prompts, num_samples in packed:
        padding = round_up(positions, pad_total) - positions
        rows = key_rows if is_copied else positions
        of_images = num_prompts * images + num_samples * shown
        found.add(MicroBatchSize(positions + padding, rows + padding, of_images))
    return found


def positions_of_update(
    config: Config, shape: ModelShape, layout: TrainLayout
) -> dict[str, int] | None:
    """Returns an update's positions with and without shared prompts; None if none are shared."""
    per_prompt = config.steps.samples_per_prompt
    if not _has_samples(config) or per_prompt == 1 or not shares_prompts(config, shape):
        return None
    lengths, num_samples = Lengths.of(config), samples_of_update(config)
    pad_each = 2 * layout.cp if layout.cp > 1 else 1
    length = round_up(lengths.prompt + lengths.response, pad_each)
    units = make_units(
        [sample // per_prompt for sample in range(num_samples)],
        [lengths.prompt] * num_samples,
        [length] * num_samples,
        layout.dp,
        max(config.train.micro_batch_tokens, length),
        attention_length(shape),
        pad_each,
    )
    computed = sum(unit.tokens for unit in units)
    return {"computed": computed, "unshared": num_samples * length}


def largest_micro_batch(config: Config, shape: ModelShape, layout: TrainLayout) -> MicroBatchSize:
    """Returns the largest possible micro-batch for any response lengths.

    Positions: the token budget, or less if the longest possible share of a replica is below it.
    Samples are distributed by length, so a replica has at most one sample more than its share. Rows
    of keys: those of the whole share, because short responses may fit into one micro-batch.
    """
    found = _largest(config, shape, layout)
    if shape.vision is None:
        return found
    return replace(found, image_tokens=found.positions)


def _largest(config: Config, shape: ModelShape, layout: TrainLayout) -> MicroBatchSize:
    needs, found = config.algorithm.needs, list[MicroBatchSize]()
    rows = [(term.data, term.algorithm.needs) for term in config.terms().values()]
    if needs is None or needs.rollouts:
        found.append(_largest_of_samples(config, shape, layout))
    else:
        rows.append((config.data, needs))
    found += [_largest_of_rows(config, shape, layout.cp, *one) for one in rows]
    return MicroBatchSize(max(one.positions for one in found), max(one.key_rows for one in found))


def _largest_of_rows(
    config: Config, shape: ModelShape, cp: int, data: DataConfig, needs: Needs | None
) -> MicroBatchSize:
    """Returns the largest micro-batch of rows of data, of which `needs` says how many responses
    each has.
    """
    budget, has_one = config.train.micro_batch_tokens, needs is not None and needs.feedback is None
    if has_one or not shares_prompts(config, shape):
        return MicroBatchSize(budget, budget)
    # The two responses share their prompt (data/supervised.py).
    prefix = min(shared_prefix(data.max_prompt_tokens, 2), max(0, budget - 4))
    prefix = int(min(prefix, _longest_copied(config, shape, cp)))
    copied = _most_copied_rows(budget, prefix, 2, budget, budget, cp)
    return MicroBatchSize(budget, cp * (budget + copied))


def _largest_of_samples(config: Config, shape: ModelShape, layout: TrainLayout) -> MicroBatchSize:
    budget = config.train.micro_batch_tokens
    prompt = config.data.max_prompt_tokens
    longest = prompt + config.rollout.max_new_tokens
    share = -(-samples_of_update(config) // layout.dp) + 1
    # With agents and in a user's own algorithm, a sample may consist of several sequences.
    if config.algorithm.needs is None or config.agent.is_on:
        positions = budget
    else:
        positions = min(budget, share * longest)
    shares, per_prompt = shares_prompts(config, shape), config.steps.samples_per_prompt
    if config.agent.is_on:
        # The episodes are not known in advance. Recurrent layers share nothing of theirs.
        copies = shares and shape.mixer is None
        rows = _most_branch_rows(positions, layout.cp) if copies else positions
        return MicroBatchSize(positions, rows)
    if not shares or per_prompt == 1:
        return MicroBatchSize(positions, positions)
    prefix = min(shared_prefix(prompt, per_prompt), max(0, budget - 2 * per_prompt))
    prefix = int(min(prefix, _longest_copied(config, shape, layout.cp)))
    copied = _most_copied_rows(positions, prefix, per_prompt, share, budget, layout.cp)
    return MicroBatchSize(positions, layout.cp * (positions + copied))


def _longest_copied(config: Config, shape: ModelShape, cp: int) -> float:
    """Returns how many tokens of a prompt samples may share for an update to copy their keys.

    On GPUs, the check at the start may still choose copies (te_attention.py:choose_calls).
    """
    is_in_place = _uses_transformer_engine(config, shape) and reads_in_place(shape, cp)
    return LEAST_SHARED - 1 if is_in_place else inf


def _most_copied_rows(
    positions: int, longest: int, per_prompt: int, share: int, budget: int, cp: int
) -> int:
    """Returns the most rows of keys that a rank copies for shared prompts up to `longest`.

    `share` is the number of a replica's samples, `budget` that of a micro-batch's tokens.
    """
    most, found = KEY_ROWS_OF_BUDGET * budget // cp, 0  # most: rows of a unit
    # Shorter prompts whose units just reach the limit copy more rows per position.
    for prefix in {longest, max(min(longest, most // per_prompt - 2), 0)}:
        # Each sample stores the prompt's last token and at least one response token.
        members = min(per_prompt, most // (prefix + 2))
        if members > 1:
            num_units = min(positions / (prefix + 2 * members), share / members)
            found = max(found, ceil(num_units * _copied_rows(prefix, members, 2, cp)))
    return found


def _most_branch_rows(positions: int, cp: int) -> int:
    if cp == 1:
        return KEY_ROWS_PER_POSITION * positions
    copied = most_copied_rows(positions, cp)
    # As in `_key_rows`: each rank gathers all keys, and copies those that a sequence continues
    # before each of its two chunks.
    return cp * (positions + ceil(positions * (1 + 1 / (2 * cp))) + 2 * copied)


def _has_samples(config: Config) -> bool:
    """Whether updates learn only from samples, not from rows that become several sequences."""
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
) -> set[tuple[int, int, int, int]]:
    """Returns the sizes of micro-batches of equal samples, as numbers of positions, rows of keys,
    prompts and samples.
    """
    length = round_up(prompt + response, pad_each)
    # Rules reject samples that exceed the budget; here such a sample is packed alone.
    token_budget = max(token_budget, length)
    if shares:
        units = make_units(
            [sample // per_prompt for sample in range(num_samples)],
            [prompt] * num_samples,
            [length] * num_samples,
            num_ranks,
            token_budget,
            attention,
            pad_each,
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
        positions = key_rows = num_prompts = 0
        for _, run in groupby(samples, key=lambda sample: sample // per_prompt):
            num_prompts += 1
            count = len(list(run))  # collation.py also merges neighbouring units of one prompt
            prefix = shared_prefix(prompt, count) if shares else 0
            if not prefix:
                positions += count * length
                key_rows += count * length
                continue
            first, own = round_up(prefix, pad_each), round_up(length - prefix, pad_each)
            positions += first + count * own
            key_rows += _key_rows(prefix, count, own, pad_each // 2 or 1)
        found.add((positions, key_rows, num_prompts, len(samples)))
    return found


def _key_rows(prefix: int, count: int, own: int, cp: int) -> int:
    """Returns the rows of keys of samples of `own` positions with their prefix, over cp ranks."""
    first = round_up(prefix, 2 * cp) if cp > 1 else prefix
    return cp * (first + count * own + _copied_rows(prefix, count, own, cp))


def _copied_rows(prefix: int, count: int, own: int, cp: int) -> int:
    if cp == 1:
        return (count - 1) * prefix
    # Each rank gathers all keys, and copies those before the end of each of its two chunks of a
    # sequence. Both ends together are the sequence and one chunk (context_parallel.py).
    ends = 1 + 1 / (2 * cp)
    return ceil(round_up(prefix, 2 * cp) * ends + count * (2 * prefix + own * ends))
