"""Reward functions that do what a reward function must not; named by dotted path in a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def raises(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Fails as user code does."""
    return float(columns["no such column"])  # type: ignore[arg-type]


def gives_nan(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns what no gradient survives."""
    return float("nan")


def gives_pairs(
    prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Mapping[str, object]]
) -> list[list[float]]:
    """Returns two numbers a sample in place of one."""
    return [[0.0, 1.0] for _ in responses]


gives_pairs.batched = True  # type: ignore[attr-defined]


def gives_text(prompt: str, response: str, columns: Mapping[str, object]) -> str:
    """Returns the response in place of a number."""
    return response


def counts(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """Returns the length of the response; nothing is wrong with it."""
    return float(len(response))
