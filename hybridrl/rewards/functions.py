"""Finds reward functions by name, or by the dotted path of a user's function. Does not import
torch, so that a run can be checked early.

A reward function takes `(prompt, response: str, columns: Mapping)` and returns a float. `prompt` is
the row's prompt: a text or the messages of a chat. `columns` contains the other columns of the row,
and the text that the model received under the key `rendered_prompt`. A function with the attribute
`batched = True` receives lists for all samples as the three arguments, and returns one float per
sample. traits.py lists all attributes.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hybridrl.config.agent import REWARD as REPORTED
from hybridrl.config.environment import REWARD as TURNS
from hybridrl.config.own_code import check_options, found_callable, imported
from hybridrl.config.reward import SERVED, RewardConfig, ScorerConfig
from hybridrl.errors import MISSING, UserError
from hybridrl.rewards.answers import Choice, ExactMatch, Gsm8k, Math
from hybridrl.rewards.instructions import Instructions
from hybridrl.rewards.remote import Remote
from hybridrl.rewards.shaping import Format, Length, Regex
from hybridrl.rewards.traits import traits_of

__all__ = ["REWARDS", "ExactMatch", "RewardFunction", "check_rewards", "find_reward", "where"]

RewardFunction = Callable[..., Any]
NOT_CALLED = (SERVED, TURNS, REPORTED)


class TurnRewards:
    """Sum of an environment's rewards, computed during generation (generation/episodes.py)."""

    runs = "world"

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        raise NotImplementedError


class ReportedReward(TurnRewards):
    """Reward that an agent reported (generation/agent_episodes.py)."""


class ServedModel:
    """Reward model that the trainer runs on its own ranks (roles/reward_models.py), from an HF
    directory of a model with a value head, for example written by `hybridrl convert` from a
    reward_model run. Raises UserError if the directory contains no model.
    """

    runs = "world"

    def __init__(self, path: str) -> None:
        if not os.path.isfile(os.path.join(os.path.expanduser(path), "config.json")):
            raise UserError(
                "reward.options.path",
                path,
                "an HF directory of a reward model",
                "Make it with algorithm.name=reward_model and hybridrl convert --to hf.",
            )

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Never called, because the model scores tokens, not texts."""
        raise NotImplementedError


def no_reward(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns 0. Used if no reward is configured because the algorithm does not need a reward."""
    return 0.0


REWARDS: dict[str, Callable[..., RewardFunction] | str] = {
    "exact_match": ExactMatch,
    "gsm8k": Gsm8k,
    "math": Math,
    "choice": Choice,
    "instructions": Instructions,
    "regex": Regex,
    "format": Format,
    "length": Length,
    "code": "hybridrl.services.sandbox.code_reward:Code",  # imported only if used
    "remote": Remote,
    SERVED: ServedModel,
    TURNS: TurnRewards,
    REPORTED: ReportedReward,
}
NEEDS_ANSWER = ("exact_match", "gsm8k", "math", "choice")


def _reward_class(name: str) -> Callable[..., RewardFunction]:
    entry = REWARDS[name]
    return imported(entry) if isinstance(entry, str) else entry


def find_reward(config: ScorerConfig) -> RewardFunction:
    """Returns the configured function with its options. Raises UserError if it is unusable."""
    name = config.function
    if name in REWARDS:
        options = dict(config.options)
        if name == "exact_match" and config.extract is not None:
            options["extract"] = config.extract
        reward_class = _reward_class(name)
        _check_options(name, reward_class, options)
        reward = reward_class(**options)
        _check_run(config, reward)
        return reward
    allowed = f"{', '.join(REWARDS)}, or a package.module:function"
    if ":" not in name:
        near = get_close_matches(name, REWARDS, 1)
        remedy = f"Did you mean {near[0]!r}?" if near else "Check the name."
        raise UserError("reward.function", name, allowed, remedy)
    found: RewardFunction = found_callable(name, "reward.function", allowed)
    after = ", after prompt, response and columns"
    given: list[object] = ["prompt", "response", {}]
    check_options(found, name, "reward.function", config.options, given, after)
    if config.options:
        found = functools.wraps(found)(functools.partial(found, **config.options))
    _check_run(config, found)
    return found


class RowCheck:
    """Checks whether configured rewards can score responses to a row, before these exist."""

    def __init__(self, config: RewardConfig) -> None:
        scorers = config.scorers().values()
        self._scorers = [
            scorer
            for scorer in scorers
            if scorer.function in REWARDS and hasattr(_reward_class(scorer.function), "check_row")
        ]

    def identity(self) -> list[object]:
        """Returns everything that determines which rows pass the check, as JSON values."""
        return [
            [scorer.function, scorer.options, hashlib.sha256(file.read_bytes()).hexdigest()]
            for scorer in self._scorers
            for file in [Path(inspect.getfile(_reward_class(scorer.function)))]
        ]

    def __call__(self, prompt: str, columns: Mapping[str, object]) -> None:
        for check in self._checks:
            check(prompt, columns)

    @functools.cached_property
    def _checks(self) -> list[Callable[[str, Mapping[str, object]], None]]:
        found = [traits_of(find_reward(scorer)).check_row for scorer in self._scorers]
        return [check for check in found if check is not None]


def check_rewards(config: RewardConfig) -> list[UserError]:
    found = []
    for name, scorer in config.scorers().items():
        try:
            find_reward(scorer)
        except UserError as error:
            if config.functions:  # only then the key contains the name
                key = error.name.replace("reward.", f"reward.functions.{name}.", 1)
                error = UserError(key, error.value, error.allowed, error.remedy)
            found.append(error)
    return found


def where(config: ScorerConfig, function: RewardFunction) -> str:
    """Returns where a configured function is executed: "here", "thread", "process" or "world"."""
    traits = traits_of(function)
    is_own = ":" in config.function and not traits.batched
    usual = traits.runs or ("process" if is_own else "here")
    if config.isolated is None or usual in ("thread", "world"):
        return usual
    return "process" if config.isolated else "here"


def _check_run(config: ScorerConfig, function: RewardFunction) -> None:
    place = where(config, function)
    remedies = {
        "here": "Remove it, or set isolated=true to run the function in processes.",
        "thread": "Remove it; limits of this function are set in its options.",
    }
    unread = {"here": ("timeout_s", "workers"), "thread": ("timeout_s", "isolated")}
    knobs = unread.get(place, ("timeout_s", "workers", "isolated") if place == "world" else ())
    if config.function != "exact_match":
        knobs = (*knobs, "extract")
    for knob in knobs:
        value = getattr(config, knob)
        if value != ScorerConfig.model_fields[knob].get_default():
            places = {"here": "in place", "thread": "in threads", "world": "in the trainer's world"}
            raise UserError(
                f"reward.{knob}",
                value,
                f"not set with function {config.function}"
                + ("" if knob == "extract" else f", which is called {places[place]}"),
                "Remove it." if knob == "extract" else remedies.get(place, "Remove it."),
            )


def _check_options(name: str, reward: Callable[..., Any], options: dict[str, Any]) -> None:
    known = inspect.signature(reward).parameters
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, 1)
            raise UserError(
                f"reward.options.{option}",
                "an unknown option",
                f"{', '.join(known) or 'no option'} with function {name}",
                f"Did you mean {near[0]!r}?" if near else "Remove it.",
            )
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(
                f"reward.options.{option}",
                MISSING,
                f"a value, which function {name} requires",
                f"Set reward.options.{option}.",
            )
