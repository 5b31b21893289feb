"""Values that are one thing or a list of them in YAML, and always a tuple in a Config. No torch."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def _as_paths(value: object) -> object:
    """Turns one path or a YAML list of paths into the tuple that the field holds."""
    if value is None or isinstance(value, tuple):
        return value
    paths = (value,) if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
        raise PydanticCustomError("paths", "a path or a list of paths")
    return tuple(paths)


Paths = Annotated[tuple[str, ...] | None, BeforeValidator(_as_paths)]
"""A file or a list of files in YAML; always a tuple (or None) in a Config."""


def _as_weights(value: object) -> object:
    """Turns a YAML list of numbers above 0 into the tuple that the field holds."""
    if value is None:
        return None
    is_list = isinstance(value, list | tuple) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")
        for x in value
    )
    if not is_list:
        raise PydanticCustomError("weights", "a list of finite numbers above 0")
    return tuple(float(x) for x in value)  # type: ignore[attr-defined]


Weights = Annotated[tuple[float, ...] | None, BeforeValidator(_as_weights)]
"""A list of weights in YAML; always a tuple (or None) in a Config."""


def _as_steps(value: object) -> object:
    """Turns a step, a range 'A-B' or a list of both into the tuple that the field holds."""
    steps: list[int] = []
    for part in value if isinstance(value, list | tuple) else (value,):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(part))
        if match is None:
            raise PydanticCustomError("steps", "a step, a range of steps as 3-5, or a list of them")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PydanticCustomError("steps", "a range of steps that ends after it begins")
        steps += range(first, last + 1)
    return tuple(sorted(set(steps)))


Steps = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_steps)]
"""Steps, ranges of steps or both in YAML; always a tuple in a Config."""


def _as_counts(value: object) -> object:
    """Turns a number from 1 or a list of them into the ascending tuple that the field holds."""
    if value is None:
        return ()
    counts = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in counts):
        raise PydanticCustomError("counts", "a number from 1, or a list of them")
    return tuple(sorted(set(counts)))


Counts = Annotated[tuple[int, ...], BeforeValidator(_as_counts)]
"""A count or several in YAML; always an ascending tuple in a Config."""
