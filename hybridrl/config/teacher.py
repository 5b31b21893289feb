"""The teacher in a distillation: its model, and whether the policy can learn from it. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.algorithm import OnPolicyDistillationConfig
from hybridrl.config.distillation import GkdConfig, TaughtConfig, TopTokensConfig
from hybridrl.config.files import read_json_object
from hybridrl.config.reward import RewardConfig
from hybridrl.config.rules_placement import cut_rules
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import model_directory, read_model_config
from hybridrl.errors import ModelError, UserError

TOKENS_FILE = "tokenizer.json"


def is_scored(config: Config) -> bool:
    """Whether a reward scores responses; false for distillation that evaluates nothing."""
    chosen, data = config.algorithm, config.data
    learns_from_it = not isinstance(chosen, OnPolicyDistillationConfig | GkdConfig)
    if isinstance(chosen, OnPolicyDistillationConfig):
        learns_from_it = chosen.reward_coef > 0
    is_evaluated = data.eval_prompts is not None or data.eval_share > 0
    return learns_from_it or is_evaluated or config.reward != RewardConfig()


def teacher_model(config: Config) -> ModelConfig | None:
    """Returns a section `model` for the teacher; None if the algorithm has no teacher."""
    chosen = config.algorithm
    if not isinstance(chosen, TaughtConfig):
        return None
    return ModelConfig(path=chosen.teacher, dtype=config.model.dtype)


def read_teacher(config: Config) -> dict[str, Any] | None:
    """Returns the teacher's config.json, or raises ModelError; None if there is no teacher."""
    section = teacher_model(config)
    try:
        return None if section is None else read_model_config(section)
    except ModelError as error:
        name = "algorithm.teacher" if error.name == "model.path" else error.name
        raise ModelError(name, error.value, error.allowed, error.remedy) from None


def teacher_rules(config: Config, policy: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields violated rules on the teacher; those on keys that `policy` lacks are skipped."""
    chosen = config.algorithm
    compares = isinstance(chosen, OnPolicyDistillationConfig) and chosen.reward_coef > 0
    if compares and config.steps.samples_per_prompt < 2:
        allowed = "2 or more with algorithm.reward_coef above 0, which compares a prompt's samples"
        remedy = "Set steps.samples_per_prompt=8, or algorithm.reward_coef=0."
        yield config.refused("steps.samples_per_prompt", allowed, remedy)
    try:
        teacher = read_teacher(config)
    except UserError as error:
        yield error
        return
    if teacher is None or "vocab_size" not in policy:
        return
    if isinstance(chosen, TopTokensConfig) and chosen.top_k > policy["vocab_size"]:
        allowed = f"at most the model's {policy['vocab_size']} tokens"
        yield config.refused("algorithm.top_k", allowed, "Lower it.")
    yield from _token_rules(config, policy["vocab_size"], teacher)
    for found in cut_rules(config, "teacher", teacher):
        allowed = found.allowed.replace("the model's", "the teacher's")
        yield UserError(found.name, found.value, allowed, found.remedy)


def _token_rules(
    config: Config, num_tokens: int, teacher: Mapping[str, Any]
) -> Iterator[UserError]:
    """Yields a violation unless both models have the same token ids; embeddings may have more."""
    section = teacher_model(config)
    assert section is not None
    num_known = teacher.get("vocab_size")
    names = [_token_names(section), _token_names(config.model)]
    different = sorted(i for i in names[0].keys() & names[1].keys() if names[0][i] != names[1][i])
    is_larger = isinstance(num_known, int) and num_known > num_tokens
    if different:
        first = different[0]
        found = f"{section.path}, in which token {first} is {names[0][first]!r}"
        allowed = (
            f"a teacher with the policy's tokens, in which token {first} is {names[1][first]!r}"
        )
    elif num_known == num_tokens or (is_larger and all(names)):
        return
    else:
        found = f"{section.path}, with {num_known} tokens"
        allowed = f"a teacher with the policy's {num_tokens} tokens"
        if is_larger:
            allowed += f", or with more tokens and a {TOKENS_FILE} that agrees with the policy's"
    yield UserError(
        "algorithm.teacher", found, allowed, "Choose a teacher from the policy's model family."
    )


def _token_names(model: ModelConfig) -> dict[int, str]:
    place = Path(os.path.expanduser(model.tokenizer or ""))
    if model.tokenizer is None or not os.path.isdir(place):
        place = model_directory(model, weights=False)
    try:
        content = read_json_object(place / TOKENS_FILE, ModelError, has_unique_keys=False)
        known = content["model"]["vocab"]
        # Unigram models list (token, score).
        pairs = (
            known.items() if isinstance(known, dict) else ((t[0], i) for i, t in enumerate(known))
        )
        added = ((token["content"], token["id"]) for token in content.get("added_tokens") or ())
        return {int(number): str(token) for token, number in (*pairs, *added)}
    except (UserError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # tokenizer.py checks the tokenizer itself
