"""Rewards for tests: one that any response gets some of, and one that does not come back."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping


def digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns the share of digits in the response."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def tells_digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns what `digits` does, and prints and warns."""
    print(f"said by rank {os.environ['RANK']}", flush=True)
    warnings.warn("a reward's own", stacklevel=1)
    return digits(prompt, response, columns)


def begins_even(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns 1 if the response begins with an even digit, so that some groups are all equal."""
    return float(response[:1] in tuple("02468"))


def hangs_on_rank_1(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns at once, but on rank 1 only after ten minutes."""
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return 0.0
