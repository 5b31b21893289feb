"""A reward that any response gets some of, so that scripted responses differ in it."""

from __future__ import annotations

from collections.abc import Mapping


def digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns the share of digits in the response."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)
