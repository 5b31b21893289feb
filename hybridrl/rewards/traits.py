"""Reads the attributes of reward functions. Does not import torch.

A user's function may be a plain callable without these attributes. Only this module reads the
attributes, and supplies defaults for missing ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class FunctionTraits:
    """Attributes of a reward function.

    Args:
        batched: Whether the function takes lists of prompts, responses and columns, and returns one
            float per sample.
        runs: Where to call the function: "here" (in place), "process" (it may hang), "thread" (it
            waits for I/O) or "world" (the trainer computes it). If None, the default applies.
        notes: Notes that rewards may carry (`Noted`); each one becomes a metric.
        memory_bytes: Limit on the address space of the function's process, if any.
        answer: Fast function that returns the answer in a response as a text, or None if there is
            no answer. Equal answers must be equal texts.
        check_row: Fast function that takes a prompt's text and columns, and raises DataError if
            responses to it cannot be scored.
    """

    batched: bool = False
    is_async: bool = False
    runs: str | None = None
    notes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    answer: Callable[[str], str | None] | None = None
    check_row: Callable[[str, Mapping[str, object]], None] | None = None


def traits_of(function: Callable[..., Any]) -> FunctionTraits:
    names = [field.name for field in fields(FunctionTraits) if field.name != "is_async"]
    found = {name: getattr(function, name) for name in names if hasattr(function, name)}
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return FunctionTraits(is_async=is_async, **found)
