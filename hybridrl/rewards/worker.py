"""Runs a scorer, or other users' code, in its own process: reads jobs, writes outcomes. No torch.

The output of the code is redirected to stderr. The process ends when the thread that started it
ends, regardless of what the code is doing.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, BinaryIO

from hybridrl.config.reward import ScorerConfig
from hybridrl.errors import UserError
from hybridrl.parallel.stop_signals import leave_stop_signals_to_the_rank
from hybridrl.rewards.functions import find_reward
from hybridrl.rewards.outcome import Job, Outcome, call_reward
from hybridrl.rewards.pool import LENGTH, encoded, framed
from hybridrl.rewards.traits import traits_of

PR_SET_PDEATHSIG = 1


def serve(
    make: Callable[[Any], Callable[[Any], Iterable[Any]]], encode: Callable[[Any], dict[str, Any]]
) -> None:
    """Answers jobs until the input ends; `make(section)` returns the function for their results."""
    leave_stop_signals_to_the_rank()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # keeps the function's output separate from answers
    config = _read(jobs)
    if config is None:  # the caller has ended
        return
    try:
        run = make(config)
    except UserError as error:
        _write(answers, 0, _user_error(error))
        return
    _write(answers, 0, {"outcomes": []})
    while (numbered := _read(jobs)) is not None:
        number, job = numbered
        try:
            _write(answers, number, {"outcomes": [encode(found) for found in run(job)]})
        except UserError as error:
            _write(answers, number, _user_error(error))


def _scorer(config: ScorerConfig) -> Callable[[Job], list[Outcome]]:
    function = find_reward(config)
    limit = traits_of(function).memory_bytes
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return partial(call_reward, function, limit_s=config.timeout_s)


def _user_error(error: UserError) -> dict[str, Any]:
    return {"user_error": error.parts()}


def _read(file: BinaryIO) -> Any:
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(file.read(*LENGTH.unpack(head)))


def _write(file: BinaryIO, number: int, answer: dict[str, Any]) -> None:
    data = framed(json.dumps({"job": number, **answer}).encode())
    try:
        file.write(data)
        file.flush()
    except BrokenPipeError:  # the caller has ended; exit handlers would write to the pipe again
        os._exit(0)


if __name__ == "__main__":
    serve(_scorer, encoded)
