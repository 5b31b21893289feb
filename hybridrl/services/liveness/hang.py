"""Detects hangs: ranks that make no progress while other ranks wait for them, without torch.

A rank is idle if none of its counters has changed for some time: its phase, its collectives, and
the rounds of its loops (progress.py). A hang is reported if idle ranks wait for another idle rank,
or if all waiting ranks are in different collectives. Two ranks inside a send and its receive wait
for no other rank, so the operation is reported as slow. Hangs do not end the run;
`run.stall_timeout_s` limits how long ranks wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.parallel.watch import MAX_NAMED, Beat, Call, Wait, WaitKey, missing_ranks, ranks_text


@dataclass(frozen=True)
class Hang:
    """A detected hang: the suspected ranks, and a message."""

    suspects: Sequence[int]
    message: str


class HangWatch:
    """Examines the heartbeats of all ranks at intervals. Reports each hang only once.

    Ranks are idle after `idle_s` without progress, before the first step after `start_s`.
    """

    def __init__(self, idle_s: float, start_s: float) -> None:
        self._idle_s, self._start_s = idle_s, start_s
        self._longest: dict[str, float] = {}  # longest pause that has ended, in seconds, by phase
        self._before: dict[int, Beat] = {}
        self._reported: Hang | None = None
        self._paused_s = 0.0

    def look(self, beats: Sequence[Beat]) -> Hang | None:
        """Records the latest heartbeats. Returns a hang that has not been reported yet, or None."""
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
        if self._reported is not None:
            return None
        self._reported = found = find_hang(beats, still)
        return found

    def over(self, beats: Sequence[Beat]) -> str | None:
        """Returns a message once the reported ranks make progress again, else None."""
        if self._reported is None:
            return None
        suspects = self._reported.suspects
        self._paused_s = max(self._paused_s, *(beats[rank].idle_s for rank in suspects))
        if all(beats[rank].idle_s >= self._idle_s for rank in suspects):
            return None
        self._reported, paused_s, self._paused_s = None, self._paused_s, 0.0
        return f"{ranks_text(suspects)} continued after {paused_s:.0f} s"

    def bound_s(self, beat: Beat) -> float:
        """Returns the seconds after which this rank is idle: twice the phase's longest pause."""
        least = self._idle_s if ", step " in beat.phase else self._start_s
        return max(least, 2 * self._longest.get(_name(beat), 0.0))


def find_hang(beats: Sequence[Beat], still: set[int]) -> Hang | None:
    calls, transfers = _Calls(beats, still), _transfers(beats, still)
    awaited = {rank: _awaited(rank, beats, still, calls) for rank in still}
    waits_for_slow = {rank for rank in still if awaited[rank] - still}
    while grown := {rank for rank in still - waits_for_slow if awaited[rank] & waits_for_slow}:
        waits_for_slow |= grown
    of_others = {other for rank in still for other in awaited[rank] & still}
    elsewhere = sorted(rank for rank in of_others if not _is_waiting(beats[rank]))
    if elsewhere:
        waiting = [  # including ranks that have not waited long
            rank
            for rank in range(len(beats))
            if _awaited(rank, beats, still, calls) & set(elsewhere) and _is_waiting(beats[rank])
        ]
        return Hang(elsewhere, _elsewhere_text(elsewhere, beats, waiting))
    in_transfers = {rank for ranks in transfers.values() for rank in ranks}
    behind = set(in_transfers)  # later also includes the ranks that wait for these ranks
    while grown := {rank for rank in still - behind if awaited[rank] & behind}:
        behind |= grown
    places: dict[str, list[int]] = {}
    for rank in sorted(still - waits_for_slow - behind):
        if _is_waiting(beats[rank]) and (awaited[rank] or rank in of_others):
            places.setdefault(waits_in(beats[rank]), []).append(rank)
    for rank, beat in enumerate(beats):  # add ranks that have not waited long
        if rank not in still and _is_waiting(beat) and (where := waits_in(beat)) in places:
            places[where] = sorted([*places[where], rank])
    # In one collective, the network is at fault, and the collective has its own timeout.
    if len(places) < 2:
        return _slow_transfers(transfers, beats, sorted(behind - in_transfers))
    fewest = min(len(ranks) for ranks in places.values())
    first = sorted(
        (ranks for ranks in places.values() if len(ranks) == fewest), key=lambda ranks: ranks[0]
    )
    suspects = [rank for ranks in first for rank in ranks]
    return Hang(suspects, _different_text(suspects, places, beats))


class _Calls:
    def __init__(self, beats: Sequence[Beat], still: set[int]) -> None:
        self._of_groups: dict[tuple[str, int, int], dict[int, Call]] = {}
        self._behind: dict[tuple[str, int, int, int, str], set[int]] = {}
        self._beats, self._missing = beats, dict[WaitKey, set[int]]()
        self._still = still
        for rank in still:
            for call in beats[rank].latest:
                if not call.is_p2p:
                    calls = self._of_groups.setdefault(self._group(call), {})
                    if rank not in calls or calls[rank].number <= call.number:
                        calls[rank] = call

    @staticmethod
    def _group(call: Call) -> tuple[str, int, int]:
        return call.group, call.ranks[0], len(call.ranks)

    def missing(self, wait: Wait) -> set[int]:
        if wait.key not in self._missing:
            self._missing[wait.key] = set(missing_ranks(wait, self._beats))
        return self._missing[wait.key]

    def behind(self, call: Call) -> set[int]:
        """Returns the idle ranks that have not reached a call, or are in another of its number."""
        if call.is_p2p:
            return set() if call.peer is None else {call.peer}
        key = (*self._group(call), call.number, call.what)
        if key not in self._behind:
            calls = self._of_groups.get(self._group(call), {})
            self._behind[key] = {
                rank
                for rank in self._still.intersection(call.ranks)
                if (one := calls.get(rank)) is None
                or one.number < call.number
                or (one.number == call.number and _differ(one, call))
            }
        return self._behind[key]


def _awaited(rank: int, beats: Sequence[Beat], still: set[int], calls: _Calls) -> set[int]:
    beat, found = beats[rank], set[int]()
    if beat.wait is not None:
        found |= calls.missing(beat.wait)
    for call in beat.latest:
        if not call.is_over and not _meets(rank, call, beats):
            found |= calls.behind(call)
    if not found and _is_in_unrecorded(beat):
        # This send or receive is not recorded, so its peer may be any rank that is not waiting.
        found |= {other for other in still if not _is_waiting(beats[other])}
    return {other for other in found - {rank} if not beats[other].has_left}


def _transfers(beats: Sequence[Beat], still: set[int]) -> dict[str, list[int]]:
    """Returns the ranks of each send and receive in which both peers are idle, by name.

    Sends over gloo are not recorded: ranks in unrecorded calls may be peers of each other.
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
    # A peer that arrived one heartbeat later is not idle yet, so half of the time is enough.
    unrecorded = [rank for rank, one_s in idle_s.items() if one_s > longest_s / 2]
    if len(unrecorded) > 1:
        found["a send with its receive"] = unrecorded
    return found


def _meets(rank: int, call: Call, beats: Sequence[Beat]) -> bool:
    """Whether a call is a send or a receive whose peer is in the matching call."""
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
    """Whether a rank is in an unrecorded call: a send or receive over gloo."""
    is_recorded = any(not call.is_over for call in beat.latest)
    return beat.is_in_collective and beat.wait is None and not is_recorded


def _differ(one: Call, other: Call) -> bool:
    return one.what.split(" of ")[0] != other.what.split(" of ")[0]


def _is_waiting(beat: Beat) -> bool:
    return (
        beat.wait is not None
        or beat.is_in_collective
        or any(not call.is_over for call in beat.latest)
    )


def waits_in(beat: Beat) -> str:
    """Returns the name of the collective in which a rank waits; "" if it waits in none."""
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
