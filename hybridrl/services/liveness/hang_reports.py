"""Reports hangs on the console, and writes the state of every rank to a file, without torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridrl.parallel.watch import Beat, Call, ranks_text
from hybridrl.services.liveness.hang import HangWatch, waits_in

HANGS = "hangs"  # Folder for reports in the run folder.
# Seconds without progress after which a rank is idle. A hang is reported within 40 s. Before the
# first step, ranks may load models and start engines for minutes.
HANG_S, START_HANG_S = 25.0, 300.0
STEP = re.compile(r"step (\d+)")


class HangReports:
    """Detects and reports hangs, as the heartbeat's `HangObserver`.

    `ask_stacks` makes all ranks write their stacks to their logs.
    """

    def __init__(self, ask_stacks: Callable[[Sequence[int]], None]) -> None:
        self._ask_stacks = ask_stacks
        self._watch = HangWatch(HANG_S, START_HANG_S)

    def look(self, beats: Sequence[Beat], silent: Sequence[int], run: Path | None) -> list[str]:
        """Records the latest heartbeats. Returns messages to print."""
        over = self._watch.over(beats)
        hang = self._watch.look(beats)
        messages = [over] if over is not None else []
        if hang is not None:
            self._ask_stacks(silent)
            messages.append(self.explained(hang.message, hang.suspects, beats, silent, run))
        return messages

    def explained(
        self,
        message: str,
        suspects: Sequence[int],
        beats: Sequence[Beat],
        silent: Sequence[int],
        run: Path | None,
    ) -> str:
        """Writes the state of every rank to the run folder. Returns the message with the path."""
        if run is None:
            return message
        step = STEP.search(beats[suspects[0] if suspects else 0].phase)
        file = run / HANGS / f"step_{step[1] if step else 0}.txt"
        with contextlib.suppress(OSError):  # the disk is full
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(file.name + ".partial")
            partial.write_text(report_text(message, suspects, beats, silent), encoding="utf-8")
            partial.replace(file)
            return f"{message}; all ranks: {file}"
        return message


def report_text(
    message: str, suspects: Sequence[int], beats: Sequence[Beat], silent: Sequence[int]
) -> str:
    """Returns the message and the state of every rank, suspected ranks first."""
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
    """Returns path and message of a run's newest report after `since` (seconds since the epoch)."""
    with contextlib.suppress(OSError):  # another host may remove the folder
        found = [(file.stat().st_mtime, file) for file in (run / HANGS).glob("step_*.txt")]
        written, file = max(found, default=(0.0, run))
        if written > since:
            return file, file.read_text(encoding="utf-8").partition("\n")[0]
    return None


def _state(rank: int, beats: Sequence[Beat], silent: Sequence[int]) -> str:
    if beats[rank].has_left:
        return "has left"
    if rank not in silent:
        return f"no progress for {beats[rank].idle_s:.0f} s"
    seen = [beat.found[rank] for beat in beats if rank in beat.found]
    return f"does not answer: {seen[0] if seen else 'no rank has reported the end of its process'}"


def _unlike_groups(beats: Sequence[Beat]) -> dict[str, dict[str, list[int]]]:
    """For process groups whose ranks are at different calls, returns the ranks at each call."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, beat in enumerate(beats):
        for call in beat.latest:
            if not call.is_p2p:
                name = f"{call.group} ({ranks_text(call.ranks)})"
                found.setdefault(name, {}).setdefault(_at(call), []).append(rank)
    return {name: calls for name, calls in found.items() if len(calls) > 1}


def _at(call: Call) -> str:
    return f"#{call.number} {call.what}, {'finished' if call.is_over else 'not finished'}"
