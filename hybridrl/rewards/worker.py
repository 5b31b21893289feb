"""The process of a scorer: reads jobs, calls the function, writes what came of them. No torch.

`serve` does the same with other code of users. It is alone with that code: its output goes to the
error stream, and it ends with the thread that started it, whatever the code is at.
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
from hybridrl.rewards.functions import find_reward
from hybridrl.rewards.outcome import Job, Outcome, call_reward
from hybridrl.rewards.pool import LENGTH, encoded, framed
from hybridrl.rewards.traits import traits_of

PR_SET_PDEATHSIG = 1


def serve(
    make: Callable[[Any], Callable[[Any], Iterable[Any]]], encode: Callable[[Any], dict[str, Any]]
) -> None:
    """Answers jobs until the input ends.

    Args:
        make: makes, of the configuration that comes first, what returns the results of a job.
        encode: makes JSON of one result.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # of a scheduler, to all; the trainer ends this
        signal.signal(number, lambda number, frame: None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the function prints is no answer
    config = _read(jobs)
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
    except BrokenPipeError:  # who asked has ended: nobody is left to tell, here or at exit
        os._exit(0)


if __name__ == "__main__":
    serve(_scorer, encoded)
