"""Limits at which the endpoint refuses further turns. Imports only the standard library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

CODES = ("context_length_exceeded", "turn_budget_exhausted", "token_budget_exhausted")


@contextmanager
def until_a_limit() -> Iterator[None]:
    """Context manager that ends at a limit of the endpoint, so that the turns so far are scored."""
    try:
        yield
    except Exception as error:
        if getattr(error, "code", None) not in CODES:
            raise
