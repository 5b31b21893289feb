"""Writes traces of steps for Perfetto and chrome://tracing: all ranks' phases and torch.profiler.

Collective: all ranks wait for each other at the beginning and the end of a traced step. Every rank
then writes its part to the run folder, which all ranks share, and rank 0 concatenates them. A
second file contains only the phases, for the report. Invariant: the profiler does not run in
UNPROFILED phases, because recording their host operations would fill the memory (about 3 GB per
million operations).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from hybridrl.metrics.timing import PhaseTimer, Span
from hybridrl.parallel.clock import clock_offset
from hybridrl.parallel.groups import World

BARRIER, CLOCK = "barrier", "hybridrl clock"
MARKS = 8  # CLOCK events per part; the shortest, which did not wait for a core, is used
UNPROFILED = ("generate",)
PIDS = 100  # process numbers per rank in the trace: for its phases, host and devices

Event = dict[str, Any]


class StepTraces:
    """Writes `step_N.json.gz`; steps count from 1. `now` is the phases' clock, in seconds."""

    def __init__(
        self,
        steps: Collection[int],
        folder: Path,
        world: World,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps, self._folder, self._world, self._now = steps, folder, world, now

    @contextmanager
    def step(self, step: int, timer: PhaseTimer) -> Iterator[None]:
        """Profiles a `with` block if `step` is one of the steps to trace."""
        if step not in self._steps:
            yield
            return
        self._world.arrive("the record of the last step")
        offset, error = clock_offset(self._world, self._now)
        barriers = [self._barrier()]
        began = self._now()
        parts = _Parts(self._world.platform.is_cpu, self._now)
        try:
            with self._world.all_agree("starting the profiler"):
                parts.start()
            timer.around = parts.around
            yield
            phases = timer.spans()
            barriers.append(self._barrier())
            clocks: list[tuple[float, float]] = self._world.gather_objects((began + offset, error))
            shift_s = offset - clocks[0][0]
            lanes = self._world.gather_objects(
                [(span.name, span.began + shift_s, span.ended + shift_s) for span in phases]
            )
            with self._world.all_agree("writing a trace"):
                parts.stop()
                self._folder.mkdir(parents=True, exist_ok=True)
                spans = self._phase_events([*phases, *barriers], step, shift_s)
                self._write(chain(spans, self._profiled(parts.done, shift_s)))
        finally:
            timer.around = nullcontext
            parts.stop()
        about = {"step": step, "clock": "rank 0's", "clock_error_us": [1e6 * e for _, e in clocks]}
        with self._world.all_agree("joining a trace"):
            if self._world.rank == 0:
                self._join(self._folder / f"step_{step}.json.gz", about)
                self._write_lanes({**about, "ranks": dict(enumerate(lanes))})

    def _barrier(self) -> Span:
        began = self._now()
        self._world.arrive("a traced step")
        return Span(BARRIER, began, self._now())

    def _profiled(
        self, parts: Sequence[tuple[profile, int, float]], shift_s: float
    ) -> Iterator[Event]:
        """Yields the profiler's events part by part, with only the CLOCK event that aligned it."""
        pids: dict[object, int] = {}
        file = self._part("profile")
        for number, (profiler, tightest, marked) in enumerate(parts):
            profiler.export_chrome_trace(str(file))
            events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
            file.unlink()
            marks = sorted(filter(_is_mark, events), key=lambda event: float(event["ts"]))
            if len(marks) != MARKS:
                raise RuntimeError(f"torch.profiler has {len(marks)} of {MARKS} events {CLOCK!r}")
            mark = marks[tightest]
            events = [event for event in events if event is mark or not _is_mark(event)]
            shift_us = (marked + shift_s) * 1e6 - (mark["ts"] + mark["dur"] / 2)
            yield from self._moved(events, shift_us, pids, number)

    def _phase_events(self, spans: list[Span], step: int, shift_s: float) -> Iterator[Event]:
        pid = self._world.rank * PIDS
        yield from _named(pid, f"rank {self._world.rank}: phases")
        for span in spans:
            ts, dur = (span.began + shift_s) * 1e6, (span.ended - span.began) * 1e6
            kind = {"ph": "X", "cat": "phase", "name": span.name, "args": {"step": step}}
            yield {**kind, "pid": pid, "tid": 0, "ts": ts, "dur": dur}

    def _moved(
        self, events: list[Event], shift_us: float, pids: dict[object, int], part: int
    ) -> Iterator[Event]:
        """Yields a part's events on rank 0's clock, with this rank's process numbers, `pids`."""
        rank = self._world.rank
        known = len(pids)
        for event in events:
            if event["ph"] != "M":
                pids.setdefault(event["pid"], rank * PIDS + 1 + len(pids))
        for old, pid in islice(pids.items(), known, None):
            what = "host" if old == os.getpid() else f"GPU {old}" if old in range(64) else old
            yield from _named(pid, f"rank {rank}: {what}")
        for event in events:
            if event["pid"] not in pids or event.get("name", "").startswith("process_"):
                continue
            moved = {**event, "pid": pids[event["pid"]]}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift_us
            if "id" in event:  # identifies the arrow from a launch to its kernel
                moved["id"] = f"{rank}.{part}.{event['id']}"
            yield moved

    def _write(self, events: Iterable[Event]) -> None:
        with self._part("part").open("w", encoding="utf-8") as out:
            for number, event in enumerate(events):
                out.write((",\n" if number else "") + json.dumps(event))

    def _join(self, target: Path, about: Mapping[str, object]) -> None:
        partial = target.with_name(target.name + ".partial")
        with gzip.open(partial, "wb", compresslevel=5) as out:
            head = {"displayTimeUnit": "ms", "otherData": about}
            out.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
            for rank in range(self._world.size):
                part = self._part("part", rank)
                out.write(b",\n" if rank else b"")
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out)
                part.unlink()
            out.write(b"\n]}\n")
        partial.rename(target)

    def _write_lanes(self, lanes: Mapping[str, Any]) -> None:
        """Writes `[name, began, ended]` of all ranks' phases, in rank 0's seconds, for reports."""
        target = self._folder / f"step_{lanes['step']}.phases.json"
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(lanes) + "\n", encoding="utf-8")
        partial.rename(target)

    def _part(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"rank_{self._world.rank if rank is None else rank}.{kind}"


class _Parts:
    """Profiles a step except UNPROFILED phases, in parts, each with the time of a CLOCK event."""

    def __init__(self, is_cpu: bool, now: Callable[[], float]) -> None:
        self.done: list[tuple[profile, int, float]] = []
        self._now, self._running = now, False
        self._activities = [ProfilerActivity.CPU]
        if not is_cpu:
            self._activities.append(ProfilerActivity.CUDA)

    def start(self) -> None:
        profiler = profile(activities=self._activities)
        profiler.start()
        self._running = True
        ends = []
        for _ in range(MARKS):
            began = self._now()
            with record_function(CLOCK):
                pass
            ends.append((began, self._now()))
        tightest = min(range(MARKS), key=lambda number: ends[number][1] - ends[number][0])
        self.done.append((profiler, tightest, sum(ends[tightest]) / 2))

    def stop(self) -> None:
        if self._running:
            self._running = False
            self.done[-1][0].stop()

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Pauses the profiler in a phase of UNPROFILED."""
        if phase not in UNPROFILED:
            yield
            return
        self.stop()
        yield
        self.start()  # not reached if the phase raised an error


def _is_mark(event: Event) -> bool:
    return event.get("name") == CLOCK and "dur" in event


def _named(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
