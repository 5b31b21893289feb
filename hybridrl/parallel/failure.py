"""Files in which a failed rank reports its error to the launcher.

The files are next to the rank's log: `rank_N.error` holds the failure as JSON, and `rank_N.running`
exists until the rank has finished its command. A rank finds the folder in LOG_DIR, which is set by
the launcher or, under torchrun, by the command. Without LOG_DIR no files are written and everything
goes to stderr. Imports no torch.
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

# A user's mistake; an error of this rank; an error of another rank; a rank that the job gave up.
Kind = Literal["mistake", "error", "peer", "lost"]


class PeerError(RuntimeError):
    """Another rank failed, died or does not respond; its log has its own message, if any.

    Args:
        message: Message that names the rank.
        culprit: Number of the rank that caused the failure, if known.
        is_lost: Whether the job has given up the rank and all ranks know it.
    """

    def __init__(self, message: str, culprit: int | None = None, is_lost: bool = False) -> None:
        self.culprit, self.is_lost = culprit, is_lost
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """The reason why a rank ended.

    Args:
        message: Message without a traceback.
        culprit: Rank that caused the failure, if it is another one.
        trace: Traceback; empty if there is none.
        time: Time of the failure, seconds since the epoch.
    """

    kind: Kind
    message: str
    culprit: int | None = None
    trace: str = ""
    time: float = field(default_factory=time.time)

    @staticmethod
    def of(error: Exception) -> Failure:
        """Returns the failure for an exception that ends a rank."""
        if isinstance(error, UserError):
            return Failure("mistake", str(error))
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, PeerError):
            return Failure("lost" if error.is_lost else "peer", str(error), error.culprit, trace)
        message = "".join(traceback.format_exception_only(error)).strip()
        return Failure("error", message, None, trace)

    def write(self, file: Path) -> None:
        """Writes the failure to a file, atomically."""
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(file)

    @staticmethod
    def read(file: Path) -> Failure | None:
        """Returns the failure in a file; None if the file cannot be read."""
        try:
            return Failure(**json.loads(file.read_text(encoding="utf-8")))
        except OSError:  # the file is missing, or the file system does not respond
            return None


def is_launched() -> bool:
    """Returns whether hybridrl's launcher, which checks the config, started this rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and LAUNCHER_PID in os.environ


def rank_file(suffix: str, rank: int | None = None) -> Path | None:
    """Returns the path of a rank's file; None if no folder is set.

    Args:
        suffix: Ending of the file's name, for example ".log".
        rank: Rank whose file it is; None for this rank.
    """
    if LOG_DIR not in os.environ:
        return None
    number = os.environ["RANK"] if rank is None else rank
    return Path(os.environ[LOG_DIR]) / f"rank_{number}{suffix}"


def begin() -> None:
    """Creates this rank's `.running` file, which `end` removes.

    It reveals processes that end early with exit code 0, for example by os._exit in users' code.
    """
    if is_launched() and (file := rank_file(RUNNING)) is not None:
        with contextlib.suppress(OSError):  # the disk is full
            file.touch()


def end() -> None:
    """Removes this rank's `.running` file: the rank has finished its command."""
    if is_launched() and (file := rank_file(RUNNING)) is not None:
        file.unlink(missing_ok=True)


def report(failure: Failure) -> None:
    """Writes the failure that ends this rank to its log, its error file or the console.

    A rank of hybridrl's launcher prints nothing: the launcher prints the failure that matters once
    it knows the failures of all ranks. A rank of torchrun prints its own error with the traceback,
    or one line if another rank is the cause.
    """
    file = rank_file(".error") if is_launched() else None
    if file is not None:
        log(failure.trace)
        shown = failure.message
        with contextlib.suppress(OSError):  # the disk is full; the message then goes to stderr
            failure.write(file)
            return
    elif failure.kind in ("peer", "lost") and log(failure.trace):
        shown = f"hybridrl: {failure.message}"
    else:
        shown = failure.trace or failure.message
    say(shown.rstrip())


def log(text: str) -> bool:
    """Appends text to this rank's log and returns whether it succeeded."""
    file = rank_file(".log")
    if file is None:
        return False
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(text if text.endswith("\n") else text + "\n")
    except OSError:  # the disk is full or the folder was removed
        return False
    return True
