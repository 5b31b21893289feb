"""A run goes on after it has lost ranks or hosts: its ranks are started again. No torch.

Owns how often, and what counts as a loss. The ranks know nothing of it: they go on from the newest
state, as at any start, with the same batches. Only what ends a rank from outside counts, a signal
that it was not asked by, silence, or the end of its host; an error of its own would come again. A
start that loses a rank before it has taken a step says that the rank does not come back: the next
one is without it, with the largest number of ranks below that the layout allows. Where ranks can
run, and how many, is an `ElasticJob`'s: of one host here, of several in hosts_job.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from hybridrl.checkpoint.folders import newest_checkpoint
from hybridrl.cli.launch import Share, caught_signals, run_ranks
from hybridrl.cli.rank_ends import conclude, lost_ranks
from hybridrl.errors import CheckpointError

PROGRAM = ("-m", "hybridrl.cli.main")


@dataclass(frozen=True)
class End:
    """How one start of a job ended.

    Args:
        code: the exit code.
        kind: "lost" where ranks were ended from outside; "wider" where they were asked to save and
            end because more can run; "over" in all other cases.
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
            comes_back: whether what was lost is to be tried again.
            received: signals that come meanwhile, which end a wait.
        """


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
        folder, given, num_restarts = log_dir.parent, list(arguments), 0
        while True:
            begins_with, before = _saved_step(folder), _records(folder)
            end = self._job.run(given, log_dir, environment)
            if end.kind == "over" or (end.kind == "lost" and num_restarts == self._max_restarts):
                return end.code
            if end.kind == "lost":
                num_restarts += 1
                after = _records(folder)
                comes_back = after != before and _last_step(after) > begins_with
                with caught_signals() as received:
                    if not self._job.settle(comes_back, received):
                        return 128 + received[0] if received else end.code
            # The checkpoint that the user went back to is the newest once a step was saved.
            given = ["newest" if one == "previous" else one for one in given]
            said = f"restart {num_restarts} of {self._max_restarts} (run.max_restarts)"
            said = said if end.kind == "lost" else "hosts have come back"
            where = f"{self._job.where} go on after step {_saved_step(folder)}"
            print(f"hybridrl: {said}: {where}", file=sys.stderr, flush=True)


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
        self._size, self._fits, self._program = size, fits, program

    @property
    def where(self) -> str:
        """How many ranks the next start has, in words."""
        return f"{self._size} ranks"

    def run(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str]) -> End:
        """Runs the ranks and waits for them."""
        command, share = [*self._program, *arguments], Share.whole(self._size)
        outcome = run_ranks(command, share, log_dir, environment)
        code = conclude(outcome, log_dir)
        return End(code, "lost" if code == 1 and lost_ranks(outcome) else "over")

    def settle(self, comes_back: bool, received: Sequence[int]) -> bool:
        """Chooses the number of ranks of the next start: there is always one."""
        if not comes_back:
            fewer = range(self._size - 1, 0, -1)
            self._size = next((size for size in fewer if self._fits(size)), self._size)
        return True


def _saved_step(folder: Path) -> int:
    """Returns the step of the newest checkpoint of a run folder; 0: there is none."""
    with suppress(CheckpointError):
        newest = newest_checkpoint(folder / "checkpoints")
        return 0 if newest is None else int(newest.name.rpartition("_")[2])
    return 0


def _records(folder: Path) -> tuple[int, str]:
    """Returns when a run last recorded a step, in ns, and the last line of its records."""
    file = folder / "metrics.jsonl"
    with suppress(OSError, ValueError, IndexError):
        return file.stat().st_mtime_ns, file.read_text(encoding="utf-8").splitlines()[-1]
    return 0, ""


def _last_step(records: tuple[int, str]) -> int:
    """Returns the last step of `_records`; 0: there is none, or its line was cut off."""
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(records[1])["step"])
    return 0
