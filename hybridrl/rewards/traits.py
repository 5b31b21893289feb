"""What a reward function says of itself by its attributes. No torch.

A user's function may be a plain callable that has none of them. So the attributes are looked up
here, with their defaults, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FunctionTraits:
    """The attributes of a reward function.

    Args:
        batched: it takes lists of prompts, responses and columns, and returns one float a sample.
        is_async: it is a coroutine function, of which many calls may wait at a time.
        runs: where it is called: "here" (in place), "process" (it may hang), "thread" (it waits for
            others) or "world" (by the trainer). None: it does not say.
        notes: words that its rewards may carry (`Noted`), each of which becomes a metric.
        memory_bytes: most address space that its process may take; None: no limit.
        answer: returns the answer in a response, in a form in which equal ones are equal texts, or
            None where it has none; quickly, whatever the response is. None: it knows of no answers.
        check_row: raises DataError for a prompt's text and columns to which it can score no
            response; quickly. None: it looks at no column, or does not say.
    """

    batched: bool = False
    is_async: bool = False
    runs: str | None = None
    notes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    answer: Callable[[str], str | None] | None = None
    check_row: Callable[[str, Mapping[str, object]], None] | None = None


def traits_of(function: Callable[..., Any]) -> FunctionTraits:
    """Returns the traits of a reward function, defaults where it has no such attribute."""
    usual = FunctionTraits()
    return FunctionTraits(
        batched=bool(getattr(function, "batched", usual.batched)),
        is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
        runs=getattr(function, "runs", usual.runs),
        notes=getattr(function, "notes", usual.notes),
        memory_bytes=getattr(function, "memory_bytes", usual.memory_bytes),
        answer=getattr(function, "answer", usual.answer),
        check_row=getattr(function, "check_row", usual.check_row),
    )
