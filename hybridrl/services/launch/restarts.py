"""Starts the ranks of a run again after ranks or hosts were lost. No torch.

The ranks continue from the newest state, as at any start, with the same batches. Only what ends a
rank from outside is a loss: a signal that it was not asked by, silence, or the end of its host; an
error of its own would come again. If a start loses a rank before it has taken a step, the rank does
not come back: the next start is without it, and only after another loss all are tried again. Where
ranks can run is an `ElasticJob`'s matter: of one host here, of several in hosts_job.py.
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
    """How one start of a job ended: "lost" if ranks were ended from outside, "wider" if they were
    asked to save and end because more can run, else "over".
    """

    code: int
    kind: Literal["over", "lost", "wider"]


class ElasticJob(Protocol):
    """Ranks of a job that can be started several times."""

    @property
    def where(self) -> str:
        """How many ranks the next start has, and where, in words."""

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        """Runs `hybridrl ARGUMENTS` as the ranks and waits for them."""

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Chooses the ranks of the next start after a loss; returns whether there are any.

        Args:
            comes_back: Whether what was lost, now or before, is tried again.
            received: Signals that come meanwhile, which end a wait.
        """

    def close(self) -> None:
        """Returns when nothing is left of the ranks of all starts."""


class ElasticLaunch:
    """Starts the ranks of a run, and starts them again; called as `launch`.

    Args:
        max_restarts: at most.
        job: the ranks.
    """

    def __init__(self, max_restarts: int, job: ElasticJob) -> None:
        self._max_restarts, self._job = max_restarts, job

    def __call__(
        self,
        arguments: Sequence[str],
        _: int,
        log_dir: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Runs the ranks until they are done, or may not be started again; arguments and result as
        of `launch`.
        """
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
            # The checkpoint that the user went back to is the newest once a step was saved.
            given = ["newest" if one == "previous" else one for one in given]
            said = f"restart {num_restarts} of {self._max_restarts} (run.max_restarts)"
            said = said if end.kind == "lost" else "hosts have come back"
            say(f"hybridrl: {said}: {self._job.where} go on")


class LocalJob:
    """The ranks of one host, as an `ElasticJob`.

    Args:
        size: their number at the first start.
        fits: whether the run can be trained by so many ranks.
        program: what Python runs in place of hybridrl, for tests.
    """

    def __init__(
        self, size: int, fits: Callable[[int], bool], program: Sequence[str] = PROGRAM
    ) -> None:
        self._full, self._size, self._fits, self._program = size, size, fits, program
        self._leaving = Leaving()

    @property
    def where(self) -> str:
        """How many ranks the next start has, in words."""
        return f"{self._size} ranks"

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        """Runs the ranks and waits for them; what killed ranks hold may not be free yet, and the
        ranks of the next start wait for that.
        """
        command, share = [*self._program, *arguments], Share.whole(self._size)
        outcome = run_ranks(command, share, log_dir, environment, leaving=self._leaving)
        code = conclude(outcome, log_dir)
        is_lost = code == 1 and not outcome.stopped_by and lost_ranks(outcome)
        return End(code, "lost" if is_lost else "over")

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Chooses the number of ranks of the next start: there is always one."""
        if comes_back:
            self._size = self._full
        else:
            fewer = range(self._size - 1, 0, -1)
            self._size = next((size for size in fewer if self._fits(size)), self._size)
        return True

    def close(self) -> None:
        """Returns when nothing is left of the ranks of all starts."""
        self._leaving.wait()


def _has_stepped(folder: Path, num_starts: int) -> bool:
    """Whether a run has recorded a step since it had so many starts."""
    starts = read_starts(folder)[num_starts:]
    return bool(starts) and _last_step(folder) > max(int(one["after_step"]) for one in starts)


def _last_step(folder: Path) -> int:
    """Returns the step that a run has recorded last; 0: none, or its line was cut off."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        line = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return int(json.loads(line)["step"])
    return 0
