"""Times the loop that steps an engine for agents, and the processes of the agents.

The loop's time is divided into engine steps in which requests begin, other engine steps, the
exchange of turns with the endpoint's process, and waiting for it while the engine is empty.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from hybridrl.agents.host import AgentHost
from hybridrl.agents.host_pool import HostPool


class LoopTimes:
    """Wraps methods of an engine and of the manager of agents' responses; adds up their times."""

    def __init__(self, engine: Any, episodes: Any) -> None:
        self._engine, self._host = engine, episodes._host
        self._seconds, self._counts = Counter[str](), Counter[str]()
        self._begins = False
        self._cpu_before: dict[str, float] = {}
        self._step, self._submit = engine.step, engine.submit
        engine.step, engine.submit = self._timed_step, self._timed_submit
        if hasattr(engine, "_add_waiting"):  # vLLM's adapter
            self._wrap(engine, "_add_waiting", "add_requests")
        self._wrap(episodes, "advance", "exchange")
        self._wrap(self._host, "wait", "wait")
        for name in ("take", "finish"):
            self._wrap(self._host, name, name)

    def begin(self) -> None:
        self._seconds.clear()
        self._counts.clear()
        self._begins = False
        self._cpu_before = self._cpu_s()
        self._began = time.perf_counter()

    def end(self) -> dict[str, float]:
        """Returns the times of a measurement: seconds of the wall clock, of the parts of the loop
        (`add_requests` is a part of the steps, `take` and `finish` of `exchange_s`) and of
        processors.
        """
        seconds = time.perf_counter() - self._began
        spent, counts = self._seconds, self._counts
        num_steps = counts["new"] + counts["old"]
        cpu_s = {name: now - self._cpu_before[name] for name, now in self._cpu_s().items()}
        return {
            "seconds": seconds,
            "engine_steps": num_steps,
            "requests_in_a_step": counts["rows"] / num_steps,
            "steps_with_new": counts["new"],
            "steps_with_new_s": spent["new"],
            "other_steps_s": spent["old"],
            "step_with_new_ms": 1000 * spent["new"] / max(counts["new"], 1),
            "other_step_ms": 1000 * spent["old"] / max(counts["old"], 1),
            "add_requests_s": spent["add_requests"],
            "submit_s": spent["submit"],
            "exchange_s": spent["exchange"] - spent["wait"],
            "take_s": spent["take"],
            "finish_s": spent["finish"],
            "wait_s": spent["wait"],
            **{f"{name}_cpu_s": found for name, found in cpu_s.items()},
        }

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self._seconds[part] += time.perf_counter() - began

        setattr(owner, name, timed)

    def _timed_step(self) -> None:
        part, self._begins = "new" if self._begins else "old", False
        self._counts["rows"] += len(self._engine._rows)
        began = time.perf_counter()
        self._step()
        self._seconds[part] += time.perf_counter() - began
        self._counts[part] += 1

    def _timed_submit(self, requests: Any) -> None:
        self._begins |= bool(requests)
        began = time.perf_counter()
        self._submit(requests)
        self._seconds["submit"] += time.perf_counter() - began

    def _cpu_s(self) -> dict[str, float]:
        """Returns the processor time of this process, of the endpoint's processes together, and of
        the agents' processes together.
        """
        found = {"engine_process": time.process_time()}
        if isinstance(self._host, AgentHost):  # in this process
            return found
        pool = self._host.process_ids if isinstance(self._host, HostPool) else ()
        endpoints = [psutil.Process(one) for one in pool or (self._host.process_id,)]
        agents = [child for one in endpoints for child in one.children(recursive=True)]
        found["endpoint"] = sum(map(_cpu_s, endpoints))
        found["agents"] = sum(map(_cpu_s, agents))
        return found


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def shown(times: Mapping[str, float]) -> dict[str, float]:
    """Returns times with four significant digits."""
    return {name: float(f"{value:.4g}") for name, value in times.items()}
