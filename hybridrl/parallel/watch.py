"""Determines from heartbeats which ranks are lost, and which ranks wait for which. No torch.

Pure logic: rank 0 collects a `Beat` from every rank, passes them to `Watch` at regular intervals
(heartbeat.py), and publishes the verdict. Time is counted in intervals, so that ranks do not appear
silent after rank 0 itself was stopped or its host was suspended.

A rank that stops sending heartbeats is lost, unless another rank on its host reports that its
process runs: it is then blocked in native code, for example while a library loads from a slow disk.
If a rank is alone on its host, it is lost only after ALONE_FACTOR times as long, because its
launcher notices immediately if the process ends. A rank that sends heartbeats is not lost, however
long its work takes. While other ranks wait for it, a message names it once a minute. The job ends
after `run.stall_timeout_s`, if this is set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

NOTICE_S = 60.0  # longer waits are reported repeatedly, at this interval
MAX_NAMED = 4  # maximum number of ranks that one message names
# A rank that is alone on its host is lost only after this many times `silent_s`.
ALONE_FACTOR = 4


WaitKey = tuple[str, range | tuple[int, ...], int]


@dataclass(frozen=True)
class Wait:
    """A rank's wait for others (all if None) to enter a collective after some work, `what`."""

    group: str
    number: int
    ranks: Sequence[int] | None
    what: str
    seconds: float

    @property
    def key(self) -> WaitKey:
        """Identifies the collective; equal on all ranks that wait in it."""
        ranks = self.ranks
        return self.group, ranks if isinstance(ranks, range) else tuple(ranks or ()), self.number


@dataclass(frozen=True)
class Call:
    """A rank's call to torch.distributed.

    Args:
        number: Number of the call in the group; sends and receives are numbered separately.
        what: Operation, dtype and shape.
        peer: Other rank of a send or receive (`is_p2p`); None if unknown.
    """

    group: str
    number: int
    what: str
    ranks: Sequence[int]
    is_over: bool = False
    is_p2p: bool = False
    peer: int | None = None

    @property
    def name(self) -> str:
        return f"{self.what}, #{self.number} of group {self.group} ({ranks_text(self.ranks)})"


@dataclass(frozen=True)
class Beat:
    """A heartbeat: the state that a rank reports every few seconds.

    Args:
        host_id: Id of the host; equal for ranks that can see each other's processes.
        part: Current part of `World.all_agree` or `World.arrive`; empty outside of them.
        entered: Number of collectives that the rank has entered, by group.
        within: Seconds since the rank began a part whose collectives have no timeout; else None.
        found: For each other rank on this host whose process cannot continue, the reason.
        stop_signal: Number of the signal that asked this rank (for rank 0: any rank) to save and
            stop; 0 if none.
        stop_epoch: How often the rank has forgotten signals; signals count only for ranks in the
            same epoch.
        latest: Unfinished calls and the last call in each group, if the rank makes no progress for
            `idle_s`.
    """

    count: int
    host: str
    host_id: str
    phase: str = ""
    part: str = ""
    at: str = ""
    entered: Mapping[str, int] = field(default_factory=dict)
    wait: Wait | None = None
    within: float | None = None
    is_in_collective: bool = False
    found: Mapping[int, str] = field(default_factory=dict)
    has_left: bool = False
    knows: bool = False
    stop_signal: int = 0
    stop_epoch: int = 0
    idle_s: float = 0.0
    latest: Sequence[Call] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=_range_ends)

    @staticmethod
    def from_json(text: str | bytes) -> Beat:
        fields: dict[str, Any] = json.loads(text)
        wait = fields.pop("wait")
        found = {int(rank): state for rank, state in fields.pop("found").items()}
        latest = tuple(
            Call(**{**call, "ranks": _ranks_of(call["ranks"])}) for call in fields.pop("latest")
        )
        own = None if wait is None else Wait(**{**wait, "ranks": _ranks_of(wait["ranks"])})
        return Beat(**fields, wait=own, found=found, latest=latest)

    @property
    def where(self) -> str:
        part = f", {self.part}" if self.part else ""
        return f"in phase '{self.phase}'{part}" + (f", at {self.at}" if self.at else "")


@dataclass(frozen=True)
class Verdict:
    """Reason why all ranks must end. `culprit` is the first rank that caused it, or None."""

    message: str
    culprit: int | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Verdict:
        return Verdict(**json.loads(text))


class Watch:
    """Examines the heartbeats of all ranks at regular intervals.

    Args:
        every_s: Seconds between two calls of `look`.
        silent_s: Seconds without a heartbeat after which a rank may be lost.
        collective_timeout_s: Timeout of a collective that all ranks have entered.
        stall_timeout_s: Maximum time that ranks wait for ranks that are alive; None for no limit.
    """

    def __init__(
        self,
        every_s: float,
        silent_s: float,
        collective_timeout_s: float,
        stall_timeout_s: float | None,
    ) -> None:
        self.every_s, self.silent_s = every_s, silent_s
        self.collective_timeout_s, self.stall_timeout_s = collective_timeout_s, stall_timeout_s
        self._counts: dict[int, int] = {}
        self._silent: dict[int, int] = {}  # intervals without a new heartbeat
        self._entered_by_all: dict[WaitKey, int] = {}  # intervals
        self._noticed_s = 0.0

    def look(self, beats: Sequence[Beat]) -> Verdict | None:
        """Records the latest heartbeats. Returns a verdict if all ranks must end, else None."""
        for rank, beat in enumerate(beats):
            is_new = self._counts.get(rank) != beat.count or beat.has_left
            self._silent[rank] = 0 if is_new else self._silent[rank] + 1
            self._counts[rank] = beat.count
        return self._lost(beats) or self._stalled(beats) or self._unfinished(beats)

    def is_silent(self, rank: int) -> bool:
        """Whether a rank's last heartbeat is at least `silent_s` old."""
        return self.silent_for_s(rank) >= self.silent_s

    def silent_for_s(self, rank: int) -> float:
        return self._silent.get(rank, 0) * self.every_s

    def notice(self, beats: Sequence[Beat]) -> str | None:
        """Returns a message, once a minute, about which ranks wait long for which, else None."""
        waits = [beat.wait.seconds for beat in beats if beat.wait is not None]
        withins = [beat.within for beat in beats if beat.within is not None]
        longest = max([*waits, *withins], default=0.0)
        if longest < NOTICE_S:
            self._noticed_s = 0.0
            return None
        if longest < self._noticed_s + NOTICE_S:
            return None
        self._noticed_s = longest
        waiting = max(beats, key=lambda beat: beat.wait.seconds if beat.wait else -1.0).wait
        if waiting is not None and (missing := missing_ranks(waiting, beats)):
            said = f"ranks have waited for {waiting.seconds:.0f} s after {waiting.what!r} for "
            return said + self.described(missing, beats)
        if withins:
            part = next(beat.part for beat in beats if beat.within == max(withins))
            others = [rank for rank, beat in enumerate(beats) if not beat.is_in_collective]
            said = f"ranks have been in {part!r} for {max(withins):.0f} s"
            return said + (f": {self.described(others, beats)}" if others else "")
        return None

    def _lost(self, beats: Sequence[Beat]) -> Verdict | None:
        why = {rank: self._why_lost(rank, beats) for rank in range(len(beats))}
        lost = {rank: reason for rank, reason in why.items() if reason is not None}
        if not lost:
            return None
        first = min(lost)
        silent_s, where = self._patience_s(first, beats), beats[first].where
        alike = [rank for rank in lost if beats[rank].host_id == beats[first].host_id]
        message = (
            f"{ranks_text(alike)} on host {beats[first].host} gave no sign of life for "
            f"{silent_s:g} s: {lost[first]}. Last seen {where}"
        )
        if others := [rank for rank in lost if rank not in alike]:
            message += f"; {ranks_text(others)} on other hosts are silent too"
        return Verdict(message, first)

    def _patience_s(self, rank: int, beats: Sequence[Beat]) -> float:
        host = beats[rank].host_id
        is_alone = all(beat.host_id != host for i, beat in enumerate(beats) if i != rank)
        return self.silent_s * (ALONE_FACTOR if is_alone else 1)

    def _why_lost(self, rank: int, beats: Sequence[Beat]) -> str | None:
        if not self.is_silent(rank) or self.silent_for_s(rank) < self._patience_s(rank, beats):
            return None
        mates = [
            other
            for other, beat in enumerate(beats)
            if beat.host_id == beats[rank].host_id and not self.is_silent(other)
        ]
        if not mates:
            return "neither its process nor another rank of that host answers"
        return next((f for m in mates if (f := beats[m].found.get(rank)) is not None), None)

    def _stalled(self, beats: Sequence[Beat]) -> Verdict | None:
        if self.stall_timeout_s is None:
            return None
        bound = f"run.stall_timeout_s={self.stall_timeout_s:g}"
        for beat in beats:
            if beat.wait is not None and beat.wait.seconds > self.stall_timeout_s:
                if missing := missing_ranks(beat.wait, beats):
                    waited = f"others wait after {beat.wait.what!r} for longer than {bound}"
                    return Verdict(f"{self.described(missing, beats)}; {waited}", missing[0])
            elif beat.within is not None and beat.within > self.stall_timeout_s:
                others = [rank for rank, one in enumerate(beats) if not one.is_in_collective]
                named = self.described(others, beats) if others else "all ranks wait"
                culprit = others[0] if others else None
                return Verdict(f"{named}; {beat.part!r} took longer than {bound}", culprit)
        return None

    def _unfinished(self, beats: Sequence[Beat]) -> Verdict | None:
        """Returns a verdict if all ranks have entered a collective that does not end."""
        waits = {wait.key: wait for beat in beats if (wait := beat.wait) is not None}
        entered = {key: wait for key, wait in waits.items() if not missing_ranks(wait, beats)}
        looks = {key: self._entered_by_all.get(key, 0) + 1 for key in entered}
        self._entered_by_all = looks
        for key, count in looks.items():
            if count * self.every_s > self.collective_timeout_s:
                message = (
                    f"all ranks entered the collective after {entered[key].what!r}, but it did not "
                    f"end within run.collective_timeout_s={self.collective_timeout_s:g}. Check the "
                    "network between the hosts"
                )
                return Verdict(message, None)
        return None

    def described(self, ranks: Sequence[int], beats: Sequence[Beat]) -> str:
        """Describes what ranks are doing. Names at most MAX_NAMED of them."""
        blocked = " (its Python does not answer, but its process runs)"
        named = [
            f"rank {rank} on host {beats[rank].host}"
            f"{blocked if self.is_silent(rank) else ''}, {beats[rank].where}"
            for rank in ranks[:MAX_NAMED]
        ]
        more = f"; and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
        return "; ".join(named) + more


class HangObserver(Protocol):
    """Reports hangs. `run` is the run folder, or None."""

    def look(self, beats: Sequence[Beat], silent: Sequence[int], run: Path | None) -> list[str]:
        """Records the latest heartbeats; returns the messages to print."""

    def explained(
        self,
        message: str,
        suspects: Sequence[int],
        beats: Sequence[Beat],
        silent: Sequence[int],
        run: Path | None,
    ) -> str:
        """Writes a report about every rank's state, whose path is added to the message."""


# Creates an observer from a function that makes all ranks write their stacks to their logs.
ObserveHangs = Callable[[Callable[[Sequence[int]], None]], HangObserver]
_OBSERVE: list[ObserveHangs] = []


def observe_hangs(make: ObserveHangs) -> None:
    """Sets the observer for all heartbeats that this process starts later."""
    _OBSERVE[:] = [make]


def hang_observer(ask_stacks: Callable[[Sequence[int]], None]) -> HangObserver | None:
    """Creates the observer for a heartbeat; returns None if none was set."""
    return _OBSERVE[0](ask_stacks) if _OBSERVE else None


def missing_ranks(wait: Wait, beats: Sequence[Beat]) -> list[int]:
    ranks = range(len(beats)) if wait.ranks is None else wait.ranks
    return [rank for rank in ranks if beats[rank].entered.get(wait.group, 0) < wait.number]


def even(ranks: Sequence[int]) -> Sequence[int]:
    """Converts evenly spaced ranks to a range, to keep heartbeats short; keeps other ranks."""
    if not ranks:
        return ranks
    found = range(ranks[0], ranks[-1] + 1, max(ranks[1] - ranks[0], 1) if len(ranks) > 1 else 1)
    return found if list(found) == list(ranks) else ranks


def _range_ends(ranks: range) -> dict[str, tuple[int, int, int]]:
    """Converts a range to JSON as its ends, because it may contain thousands of ranks."""
    return {"range": (ranks.start, ranks.stop, ranks.step)}


def _ranks_of(found: Any) -> Sequence[int]:
    return range(*found["range"]) if isinstance(found, dict) else found


def ranks_text(ranks: Collection[int]) -> str:
    """Returns "rank 3" or "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
