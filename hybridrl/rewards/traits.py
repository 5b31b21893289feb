"""Attributes of reward functions. No torch.

A user's function may be a plain callable without them, so this module looks them up, with defaults;
no other module does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class FunctionTraits:
    """The attributes of a reward function.

    Args:
        batched: Whether it takes lists of prompts, responses and columns, and returns one float per
            sample.
        is_async: Whether it is a coroutine function, so that many calls may wait concurrently.
        runs: Place to call it: "here" (in place), "process" (it may hang), "thread" (it waits for
            others) or "world" (the trainer calls it); None for the default.
        notes: Words that its rewards may carry (`Noted`); each becomes a metric.
        memory_bytes: Limit of its process's address space; None for no limit.
        answer: Function that returns the answer in a response, quickly and in a form in which equal
            answers are equal texts; None for a response without an answer. Not set if there is no
            such form.
        check_row: Function that takes a prompt's text and columns, and quickly raises DataError if
            no response to it can be scored.
    """

    batched: bool = False
    is_async: bool = False
    runs: str | None = None
    notes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    answer: Callable[[str], str | None] | None = None
    check_row: Callable[[str, Mapping[str, object]], None] | None = None


def traits_of(function: Callable[..., Any]) -> FunctionTraits:
    """Returns the traits of a reward function, with defaults for missing attributes."""
    names = [field.name for field in fields(FunctionTraits) if field.name != "is_async"]
    found = {name: getattr(function, name) for name in names if hasattr(function, name)}
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return FunctionTraits(is_async=is_async, **found)
