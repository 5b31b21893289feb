"""Records a run's starts for its report: times, ranks, machine, git commit, first step.

Rank 0 writes `run.json` in the run folder: `{"starts": [...]}`, oldest first. A start without
`exit` is still running or was killed. A thread looks up the commit, because git takes seconds on
some file systems.
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
FINISHED = "finished"  # value of `exit` if the start reached the last step


class RunStarts:
    def __init__(self, folder: Path) -> None:
        self._path = folder / RUN_FILE
        self._starts: list[dict[str, Any]] = []
        self._is_open = False
        self._writing = threading.Lock()
        self._commit_thread: threading.Thread | None = None

    def begin(self, after_step: int, world_size: int, hosts: int, device: str | None) -> None:
        """Records a start. `device` is the name of rank 0's GPU, or None on CPU."""
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
        thread = threading.Thread(target=self._note_commit, name="commit", daemon=True)
        self._commit_thread = thread
        thread.start()

    def took(self, seconds: Mapping[str, float]) -> None:
        if self._is_open:
            self._note(seconds={name: round(value, 2) for name, value in seconds.items()})

    def end(self, how: str) -> None:
        """Records how the start ended, unless this was already recorded."""
        if self._is_open:
            self._is_open = False
            if self._commit_thread is not None:
                self._commit_thread.join()
            self._note(ended=_now(), exit=how)

    def _note_commit(self) -> None:
        found = commit()
        with contextlib.suppress(OSError):  # the main thread reports a full disk
            self._note(commit=found)

    def _note(self, **values: object) -> None:
        with self._writing:
            self._starts[-1] |= values
            replace_text(self._path, json.dumps({"starts": self._starts}, indent=1) + "\n")


class StartTimes(Observer):
    """Measures how long each part of a start takes on this rank, from its process's creation.
    `report` receives the `seconds` of each part, in order, after the first step.
    """

    def __init__(self) -> None:
        self.report: Callable[[Mapping[str, float]], None] | None = None
        self.seconds: dict[str, float] = {}
        self._is_over, self._since = False, time.monotonic()
        if is_launched():  # otherwise the process, such as a notebook, did other work before
            self._since -= time.time() - psutil.Process().create_time()

    def over(self, part: str, is_last: bool = False) -> bool:
        """Ends the current part of the start; returns False if the start has already ended."""
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
    """Describes in words how a start ended, given the exception that ended it, or None."""
    if error is None:
        return FINISHED
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "stopped by a signal"
    return f"failed: {type(error).__name__}"


def commit() -> str | None:
    """Returns the package's git commit, with "+" if files were changed; None if unknown."""
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
    """Returns the starts recorded in a run folder; [] if the file is missing or damaged."""
    try:
        starts = parse_json((folder / RUN_FILE).read_bytes())["starts"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [s for s in starts if isinstance(s, dict)] if isinstance(starts, list) else []


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
