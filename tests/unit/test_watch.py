"""What rank 0 concludes from the beats of all ranks."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.parallel import stopping
from hybridrl.parallel.heartbeat import Heartbeat
from hybridrl.parallel.watch import ALONE_FACTOR, Beat, Call, Verdict, Wait, Watch, even

HOSTS = ("a", "a", "b", "b")
EVERY_S, SILENT_S = 2.0, 30.0


class Job:
    """Four ranks on two hosts, whose beats a test changes."""

    def __init__(self, stall_timeout_s: float | None = None) -> None:
        self.watch = Watch(EVERY_S, SILENT_S, 600.0, stall_timeout_s)
        self.beats = [
            Beat(1, host, f"{host}/1", "generate, step 2", at=f"engine.py:{rank} in step")
            for rank, host in enumerate(HOSTS)
        ]
        self.silent: set[int] = set()

    def change(self, rank: int, **fields: object) -> None:
        self.beats[rank] = replace(self.beats[rank], **fields)

    def wait(self, ranks: tuple[int, ...], seconds: float, number: int = 7) -> None:
        for rank in range(4):
            self.change(rank, entered={"world": number if rank in ranks else number - 1})
        for rank in ranks:
            self.change(rank, wait=Wait("world", number, None, "generation", seconds))

    def looks(self, seconds: float) -> Verdict | None:
        for _ in range(int(seconds / EVERY_S)):
            for rank in set(range(4)) - self.silent:
                self.change(rank, count=self.beats[rank].count + 1)
            if (found := self.watch.look(self.beats)) is not None:
                return found
        return None


def test_beats_travel_as_text() -> None:
    wait = Wait("replica", 3, [0, 1], "telling", 1.5)
    beat = Beat(
        4, "a", "a/1", "p", "q", "r", {"world": 2}, wait, 0.5, True, {3: "gone"}, True, True
    )
    assert Beat.from_json(beat.to_json()) == beat
    calls = (Call("g", 3, "barrier", range(0, 4096, 8)), Call("h", 1, "barrier", [1, 2, 5], True))
    beat = replace(beat, latest=calls, idle_s=3.0)
    assert Beat.from_json(beat.to_json()) == beat
    assert len(beat.to_json()) < 700  # not a number for each of 512 ranks
    # So it is with the group of what a rank waits in, of which each of thousands tells.
    beat = replace(beat, wait=Wait("engines", 3, even(list(range(4096))), "telling", 1.5))
    assert Beat.from_json(beat.to_json()) == beat and len(beat.to_json()) < 700
    assert even([]) == [] and even([5]) == range(5, 6) and even([1, 2, 5]) == [1, 2, 5]
    verdict = Verdict("x", 3)
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_watch_finds_nothing_wrong_with_ranks_that_beat_however_long_they_take() -> None:
    job = Job()
    job.wait((0, 2, 3), 7200.0)
    assert job.looks(7200) is None


def test_watch_names_a_stopped_rank_after_30_s() -> None:
    job = Job()
    assert job.looks(20) is None
    job.silent = {1}
    assert job.looks(28) is None
    job.change(0, found={1: "its process is stopped"})
    found = job.looks(4)
    assert found is not None and found.culprit == 1
    assert found.message == (
        "rank 1 on host a gave no sign of life for 30 s: its process is stopped. Last seen in "
        "phase 'generate, step 2', at engine.py:1 in step"
    )


def test_watch_waits_for_a_silent_rank_whose_process_runs() -> None:
    job = Job()
    job.looks(4)
    job.silent = {1}
    assert job.looks(600) is None
    job.wait((0, 2, 3), 61.0)
    notice = job.watch.notice(job.beats)
    assert notice is not None and "rank 1 on host a (its Python does not answer" in notice


def test_watch_names_a_host_that_vanished_with_all_its_ranks() -> None:
    job = Job()
    job.looks(4)
    job.silent = {2, 3}
    found = job.looks(40)
    assert found is not None and found.culprit == 2
    assert found.message.startswith("ranks 2-3 on host b gave no sign of life for 30 s: neither")


def test_watch_gives_the_only_rank_of_a_host_more_time() -> None:
    """Nobody can tell whether its process runs; native code may hold its interpreter."""
    job = Job()
    job.change(3, host="c", host_id="c/1")
    assert job.looks(10) is None
    job.silent = {3}
    assert job.looks(SILENT_S * ALONE_FACTOR - 4) is None
    found = job.looks(8)
    assert found is not None and found.culprit == 3
    assert (
        "rank 3 on host c gave no sign of life for 120 s: neither its process nor" in found.message
    )


def test_watch_does_not_miss_ranks_that_took_leave() -> None:
    job = Job()
    job.looks(4)
    job.silent = {1, 2, 3}
    for rank in job.silent:
        job.change(rank, has_left=True)
    assert job.looks(600) is None


def test_watch_counts_its_own_looks_and_not_the_time_that_it_was_stopped() -> None:
    job = Job()
    job.looks(4)
    job.silent = {0, 1, 2, 3}  # all were, with their clocks; then go on
    assert job.looks(10) is None
    job.silent = set()
    assert job.looks(4) is None


def test_watch_gives_up_a_rank_that_beats_after_the_stall_timeout() -> None:
    job = Job(stall_timeout_s=100.0)
    job.wait((0, 2, 3), 99.0)
    job.change(1, part="generation", at="own.py:3 in forever")
    assert job.looks(2) is None
    job.wait((0, 2, 3), 101.0)
    found = job.looks(2)
    assert found is not None and found.culprit == 1
    assert found.message == (
        "rank 1 on host a, in phase 'generate, step 2', generation, at own.py:3 in forever; "
        "others wait after 'generation' for longer than run.stall_timeout_s=100"
    )


def test_watch_knows_who_keeps_the_others_in_a_part_without_bounds() -> None:
    job = Job(stall_timeout_s=100.0)
    for rank in range(4):
        job.change(rank, part="writing", within=101.0, is_in_collective=rank != 3)
    found = job.looks(2)
    assert found is not None and found.culprit == 3
    assert "rank 3 on host b" in found.message and "'writing' took longer than" in found.message


def test_watch_compares_waits_with_ranks_of_the_same_group_only() -> None:
    job = Job(stall_timeout_s=100.0)
    for rank, number in enumerate((5, 4, 3, 3)):  # of two replicas
        job.change(rank, entered={"replica": number})
    job.change(0, wait=Wait("replica", 5, [0, 1], "telling", 101.0))
    found = job.looks(2)
    assert found is not None and found.culprit == 1
    assert "rank 2" not in found.message


def test_watch_bounds_a_collective_that_all_have_entered() -> None:
    job = Job()
    job.wait((0, 1, 2, 3), 10.0)
    assert job.looks(590) is None
    found = job.looks(20)
    assert found is not None and found.culprit is None
    assert "run.collective_timeout_s=600" in found.message and "network" in found.message


def test_watch_says_once_a_minute_who_is_waited_for() -> None:
    job = Job()
    told = []
    for seconds in range(0, 200, 2):
        job.wait((0, 2), float(seconds))
        job.looks(2)
        if (notice := job.watch.notice(job.beats)) is not None:
            told.append((seconds, notice))
    assert [seconds for seconds, _ in told] == [60, 120, 180]
    assert told[0][1] == (
        "ranks have waited for 60 s after 'generation' for rank 1 on host a, in phase "
        "'generate, step 2', at engine.py:1 in step; rank 3 on host b, in phase "
        "'generate, step 2', at engine.py:3 in step"
    )
    job.wait((), 0.0)
    assert job.watch.notice([replace(beat, wait=None) for beat in job.beats]) is None
    job.wait((0, 2), 70.0)
    assert job.watch.notice(job.beats) is not None  # another wait


class SlowStore:
    """A store on a busy host."""

    def __init__(self, answers_after_s: float) -> None:
        self._answers_after_s, self.is_asked = answers_after_s, threading.Event()
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.is_asked.set()
            time.sleep(self._answers_after_s)
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return False


def test_a_rank_leaves_after_the_answer_of_a_slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts a process whose thread comes back from the store while it ends."""
    monkeypatch.setattr("hybridrl.parallel.heartbeat.BEAT_S", 0.01)
    store = SlowStore(answers_after_s=1.0)
    beating = Heartbeat(store, 1, 2, Watch(2.0, 30.0, 600.0, None))  # type: ignore[arg-type]
    beating.start()
    assert store.is_asked.wait(5)
    beating.stop()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"_beat_on", "_guard"}
    assert Beat.from_json(store.values["beat/1"]).has_left


def test_a_stop_file_is_found_after_its_file_system_did_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that looks for it goes on; pathlib's `exists` would raise."""
    real, fails = os.stat, [3]

    def stat(path: Any, *given: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("/stop") and fails[0]:
            fails[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *given, **named)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(stopping, "LOOK_S", 0.01)
    file = tmp_path / "stop"
    file.touch()
    heartbeat = SimpleNamespace(stop_signal=0)
    world: Any = SimpleNamespace(rank=0, heartbeat=heartbeat)
    is_saving = threading.Event()
    given = world, stopping.Notice(1000.0, file), is_saving
    thread = threading.Thread(target=stopping._look, args=given, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not heartbeat.stop_signal and time.monotonic() < deadline:
        time.sleep(0.01)
    is_saving.set()
    thread.join()
    assert heartbeat.stop_signal == signal.SIGTERM and fails == [0] and not file.exists()
