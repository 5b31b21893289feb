"""Checks the values that enter a batch (batch.py) and raises an error for invalid ones."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.blobs import misfit
from hybridrl.contracts.prompts import Prompt, Rollout
from hybridrl.errors import UserError


@dataclass(frozen=True)
class Producer:
    """Code that produced a value: name, source file and line; no file if it is not a function."""

    what: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return self.what if not self.file else f"{self.what} ({Path(self.file).name}:{self.line})"

    @staticmethod
    def of(source: object, what: str) -> Producer:
        target: Any = inspect.unwrap(source) if callable(source) else source
        target = target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
        return Producer(what, *_source(target))

    @staticmethod
    def here(what: str) -> Producer:
        """Returns a Producer for the line of code that calls this function."""
        frame = sys._getframe(1)
        return Producer(what, frame.f_code.co_filename, frame.f_lineno)


@lru_cache
def _source(target: Callable[..., object]) -> tuple[str, int]:
    """Returns file and line. Cached, because finding the line of a class parses the whole file."""
    try:
        file = inspect.getsourcefile(target) or inspect.getfile(target)
        return file, inspect.getsourcelines(target)[1]
    except (TypeError, OSError):  # the target is written in C or was typed interactively
        return f"<{target.__module__}>", 0


class BatchError(UserError):
    """Raised for a value that violates the data contract.

    Args:
        got: Description of the value, as a verb phrase: "returned shape (4, 12)".
    """

    def __init__(
        self, producer: Producer, field: str, got: str, expected: str, remedy: str = ""
    ) -> None:
        super().__init__(field, got, expected, remedy)
        self.producer = producer
        self.args = (
            f"{producer} {got}, expected {expected} [{field}]{'. ' if remedy else ''}{remedy}",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchError, (self.producer, self.name, self.value, self.allowed, self.remedy)


@dataclass(frozen=True)
class Column:
    """Type of the values in a column. A field of a stage type is a column if its metadata is
    `holds(column)`. Columns are then included in checks, selection, joining, sending and saving.

    Args:
        dtype: Type of the values.
        per_token: Whether the column has one value per token, (T,), instead of one per sample,
            (B,).
        response_only: Whether values must be zero on tokens that were not sampled.
        is_wide: Whether the column has several values per token, (T, K).
    """

    dtype: torch.dtype
    per_token: bool = False
    response_only: bool = False
    is_wide: bool = False


INTEGER, NUMBER, FLAG = Column(torch.int64), Column(torch.float32), Column(torch.bool)
TOKEN, TOKEN_FLAG = (Column(dtype, per_token=True) for dtype in (torch.int64, torch.bool))
RESPONSE = Column(torch.float32, per_token=True, response_only=True)
WIDE_RESPONSE = Column(torch.float32, per_token=True, response_only=True, is_wide=True)
# int32, because this column has more values than all other columns combined.
WIDE_TOKENS = Column(torch.int32, per_token=True, response_only=True, is_wide=True)
_KEY = "column"


def holds(column: Column) -> dict[str, Column]:
    return {_KEY: column}


def columns_of(stage: type) -> dict[str, Column]:
    return {f.name: f.metadata[_KEY] for f in fields(stage) if _KEY in f.metadata}


_WORDS = {torch.float32: "floats", torch.bool: "booleans"}
NO_MASK = torch.zeros(0, dtype=torch.bool)
LENGTHS = ("lengths_B", "prompt_lengths_B")
"""Fields that define where samples are in the columns; not columns themselves."""


def check(
    value: object, name: str, column: Column, size: int, producer: Producer, response_mask_T: Tensor
) -> None:
    """Raises BatchError unless a finite CPU tensor fits the column: (size,), or (size, K)."""
    shape = f"({size}, K)" if column.is_wide else f"({size},)"
    expected = f"{shape} {_WORDS.get(column.dtype, 'integers')}"
    if not isinstance(value, Tensor):
        raise BatchError(
            producer, name, f"returned a {type(value).__name__}", f"a tensor of {expected}"
        )
    if value.shape[:1] != (size,) or value.ndim != 1 + column.is_wide:
        raise BatchError(producer, name, f"returned shape {tuple(value.shape)}", expected)
    if value.dtype != column.dtype or value.device.type != "cpu" or value.requires_grad:
        got = f"returned {value.dtype} on {value.device}{' with a gradient' * value.requires_grad}"
        raise BatchError(producer, name, got, f"{column.dtype} on cpu without a gradient")
    # A finite sum proves that all values are finite. An infinite sum proves nothing, because the
    # sum may overflow.
    is_doubtful = column.dtype.is_floating_point and not bool(value.sum().isfinite())
    if is_doubtful and not bool((finite := value.isfinite()).all()):
        got = _first(value, ~finite)
        raise BatchError(producer, name, got, f"finite {expected}")
    if not column.response_only:
        return
    # Indexing is ten times as fast with numpy as with torch.
    if value.numpy()[~response_mask_T.numpy()].any():
        mask = response_mask_T[:, None] if column.is_wide else response_mask_T
        got = f"{_first(value, value.ne(0) & ~mask)}, a token that was not sampled"
        raise BatchError(producer, name, got, "zero on prompt tokens and observations")


def _first(value: Tensor, is_wrong: Tensor) -> str:
    where = tuple(is_wrong.nonzero()[0].tolist())
    return f"returned {value[where].item()} at index {where[0]}"


def check_rollouts(rollouts: Sequence[Rollout], groups: Sequence[int], who: Producer) -> None:
    """Raises BatchError unless rollouts' fields are equally long and each group has one prompt."""
    if len(groups) != len(rollouts):
        got = f"returned {len(groups)} groups for {len(rollouts)} rollouts"
        raise BatchError(who, "group_B", got, "one group per rollout")
    prompt_of: dict[int, int] = {}
    for rollout, group in zip(rollouts, groups, strict=True):
        expected = f"{len(rollout.tokens)}, one per token"
        if len(rollout.logps) != len(rollout.tokens):
            got = f"returned {len(rollout.logps)} logps for sample {rollout.sample_id}"
            raise BatchError(who, "behaviour_logp_T", got, expected)
        if rollout.observed is not None and len(rollout.observed) != len(rollout.tokens):
            got = (
                f"returned a mask of {len(rollout.observed)} tokens for sample {rollout.sample_id}"
            )
            raise BatchError(who, "observed_T", got, expected)
        if prompt_of.setdefault(group, rollout.prompt.prompt_id) != rollout.prompt.prompt_id:
            got = f"returned group {group} with several prompts"
            raise BatchError(who, "group_B", got, "one prompt per group")


def check_blob_type(name: str, dtype: str, num_dims: int, who: Producer) -> None:
    """Raises BatchError unless the blob is declared and its values have an allowed type."""
    if (wrong := misfit(name, dtype, num_dims)) is not None:
        raise BatchError(who, name, f"returned {wrong[0]}", wrong[1])


def check_observed(
    observed_T: Tensor, lengths_B: Tensor, prompt_lengths_B: Tensor, who: Producer
) -> None:
    """Raises BatchError unless all observations are inside responses and none ends a response."""
    name, size = "observed_T", int(lengths_B.sum())
    check(observed_T, name, TOKEN_FLAG, size, who, NO_MASK)
    ends_B = lengths_B.cumsum(0)
    starts_B = ends_B - lengths_B + prompt_lengths_B
    is_prompt_T = torch.arange(size) < starts_B.repeat_interleave(lengths_B)
    wrong_T = (observed_T & is_prompt_T).index_put((ends_B - 1,), observed_T[ends_B - 1])
    if bool(wrong_T.any()):
        got = f"returned an observation at index {int(wrong_T.nonzero()[0])}"
        raise BatchError(who, name, got, "none in a prompt, and none that ends a response")


def check_lengths(
    prompts: Sequence[Prompt],
    lengths_B: Tensor,
    prompt_lengths_B: Tensor,
    has_contexts: bool,
    producer: Producer,
) -> None:
    """Raises BatchError if a length is impossible, or if a prompt length differs from the prompt's
    own length although sequences have no contexts of agents (`has_contexts`).
    """
    for name, value in zip(LENGTHS, (lengths_B, prompt_lengths_B), strict=True):
        check(value, name, INTEGER, len(prompts), producer, NO_MASK)
    if not prompts:
        raise BatchError(producer, "prompts", "returned no sample", "at least 1 sample")
    # An agent's contexts have other lengths than the prompts.
    if not has_contexts and [len(p.tokens) for p in prompts] != prompt_lengths_B.tolist():
        got = "returned lengths that differ from the lengths of its prompts"
        raise BatchError(producer, "prompt_lengths_B", got, "the number of tokens in each prompt")
    wrong = (prompt_lengths_B < 1) | (lengths_B <= prompt_lengths_B)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        prompt, total = int(prompt_lengths_B[i]), int(lengths_B[i])
        got = f"returned {prompt} prompt and {total - prompt} response tokens for sample {i}"
        expected = "at least 1 prompt token and at least 1 response token"
        raise BatchError(producer, "lengths_B", got, expected)


def check_observed_counts(
    counts_B: Tensor, response_lengths_B: Tensor, has_holders: bool, producer: Producer
) -> None:
    """Raises BatchError if counts of observed tokens are impossible or not needed."""
    name = "num_observed_B"
    check(counts_B, name, INTEGER, len(response_lengths_B), producer, NO_MASK)
    if not has_holders:
        got = (
            "returned num_observed_B without holders, although observed_T already determines "
            "these counts"
        )
        raise BatchError(producer, name, got, "None")
    if bool(((counts_B < 0) | (counts_B >= response_lengths_B)).any()):
        lengths = response_lengths_B.tolist()[:8]
        got = f"returned {counts_B.tolist()[:8]} for responses with {lengths} tokens"
        raise BatchError(producer, name, got, "the number of observed tokens of each response")
