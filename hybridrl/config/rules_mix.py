"""Rules on online DPO and on additional loss terms (the section `mix`). No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridrl.config.mix import TermConfig
from hybridrl.config.rules_placement import parallel_sizes
from hybridrl.config.schema import Config, KtoConfig, OnlineDpoConfig
from hybridrl.config.supervised import PAIR_PRESETS
from hybridrl.errors import UserError

# Prefixes of metric names. Terms must not have these names, because a term's name is a prefix, too.
TAKEN = (
    *("policy", "critic", "reward", "response_tokens", "generate", "mismatch", "correction"),
    *("preference", "teacher", "environment", "train", "eval", "reshard", "memory", "throughput"),
    *("time_s", "time_share", "flops", "mfu", "step"),
)


MUST_FIT = (
    "Raise train.micro_batch_tokens, or lower one of these limits, because every sample must fit "
    "into a micro-batch."
)


def must_fit(config: Config, longest: int, what: str) -> Iterator[UserError]:
    """Yields the violation if a sample of `longest` tokens, the sum of `what`, exceeds a
    micro-batch. Context parallel ranks divide a sample into 2 * cp equal parts.
    """
    sizes = parallel_sizes(config, "cp").items()
    padded, key = max((_padded(longest, cp), key) for key, cp in sizes)
    if config.train.micro_batch_tokens < padded:
        allowed = f"at least {what} = {longest}"
        if padded > longest:
            allowed += f", padded to {padded}, a multiple of 2 * {key}"
        yield config.refused("train.micro_batch_tokens", allowed, MUST_FIT)


def _padded(length: int, cp: int) -> int:
    return -(-length // (2 * cp)) * 2 * cp if cp > 1 else length


def online_rules(config: Config) -> Iterator[UserError]:
    steps = config.steps
    if not isinstance(config.algorithm, OnlineDpoConfig):
        return
    if steps.samples_per_prompt < 2:
        allowed = "2 or more with algorithm online_dpo, which pairs the samples of a prompt"
        yield config.refused("steps.samples_per_prompt", allowed, "Set steps.samples_per_prompt=2.")
    if config.rollout.temperature == 0:
        allowed = (
            "above 0 with algorithm online_dpo, because all greedy samples of a prompt are equal"
        )
        yield config.refused("rollout.temperature", allowed, "Set rollout.temperature=1.")
    if steps.updates_per_step > 1:
        allowed = "1 with algorithm online_dpo, whose gradient is computed at the start of the step"
        remedy = "Set steps.updates_per_step=1, and lower steps.prompts_per_step."
        yield config.refused("steps.updates_per_step", allowed, remedy)


def mix_rules(config: Config) -> Iterator[UserError]:
    for name, term in config.mix.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in TAKEN:
            allowed = "names of lower-case letters, digits and _, except these prefixes of metrics"
            allowed = f"{allowed}: {', '.join(TAKEN)}"
            yield UserError("mix", f"a term {name!r}", allowed, "Rename the term.")
        yield from _algorithm_rules(f"mix.{name}", term)
    for name, term in config.terms().items():
        if config.algorithm.needs is not None and not config.algorithm.needs.policy:
            allowed = (
                f"no value with algorithm {config.algorithm.name}, which does not train a policy"
            )
            yield UserError(f"mix.{name}", "a term", allowed, f"Remove mix.{name}.")
        yield from _number_rules(config, f"mix.{name}", term)
        yield from _data_rules(f"mix.{name}.data", term)


def _algorithm_rules(key: str, term: TermConfig) -> Iterator[UserError]:
    if term.algorithm.needs is not None and not term.algorithm.needs.fits_term:
        allowed = f"sft, {', '.join(PAIR_PRESETS)} or kto, which learn from responses in the data"
        remedy = f"Use {term.algorithm.name} as the main algorithm, and the other one as the term."
        yield UserError(f"{key}.algorithm.name", term.algorithm.name, allowed, remedy)


def _number_rules(config: Config, key: str, term: TermConfig) -> Iterator[UserError]:
    updates, rows = config.steps.updates_per_step, term.prompts_per_step
    if rows % updates:
        reason = "so that all updates have equally many rows"
        allowed = f"a multiple of steps.updates_per_step = {updates}, {reason}"
        remedy = f"Set {key}.prompts_per_step={-(-rows // updates) * updates}."
        yield UserError(f"{key}.prompts_per_step", rows, allowed, remedy)
    elif isinstance(term.algorithm, KtoConfig) and rows // updates < 2:
        reason = "which estimates the KL from responses to other prompts"
        allowed = f"2 or more for each optimizer step with algorithm kto, {reason}"
        remedy = f"Set {key}.prompts_per_step={32 * updates}."
        yield UserError(f"{key}.prompts_per_step", rows, allowed, remedy)
    most = term.data.longest_response(config.rollout.max_new_tokens)
    longest = term.data.max_prompt_tokens + most
    what = f"{key}.data.max_prompt_tokens + the longest response"
    yield from must_fit(config, longest, what)


def _data_rules(key: str, term: TermConfig) -> Iterator[UserError]:
    data = term.data
    for knob in ("validation", "eval_prompts", "eval_share", "eval_limit"):
        if getattr(data, knob):
            allowed = "no value in a term, because evaluations use the prompts in the section data"
            remedy = f"Remove {key}.{knob}, and set data.{knob}."
            yield UserError(f"{key}.{knob}", getattr(data, knob), allowed, remedy)
    if data.margin_key is not None:
        allowed = "no value in a term, because only reward_model uses margins"
        yield UserError(f"{key}.margin_key", data.margin_key, allowed, f"Remove {key}.margin_key.")
