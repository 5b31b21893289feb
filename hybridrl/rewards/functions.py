"""Reward functions by name, and how a user's own is found. No torch, so that a run can be checked
early.

A reward function takes `(prompt: str, response: str, columns: Mapping)` and returns a float;
`columns` is the rest of the prompt's row. One with the attribute `batched = True` takes lists of
the three, for all samples at once, and returns one float a sample.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from hybridrl.config.schema import RewardConfig
from hybridrl.errors import DataError, UserError

RewardFunction = Callable[..., Any]


class ExactMatch:
    """1 if the answer found in the response is the row's "answer" column, else 0.

    Args:
        extract: a regular expression; group 1 of its last match (that is not empty) is the
            answer, no match scores 0. None takes the whole response. White space at both ends
            does not count.

    Raises:
        UserError: `extract` is not a regular expression with a group.
    """

    def __init__(self, extract: str | None) -> None:
        try:
            self._pattern = re.compile(extract) if extract is not None else None
        except re.error as error:
            raise _bad_pattern(extract, f"Mend it: {error}.") from error
        if self._pattern is not None and self._pattern.groups < 1:
            raise _bad_pattern(extract, "Put ( ) around the part that is the answer.")

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns 1.0 or 0.0."""
        if "answer" not in columns:
            raise DataError(
                "data.answer_key",
                f"no answer for the prompt {prompt[:40]!r}, only {sorted(columns)}",
                "a column with the answer in every row",
                "Set data.answer_key to its name.",
            )
        answer = self._extracted(response)
        return float(answer is not None and answer == str(columns["answer"]).strip())

    def _extracted(self, response: str) -> str | None:
        if self._pattern is None:
            return response.strip()
        # `([^,]*)$` matches "15,08,85" twice, at last with nothing: such a match is no answer.
        found = [m[1].strip() for m in self._pattern.finditer(response) if m[1]]
        return found[-1] if found else None


REWARDS: dict[str, Callable[[RewardConfig], RewardFunction]] = {
    "exact_match": lambda config: ExactMatch(config.extract),
}


def find_reward(config: RewardConfig) -> RewardFunction:
    """Returns the function that the section names, from the table or a dotted path
    `module:function`.

    Raises:
        UserError: there is no such function, or its settings are wrong.
    """
    name = config.function
    if name in REWARDS:
        return REWARDS[name](config)
    module, colon, attribute = name.partition(":")
    if not colon:
        near = get_close_matches(name, REWARDS, 1)
        raise _unknown(name, f"Did you mean {near[0]!r}?" if near else "Check the name.")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # any error of the user's own module
        raise _unknown(name, f"Importing it failed: {type(error).__name__}: {error}.") from error
    if not callable(function):
        raise _unknown(name, f"It is a {type(function).__name__}, which cannot be called.")
    found: RewardFunction = function
    return found


def _unknown(name: str, remedy: str) -> UserError:
    return UserError(
        "reward.function", name, f"{', '.join(REWARDS)} or package.module:function", remedy
    )


def _bad_pattern(extract: str | None, remedy: str) -> UserError:
    allowed = "a regular expression with a group"
    return UserError("reward.extract", repr(extract), allowed, remedy)
