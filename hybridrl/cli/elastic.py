"""A run of one machine goes on after it has lost ranks: they are started again. No torch.

Owns how often, and with how many ranks. The ranks know nothing of it: they go on from the newest
checkpoint, as at any start, with the same batches. Only what ends a rank from outside counts, a
signal that it was not asked by or silence; an error of its own would come again. A start that loses
a rank before it has taken a step says that the rank does not come back: the next one is with the
next smaller number of ranks that the layout allows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from hybridrl.checkpoint.folders import newest_checkpoint
from hybridrl.cli.launch import Share, run_ranks
from hybridrl.cli.rank_ends import Outcome, conclude
from hybridrl.errors import CheckpointError

PROGRAM = ("-m", "hybridrl.cli.main")


class ElasticLaunch:
    """Starts the ranks of a run, and starts them again; called as `launch`.

    Args:
        max_restarts: at most.
        fits: whether the run can be trained by so many ranks.
        program: what Python runs in place of hybridrl, for tests.
    """

    def __init__(
        self, max_restarts: int, fits: Callable[[int], bool], program: Sequence[str] = PROGRAM
    ) -> None:
        self._max_restarts, self._fits, self._program = max_restarts, fits, program

    def __call__(
        self,
        arguments: Sequence[str],
        world_size: int,
        log_dir: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Runs the ranks until they are done, or may not be started again; arguments and result as
        of `launch`.
        """
        folder, size, given = log_dir.parent, world_size, list(arguments)
        for restart in range(self._max_restarts + 1):
            begins_with, before = _saved_step(folder), _records(folder)
            outcome = run_ranks([*self._program, *given], Share.whole(size), log_dir, environment)
            code = conclude(outcome, log_dir)
            if code != 1 or not _lost(outcome) or restart == self._max_restarts:
                break
            after = _records(folder)
            if after == before or _last_step(after) <= begins_with:
                size = next((n for n in range(size - 1, 0, -1) if self._fits(n)), size)
            # The checkpoint that the user went back to is the newest once a step was saved.
            given = ["newest" if one == "previous" else one for one in given]
            said = f"restart {restart + 1} of {self._max_restarts} (run.max_restarts): {size} ranks"
            where = f"go on after step {_saved_step(folder)}"
            print(f"hybridrl: {said} {where}", file=sys.stderr, flush=True)
        return code


def _lost(outcome: Outcome) -> bool:
    """Whether ranks were ended from outside, and none by an error of its own."""
    culprits = [rank for rank in outcome.ranks if rank.index in outcome.culprits]
    is_killed = any(rank.code < 0 for rank in culprits)
    is_silent = any(rank.failure is not None and rank.failure.kind == "lost" for rank in culprits)
    return (is_killed or is_silent) and not any(rank.spoke for rank in culprits)


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
