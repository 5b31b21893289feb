"""How responses are drawn and ended beyond temperature and truncation: what an engine can do, what
a policy gradient allows, and a model's own `generation_config.json`. No torch.

On-policy training takes a response as drawn from the policy that the trainer computes: softmax of
the logits over the temperature. A stop string only says after which token a response ends; every
token is still drawn from that distribution, so that the gradient is right. Least lengths and
penalties change it by what was said before: a token's behaviour log-probability is then of another
distribution, whose ratio to the policy's is not 1 at equal weights, and the end token has
probability 0 where the policy gives it some. They are refused where samples are trained on.
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
from hybridrl.errors import ModelError, UserError, said
from hybridrl.rollout.registry import ENGINES, offered_engines

GENERATION_CONFIG = "generation_config.json"
# What is taken of it, by its names, which are those of the section too.
_TAKEN = ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "repetition_penalty")
_OFF: dict[str, float] = {
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
}
"""The knobs that change the distribution by what was said before, and where they do not."""


def with_generation_config(config: Config) -> Config:
    """Returns a configuration in which knobs of `rollout` that it does not set are those of the
    model's generation_config.json, where `rollout.generation_config` asks for it.

    Raises:
        ModelError: there is no such file, or it has a value that the knob cannot have.
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
                why = said(ValueError(error.errors()[0]["msg"]))
                remedy = f"Set rollout.{key}, or rollout.generation_config=false."
                raise ModelError(f"{file}: {key}", value, why, remedy) from error
            rollout = rollout.model_copy(update={key: checked})
    return config.model_copy(update={"rollout": rollout})


def declared_end_tokens(model: ModelConfig, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end tokens that the model's generation_config.json names, if there is one.

    They are read whatever `rollout.generation_config` says: some chat models (Phi-3, some of Gemma)
    name the token that ends a turn nowhere else, and never stop without it.

    Args:
        model: the section, which names the model's directory.
        hf_config: the content of config.json.

    Raises:
        ModelError: they are no tokens of the model.
    """
    file = model_directory(model, weights=False) / GENERATION_CONFIG
    if not os.path.lexists(file):  # a broken link is damage, not absence
        return ()
    named: Any = read_json_object(file, ModelError).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    num_tokens = hf_config.get("vocab_size")
    most = num_tokens if isinstance(num_tokens, int) else sys.maxsize
    if not all(type(number) is int and 0 <= number < most for number in ids):
        raise ModelError(
            f"{file}: eos_token_id",
            shown(named),
            f"a token below vocab_size = {most}, several of them, or null",
            "Correct the file; it may be another model's.",
        )
    return tuple(ids)


def generation_rules(config: Config) -> Iterator[UserError]:
    """Rules of what the engine can do."""
    rollout, traits = config.rollout, ENGINES[config.rollout.engine]
    if rollout.stop_strings and not traits.ends_by_text:
        able = [name for name in offered_engines() if ENGINES[name].ends_by_text]
        yield _refused("stop_strings", config, able)
    for key, off in _OFF.items():
        if getattr(rollout, key) != off and not traits.penalizes:
            able = [name for name in offered_engines() if ENGINES[name].penalizes]
            yield _refused(key, config, able)
    if rollout.stop_strings and config.environment.name is not None:
        yield UserError(
            "rollout.stop_strings",
            list(rollout.stop_strings),
            "nothing with an environment, which answers a turn after its end token",
            "Let the environment look for them in a turn's text.",
        )
    if rollout.min_new_tokens > rollout.max_new_tokens:
        allowed = f"at most rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield UserError("rollout.min_new_tokens", rollout.min_new_tokens, allowed, "Lower it.")
    if rollout.gpu_memory_share is not None and not traits.has_fixed_kv_cache:
        yield UserError(
            "rollout.gpu_memory_share",
            rollout.gpu_memory_share,
            f"nothing with rollout.engine={rollout.engine}, whose cache grows with its requests",
            "Remove it, and bound requests by rollout.max_batch.",
        )


def on_policy_rules(config: Config) -> Iterator[UserError]:
    """Rules of what may be trained on: samples of the policy's own distribution."""
    needs = config.algorithm.needs
    if needs is not None and not needs.rollouts:
        return  # what is generated is only evaluated
    for key, off in _OFF.items():
        if (value := getattr(config.rollout, key)) != off:
            yield UserError(
                f"rollout.{key}",
                value,
                f"{off:g} in training with algorithm {config.algorithm.name}: tokens would be "
                "drawn from another distribution than the policy's, which the gradient is of",
                f"Set rollout.{key}={off:g}; hybridrl eval takes it.",
            )


def _refused(key: str, config: Config, able: list[str]) -> UserError:
    engine = config.rollout.engine
    value = getattr(config.rollout, key)
    allowed = f"nothing with rollout.engine={engine}; {', '.join(able)} can"
    shown = list(value) if isinstance(value, tuple) else value
    return UserError(f"rollout.{key}", shown, allowed, f"Set rollout.engine={able[0]}.")
