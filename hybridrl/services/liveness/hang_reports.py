"""Names hangs on the console and writes down what every rank does. No torch.

The rank that judges (parallel/heartbeat.py) calls this with the beats of all ranks. A hang ends
nothing. Stacks are in the ranks' own logs, where each rank writes them when it is asked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridrl.parallel.watch import Beat, Call, ranks_text
from hybridrl.services.liveness.hang import HangWatch, waits_in

HANGS = "hangs"  # the folder of reports, in that of the run
# Without progress, of a rank that others wait for. With beats and looks a rank is named within
# 40 s. Before the first step models are read and engines started, which ranks do for minutes.
HANG_S, START_HANG_S = 25.0, 300.0
STEP = re.compile(r"step (\d+)")


class HangReports:
    """Finds and reports hangs, as a `HangObserver` of the heartbeat.

    Args:
        ask_stacks: Has all ranks write their stacks to their logs.
    """

    def __init__(self, ask_stacks: Callable[[Sequence[int]], None]) -> None:
        self._ask_stacks = ask_stacks
        self._watch = HangWatch(HANG_S, START_HANG_S)

    def look(self, beats: Sequence[Beat], silent: Sequence[int], run: Path | None) -> list[str]:
        """Takes in the latest beats; returns what there is to say."""
        over = self._watch.over(beats)
        hang = self._watch.look(beats)
        told = [over] if over is not None else []
        if hang is not None:
            self._ask_stacks(silent)
            told.append(self.explained(hang.message, hang.suspects, beats, silent, run))
        return told

    def explained(
        self,
        message: str,
        suspects: Sequence[int],
        beats: Sequence[Beat],
        silent: Sequence[int],
        run: Path | None,
    ) -> str:
        """Writes what every rank does to a file of the run folder; returns the message with where
        that is.
        """
        if run is None:
            return message
        step = STEP.search(beats[suspects[0] if suspects else 0].phase)
        file = run / HANGS / f"step_{step[1] if step else 0}.txt"
        with contextlib.suppress(OSError):  # of a full disk
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(file.name + ".partial")
            partial.write_text(report_text(message, suspects, beats, silent), encoding="utf-8")
            partial.replace(file)
            return f"{message}; all ranks: {file}"
        return message


def report_text(
    message: str, suspects: Sequence[int], beats: Sequence[Beat], silent: Sequence[int]
) -> str:
    """Returns the message and what every rank does, suspected ranks first."""
    lines = [message, "", "Stacks are in logs/rank_N.log.", ""]
    for rank in sorted(range(len(beats)), key=lambda rank: (rank not in suspects, rank)):
        beat, mark = beats[rank], " (suspected)" if rank in suspects else ""
        lines += [
            f"rank {rank} on host {beat.host}{mark}: {_state(rank, beats, silent)}",
            f"  {beat.where}",
            f"  waits in: {waits_in(beat) or 'nothing'}",
        ]
    for group, calls in _unlike_groups(beats).items():
        lines += ["", f"process group {group}"]
        lines += [f"  {ranks_text(ranks)}: {call}" for call, ranks in calls.items()]
    return "\n".join(lines) + "\n"


def newest_report(run: Path, since: float) -> tuple[Path, str] | None:
    """Returns the newest report in a run folder and its message; None if none was written after
    `since`, seconds since the epoch.
    """
    with contextlib.suppress(OSError):  # a folder that another host removes
        found = [(file.stat().st_mtime, file) for file in (run / HANGS).glob("step_*.txt")]
        written, file = max(found, default=(0.0, run))
        if written > since:
            return file, file.read_text(encoding="utf-8").partition("\n")[0]
    return None


def _state(rank: int, beats: Sequence[Beat], silent: Sequence[int]) -> str:
    if beats[rank].has_left:
        return "took leave"
    if rank not in silent:
        return f"no progress for {beats[rank].idle_s:.0f} s"
    seen = [beat.found[rank] for beat in beats if rank in beat.found]
    return f"does not answer: {seen[0] if seen else 'nobody knows that its process has ended'}"


def _unlike_groups(beats: Sequence[Beat]) -> dict[str, dict[str, list[int]]]:
    """Returns the process groups whose ranks are not at the same call: who is at which."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, beat in enumerate(beats):
        for call in beat.latest:
            if not call.is_p2p:
                name = f"{call.group} ({ranks_text(call.ranks)})"
                found.setdefault(name, {}).setdefault(_at(call), []).append(rank)
    return {name: calls for name, calls in found.items() if len(calls) > 1}


def _at(call: Call) -> str:
    return f"#{call.number} {call.what}, {'over' if call.is_over else 'not over'}"
