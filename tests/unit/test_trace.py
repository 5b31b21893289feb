"""Parts of a profile on the clock of phases."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hybridrl.loop import trace


def test_a_rank_that_loses_its_core_while_a_part_begins_is_on_the_clock(tmp_path: Path) -> None:
    """The clock is read, the core is lost, and the event comes long after."""
    num_read = [0]

    def now() -> float:
        found = time.perf_counter()
        num_read[0] += 1
        if num_read[0] in (1, 5):  # before an event
            time.sleep(0.2)
        return found

    parts = trace._Parts(True, now)
    shifts_us = []
    for number in range(2):
        parts.start()
        parts.stop()
        profiler, tightest, marked = parts.done[number]
        file = tmp_path / f"{number}.json"
        profiler.export_chrome_trace(str(file))
        events = filter(trace._is_mark, json.loads(file.read_text())["traceEvents"])
        mark = sorted(events, key=lambda event: event["ts"])[tightest]
        shifts_us.append(marked * 1e6 - (mark["ts"] + mark["dur"] / 2))
    # Both parts are of the same clocks; a core that is lost eight times in turn is not expected.
    assert abs(shifts_us[0] - shifts_us[1]) < 20e3, shifts_us
