"""What a benchmark says of what it measures: the commit, and a case what it knows of itself so far.

Rank 0 writes the result anew after each part, so that what was measured stays if a later part ends
the processes, and says where it is while a part takes long. Shortly before its limit every rank
writes the stacks of its threads and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any, ClassVar, TextIO

from hybridrl.parallel.stacks import calls_of_threads

ROOT = Path(__file__).resolve().parents[1]
PROGRESS = "[bench]"
# Of the limit, what is left when ranks end by themselves.
END_BEFORE_LIMIT_S, END_BEFORE_LIMIT_SHARE = 2.0, 0.25
WHERE_EVERY_S = 15.0
NUM_FRAMES = 3  # of where a rank is
# Of cases that are started at once: what one says once started, and the file that lets it go on.
READY, TURN = "ready", "turn"


def commit() -> str | None:
    """Returns the commit that is measured, marked where the tree has changes; None without git."""
    try:
        found = subprocess.check_output(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip() or None


def command_of(argv: Sequence[str]) -> str:
    """Returns a command line as a report names it: of files elsewhere their names."""
    return " ".join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in argv)])


def end_late(job: Mapping[str, Any]) -> None:
    """Ends this rank shortly before the case's limit, with the stacks of its threads in a file of
    its own in the case's folder. Not by a signal: the Trainer takes one for a request to stop.

    A thread writes them. Where it cannot, since another one keeps Python's lock, faulthandler does,
    which looks at frames that may change meanwhile, and ends at one that does.
    """
    path = Path(job["folder"], f"stacks.{os.environ['RANK']}.txt")
    file = path.open("w")  # noqa: SIM115  # stays open: it is written to at the limit
    before_limit = min(END_BEFORE_LIMIT_S, END_BEFORE_LIMIT_SHARE * job["limit_s"])
    left = max(job["launched_at"] + job["limit_s"] - before_limit - time.time(), 0.1)
    faulthandler.dump_traceback_later(left + before_limit / 2, file=file, exit=True)
    timer = threading.Timer(left, _end, [file])
    timer.daemon = True
    timer.start()


def _end(file: TextIO) -> None:
    faulthandler.dump_traceback(file, all_threads=True)
    file.flush()
    os._exit(1)


def stacks_of(folder: str | Path) -> dict[str, str]:
    found = {file.suffixes[0][1:]: file.read_text() for file in Path(folder).glob("stacks.*.txt")}
    return {rank: text for rank, text in sorted(found.items()) if text}


@dataclass
class CaseRecord:
    """A case and what is known of it so far.

    `job["folder"]` gets the result, and so does the file `partial` where one is named, which
    outlives a parent that is killed.
    """

    job: Mapping[str, Any]
    result: dict[str, Any] = field(default_factory=dict)
    said_at: ClassVar[float] = 0.0  # on the monotonic clock

    @property
    def age_s(self) -> float:
        return time.time() - float(self.job["launched_at"])

    def save(self, done: str, found: str = "") -> None:
        if int(os.environ["RANK"]) != 0:
            return
        seconds = self.age_s
        self.result.setdefault("seconds", {})[done] = round(seconds, 1)
        self.say(f"{done} {found}")
        files = [Path(self.job["folder"], "result.json"), self.job.get("partial")]
        for file in map(Path, filter(None, files)):
            part = file.with_suffix(".part")
            part.write_text(json.dumps(self.result))
            part.replace(file)

    def say(self, text: str) -> None:
        """Writes a line of progress, in one piece: others write into the same pipe."""
        CaseRecord.said_at = time.monotonic()
        sys.stdout.write(f"{PROGRESS} {self.job['case']} {self.age_s:6.1f} s: {text}\n")
        sys.stdout.flush()

    def begin(self) -> None:
        """Begins to say where rank 0 is; all ranks end shortly before the case's limit."""
        end_late(self.job)
        self.save("starting")
        if int(os.environ["RANK"]) == 0:
            threading.Thread(target=self._say_where, name="where", daemon=True).start()

    def _say_where(self) -> None:
        main = threading.main_thread().ident
        while True:
            time.sleep(1)
            calls = calls_of_threads().get(main or 0)
            if calls and time.monotonic() - self.said_at > WHERE_EVERY_S:
                self.say(f"  in {where(calls)}")


def where(stack: Sequence[FrameSummary]) -> str:
    """Returns the innermost calls of a thread, and the innermost one in this repository."""
    calls, of_ours = list[str](), ""
    for one in stack:
        file = Path(one.filename)
        call = f"{file.name}:{one.lineno} {one.name}"
        if len(calls) < NUM_FRAMES:
            calls.append(call)
        is_ours = file.is_relative_to(ROOT / "hybridrl") or file.parent == ROOT / "benchmarks"
        if is_ours and not of_ours:
            of_ours = call
    return " < ".join(calls if of_ours in calls else [*calls, "...", of_ours])
