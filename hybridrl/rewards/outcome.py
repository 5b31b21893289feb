"""Represents the outcome of scoring one sample: a number or a failure. Does not import torch.

Guards the boundary with users' code: any error in a reward function becomes a ScorerFailure, and
any returned number becomes a float within the range of float32. A DataError from a reward means
that the row is faulty. It also counts as a failure, so `reward.on_error` applies to it. Other
UserErrors propagate.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from hybridrl.config.own_code import awaited, own_lines, traceback_text
from hybridrl.contracts.prompts import Asked
from hybridrl.errors import DataError, UserError, error_text, failure_text, short
from hybridrl.parallel import failure
from hybridrl.parallel.failure import rank_file
from hybridrl.rewards.traits import traits_of

LARGEST = float(np.finfo(np.float32).max)
WHERE = "\0"
MAX_WAITING = 64  # maximum number of concurrent calls to an async function in one process
MAX_LOGGED = 1000  # maximum number of logged tracebacks that are remembered
_LOGGED: set[str] = set()


class Noted(float):
    """A reward with a one-word note that is counted, such as the limit that a program reached."""

    note: str

    def __new__(cls, value: float, note: str) -> Noted:
        noted = super().__new__(cls, value)
        noted.note = note
        return noted


class ReportedError(Exception):
    """Shows the traceback of another process as the cause in this process's traceback."""


@dataclass(frozen=True)
class ScorerFailure:
    """The reason why a sample has no score.

    Args:
        got: What the scorer did, as a verb phrase; WHERE stands for the name of the sample.
        cause: Exception that the scorer raised in this process, or the error about the row.
        is_untrainable: Whether the policy sampled nothing that could be trained.
    """

    got: str
    expected: str = "a finite float"
    cause: BaseException | None = None
    trace: str = ""
    is_untrainable: bool = False

    def log(self) -> str:
        """Writes the traceback to this rank's log, once; returns a sentence that names the log."""
        if not self.trace or not (self.trace in _LOGGED or failure.log(self.trace)):
            return ""
        if len(_LOGGED) < MAX_LOGGED:
            _LOGGED.add(self.trace)
        return f"The traceback is in {rank_file('.log')}."

    def reported(self) -> ReportedError | None:
        return ReportedError(f"\n{self.trace}") if self.trace else None

    def as_json(self) -> dict[str, object]:
        """Returns the fields as JSON for `failed`; processes must not exchange Python objects."""
        row = {"row": self.cause.parts()} if isinstance(self.cause, DataError) else {}
        return {"got": self.got, "expected": self.expected, "trace": self.trace, **row}


def failed(entry: Mapping[str, Any]) -> ScorerFailure:
    """Restores a failure from JSON that a process sent. The fields may have any type."""
    name, value, allowed, remedy = map(str, entry.get("row", [""] * 4))
    cause = DataError(name, value, allowed, remedy) if "row" in entry else None
    trace = str(entry.get("trace", ""))
    return ScorerFailure(str(entry["got"]), str(entry["expected"]), cause, trace)


Outcome = float | ScorerFailure
Job = tuple[Sequence[Asked], Sequence[str], Sequence[Mapping[str, object]]]
"""Prompts, responses and columns of the samples to score."""


def call_reward(
    function: Callable[..., Any], job: Job, stops: bool = False, limit_s: float | None = None
) -> list[Outcome]:
    """Calls a reward function once per sample, or once if it is batched; async ones concurrently.
    Raises UserError if the function reported a fault in the configuration.

    Args:
        stops: Whether to stop after the first failure; samples without a score have 0 or are
            missing.
        limit_s: Time limit for one call to an async function, in seconds.
    """
    if traits_of(function).batched:
        return _batched(function, job)
    if traits_of(function).is_async:
        found: list[Outcome] = awaited(_call_concurrently(function, job, stops, limit_s))
        return found
    found = []
    for arguments in zip(*job, strict=True):
        found.append(_single(function, *arguments))
        if stops and isinstance(found[-1], ScorerFailure):
            break
    return found


async def _call_concurrently(
    function: Callable[..., Any], job: Job, stops: bool, limit_s: float | None
) -> list[Outcome]:
    found: list[Outcome] = [0.0] * len(job[0])
    room = asyncio.Semaphore(MAX_WAITING)

    async def score(index: int, *arguments: object) -> None:
        async with room:
            found[index] = await _single_async(function, limit_s, *arguments)

    calls = [asyncio.create_task(score(i, *row)) for i, row in enumerate(zip(*job, strict=True))]
    try:
        for call in asyncio.as_completed(calls):
            await call
            if stops and any(isinstance(outcome, ScorerFailure) for outcome in found):
                break
        return list(found)  # a copy, before the other calls are cancelled
    finally:
        for task in calls:
            task.cancel()


async def _single_async(
    function: Callable[..., Any], limit_s: float | None, *arguments: object
) -> Outcome:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            value = await function(*arguments)
        return _reward(value)
    except BaseException as error:  # users' code may raise anything
        if limit.expired() and not isinstance(error, UserError):
            return ScorerFailure(f"took longer than {limit_s:g} s for {WHERE}")
        return _failure(error, WHERE)


def _single(function: Callable[..., Any], *arguments: object) -> Outcome:
    try:
        return _reward(awaited(function(*arguments)))
    except BaseException as error:  # users' code may raise anything
        return _failure(error, WHERE)


def _reward(value: Any) -> Outcome:
    shape = tuple(value.shape) if hasattr(value, "shape") else ()
    if shape:
        return ScorerFailure(f"returned shape {shape} for {WHERE}")
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real):
        return ScorerFailure(f"returned a {type(value).__name__} for {WHERE}")
    if isinstance(number, int) and abs(number) > LARGEST:  # it may not convert to a float
        return ScorerFailure(f"returned {short(int(number))} for {WHERE}")
    if not math.isfinite(reward := float(number)) or abs(reward) > LARGEST:
        return ScorerFailure(f"returned {reward} for {WHERE}")
    return number if isinstance(number, Noted) else reward


def _batched(function: Callable[..., Any], job: Job) -> list[Outcome]:
    num = len(job[0])
    try:
        value = awaited(function(*job))
        found = _array(value)
    except BaseException as error:  # users' code may raise anything
        return [_failure(error, "the batch")] * num
    if isinstance(found, np.ndarray) and found.shape == (num,):
        return [
            float(x)
            if math.isfinite(x) and abs(x) <= LARGEST
            else ScorerFailure(f"returned {x} at index {i}")
            for i, x in enumerate(found.tolist())
        ]
    got = f"shape {found.shape}" if isinstance(found, np.ndarray) else found
    return [ScorerFailure(f"returned {got}", f"({num},) floats")] * num


def _array(value: Any) -> np.ndarray | str:
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().double().numpy()
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        return f"a {type(value).__name__}"
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as error:
        return f"rows of several shapes ({error_text(error)})"
    if found.dtype.kind not in "fiub":
        return f"a {type(value).__name__} of {found.dtype}"
    return found.astype(np.float64)


def raised(
    error: BaseException, where: str, expected: str = "a finite float per sample"
) -> ScorerFailure:
    """Converts an exception from users' code to a failure that shows the user's lines. Raises
    UserError if the code was interrupted, for example from the keyboard, so that the run must end.
    """
    lines = own_lines(error)
    if not lines:  # a reward of hybridrl itself: show its last line, unless the call itself failed
        frames = traceback.extract_tb(error.__traceback__)[1:]
        lines = "".join(f"{f.filename}:{f.lineno}" for f in frames[-1:] if f.filename != __file__)
    at = f" at {lines}" if lines else ""
    got = f"{failure_text(error)}{at}{',' * (', ' in at)} on {where}"
    if isinstance(error, KeyboardInterrupt):
        got = got.replace(WHERE, "a sample")
        raise UserError(
            "users' code", f"code that {got}", expected, "Start the run again."
        ) from error
    got += "" if isinstance(error, SystemExit) else f": {error_text(error)}"
    return ScorerFailure(got, expected, error, traceback_text(error))


def _failure(error: BaseException, where: str) -> ScorerFailure:
    """Converts an exception to a failure; raises a UserError that does not concern the row."""
    if isinstance(error, DataError):
        return ScorerFailure(f"raised DataError on {where}: {error_text(error)}", cause=error)
    if isinstance(error, UserError):
        raise error
    return raised(error, where)
