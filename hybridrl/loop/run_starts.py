"""Starts of a run, for its report: time, ranks, machine, code, seconds to the first step, end.

Owns `run.json` in the run folder: `{"starts": [...]}`, the oldest first. Rank 0 writes. A start
without `exit` goes on, or was killed. A thread finds the commit, since git takes seconds on some
file systems.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from hybridrl import __version__
from hybridrl.config.files import RUN_FILE, parse_json, replace_text
from hybridrl.loop.observers import Observer, StepRecord
from hybridrl.parallel.failure import is_launched

GIT_TIMEOUT_S = 10
FINISHED = "finished"  # how a start ended that took the last step


class RunStarts:
    """The starts of a run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RUN_FILE
        self._starts: list[dict[str, Any]] = []
        self._is_open = False
        self._writing = threading.Lock()
        self._finding: threading.Thread | None = None  # which code it is

    def begin(self, after_step: int, world_size: int, hosts: int, device: str | None) -> None:
        """Notes a start; `device` is the GPU of rank 0, None on CPU."""
        self._starts = [*read_starts(self._path.parent), {}]
        self._is_open = True
        self._note(
            began=_now(),
            after_step=after_step,
            world_size=world_size,
            hosts=hosts,
            device=device or "CPU",
            is_cpu=device is None,
            version=__version__,
        )
        note = self._note_commit
        self._finding = threading.Thread(target=note, name="commit", daemon=True)
        self._finding.start()

    def took(self, seconds: Mapping[str, float]) -> None:
        """Notes what the start took to the end of its first step."""
        if self._is_open:
            self._note(seconds={name: round(value, 2) for name, value in seconds.items()})

    def end(self, how: str) -> None:
        """Notes how the start ended, if that is not noted yet."""
        if self._is_open:
            self._is_open = False
            if self._finding is not None:
                self._finding.join()
            self._note(ended=_now(), exit=how)

    def _note_commit(self) -> None:
        found = commit()
        with contextlib.suppress(OSError):  # of a full disk; the main thread says so
            self._note(commit=found)

    def _note(self, **values: object) -> None:
        with self._writing:
            self._starts[-1] |= values
            replace_text(self._path, json.dumps({"starts": self._starts}, indent=1) + "\n")


class StartTimes(Observer):
    """Times of the parts of a start on this rank, from the beginning of its process.

    Args:
        report: Gets the seconds of all parts after the first step.

    Attributes:
        seconds: Seconds of each finished part, in order.
    """

    def __init__(self, report: Callable[[Mapping[str, float]], None] | None = None) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self._is_over, self._since = False, time.monotonic()
        if is_launched():  # a process of this start alone; a notebook's has done other things
            self._since -= time.time() - psutil.Process().create_time()

    def over(self, part: str, is_last: bool = False) -> bool:
        """Ends the part that began when the one before ended; returns False after the last part."""
        if self._is_over:
            return False
        now = time.monotonic()
        self.seconds[part] = now - self._since
        self._since, self._is_over = now, is_last
        return True

    def step_ends(self, record: StepRecord) -> None:
        if self.over("first step", is_last=True) and self.report is not None:
            self.report(self.seconds)


def exit_of(error: BaseException | None) -> str:
    """Returns what is noted of a start that ended with this exception, or with none."""
    if error is None:
        return FINISHED
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped by a signal"
    return f"failed: {type(error).__name__}"


def commit() -> str | None:
    """Returns the commit of the package's checkout, with "+" where files differ from it; None where
    it is in none, or git is not there.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = _git(root, "rev-parse", "HEAD")
        is_changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if is_changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=GIT_TIMEOUT_S,
    )
    return done.stdout.strip()


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Returns the starts that are noted in a run folder; none of a file that is damaged."""
    try:
        starts = parse_json((folder / RUN_FILE).read_bytes())["starts"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
