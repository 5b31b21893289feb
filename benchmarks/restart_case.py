"""The run of bench_restart.py: what is seen of it from outside, the kill, and what copies and
checkpoints cost.

Owns the process of `hybridrl train`, which ends with it, and removes what the run leaves in host
memory. Times are of files that ranks write, looked at every 4 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench_reshard_gpu import ENVIRONMENT, ROOT
from case_record import PROGRESS

from hybridrl.checkpoint.manifest import MANIFEST_DIGEST
from hybridrl.checkpoint.memory_folders import RUN_ID, host_folder, remove_copies, run_id
from hybridrl.loop.copying import WAITING_COST, every_steps
from hybridrl.loop.run_starts import read_starts

WARMUPS = 2
LOOK_S = 0.004
END_S = 20.0  # for ranks, once their launcher is gone


@dataclass
class Events:
    """What was seen of a run, each with its time, seconds of the monotonic clock.

    Args:
        phases: of rank 0, as it says.
        records: when the line of a step came, by number; the first time it did.
        output: lines of the launcher.
        writing: when a checkpoint was being written, by looks.
        complete: when a copy in host memory was complete, by step.
    """

    phases: list[tuple[float, str]] = field(default_factory=list)
    records: dict[int, float] = field(default_factory=dict)
    output: list[tuple[float, str]] = field(default_factory=list)
    writing: list[float] = field(default_factory=list)
    complete: dict[int, float] = field(default_factory=dict)

    def begun(self, step: int) -> float | None:
        """When the first phase of a step began."""
        ends = f", step {step}"
        return next((at for at, what in self.phases if what.endswith(ends)), None)

    def is_writing(self, since: float, until: float) -> bool:
        """Whether a checkpoint was being written between two times."""
        return any(since <= at <= until for at in self.writing)


class Run:
    """A run of the case.

    Args:
        folder: of its inputs.
        num_ranks: of the run.
        arguments: of the command.
    """

    def __init__(self, folder: Path, num_ranks: int, arguments: argparse.Namespace) -> None:
        self._num_ranks, self._every = num_ranks, arguments.copy_every
        self._loses_more = bool(arguments.fewer)
        self._run_folder = folder / "runs" / "restart"
        self._began, self._limit_s = time.monotonic(), arguments.limit_s
        self.events = Events()
        command = [sys.executable, "-m", "hybridrl.cli.main", "train"]
        command += [str(folder / "restart.yaml"), *arguments.set, "--world", str(num_ranks)]
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [_path()])])}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT / "benchmarks",
            env={**ENVIRONMENT, **os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, name="output", daemon=True).start()

    def measured(self) -> dict[str, Any]:
        """Returns what was measured; with "error" where the run did not get so far."""
        killed_step = 4 * self._every + 2
        found: dict[str, Any] = {}
        try:
            self._wait(lambda: self._at(f"update, step {killed_step}"))
            steps = self._steps()
            found["steps"], found["first_step_s"] = steps, self._since_start(1)
            found |= costs(steps, self._every)
            found["restart"] = self._kill_and_wait(killed_step)
            if self._loses_more:
                found["fewer"] = self._lose_until_fewer()
        except (RuntimeError, psutil.Error) as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["output"] = [text for _, text in self.events.output][-60:]
        finally:
            self._end()
        return found

    def _end(self) -> None:
        """Ends the launcher, and the ranks with it; removes the copies in memory."""
        with suppress(psutil.Error):
            ranks = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            psutil.wait_procs(ranks, END_S)
        self._process.wait()
        with suppress(OSError):
            remove_copies(run_id(self._run_folder))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.output.append((time.monotonic(), line.rstrip()))
            print(f"{time.monotonic() - self._began:6.1f} s {line}", end="", flush=True)

    def _look(self) -> None:
        """Takes in what the run says of itself now."""
        now, logs = time.monotonic(), self._run_folder / "logs"
        with suppress(OSError):
            phase = (logs / "rank_0.phase").read_text().strip()
            if phase and (not self.events.phases or self.events.phases[-1][1] != phase):
                self.events.phases.append((now, phase))
        if any(self._run_folder.glob("checkpoints/*.partial")):
            self.events.writing.append(now)
        if (self._run_folder / RUN_ID).exists():
            copies = host_folder(run_id(self._run_folder))
            for file in copies.glob(f"step_*/{MANIFEST_DIGEST}"):  # the last that is written
                self.events.complete.setdefault(int(file.parent.name[5:]), now)
        for record in self.records()[len(self.events.records) :]:
            self.events.records.setdefault(int(record["step"]), now)

    def records(self) -> list[dict[str, float]]:
        """The lines of the run's steps so far."""
        with suppress(OSError):
            text = (self._run_folder / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def _at(self, phase: str) -> bool:
        with suppress(OSError):  # of the rank that is to be killed
            file = self._run_folder / "logs" / f"rank_{self._num_ranks - 1}.phase"
            return file.read_text().strip() == phase
        return False

    def _wait(self, is_so: Callable[[], bool]) -> float:
        """Looks until something is so; returns when that was.

        Raises:
            RuntimeError: the run has ended, or its time is over.
        """
        while True:
            self._look()
            if is_so():
                return time.monotonic()
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"the run ended with {code}")
            if time.monotonic() - self._began > self._limit_s:
                raise RuntimeError(f"more than --limit-s {self._limit_s:g}")
            time.sleep(LOOK_S)

    def _since_start(self, step: int) -> float:
        return round(self.events.records[step] - self._began, 2)

    def _steps(self) -> list[dict[str, Any]]:
        """Returns what each finished step took, and beside what."""
        found: list[dict[str, Any]] = []
        for record in self.records():
            number = int(record["step"])
            ended, next_begun = self.events.records[number], self.events.begun(number + 1)
            copy_s = record.get("time_s/checkpoint", 0.0)
            begun, complete = ended - record["time_s/step"], self.events.complete.get(number)
            found.append(
                {
                    "step": number,
                    "step_s": record["time_s/step"],
                    "copy_s": copy_s,
                    "complete_s": None if complete is None else max(complete - ended, 0.0),
                    "gap_s": None if next_begun is None else max(next_begun - ended, 0.0),
                    "is_warm": number > WARMUPS,
                    "is_beside_copy": bool(found and found[-1]["copy_s"]),
                    "is_beside_checkpoint": self.events.is_writing(begun, ended),
                    "has_checkpoint": number == checkpoint_step(self._every),
                }
            )
        return found

    def _kill_and_wait(self, step: int) -> dict[str, Any]:
        """Kills the last rank, and waits until the ranks that follow have finished a step."""
        rank, last = self._num_ranks - 1, max(self.events.records)
        num_phases, num_lines = len(self.events.phases), len(self.events.output)
        killed = self._kill(self._last_rank(), f"in the update of step {step}")
        took = self._wait(lambda: self._has_stepped(1)) - killed
        first, start = read_starts(self._run_folder)[:2]
        after = int(start["after_step"])
        told = [(round(at - killed, 2), what) for at, what in self.events.phases[num_phases:]]
        lines = [(round(at - killed, 2), what) for at, what in self.events.output[num_lines:]]
        return {
            "rank": rank,
            "killed_in": f"update, step {step}",
            "restart_s": round(took, 2),
            "after_step": after,
            "lost_steps": last - after,
            "seconds_of_rank_0": start.get("seconds"),
            "seconds_of_first_start": first.get("seconds"),
            "phases_of_rank_0": told,
            "output": lines[-80:],
        }

    def _lose_until_fewer(self) -> dict[str, Any]:
        """Kills the last rank once more, and its replacement before that has taken a step: it does
        not come back. Waits until the ranks that are left have finished a step.
        """
        step = int(read_starts(self._run_folder)[1]["after_step"]) + 2
        self._wait(lambda: self._at(f"update, step {step}"))
        num_lines, last = len(self.events.output), step - 1
        gone = self._last_rank()
        killed = self._kill(gone, f"in the update of step {step}")
        self._wait(lambda: (found := self._last_rank()) is not None and found.pid != gone.pid)
        again = self._kill(self._last_rank(), "before it has taken a step")

        def is_finished() -> bool:
            starts = read_starts(self._run_folder)
            return starts[-1]["world_size"] < self._num_ranks and self._has_stepped(len(starts) - 1)

        ended = self._wait(is_finished)
        start = read_starts(self._run_folder)[-1]
        lines = [(round(at - killed, 2), what) for at, what in self.events.output[num_lines:]]
        return {
            "ranks": start["world_size"],
            "restart_s": round(ended - killed, 2),
            "replacement_lived_s": round(again - killed, 2),
            "after_step": int(start["after_step"]),
            "lost_steps": last - int(start["after_step"]),
            "seconds_of_rank_0": start.get("seconds"),
            "output": lines[-80:],
        }

    def _last_rank(self) -> psutil.Process | None:
        """The process of the last rank; None while there is none."""
        with suppress(psutil.Error):
            ranks = psutil.Process(self._process.pid).children()
            return next((one for one in ranks if _rank(one) == self._num_ranks - 1), None)
        return None

    def _kill(self, rank: psutil.Process | None, when: str) -> float:
        """Kills a rank; returns when."""
        if rank is None:
            raise RuntimeError(f"there is no rank to be killed {when}")
        at = time.monotonic()
        rank.send_signal(signal.SIGKILL)
        print(f"{PROGRESS} killed rank {self._num_ranks - 1} {when}", flush=True)
        return at

    def _has_stepped(self, number: int) -> bool:
        """Whether a start, counted from 0, has finished a step."""
        starts, records = read_starts(self._run_folder), self.records()
        # Noted after the start's first step. Before, records may yet be of the one before.
        has_stepped = len(starts) > number and "seconds" in starts[number]
        return has_stepped and records[-1]["step"] > starts[number]["after_step"]


def _path() -> str | None:
    return os.environ.get("PYTHONPATH")


def _rank(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        return int(process.environ().get("RANK", "-1"))
    return None


# Costs


def checkpoint_step(every: int) -> int:
    """Returns the step after which the checkpoint is begun, with `every` steps between copies."""
    return 4 * every - 1


def costs(steps: Sequence[Mapping[str, Any]], every: int) -> dict[str, Any]:
    """Returns what copies and checkpoints cost, from what each step took.

    Args:
        steps: as of `Run`.
        every: steps between copies.

    Raises:
        RuntimeError: there was no copy, or no checkpoint.
    """
    warm = [one for one in steps if one["is_warm"]]
    copied = [one for one in warm if one["copy_s"]]
    if len(copied) < 2:
        raise RuntimeError("no copies of the state in host memory: see the output")

    def body(one: Mapping[str, Any]) -> float:
        return float(one["step_s"] - one["copy_s"])

    alone = [o for o in warm if not o["is_beside_copy"] and not o["is_beside_checkpoint"]]
    first = copied[0]["step"]
    beside = [o for o in warm if o["is_beside_copy"] and o["step"] > first + 1]
    beside = [o for o in beside if not o["is_beside_checkpoint"]] or beside
    without = statistics.median(body(one) for one in alone or warm)
    wait = statistics.median(one["copy_s"] for one in copied[1:])
    slower = statistics.median(body(one) for one in beside) - without if beside else 0.0
    gaps = [one["gap_s"] for one in warm if not one["has_checkpoint"] and one["gap_s"] is not None]
    saved = [one for one in warm if one["has_checkpoint"] and one["gap_s"] is not None]
    if not saved:
        raise RuntimeError("no checkpoint was begun between two steps: see the output")
    usual = statistics.median(gaps) if gaps else 0.0
    cost, by_auto = wait + max(slower, 0.0), every_steps(wait, without, WAITING_COST)
    ends = [one["complete_s"] for one in copied if one["complete_s"] is not None]
    return {
        "copy": {
            "step_without_s": round(without, 4),
            "num_without": len(alone),
            "waits_s": round(wait, 4),
            "first_waits_s": round(copied[0]["copy_s"], 4),
            "step_beside_is_longer_s": round(slower, 4),
            "complete_after_s": [round(end, 2) for end in ends],
            "share_of_a_step": round(cost / without, 4),
            "waits_share": round(wait / (every * without), 4),
            "share": round(cost / (every * without), 4),
            "auto_would_copy_every": by_auto,
            "auto_waits_share": round(wait / (by_auto * without), 4),
            "auto_share": round(cost / (by_auto * without), 4),
        },
        "checkpoint": {
            "stalls_s": round(saved[0]["gap_s"] - usual, 3),
            "usual_gap_s": round(usual, 4),
        },
    }
