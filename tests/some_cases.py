"""Cases of which `make test` runs the first ones and `make test-full` all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some(cases: Sequence[Any], num_usual: int) -> list[Any]:
    """Returns the cases as parameters, from number `num_usual` on marked `full`."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    rare = (pytest.param(*value, marks=pytest.mark.full) for value in values[num_usual:])
    return [*cases[:num_usual], *rare]
