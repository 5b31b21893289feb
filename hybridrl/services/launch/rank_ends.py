"""Reports how the ranks of a job ended. No torch.

The outcomes of several machines are put together, so that the report is that of one machine. The
exit code is 2 for a user's mistake, 0 if all is done, 128 + the signal's number if a signal stopped
the job, else 1.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.console import say
from hybridrl.parallel.failure import Failure
from hybridrl.services.liveness.hang_reports import newest_report

LOG_LINES_SHOWN = 20
OWN_ERRORS = ("mistake", "error")  # kinds of failures that would come again


@dataclass(frozen=True)
class EndedRank:
    """A rank whose process is gone; `code` is the exit code, -N for signal N."""

    index: int
    code: int
    log: str
    host: str

    @property
    def failure(self) -> Failure | None:
        """What the rank said of its end, if it could."""
        return Failure.read(Path(self.log).with_suffix(".error"))

    @property
    def spoke(self) -> bool:
        """Whether it ended by an error or mistake of its own, and said so."""
        return self.failure is not None and self.failure.kind in OWN_ERRORS

    @property
    def phase(self) -> str:
        """What it was doing."""
        file = Path(self.log).with_suffix(".phase")
        try:
            return file.read_text().strip()
        except OSError:  # there is none, or the file system does not answer
            return "start"


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a launcher ended.

    Args:
        culprits: Numbers of the ranks that failed by themselves; the launcher ended the others.
        stopped_by: Signal that asked them to stop; 0 if none.
        fault: Why the log of rank 0 is cut off; None if it is not.
    """

    ranks: Sequence[EndedRank]
    culprits: Sequence[int] = ()
    stopped_by: int = 0
    fault: str | None = None

    @staticmethod
    def from_json(text: str) -> Outcome:
        """Returns the outcome that `asdict` and JSON wrote."""
        found = json.loads(text)
        return Outcome(**{**found, "ranks": [EndedRank(**rank) for rank in found["ranks"]]})

    @staticmethod
    def together(parts: Sequence[Outcome]) -> Outcome:
        """Returns the outcome of several launchers of one job."""
        signals = [part.stopped_by for part in parts if part.stopped_by]
        faults = [part.fault for part in parts if part.fault is not None]
        return Outcome(
            [rank for part in parts for rank in part.ranks],
            [index for part in parts for index in part.culprits],
            signals[0] if signals else 0,
            faults[0] if faults else None,
        )


def lost_ranks(outcome: Outcome) -> list[int]:
    """Returns the ranks that were ended from outside, by a signal or because they fell silent; none
    where a rank ended by an error of its own, which would come again.

    SIGKILL comes from outside always. What other ranks say then is that their connections broke.
    """
    culprits = [rank for rank in outcome.ranks if rank.index in outcome.culprits]
    killed = [rank.index for rank in culprits if rank.code < 0]
    silent = {
        failure.culprit
        for rank in culprits
        if (failure := rank.failure) is not None and failure.kind == "lost"
    }
    is_certain = any(rank.code == -signal.SIGKILL for rank in culprits)
    if not is_certain and any(rank.spoke for rank in culprits):
        return []
    return sorted({*killed, *(one for one in silent if one is not None)})


def has_lost_ranks(outcome: Outcome, log_dir: Path) -> bool:
    """Whether ranks of one node of a job were lost, where each node judges alone. Another node's
    rank may have ended by an error of its own before: its file is in the folder of logs, which
    nodes share. Next to SIGKILL such a file may be of a connection that broke.
    """
    if not lost_ranks(outcome):
        return False
    if any(rank.code == -signal.SIGKILL for rank in outcome.ranks):
        return True
    failures = map(Failure.read, log_dir.glob("rank_*.error"))
    return not any(failure is not None and failure.kind in OWN_ERRORS for failure in failures)


def conclude(outcome: Outcome, log_dir: Path) -> int:
    """Says how the ranks ended, if not well; returns the exit code."""
    if outcome.stopped_by and not outcome.culprits:
        name = signal.Signals(outcome.stopped_by).name
        say(f"hybridrl: stopped by {name}")
        return 128 + outcome.stopped_by
    if outcome.culprits:
        return _report(outcome, log_dir)
    if outcome.fault is not None:
        say(f"hybridrl: {log_dir / 'rank_0.log'} is cut off: {outcome.fault}")
    return 0


def _report(outcome: Outcome, log_dir: Path) -> int:
    """Prints which rank failed first, and why, also into the logs of the others, which may have
    been ended without a word; returns the exit code.
    """
    ranks = {rank.index: rank for rank in outcome.ranks}
    culprits = [ranks[index] for index in outcome.culprits]
    mistaken = [rank for rank in culprits if rank.code == 2]
    if mistaken:
        said = mistaken[0].failure
        unsaid = f"rank {mistaken[0].index} refused; see {mistaken[0].log}"
        say(unsaid if said is None else said.message)
        return 2
    # A killed rank tears the others' connections; else the first to say what ended it is the cause,
    # unless it was another rank.
    first = min(culprits, key=lambda rank: _order(rank.code, rank.failure))
    failure, code = first.failure, first.code
    if code > 0 and failure is not None and failure.culprit is not None:
        blamed, message = failure.culprit, failure.message
    else:
        how = f"ended with code {code}" if code else "ended itself with code 0, as by os._exit(0),"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        blamed = first.index
        message = f"rank {first.index} on host {first.host} {how} in phase '{first.phase}'"
        message += f": {failure.message}" if failure is not None else ""
    log = _log_of(blamed, ranks, log_dir)
    report = newest_report(log_dir.parent, _phase_began(log))
    if report is not None and report[0].name not in message:
        message += f"; what all ranks did before: {report[0]}"
    message = f"hybridrl: {message}; the other ranks were ended. Its log is {log}"
    others = [rank for rank in outcome.ranks if rank.index != blamed]
    found = {outcome.fault, *(_append(rank, message) for rank in others)}
    if faults := [one for one in found if one is not None]:
        message += f" (logs are cut off: {', '.join(sorted(faults))})"
    say(message)
    if blamed == first.index and code > 0:
        trace = failure.trace if failure is not None else _tail(first)
        say("\n".join(f"  | {line}" for line in trace.splitlines()))
    return 1


def _log_of(index: int, ranks: Mapping[int, EndedRank], log_dir: Path) -> str:
    """Returns a rank's log, which may be of another machine's launcher."""
    return ranks[index].log if index in ranks else str(log_dir / f"rank_{index}.log")


def _phase_began(log: str) -> float:
    """Returns when a rank began the phase that it ended in: pages of before tell of others."""
    file = Path(log).with_suffix(".phase")
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()


def _order(code: int, failure: Failure | None) -> tuple[bool, bool, float]:
    """Returns what sorts the ends of ranks by how likely they are the cause, likeliest first."""
    is_of_peer = failure is not None and failure.kind in ("peer", "lost")
    # One that ended without a word breaks connections, which others report as errors of their own.
    return code >= 0, is_of_peer, 0.0 if failure is None else failure.time


def _append(rank: EndedRank, message: str) -> str | None:
    """Writes the message into the log of a rank; returns why it could not."""
    try:
        with Path(rank.log).open("a") as file:
            print(message, file=file)
    except OSError as error:
        return error.strerror
    return None


def _tail(rank: EndedRank) -> str:
    """Returns the end of a log; of rank 0's nothing, which is on the console already."""
    if rank.index == 0:
        return ""
    return "\n".join(Path(rank.log).read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
