"""Restarts the ranks of a run after ranks or hosts are lost. Does not import torch.

A rank is lost if an unexpected signal ends it, its heartbeats stop, or its host fails; its own
error causes no restart, because it would recur. If a start loses a rank before its first step, the
next start leaves that rank out; after another loss, all ranks are tried again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from hybridrl.console import say
from hybridrl.loop.run_starts import read_starts
from hybridrl.services.launch.leaving import Leaving
from hybridrl.services.launch.local_ranks import PROGRAM, Share, caught_signals, run_ranks
from hybridrl.services.launch.rank_ends import conclude, lost_ranks


@dataclass(frozen=True)
class End:
    """How one start of a job ended: "wider" if ranks saved and ended because more can run."""

    code: int
    kind: Literal["over", "lost", "wider"]


class ElasticJob(Protocol):
    """A job whose ranks can be started several times."""

    @property
    def where(self) -> str:
        """Text that describes the ranks of the next start and their hosts."""

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        """Runs `hybridrl ARGUMENTS` in every rank, and waits for all ranks."""

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Chooses the ranks for the next start, with those lost before if `comes_back`.

        A signal in `received` ends a wait. Returns whether a start is possible.
        """

    def close(self) -> None:
        """Waits until all processes from all starts are gone."""


class ElasticLaunch:
    """Starts and restarts the ranks of a run. Called with the same arguments as `launch`."""

    def __init__(self, max_restarts: int, job: ElasticJob) -> None:
        self._max_restarts, self._job = max_restarts, job

    def __call__(
        self,
        arguments: Sequence[str],
        _: int,
        log_dir: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Runs the ranks until they are done or must not restart again; see `launch`."""
        try:
            return self._run(arguments, log_dir, environment)
        finally:
            self._job.close()

    def _run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> int:
        folder, given, num_restarts = log_dir.parent, list(arguments), 0
        while True:
            num_starts = len(read_starts(folder))
            end = self._job.run(given, log_dir, environment)
            if end.kind == "over" or (end.kind == "lost" and num_restarts == self._max_restarts):
                return end.code
            if end.kind == "lost":
                num_restarts += 1
                comes_back = _has_stepped(folder, num_starts)
                with caught_signals() as received:
                    is_settled = self._job.settle(comes_back, received)
                if received:
                    return 128 + received[0]
                if not is_settled:
                    return end.code
            # The newest checkpoint descends from the one that the user chose.
            given = ["newest" if one == "previous" else one for one in given]
            reason = f"restart {num_restarts} of {self._max_restarts} (run.max_restarts)"
            reason = reason if end.kind == "lost" else "lost hosts are reachable again"
            say(f"hybridrl: {reason}: continuing with {self._job.where}")


class LocalJob:
    """Ranks on one host, as an `ElasticJob`; `fits` says whether a number of ranks can train."""

    def __init__(
        self, size: int, fits: Callable[[int], bool], program: Sequence[str] = PROGRAM
    ) -> None:
        self._full, self._size, self._fits, self._program = size, size, fits, program
        self._leaving = Leaving()

    @property
    def where(self) -> str:
        return f"{self._size} ranks"

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        command, share = [*self._program, *arguments], Share.whole(self._size)
        outcome = run_ranks(command, share, log_dir, environment, leaving=self._leaving)
        code = conclude(outcome, log_dir)
        is_lost = code == 1 and not outcome.stopped_by and lost_ranks(outcome)
        return End(code, "lost" if is_lost else "over")

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        if comes_back:
            self._size = self._full
        else:
            fewer = range(self._size - 1, 0, -1)
            self._size = next((size for size in fewer if self._fits(size)), self._size)
        return True

    def close(self) -> None:
        self._leaving.wait()


def _has_stepped(folder: Path, num_starts: int) -> bool:
    starts = read_starts(folder)[num_starts:]
    return bool(starts) and _last_step(folder) > max(int(one["after_step"]) for one in starts)


def _last_step(folder: Path) -> int:
    """Returns the last recorded step; 0 if the last line is missing or incomplete."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        line = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return int(json.loads(line)["step"])
    return 0
