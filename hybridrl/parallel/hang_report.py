"""What ranks tell of a hang, and how it comes together in one page, through the job's store.

Who waits for whom: the rank that judges (heartbeat.py) asks, in a key that all read with every
beat, and waits GATHER_S at most. Each rank answers in a thread of its own, so that neither training
nor its beats wait. A rank that does not beat is not waited for: another one of its host tells what
the kernel says of it. Where the store itself does not answer, ranks leave their reports in files of
the run folder, and the first of those that did makes the page.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from hybridrl.console import say
from hybridrl.parallel import failure, progress
from hybridrl.parallel.collectives import latest_calls, num_called
from hybridrl.parallel.hang_page import HANGS, HangPage, RankReport, newest_page
from hybridrl.parallel.stacks import process_state, stacks_by_signal, stacks_of_threads
from hybridrl.parallel.watch import Beat, Call

GATHER_S = 5.0  # two beats, and ANSWER_S of stacks.py
FILES_S = 2.0  # for the files of other ranks to come, where there is no store
PAGE_S = 6.0  # for the page that another rank makes of them
RECENT_S = 10.0  # before: what ranks have left then is of the same hang
CALLS_S = 0.5  # for the flight recorder, which asks the device
POLL_S = 0.1
STEP = re.compile(r"step (\d+)")


class IdleClock:
    """How long nothing has changed that counts a rank's work, and in which calls it is meanwhile.

    Time in which nobody looked, because the process was stopped or its Python held up, counts for
    one look at most: others know of it, and the rank goes on.

    Args:
        note_after_s: from then on its calls are noted.
        every_s: between two looks; more of them do no harm.
    """

    def __init__(self, note_after_s: float, every_s: float) -> None:
        self._note_after_s, self._every_s = note_after_s, every_s
        self._seen: tuple[object, ...] = ()
        self._idle_s, self._looked = 0.0, time.monotonic()
        self._noting: threading.Thread | None = None
        self._latest: Sequence[Call] = ()

    def look(self, *work: object) -> tuple[float, Sequence[Call]]:
        """Returns seconds without a change, and the calls if they are many.

        Args:
            work: anything that changes with the rank's work, besides calls and rounds.
        """
        seen = (num_called(), progress.num_rounds(), *work)
        now = time.monotonic()
        self._idle_s += min(now - self._looked, 2 * self._every_s)
        self._looked = now
        if seen != self._seen:
            self._seen, self._idle_s, self._latest = seen, 0.0, ()
        if self._idle_s >= self._note_after_s:
            self._note()
        return self._idle_s, self._latest

    def calls(self) -> Sequence[Call]:
        """Returns the rank's calls, as far as they can be had in CALLS_S."""
        self._note()
        if self._noting is not None:
            self._noting.join(CALLS_S)
        return self._latest

    def _note(self) -> None:
        if self._noting is None or not self._noting.is_alive():
            self._noting = threading.Thread(target=self._read, name="calls", daemon=True)
            self._noting.start()

    def _read(self) -> None:
        # Of a device that has failed; of a group that goes meanwhile.
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            self._latest = tuple(latest_calls())


class HangReports:
    """This rank's part in the page of a hang.

    Args:
        store: of the job, for the heartbeat alone.
        rank: this one.
        size: of the job.
        beat: returns this rank's present beat, with its calls.
        main: `get_ident` of its main thread.
        mates: process numbers of the other ranks of its host.

    Attributes:
        folder: for pages; None: they go to stderr.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        size: int,
        beat: Callable[[], Beat],
        main: int,
        mates: Mapping[int, int],
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._beat, self._main, self.mates = beat, main, mates
        self._num_asked, self._answered = 0, ""
        self.thread: threading.Thread | None = None
        log = failure.rank_file(".log", rank)
        self.folder: Path | None = None if log is None else log.parent.parent / HANGS

    def answer(self, asked: str) -> None:
        """Answers in a thread what rank 0, or its deputy, has asked, if that is new."""
        if not asked or asked == self._answered:
            return
        self._answered = asked
        self.thread = threading.Thread(
            target=self._answer, args=[asked], name="report", daemon=True
        )
        self.thread.start()

    def _answer(self, asked: str) -> None:
        assert self._store is not None
        name, silent = json.loads(asked)
        report = self._report(silent)
        with contextlib.suppress(dist.DistError):  # the store went with its process
            self._store.set(f"report/{name}/{self._rank}", report.to_json())
            self._store.add(f"reported/{name}", 1)

    def gather(
        self, message: str, suspects: Sequence[int], beats: Sequence[Beat], silent: Sequence[int]
    ) -> Path | None:
        """Asks all ranks that beat and writes the page of what they answer; returns its path.

        Args:
            message: what was found.
            suspects: as of `HangPage`.
            beats: of all ranks.
            silent: the ranks that do not beat.
        """
        assert self._store is not None
        self._num_asked += 1
        name = f"{self._rank}.{self._num_asked}"
        self._answered = json.dumps([name, list(silent)])
        self._store.set("ask", self._answered)
        asked = [
            rank
            for rank, beat in enumerate(beats)
            if rank not in silent and not beat.has_left and rank != self._rank
        ]
        reports = {self._rank: self._report(silent)}
        deadline = time.monotonic() + GATHER_S
        while self._store.add(f"reported/{name}", 0) < len(asked):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        keys = {rank: f"report/{name}/{rank}" for rank in asked}
        there = [rank for rank, key in keys.items() if self._store.check([key])]
        texts = self._store.multi_get([keys[rank] for rank in there]) if there else []
        reports |= {
            rank: RankReport.from_json(text) for rank, text in zip(there, texts, strict=True)
        }
        for key in keys.values():
            self._store.delete_key(key)
        step = step_of(beats[suspects[0]] if suspects else beats[0])
        return self._write(HangPage(step, message, suspects, dict(enumerate(beats)), reports))

    def leave_in_files(self, message: str, suspects: Sequence[int], first: Beat) -> Path | None:
        """Leaves this rank's report in a file, and makes the page of all if it is the first one
        there; returns the page's path.

        Args:
            message: what was found.
            suspects: as of `HangPage`; rank 0 is one.
            first: rank 0's latest beat.
        """
        if self.folder is None:
            return None
        began, parts = time.time(), self.folder / "parts"
        report = self._report(suspects)
        try:
            parts.mkdir(parents=True, exist_ok=True)
            partial = parts / f"rank_{self._rank}.partial"
            partial.write_text(report.to_json(), encoding="utf-8")
            partial.replace(partial.with_suffix(".json"))
            time.sleep(FILES_S)
            reports = {
                int(file.stem.removeprefix("rank_")): RankReport.from_json(file.read_bytes())
                for file in parts.glob("rank_*.json")
                if file.stat().st_mtime > began - RECENT_S
            }
        except OSError:  # of a full disk
            return None
        if self._rank == min(reports, default=self._rank):
            beats = {rank: report.beat for rank, report in reports.items()} | {0: first}
            step = max(map(step_of, beats.values()))
            return self._write(HangPage(step, message, suspects, beats, reports))
        page, deadline = None, time.monotonic() + PAGE_S
        while page is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            page = newest_page(self.folder.parent, began - RECENT_S)
        return None if page is None else page[0]

    def _report(self, silent: Sequence[int]) -> RankReport:
        mates = dict(self.mates)
        seen = {rank: pid for rank, pid in mates.items() if rank in silent}
        is_first = self._rank == min([self._rank, *(set(mates) - set(silent))])
        stacks_of = {
            rank: stacks
            for rank, pid in (seen.items() if is_first else ())
            if (stacks := stacks_by_signal(pid, rank))
        }
        return RankReport(
            self._beat(),
            os.getpid(),
            stacks_of_threads(self._main),
            {rank: process_state(pid) for rank, pid in seen.items()},
            stacks_of,
        )

    def _write(self, page: HangPage) -> Path | None:
        with contextlib.suppress(OSError):  # of a full disk
            if self.folder is not None:
                return page.write(self.folder)
        say(page.text())
        return None


def step_of(beat: Beat) -> int:
    """Returns the step that a rank is in; 0: before the first."""
    found = STEP.search(beat.phase)
    return int(found[1]) if found else 0


def with_page(message: str, page: Path | None) -> str:
    """Returns a message with where the page is."""
    return message if page is None else f"{message}; stacks of all ranks: {page}"


def with_calls(beat: Beat, clock: IdleClock) -> Beat:
    """Returns a rank's beat with its calls, as they are now."""
    return replace(beat, latest=clock.calls())
