"""Writes and reads the files in which a failed rank reports its error to the launcher. No torch.

In the folder LOG_DIR (an environment variable), `rank_N.error` contains the failure as JSON, and
`rank_N.running` exists until the rank has finished its command. The launcher sets LOG_DIR; under
torchrun, the command sets it. Without LOG_DIR, reports are printed to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from hybridrl.console import say
from hybridrl.errors import UserError

# Environment variables that the launcher sets for its ranks.
LAUNCHER_PID = "HYBRIDRL_LAUNCHER_PID"
LOG_DIR = "HYBRIDRL_LOG_DIR"
STORE_FD = "HYBRIDRL_STORE_FD"  # descriptor of the socket on which rank 0 serves the job's store
RUNNING = ".running"

# Kinds of failure, in this order: a user's mistake, an error in this rank, an error in another
# rank, and a rank that the job has declared lost.
Kind = Literal["mistake", "error", "peer", "lost"]


class PeerError(RuntimeError):
    """Another rank, `culprit` if known, failed, died or does not respond; see its log.

    `is_lost` says whether the job has declared the rank lost, so that all ranks know about it.
    """

    def __init__(self, message: str, culprit: int | None = None, is_lost: bool = False) -> None:
        self.culprit, self.is_lost = culprit, is_lost
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """Reason why a rank ended.

    Args:
        culprit: The rank that caused the failure, if it is another rank.
        time: Time of the failure, in seconds since the epoch.
    """

    kind: Kind
    message: str
    culprit: int | None = None
    trace: str = ""
    time: float = field(default_factory=time.time)

    @staticmethod
    def of(error: Exception) -> Failure:
        if isinstance(error, UserError):
            return Failure("mistake", str(error))
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, PeerError):
            return Failure("lost" if error.is_lost else "peer", str(error), error.culprit, trace)
        message = "".join(traceback.format_exception_only(error)).strip()
        return Failure("error", message, None, trace)

    def write(self, file: Path) -> None:
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(file)

    @staticmethod
    def read(file: Path) -> Failure | None:
        """Reads the failure from a file; returns None if the file cannot be read."""
        try:
            return Failure(**json.loads(file.read_text(encoding="utf-8")))
        except OSError:  # the file is missing, or the file system does not respond
            return None


def is_launched() -> bool:
    """Whether hybridrl's launcher started this rank. If so, the config has already been checked."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and LAUNCHER_PID in os.environ


def rank_file(suffix: str, rank: int | None = None) -> Path | None:
    """Returns the path of a rank's file, by default this rank's; None if LOG_DIR is not set."""
    if LOG_DIR not in os.environ:
        return None
    number = os.environ["RANK"] if rank is None else rank
    return Path(os.environ[LOG_DIR]) / f"rank_{number}{suffix}"


def begin() -> None:
    """Creates this rank's `.running` file, which `end` removes.

    It reveals a process that ends early with exit code 0, for example by os._exit.
    """
    if is_launched() and (file := rank_file(RUNNING)) is not None:
        with contextlib.suppress(OSError):  # the disk is full
            file.touch()


def end() -> None:
    if is_launched() and (file := rank_file(RUNNING)) is not None:
        file.unlink(missing_ok=True)


def report(failure: Failure) -> None:
    """Reports the failure that ends this rank, in its log, its error file or on the console.

    Under hybridrl's launcher, a rank prints nothing, because the launcher collects the failures of
    all ranks and prints the failure that caused the others. Under torchrun, a rank prints its own
    error with the traceback, or one line if another rank is the cause.
    """
    file = rank_file(".error") if is_launched() else None
    if file is not None:
        log(failure.trace)
        shown = failure.message
        with contextlib.suppress(OSError):  # the disk is full; print the message instead
            failure.write(file)
            return
    elif failure.kind in ("peer", "lost") and log(failure.trace):
        shown = f"hybridrl: {failure.message}"
    else:
        shown = failure.trace or failure.message
    say(shown.rstrip())


def log(text: str) -> bool:
    file = rank_file(".log")
    if file is None:
        return False
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(text if text.endswith("\n") else text + "\n")
    except OSError:  # the disk is full or the folder was removed
        return False
    return True
