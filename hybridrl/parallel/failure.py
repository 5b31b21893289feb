"""What a rank leaves behind when it fails, for who started it. No torch.

Owns the files beside a rank's log: `rank_N.error` says in JSON what ended it, `rank_N.running` that
it has not yet done its command. A rank knows its folder from LOG_DIR, which the launcher sets, or
the command under torchrun; without it there are no files, and everything goes to stderr.
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
STORE_FD = "HYBRIDRL_STORE_FD"  # of the socket that rank 0 serves the job's store on
RUNNING = ".running"

# A user's mistake; an error of this rank; of another one; a rank that was given up by all.
Kind = Literal["mistake", "error", "peer", "lost"]


class PeerError(RuntimeError):
    """Another rank failed, died or stays away; its own message, if any, is in its log.

    Args:
        message: names that rank.
        culprit: its number, if one is to blame.
        is_lost: whether it will never answer, which all ranks were told.
    """

    def __init__(self, message: str, culprit: int | None = None, is_lost: bool = False) -> None:
        self.culprit, self.is_lost = culprit, is_lost
        super().__init__(message)


@dataclass(frozen=True)
class Failure:
    """What ended a rank.

    Args:
        kind: whose fault it was.
        message: for people; without a traceback.
        culprit: the rank to blame where it is another one.
        trace: the traceback, if there is one.
        time: when, seconds since the epoch.
    """

    kind: Kind
    message: str
    culprit: int | None = None
    trace: str = ""
    time: float = field(default_factory=time.time)

    @staticmethod
    def of(error: Exception) -> Failure:
        """Returns what an exception that ends a rank says."""
        if isinstance(error, UserError):
            return Failure("mistake", str(error))
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, PeerError):
            return Failure("lost" if error.is_lost else "peer", str(error), error.culprit, trace)
        message = "".join(traceback.format_exception_only(error)).strip()
        return Failure("error", message, None, trace)

    def write(self, file: Path) -> None:
        """Writes the failure, whole or not at all."""
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(file)

    @staticmethod
    def read(file: Path) -> Failure | None:
        """Returns what was written there; None if nothing was, or it cannot be read."""
        try:
            return Failure(**json.loads(file.read_text(encoding="utf-8")))
        except OSError:  # there is none, or the file system does not answer
            return None


def is_launched() -> bool:
    """Returns whether this is a rank of our launcher, which has checked the config already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and LAUNCHER_PID in os.environ


def rank_file(suffix: str, rank: int | None = None) -> Path | None:
    """Returns a rank's file with this ending, for example ".log"; None if there is no folder.

    Args:
        suffix: of the file.
        rank: whose; None: this one's.
    """
    if LOG_DIR not in os.environ:
        return None
    number = os.environ["RANK"] if rank is None else rank
    return Path(os.environ[LOG_DIR]) / f"rank_{number}{suffix}"


def begin() -> None:
    """Leaves a file beside the log of a rank of our launcher until `end`: what ends the process
    without a word, os._exit in users' code say, may give the exit code 0.
    """
    if is_launched() and (file := rank_file(RUNNING)) is not None:
        with contextlib.suppress(OSError):  # of a full disk
            file.touch()


def end() -> None:
    """Says that this rank has done its command."""
    if is_launched() and (file := rank_file(RUNNING)) is not None:
        file.unlink(missing_ok=True)


def report(failure: Failure) -> None:
    """Tells what ends this rank: all of it to its log and its error file.

    On the console stands what matters first. Our launcher prints that when it knows all ranks'
    failures; a rank of torchrun prints its own error with the traceback, and one line where another
    rank is the cause.
    """
    file = rank_file(".error") if is_launched() else None
    if file is not None:
        log(failure.trace)
        shown = failure.message
        with contextlib.suppress(OSError):  # of a full disk; then the message goes to stderr
            failure.write(file)
            return
    elif failure.kind in ("peer", "lost") and log(failure.trace):
        shown = f"hybridrl: {failure.message}"
    else:
        shown = failure.trace or failure.message
    say(shown.rstrip())


def log(text: str) -> bool:
    """Appends to this rank's own log alone; returns whether it could."""
    file = rank_file(".log")
    if file is None:
        return False
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(text if text.endswith("\n") else text + "\n")
    except OSError:  # the disk is full, or the folder is gone: there is nowhere else to say so
        return False
    return True
