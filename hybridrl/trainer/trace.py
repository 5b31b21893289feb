"""Traces of steps for Perfetto and chrome://tracing: the phases of all ranks on one clock, with
what torch.profiler saw of them.

Who waits for whom: a traced step begins and ends with a barrier, whose ends show how well the
clocks agree; then every rank writes its part, and rank 0 joins the parts once all are there. All
ranks must see the run folder. Other steps are left as they are.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hybridrl.metrics.timing import Span
from hybridrl.parallel.clock import clock_offset
from hybridrl.parallel.groups import World

BARRIER, CLOCK = "barrier", "hybridrl clock"
PIDS = 100  # process numbers of a rank in the trace: its phases, the host, devices

Event = dict[str, Any]


class StepTraces:
    """Writes `step_N.json.gz` for each of some steps.

    Args:
        steps: which, from 1.
        folder: where to, usually `runs/NAME/traces`.
        world: whose ranks.
        now: the clock of phases, seconds.
    """

    def __init__(
        self,
        steps: Collection[int],
        folder: Path,
        world: World,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps, self._folder, self._world, self._now = steps, folder, world, now

    @contextmanager
    def step(self, step: int, spans: Callable[[], list[Span]]) -> Iterator[None]:
        """Traces the block, if it is one of the steps.

        Args:
            step: its number.
            spans: the phases of the step, once it is over.
        """
        if step not in self._steps:
            yield
            return
        offset, error = clock_offset(self._world, self._now)
        barriers = [self._barrier()]
        activities = [ProfilerActivity.CPU]
        if not self._world.platform.is_cpu:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            began = self._now()
            with record_function(CLOCK):
                pass
            marked = (began + self._now()) / 2
            yield
        phases = spans()
        barriers.append(self._barrier())
        clocks: list[tuple[float, float]] = self._world.gather_objects((began + offset, error))
        start = clocks[0][0]
        profiled = self._profiled(profiler)
        middles = [
            e["ts"] + e["dur"] / 2 for e in profiled if e.get("name") == CLOCK and "dur" in e
        ]
        shift_us = (marked + offset - start) * 1e6 - middles[0]
        events = [*self._phase_events([*phases, *barriers], step, offset - start)]
        events += self._moved(profiled, shift_us)
        about = {"step": step, "clock": "rank 0's", "clock_error_us": [1e6 * e for _, e in clocks]}
        self._write(step, events, about)

    def _barrier(self) -> Span:
        began = self._now()
        dist.barrier(group=self._world.cpu_group)
        return Span(BARRIER, began, self._now())

    def _profiled(self, profiler: profile) -> list[Event]:
        file = self._part("profile")
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        file.unlink()
        return events

    def _phase_events(self, spans: list[Span], step: int, shift_s: float) -> Iterator[Event]:
        pid = self._world.rank * PIDS
        yield from _named(pid, f"rank {self._world.rank}: phases")
        for span in spans:
            ts, dur = (span.began + shift_s) * 1e6, (span.ended - span.began) * 1e6
            kind = {"ph": "X", "cat": "phase", "name": span.name, "args": {"step": step}}
            yield {**kind, "pid": pid, "tid": 0, "ts": ts, "dur": dur}

    def _moved(self, events: list[Event], shift_us: float) -> Iterator[Event]:
        """Yields the profiler's events on rank 0's clock, under process numbers of this rank."""
        rank = self._world.rank
        pids: dict[object, int] = {}
        for event in events:
            if event["ph"] != "M":
                pids.setdefault(event["pid"], rank * PIDS + 1 + len(pids))
        for old, pid in pids.items():
            what = "host" if old == os.getpid() else f"GPU {old}" if old in range(64) else old
            yield from _named(pid, f"rank {rank}: {what}")
        for event in events:
            if event["pid"] not in pids or event.get("name", "").startswith("process_"):
                continue
            moved = {**event, "pid": pids[event["pid"]]}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift_us
            if "id" in event:  # of arrows, from a launch to its kernel
                moved["id"] = f"{rank}.{event['id']}"
            yield moved

    def _write(self, step: int, events: list[Event], about: Mapping[str, object]) -> None:
        with self._world.all_agree("writing a trace"):
            text = ",\n".join(json.dumps(event) for event in events)
            self._part("part").write_text(text, encoding="utf-8")
        with self._world.all_agree("joining a trace"):
            if self._world.rank == 0:
                self._join(self._folder / f"step_{step}.json.gz", about)

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

    def _part(self, kind: str, rank: int | None = None) -> Path:
        return self._folder / f"rank_{self._world.rank if rank is None else rank}.{kind}"


def _named(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
