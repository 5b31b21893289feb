"""Finds ranks without progress for which others wait. No torch.

Pure: takes the beats of all ranks (watch.py), look after look. A rank stands still once nothing
that counts its work has changed for some time: its phase, its collectives, the rounds of its loops
(progress.py). That alone is no fault. It is a hang if others stand still because they wait for it,
or if all that wait do so in different collectives. A rank that is slow, and one that waits for a
slow one, make progress or wait for one that does. A send and its receive are one operation: ranks
that are both inside it wait for nobody else, and it is told as a slow operation.

Nothing ends a run here: what is found is told. `run.stall_timeout_s` bounds such a wait (watch.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.parallel.watch import (
    MAX_NAMED,
    Beat,
    Call,
    Wait,
    WaitKey,
    missing_ranks,
    ranks_text,
)


@dataclass(frozen=True)
class Hang:
    """Ranks without progress: those to look at first, and a message for people."""

    suspects: Sequence[int]
    message: str


class HangWatch:
    """Looks at the beats of all ranks, again and again; returns each hang once.

    Args:
        idle_s: Seconds without progress, in a phase of a step, after which a rank stands still.
        start_s: The same before the first step, where models are read and engines started.
    """

    def __init__(self, idle_s: float, start_s: float) -> None:
        self._idle_s, self._start_s = idle_s, start_s
        self._longest: dict[str, float] = {}  # pause of each phase that ended, seconds
        self._before: dict[int, Beat] = {}
        self._told: Hang | None = None
        self._told_idle_s = 0.0

    def look(self, beats: Sequence[Beat]) -> Hang | None:
        """Takes in the latest beat of every rank; returns a hang that it has not yet told."""
        for rank, beat in enumerate(beats):
            before = self._before.get(rank, beat)
            if beat.idle_s < before.idle_s and not _is_waiting(before):
                name = _name(before)
                self._longest[name] = max(before.idle_s, self._longest.get(name, 0.0))
            self._before[rank] = beat
        still = {
            rank
            for rank, beat in enumerate(beats)
            if not beat.has_left and beat.idle_s >= self.bound_s(beat)
        }
        if self._told is not None:
            return None
        self._told = found = find_hang(beats, still)
        return found

    def over(self, beats: Sequence[Beat]) -> str | None:
        """Returns what there is to say once ranks that were told of go on."""
        if self._told is None:
            return None
        suspects = self._told.suspects
        self._told_idle_s = max(self._told_idle_s, *(beats[rank].idle_s for rank in suspects))
        if all(beats[rank].idle_s >= self._idle_s for rank in suspects):
            return None
        self._told, paused_s, self._told_idle_s = None, self._told_idle_s, 0.0
        return f"{ranks_text(suspects)} went on after {paused_s:.0f} s"

    def bound_s(self, beat: Beat) -> float:
        """Returns the seconds without progress that make a rank stand still in its phase: at least
        twice the longest pause that has ended there.
        """
        least = self._idle_s if ", step " in beat.phase else self._start_s
        return max(least, 2 * self._longest.get(_name(beat), 0.0))


def find_hang(beats: Sequence[Beat], still: set[int]) -> Hang | None:
    """Returns the hang in which the ranks are that stand still; None if there is none."""
    calls, transfers = _Calls(beats, still), _transfers(beats, still)
    awaited = {rank: _awaited(rank, beats, still, calls) for rank in still}
    waits_for_slow = {rank for rank in still if awaited[rank] - still}
    while grown := {rank for rank in still - waits_for_slow if awaited[rank] & waits_for_slow}:
        waits_for_slow |= grown
    of_others = {other for rank in still for other in awaited[rank] & still}
    elsewhere = sorted(rank for rank in of_others if not _is_waiting(beats[rank]))
    if elsewhere:
        waiting = [  # also those that have not yet waited for long
            rank
            for rank in range(len(beats))
            if _awaited(rank, beats, still, calls) & set(elsewhere) and _is_waiting(beats[rank])
        ]
        return Hang(elsewhere, _elsewhere_text(elsewhere, beats, waiting))
    in_transfers = {rank for ranks in transfers.values() for rank in ranks}
    behind = set(in_transfers)  # and who waits for them
    while grown := {rank for rank in still - behind if awaited[rank] & behind}:
        behind |= grown
    places: dict[str, list[int]] = {}
    for rank in sorted(still - waits_for_slow - behind):
        if _is_waiting(beats[rank]) and (awaited[rank] or rank in of_others):
            places.setdefault(waits_in(beats[rank]), []).append(rank)
    for rank, beat in enumerate(beats):  # who waits there too, and not yet for long
        if rank not in still and _is_waiting(beat) and (where := waits_in(beat)) in places:
            places[where] = sorted([*places[where], rank])
    if len(places) < 2:  # all in the same: the network's fault, whose bound is another
        return _slow_transfers(transfers, beats, sorted(behind - in_transfers))
    fewest = min(len(ranks) for ranks in places.values())
    first = sorted(
        (ranks for ranks in places.values() if len(ranks) == fewest), key=lambda ranks: ranks[0]
    )
    suspects = [rank for ranks in first for rank in ranks]
    return Hang(suspects, _different_text(suspects, places, beats))


class _Calls:
    """The calls of ranks that stand still, by their group."""

    def __init__(self, beats: Sequence[Beat], still: set[int]) -> None:
        self._of_groups: dict[tuple[str, int, int], dict[int, Call]] = {}
        self._behind: dict[tuple[str, int, int, int, str], set[int]] = {}
        self._beats, self._missing = beats, dict[WaitKey, set[int]]()
        self._still = still
        for rank in still:
            for call in beats[rank].latest:
                if not call.is_p2p:
                    theirs = self._of_groups.setdefault(self._group(call), {})
                    if rank not in theirs or theirs[rank].number <= call.number:
                        theirs[rank] = call

    @staticmethod
    def _group(call: Call) -> tuple[str, int, int]:
        return call.group, call.ranks[0], len(call.ranks)

    def missing(self, wait: Wait) -> set[int]:
        """Returns what `missing_ranks` does; once for all ranks that wait in the same."""
        if wait.key not in self._missing:
            self._missing[wait.key] = set(missing_ranks(wait, self._beats))
        return self._missing[wait.key]

    def behind(self, call: Call) -> set[int]:
        """Returns the ranks that keep a call from ending: those that have not come to it, or to
        another one under its number. Of a rank that makes progress it is not known.
        """
        if call.is_p2p:
            return set() if call.peer is None else {call.peer}
        key = (*self._group(call), call.number, call.what)
        if key not in self._behind:
            theirs = self._of_groups.get(self._group(call), {})
            self._behind[key] = {
                rank
                for rank in self._still.intersection(call.ranks)
                if (one := theirs.get(rank)) is None
                or one.number < call.number
                or (one.number == call.number and _differ(one, call))
            }
        return self._behind[key]


def _awaited(rank: int, beats: Sequence[Beat], still: set[int], calls: _Calls) -> set[int]:
    """Returns for whom a rank waits, as far as that is known."""
    beat, found = beats[rank], set[int]()
    if beat.wait is not None:
        found |= calls.missing(beat.wait)
    for call in beat.latest:
        if not call.is_over and not _meets(rank, call, beats):
            found |= calls.behind(call)
    if not found and _is_in_unrecorded(beat):
        # A send or a receive that is not recorded: for somebody who does something else.
        found |= {other for other in still if not _is_waiting(beats[other])}
    return {other for other in found - {rank} if not beats[other].has_left}


def _transfers(beats: Sequence[Beat], still: set[int]) -> dict[str, list[int]]:
    """Returns the sends and receives that ranks which stand still are in together, by name.

    gloo's are not recorded. Where several ranks are in such, each may be the other's peer, so that
    nothing says that one of them should be elsewhere.
    """
    found: dict[str, list[int]] = {}
    for rank in sorted(still):
        for call in beats[rank].latest:
            if not call.is_over and call.peer in still and _meets(rank, call, beats):
                ends = sorted((rank, call.peer))
                tensors = call.what.partition(" of ")[2]
                of = f" of {tensors}" if tensors else ""
                name = f"a send{of} between ranks {ends[0]} and {ends[1]}, group {call.group},"
                found[name] = ends
    idle_s = {rank: beat.idle_s for rank, beat in enumerate(beats) if _is_in_unrecorded(beat)}
    longest_s = max((idle_s[rank] for rank in still & idle_s.keys()), default=math.inf)
    # A peer that came a beat later does not stand still yet: half the time is enough to count it.
    unrecorded = [rank for rank, one_s in idle_s.items() if one_s > longest_s / 2]
    if len(unrecorded) > 1:
        found["a send with its receive"] = unrecorded
    return found


def _meets(rank: int, call: Call, beats: Sequence[Beat]) -> bool:
    """Whether a call is a send or a receive, and its peer is in the other half of it."""
    if not call.is_p2p or call.peer is None:
        return False
    is_send, tensors = call.what.startswith("send"), call.what.partition(" of ")[2]
    return any(
        one.is_p2p
        and not one.is_over
        and (one.group, one.peer) == (call.group, rank)
        and one.what.startswith("send") is not is_send
        and one.what.partition(" of ")[2] == tensors
        for one in beats[call.peer].latest
    )


def _is_in_unrecorded(beat: Beat) -> bool:
    """Whether a rank is in a call that the recorder does not know of: gloo's send or receive."""
    is_recorded = any(not call.is_over for call in beat.latest)
    return beat.is_in_collective and beat.wait is None and not is_recorded


def _differ(one: Call, other: Call) -> bool:
    """Whether two calls of the same number are different operations."""
    return one.what.split(" of ")[0] != other.what.split(" of ")[0]


def _is_waiting(beat: Beat) -> bool:
    return (
        beat.wait is not None
        or beat.is_in_collective
        or any(not call.is_over for call in beat.latest)
    )


def waits_in(beat: Beat) -> str:
    """Returns in which collective a rank waits; empty if it is in none."""
    pending = [call for call in beat.latest if not call.is_over]
    if pending:
        return pending[0].name
    if beat.wait is not None:
        return f"{beat.wait.what} of {beat.wait.group}"
    return beat.at if beat.is_in_collective else ""


def _elsewhere_text(suspects: Sequence[int], beats: Sequence[Beat], waiting: Sequence[int]) -> str:
    named = "; ".join(
        f"rank {rank} on host {beats[rank].host} has made no progress for "
        f"{beats[rank].idle_s:.0f} s, {beats[rank].where}"
        for rank in suspects[:MAX_NAMED]
    )
    if len(suspects) > MAX_NAMED:
        named += f"; and {len(suspects) - MAX_NAMED} more"
    first = beats[waiting[0]]
    where = f" in {waits_in(first)}" if any(not call.is_over for call in first.latest) else ""
    after = f" after {first.wait.what!r}" if first.wait is not None else ""
    return f"{named}; {ranks_text(waiting)} wait{'s' * (len(waiting) == 1)}{after}{where}"


def _slow_transfers(
    transfers: Mapping[str, Sequence[int]], beats: Sequence[Beat], waiting: Sequence[int]
) -> Hang | None:
    """Returns what there is to say about sends and receives that do not end; None if there are
    none. `waiting` are the ranks that wait for them.
    """
    if not transfers:
        return None
    suspects = sorted({rank for ranks in transfers.values() for rank in ranks})
    named = "; ".join(
        f"{name} is slow: {ranks_text(ranks)} have been inside for "
        f"{min(beats[rank].idle_s for rank in ranks):.0f} s, "
        + "; ".join(f"rank {rank} {beats[rank].where}" for rank in ranks[:MAX_NAMED])
        for name, ranks in list(transfers.items())[:MAX_NAMED]
    )
    if waiting:
        first = beats[waiting[0]]
        after = first.wait.what if first.wait is not None else waits_in(first)
        named += f"; {ranks_text(waiting)} wait{'s' * (len(waiting) == 1)} in {after}"
    return Hang(suspects, named)


def _different_text(
    suspects: Sequence[int], places: Mapping[str, Sequence[int]], beats: Sequence[Beat]
) -> str:
    idle_s = min(beats[rank].idle_s for rank in suspects)
    named = "; ".join(
        f"{ranks_text(ranks)} in {place} ({beats[ranks[0]].where})"
        for place, ranks in sorted(places.items(), key=lambda item: len(item[1]))[:MAX_NAMED]
    )
    return f"ranks have waited for each other in different collectives for {idle_s:.0f} s: {named}"


def _name(beat: Beat) -> str:
    return beat.phase.partition(", step ")[0]
