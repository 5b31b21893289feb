"""Sampling options other than temperature and truncation, and `generation_config.json`. No torch.

On-policy training assumes that tokens are drawn from the softmax of the logits over the
temperature. Minimum lengths and penalties change this distribution, so that the ratio to the policy
is not 1 even if the weights are equal; training refuses them. A stop string only ends a response.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hybridrl.config.files import read_json_object, shown
from hybridrl.config.schema import Config, ModelConfig, RolloutConfig
from hybridrl.config.source import model_directory
from hybridrl.errors import ModelError, UserError, error_text
from hybridrl.rollout.registry import ENGINES, offered_engines

GENERATION_CONFIG = "generation_config.json"
# Keys that are read from generation_config.json; the knobs of `rollout` have the same names.
_TAKEN = ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "repetition_penalty")
_OFF: dict[str, float] = {"min_new_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
"""Knobs that modify the distribution depending on earlier tokens, with the values that turn them
off.
"""


def with_generation_config(config: Config) -> Config:
    """Fills unset knobs of `rollout` from generation_config.json if the configuration says so.

    Raises:
        ModelError: The file is missing, or contains a value that the knob does not allow.
    """
    rollout = config.rollout
    if not rollout.generation_config:
        return config
    file = model_directory(config.model, weights=False) / GENERATION_CONFIG
    content = read_json_object(file, ModelError)
    given = {key: content[key] for key in _TAKEN if content.get(key) is not None}
    if content.get("do_sample") is False:
        given["temperature"] = 0.0
    for key, value in given.items():
        if key not in rollout.model_fields_set:
            try:
                checked = getattr(RolloutConfig.model_validate({key: value}), key)
            except ValidationError as error:
                why = error_text(ValueError(error.errors()[0]["msg"]))
                remedy = f"Set rollout.{key}, or rollout.generation_config=false."
                raise ModelError(f"{file}: {key}", value, why, remedy) from error
            rollout = rollout.model_copy(update={key: checked})
    return config.model_copy(update={"rollout": rollout})


def declared_end_tokens(model: ModelConfig, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end tokens from generation_config.json; ModelError outside the vocabulary.

    They apply even if `rollout.generation_config` is off: some chat models (Phi-3, some Gemma
    models) list the token that ends a turn only in this file, and never stop without it.
    """
    file = model_directory(model, weights=False) / GENERATION_CONFIG
    if not os.path.lexists(file):  # a broken link is damage, not absence
        return ()
    named: Any = read_json_object(file, ModelError).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    num_tokens = hf_config.get("vocab_size")
    most = num_tokens if isinstance(num_tokens, int) else sys.maxsize
    if not all(type(number) is int and 0 <= number < most for number in ids):
        allowed = f"a token below vocab_size = {most}, a list of tokens, or null"
        remedy = "Correct the file; it may belong to another model."
        raise ModelError(f"{file}: eos_token_id", shown(named), allowed, remedy)
    return tuple(ids)


def generation_rules(config: Config) -> Iterator[UserError]:
    """Yields the knobs that the engine does not support."""
    rollout, traits = config.rollout, ENGINES[config.rollout.engine]
    if rollout.stop_strings and not traits.ends_by_text:
        able = [name for name in offered_engines() if ENGINES[name].ends_by_text]
        yield _refused("stop_strings", config, able)
    for key, off in _OFF.items():
        if getattr(rollout, key) != off and not traits.penalizes:
            able = [name for name in offered_engines() if ENGINES[name].penalizes]
            yield _refused(key, config, able)
    if rollout.stop_strings and config.environment.name is not None:
        allowed = (
            "no value with an environment, which responds only when a turn ends with an end token"
        )
        remedy = "Remove rollout.stop_strings, and let the environment search each turn's text."
        yield UserError("rollout.stop_strings", list(rollout.stop_strings), allowed, remedy)
    if rollout.min_new_tokens > rollout.max_new_tokens:
        allowed = f"at most rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield config.refused("rollout.min_new_tokens", allowed, "Lower rollout.min_new_tokens.")
    if rollout.gpu_memory_share is not None and not traits.has_fixed_kv_cache:
        reason = "whose KV cache grows with its requests"
        allowed = f"no value with rollout.engine={rollout.engine}, {reason}"
        remedy = "Remove rollout.gpu_memory_share, and limit requests with rollout.max_batch."
        yield config.refused("rollout.gpu_memory_share", allowed, remedy)


def on_policy_rules(config: Config) -> Iterator[UserError]:
    """Yields the knobs that would make training samples off-policy."""
    needs = config.algorithm.needs
    if needs is not None and not needs.rollouts:
        return  # samples are used only in evaluations
    for key, off in _OFF.items():
        if (value := getattr(config.rollout, key)) != off:
            reason = "assumes that tokens are sampled from the policy's own distribution"
            name = config.algorithm.name
            allowed = f"{off:g} in training with algorithm {name}, whose gradient {reason}"
            remedy = f"Set rollout.{key}={off:g}; `hybridrl eval` accepts other values."
            yield UserError(f"rollout.{key}", value, allowed, remedy)


def _refused(key: str, config: Config, able: list[str]) -> UserError:
    engine = config.rollout.engine
    value = getattr(config.rollout, key)
    allowed = f"no value with rollout.engine={engine}; {' or '.join(able)} supports it"
    shown = list(value) if isinstance(value, tuple) else value
    return UserError(f"rollout.{key}", shown, allowed, f"Set rollout.engine={able[0]}.")
