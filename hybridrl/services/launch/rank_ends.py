"""Reports how the ranks of a job ended, on one or several machines. Does not import torch."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.console import say
from hybridrl.parallel.failure import Failure
from hybridrl.services.liveness.hang_reports import newest_report

LOG_LINES_SHOWN = 20
OWN_ERRORS = ("mistake", "error")  # kinds of failures that would recur after a restart


@dataclass(frozen=True)
class EndedRank:
    """A rank whose process has ended. `code` is its exit code, or -N for signal N."""

    index: int
    code: int
    log: str
    host: str

    @property
    def failure(self) -> Failure | None:
        return Failure.read(Path(self.log).with_suffix(".error"))

    @property
    def spoke(self) -> bool:
        """Whether the rank reported its own error or mistake."""
        return self.failure is not None and self.failure.kind in OWN_ERRORS

    @property
    def phase(self) -> str:
        try:
            return Path(self.log).with_suffix(".phase").read_text().strip()
        except OSError:  # the file is missing, or the file system does not respond
            return "start"


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a launcher ended. `culprits` failed first; the others were ended.

    `stopped_by` is the signal that asked the ranks to stop, or 0. `fault` is why the log of rank 0
    is incomplete, or None.
    """

    ranks: Sequence[EndedRank]
    culprits: Sequence[int] = ()
    stopped_by: int = 0
    fault: str | None = None

    @staticmethod
    def from_json(text: str) -> Outcome:
        """Parses an outcome from JSON that was created with `asdict`."""
        found = json.loads(text)
        return Outcome(**{**found, "ranks": [EndedRank(**rank) for rank in found["ranks"]]})

    @staticmethod
    def together(parts: Sequence[Outcome]) -> Outcome:
        signals = [part.stopped_by for part in parts if part.stopped_by]
        faults = [part.fault for part in parts if part.fault is not None]
        return Outcome(
            [rank for part in parts for rank in part.ranks],
            [index for part in parts for index in part.culprits],
            signals[0] if signals else 0,
            faults[0] if faults else None,
        )


def lost_ranks(outcome: Outcome) -> list[int]:
    """Returns the ranks that were killed by a signal or stopped sending heartbeats.

    Returns [] if a rank failed with its own error, which would recur. After a SIGKILL, which comes
    from outside, errors of other ranks do not count: they report broken connections.
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
    """Whether this node lost ranks, and no rank reported its own error in the shared logs."""
    if not lost_ranks(outcome):
        return False
    if any(rank.code == -signal.SIGKILL for rank in outcome.ranks):
        return True
    failures = map(Failure.read, log_dir.glob("rank_*.error"))
    return not any(failure is not None and failure.kind in OWN_ERRORS for failure in failures)


def conclude(outcome: Outcome, log_dir: Path) -> int:
    """Prints how the ranks ended, unless all succeeded. Returns the exit code."""
    if outcome.stopped_by and not outcome.culprits:
        say(f"hybridrl: stopped by {signal.Signals(outcome.stopped_by).name}")
        return 128 + outcome.stopped_by
    if outcome.culprits:
        return _report(outcome, log_dir)
    if outcome.fault is not None:
        say(f"hybridrl: {log_dir / 'rank_0.log'} is incomplete: {outcome.fault}")
    return 0


def _report(outcome: Outcome, log_dir: Path) -> int:
    ranks = {rank.index: rank for rank in outcome.ranks}
    culprits = [ranks[index] for index in outcome.culprits]
    mistaken = [rank for rank in culprits if rank.code == 2]
    if mistaken:
        failure = mistaken[0].failure
        unknown = f"rank {mistaken[0].index} ended with a user's mistake; see {mistaken[0].log}"
        say(unknown if failure is None else failure.message)
        return 2
    # A rank that was killed is the cause, because its death breaks the other ranks' connections.
    # Otherwise the first failure is the cause, unless it names another rank as the culprit.
    first = min(culprits, key=lambda rank: _order(rank.code, rank.failure))
    failure, code = first.failure, first.code
    if code > 0 and failure is not None and failure.culprit is not None:
        blamed, message = failure.culprit, failure.message
    else:
        how = f"ended with code {code}" if code else "ended too early, for example by os._exit(0),"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        blamed = first.index
        message = f"rank {first.index} on host {first.host} {how} in phase '{first.phase}'"
        message += f": {failure.message}" if failure is not None else ""
    # A launcher on another machine may have written the log.
    log = ranks[blamed].log if blamed in ranks else str(log_dir / f"rank_{blamed}.log")
    report = newest_report(log_dir.parent, _phase_began(log))
    if report is not None and report[0].name not in message:
        message += f"; state of all ranks before that: {report[0]}"
    message = f"hybridrl: {message}; the other ranks were ended. Its log is {log}"
    others = [rank for rank in outcome.ranks if rank.index != blamed]
    found = {outcome.fault, *(_append(rank, message) for rank in others)}
    if faults := [one for one in found if one is not None]:
        message += f" (logs are incomplete: {', '.join(sorted(faults))})"
    say(message)
    if blamed == first.index and code > 0:
        trace = failure.trace if failure is not None else _tail(first)
        say("\n".join(f"  | {line}" for line in trace.splitlines()))
    return 1


def _phase_began(log: str) -> float:
    """Returns when a rank's last phase began. Earlier hang reports are about other hangs."""
    try:
        return Path(log).with_suffix(".phase").stat().st_mtime
    except OSError:
        return time.time()


def _order(code: int, failure: Failure | None) -> tuple[bool, bool, float]:
    is_of_peer = failure is not None and failure.kind in ("peer", "lost")
    # A rank that ends without a report breaks connections. Other ranks then report the broken
    # connection as their own error.
    return code >= 0, is_of_peer, 0.0 if failure is None else failure.time


def _append(rank: EndedRank, message: str) -> str | None:
    try:
        with Path(rank.log).open("a") as file:
            print(message, file=file)
    except OSError as error:
        return error.strerror
    return None


def _tail(rank: EndedRank) -> str:
    """Returns the last lines of a rank's log; "" for rank 0, whose output is on the console."""
    if rank.index == 0:
        return ""
    return "\n".join(Path(rank.log).read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
