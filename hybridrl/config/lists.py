"""Types of knobs that accept one value or a list in YAML and store a tuple. No torch."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def _as_paths(value: object) -> object:
    if value is None or isinstance(value, tuple):
        return value
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise PydanticCustomError("paths", "a path or a list of paths")
    return tuple(paths)


Paths = Annotated[tuple[str, ...] | None, BeforeValidator(_as_paths)]
"""A file or a list of files."""


def _as_weights(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
        for x in value
    ):
        raise PydanticCustomError("weights", "a list of finite numbers above 0")
    return tuple(float(x) for x in value)


Weights = Annotated[tuple[float, ...] | None, BeforeValidator(_as_weights)]
"""A list of weights."""


def _as_steps(value: object) -> object:
    """Expands a step, a range 'A-B' or a list of both."""
    steps: list[int] = []
    for part in value if isinstance(value, list | tuple) else (value,):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(part))
        if match is None:
            allowed = "a step, a range of steps such as 3-5, or a list of these"
            raise PydanticCustomError("steps", allowed)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PydanticCustomError("steps", "a range of steps that ends after it begins")
        steps += range(first, last + 1)
    return tuple(sorted(set(steps)))


Steps = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_steps)]
"""Steps and ranges of steps, ascending."""


def _as_counts(value: object) -> object:
    if value is None:
        return ()
    counts = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in counts):
        raise PydanticCustomError("counts", "a number of 1 or more, or a list of such numbers")
    return tuple(sorted(set(counts)))


Counts = Annotated[tuple[int, ...], BeforeValidator(_as_counts)]
"""One count or several, ascending."""


def _as_texts(value: object) -> object:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list | tuple) or not all(
        isinstance(one, str) and one for one in texts
    ):
        raise PydanticCustomError("texts", "a non-empty text, or a list of non-empty texts")
    return tuple(texts)


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_texts)]
"""A text or a list of texts."""
OptionalTexts = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(lambda value: None if value is None else _as_texts(value)),
]
"""A text or a list of texts, or null."""
