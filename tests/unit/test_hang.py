"""Which ranks without progress are named, and what their page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.parallel import collectives
from hybridrl.parallel.collectives import calls_of
from hybridrl.parallel.failure import Failure
from hybridrl.parallel.idle_clock import IdleClock
from hybridrl.parallel.stacks import _written_calls, calls_of_threads, position
from hybridrl.parallel.watch import Beat, Call, Wait, missing_ranks
from hybridrl.services.launch.rank_ends import EndedRank, Outcome, conclude
from hybridrl.services.liveness import hang
from hybridrl.services.liveness.hang import Hang, HangWatch, find_hang
from hybridrl.services.liveness.hang_reports import HangReports, newest_report

ALL = (0, 1, 2, 3)


def call(number: int, ranks: tuple[int, ...] = ALL, what: str = "all_reduce", **more: Any) -> Call:
    return Call(f"g{ranks}", number, f"{what} of float [2]", ranks, **more)


def beats(**of_ranks: dict[str, Any]) -> list[Beat]:
    """Returns four ranks' beats: without progress for 30 s in step 2, unless told otherwise."""
    plain = Beat(1, "a", "a/1", "update, step 2", at="own.py:3 in f", idle_s=30.0)
    return [replace(plain, **of_ranks.get(f"r{rank}", {})) for rank in range(4)]


def waits_in(*calls: Call) -> dict[str, Any]:
    return {"latest": calls, "is_in_collective": True}


def found(those: list[Beat]) -> Hang | None:
    return HangWatch(25.0, 300.0).look(those)


def test_a_rank_elsewhere_is_named_and_where_the_others_wait() -> None:
    waiting = waits_in(call(5))
    hang = found(beats(r0=waiting, r1=waiting, r2={"latest": (call(4, is_over=True),)}, r3=waiting))
    assert hang is not None and hang.suspects == [2]
    assert hang.message == (
        "rank 2 on host a has made no progress for 30 s, in phase 'update, step 2', at own.py:3 in "
        "f; ranks 0-1, 3 wait in all_reduce of float [2], #5 of group g(0, 1, 2, 3) (ranks 0-3)"
    )


def test_ranks_without_progress_for_which_nobody_waits_are_no_hang() -> None:
    assert found(beats()) is None


def test_a_rank_that_makes_progress_is_waited_for() -> None:
    waiting = waits_in(call(5))
    assert found(beats(r0=waiting, r1=waiting, r2={"idle_s": 3.0}, r3=waiting)) is None
    wait = Wait("world", 7, None, "generation", 600.0)
    of_world = {"wait": wait, "entered": {"world": 7}}
    slow = {"idle_s": 3.0, "entered": {"world": 6}}
    assert found(beats(r0=of_world, r1=of_world, r2=slow, r3=of_world)) is None
    still = {"entered": {"world": 6}}
    hang = found(beats(r0=of_world, r1=of_world, r2=still, r3=of_world))
    assert hang is not None and hang.suspects == [2]
    assert hang.message.endswith("; ranks 0-1, 3 wait after 'generation'")


def test_who_waits_for_a_slow_rank_is_not_blamed_by_those_that_wait_for_it() -> None:
    """Rank 0 waits for the world, rank 1 in its replica for rank 2, which generates."""
    world = Wait("world", 7, None, "generation", 60.0)
    replica = Wait("replica", 3, (1, 2), "telling", 60.0)
    those = beats(
        r0={"wait": world, "entered": {"world": 7}},
        r1={"wait": replica, "entered": {"world": 6, "replica": 3}},
        r2={"idle_s": 1.0, "entered": {"world": 6, "replica": 2}},
        r3={"wait": world, "entered": {"world": 7}},
    )
    assert found(those) is None
    those[2] = replace(those[2], idle_s=40.0)
    hang = found(those)
    assert hang is not None and hang.suspects == [2]


def test_a_row_of_ranks_of_which_the_last_waits_for_a_slow_one_is_no_hang() -> None:
    those = beats(r3={"idle_s": 1.0, "entered": {"c": 1}})
    for rank, group in enumerate("abc"):
        wait = Wait(group, 2, (rank, rank + 1), "its turn", 60.0)
        those[rank] = replace(those[rank], wait=wait, entered={group: 2})
    assert found(those) is None
    those[3] = replace(those[3], idle_s=40.0)
    hang = found(those)
    assert hang is not None and hang.suspects == [3]


def test_ranks_in_different_collectives_are_named_the_fewest_first() -> None:
    whole, pair = waits_in(call(5)), waits_in(call(3, (0, 2)), call(4, is_over=True))
    over = call(2, (0, 2), is_over=True)
    hang = found(beats(r0=waits_in(call(5), over), r1=whole, r2=pair, r3=whole))
    assert hang is not None and hang.suspects == [2]
    assert hang.message.startswith(
        "ranks have waited for each other in different collectives for 30 s: rank 2 in all_reduce "
        "of float [2], #3 of group g(0, 2) (ranks 0, 2) ("
    )
    assert "; ranks 0-1, 3 in all_reduce of float [2], #5 of group g(0, 1, 2, 3)" in hang.message


def test_a_rank_that_has_just_come_to_a_collective_counts_there() -> None:
    whole, pair = waits_in(call(5)), waits_in(call(3, (0, 2)), call(4, is_over=True))
    late = {**whole, "idle_s": 20.0}
    over = call(2, (0, 2), is_over=True)
    hang = found(beats(r0=waits_in(call(5), over), r1=late, r2=pair, r3=late))
    assert hang is not None and hang.suspects == [2] and "; ranks 0-1, 3 in all" in hang.message


def test_two_ranks_in_different_collectives_are_both_named() -> None:
    """Nobody can tell which of the two is wrong."""
    those = beats(
        r0=waits_in(call(2, (0, 1)), call(8, is_over=True)),
        r1=waits_in(call(9), call(1, (0, 1), is_over=True)),
        r2={"idle_s": 0.0},
        r3={"idle_s": 0.0},
    )
    hang = found(those)
    assert hang is not None and hang.suspects == [0, 1]


def test_different_operations_of_the_same_number_are_different_collectives() -> None:
    same, other = waits_in(call(5)), waits_in(call(5, what="barrier"))
    hang = found(beats(r0=same, r1=other, r2=same, r3=same))
    assert hang is not None and hang.suspects == [1]


def test_all_ranks_in_the_same_collective_are_the_networks_matter() -> None:
    same = waits_in(call(5))
    assert found(beats(r0=same, r1=same, r2=same, r3=same)) is None


def test_a_receive_is_for_its_sender() -> None:
    receive = call(3, what="recv 0<-1", is_p2p=True, peer=1)
    hang = found(beats(r0=waits_in(receive), r1={}, r2={"idle_s": 0.0}, r3={"idle_s": 0.0}))
    assert hang is not None and hang.suspects == [1]
    # gloo's are not recorded
    hang = found(beats(r0={"is_in_collective": True}, r2={"idle_s": 0.0}, r3={"idle_s": 0.0}))
    assert hang is not None and hang.suspects == [1]


def transfer(what: str, peer: int, tensors: str = "float [2]", number: int = 1) -> dict[str, Any]:
    waiting = Call("7", number, f"{what} of {tensors}", (0, 1), is_p2p=True, peer=peer)
    return waits_in(waiting)


def test_a_send_and_its_receive_are_one_slow_operation() -> None:
    """Page-locked memory that is taken in a first checkpoint holds up NCCL."""
    sends, receives = transfer("send 0->1", 1, number=9), transfer("recv 1<-0", 0)
    at = {"r2": {"idle_s": 0.0}, "r3": {"idle_s": 0.0}}
    hang = found(beats(r0={**sends, "at": "pin.py:7 in reserve"}, r1=receives, **at))
    assert hang is not None and hang.suspects == [0, 1]
    assert hang.message == (
        "a send of float [2] between ranks 0 and 1, group 7, is slow: ranks 0-1 have been inside "
        "for 30 s, rank 0 in phase 'update, step 2', at pin.py:7 in reserve; rank 1 in phase "
        "'update, step 2', at own.py:3 in f"
    )
    waiting = waits_in(call(5))
    hang = found(beats(r0=sends, r1=receives, r2=waiting, r3=waiting))
    assert hang is not None and hang.suspects == [0, 1] and " is slow: " in hang.message
    assert hang.message.endswith(
        "; ranks 2-3 wait in all_reduce of float [2], #5 of group g(0, 1, 2, 3) (ranks 0-3)"
    )
    # gloo's are not recorded: whose peer is whose is not known.
    inside = {"is_in_collective": True}
    hang = found(beats(r0=inside, r1=inside, r2=waiting, r3=waiting))
    assert hang is not None and hang.suspects == [0, 1]
    assert hang.message.startswith("a send with its receive is slow: ranks 0-1 have been inside")
    # One of them came a beat later, and does not stand still yet.
    later = {**inside, "idle_s": 23.0}
    hang = found(beats(r0=inside, r1=later, r2=waiting, r3=waiting))
    assert hang is not None and hang.suspects == [0, 1], hang
    assert hang.message.startswith("a send with its receive is slow: ranks 0-1 have been inside")


@pytest.mark.parametrize(
    "other", [("send 1->0", 0, "float [2]"), ("recv 1<-0", 0, "float [3]"), ("recv 1<-2", 2)]
)
def test_sends_and_receives_that_do_not_meet_are_different_operations(
    other: tuple[Any, ...],
) -> None:
    elsewhere = waits_in(call(5))
    hang = found(
        beats(r0=transfer("send 0->1", 1), r1=transfer(*other), r2=elsewhere, r3=elsewhere)
    )
    assert hang is not None
    assert hang.message.startswith("ranks have waited for each other in different collectives")


def test_ranks_that_took_leave_are_not_waited_for() -> None:
    waiting = waits_in(call(5))
    gone = {"has_left": True}
    assert found(beats(r0=waiting, r1=waiting, r2=gone, r3=waiting)) is None


def test_more_time_passes_before_the_first_step() -> None:
    waiting = {**waits_in(call(5)), "phase": "start"}
    those = beats(r0=waiting, r1=waiting, r2={"phase": "start"}, r3=waiting)
    assert found(those) is None
    assert found([replace(beat, idle_s=301.0) for beat in those]) is not None


def test_a_phase_that_once_paused_for_long_is_given_twice_that() -> None:
    watch, waiting = HangWatch(25.0, 300.0), waits_in(call(5))
    those = beats(r0=waiting, r1=waiting, r3=waiting)
    assert watch.look(those) is not None
    assert watch.look([replace(beat, idle_s=31.0) for beat in those]) is None  # it was told
    assert watch.over([replace(beat, idle_s=40.0) for beat in those]) is None
    watch.look([replace(beat, idle_s=40.0) for beat in those])
    on = beats(r2={"idle_s": 0.0})
    assert watch.over(on) == "rank 2 continued after 40 s"
    assert watch.look(on) is None
    assert watch.over(on) is None
    again = [replace(beat, idle_s=79.0) for beat in those]
    assert watch.look(again) is None
    assert watch.look([replace(beat, idle_s=81.0) for beat in again]) is not None


def test_calls_are_read_from_the_flight_recorder() -> None:
    def entry(number: int, name: str, group: str, **more: Any) -> dict[str, Any]:
        plain = {
            "process_group": [group, "GRADS"],
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": name,
            "input_sizes": [[3, 4]],
            "input_dtypes": ["BFloat16"],
            "retired": True,
            "state": "scheduled",
        }
        return plain | more

    entries = [
        entry(1, "nccl:all_reduce", "7"),
        entry(2, "nccl:all_gather", "7", retired=False),
        entry(1, "nccl:barrier", "gone"),
        entry(2, "nccl:send 0->1", "7", is_p2p=True, p2p_seq_id=1),
        entry(2, "nccl:recv 0<-1", "7", is_p2p=True, p2p_seq_id=2, retired=False),
        entry(3, "nccl:broadcast", "7", retired=False, input_sizes=[], input_dtypes=[]),
    ]
    gathered, received, broadcast = calls_of(entries, {"7": [4, 9]})
    assert gathered.name == "all_gather of bfloat16 [3, 4], #2 of group 7 GRADS (ranks 4, 9)"
    assert not gathered.is_over and not broadcast.is_over and broadcast.number == 3
    assert received.is_p2p and received.peer == 9 and received.number == 2
    [last] = calls_of(entries[:1], {"7": [4, 9]})
    assert last.is_over and last.number == 1


def test_a_recorder_without_entries_hides_no_call_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's recorder of torch 2.14 writes no entries while a process has used gloo alone."""
    call = {
        "process_group": ["7", ""],
        "collective_seq_id": 1,
        "is_p2p": False,
        "profiling_name": "gloo:barrier",
        "input_sizes": [],
        "input_dtypes": [],
        "retired": False,
        "state": "scheduled",
    }
    dumps = [lambda *_: '{"version": "2.10"}', lambda *_: json.dumps({"entries": [call]})]
    group = SimpleNamespace(group_name="7", size=lambda: 2)
    monkeypatch.setattr(collectives, "_dumps", lambda: dumps)
    monkeypatch.setattr(collectives, "_groups", lambda: [group])
    monkeypatch.setattr(collectives.dist, "get_process_group_ranks", lambda _: [4, 9])
    [waiting] = collectives.latest_calls()
    assert waiting.name == "barrier, #1 of group 7 (ranks 4, 9)" and not waiting.is_over


def test_a_rank_that_was_held_up_is_not_idle_for_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("hybridrl.parallel.idle_clock.time.monotonic", lambda: now[0])
    clock = IdleClock(1e9, 2.0)
    assert clock.look("update")[0] == 0.0
    for _ in range(10):
        now[0] += 2.0
        idle_s, _ = clock.look("update")
    assert idle_s == pytest.approx(20.0)
    now[0] += 3600.0
    assert clock.look("update")[0] == pytest.approx(24.0)
    assert clock.look("generate")[0] == 0.0


# A watcher reads a thread that goes deep and back, while garbage lets that thread run on as soon as
# it is collected, whoever collects it. Frame objects of that thread end this in a tenth of a second
# in Python 3.11.
WATCHED = """
import gc, os, threading, time
from hybridrl.parallel.stacks import _written_calls, calls_of_threads, position

gc.set_threshold(25, 1000, 1000)
main = threading.get_ident()
told = []

class Garbage:
    left = 20
    def __init__(self):
        self.me = self
        Garbage.left -= 1
    def __del__(self):
        time.sleep(0.0001)
        Garbage.left += 1

def watch():
    while True:
        told.append(position(main, ""))

def deep(left):
    if left:
        return deep(left - 1)
    if Garbage.left > 0:
        Garbage()
    time.sleep(0)

threading.Thread(target=watch, daemon=True).start()
ends = time.monotonic() + 1
while time.monotonic() < ends or len(told) < 20:
    deep(400)
    deep(3)
assert any("in deep" in line for line, _, _ in told)
os._exit(0)  # the watcher goes on
"""


def test_a_thread_can_be_read_while_it_runs() -> None:
    command = [sys.executable, "-c", WATCHED]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)


def test_where_no_file_can_be_opened_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    for name in ("memfd_create", "open"):
        monkeypatch.setattr(os, name, refuse, raising=False)
    assert _written_calls() == {}


@pytest.mark.parametrize("read", [calls_of_threads, _written_calls])
def test_names_that_are_not_ascii_are_told_as_they_are(
    read: Callable[[], dict[int, list[FrameSummary]]],
) -> None:
    ready, end = threading.Event(), threading.Event()
    names = {"ready": ready, "end": end}
    file = "/home/J\xfcrgen/\u6e2c\u8a66/\U0001f600.py"
    exec(compile("def größe():\n    ready.set()\n    end.wait(60)", file, "exec"), names)
    thread = threading.Thread(target=names["größe"])
    thread.start()
    assert ready.wait(10) and thread.ident is not None
    calls = read()[thread.ident]
    end.set()
    thread.join()
    [found] = [call for call in calls if call.filename == file]
    assert (found.name, found.lineno) == ("größe", 3)


def test_the_report_has_the_suspected_rank_first(tmp_path: Path) -> None:
    those = beats(r0=waits_in(call(5)), r1={"latest": (call(4, is_over=True),)})
    those[2] = replace(those[2], found={1: "its process is stopped"})
    asked: list[Sequence[int]] = []
    reports = HangReports(asked.append)
    told = reports.explained("rank 1 hangs", [1], those, [1], tmp_path)
    file = tmp_path / "hangs" / "step_2.txt"
    assert told == f"rank 1 hangs; all ranks: {file}" and asked == []
    text = file.read_text()
    assert text.index("rank 1 on host a (suspected): does not answer: its process is stopped") < (
        text.index("rank 0 on host a: no progress for 30 s")
    )
    assert "waits in: all_reduce of float [2], #5 of group g(0, 1, 2, 3) (ranks 0-3)" in text
    assert "  rank 0: #5 all_reduce of float [2], not finished\n  rank 1: #4 " in text
    assert reports.explained("rank 1 hangs", [1], those, [1], None) == "rank 1 hangs"


def test_stacks_are_asked_for_once_a_hang(tmp_path: Path) -> None:
    waiting = waits_in(call(5))
    those = beats(r0=waiting, r1={"latest": (call(4, is_over=True),)}, r2=waiting, r3=waiting)
    asked: list[Sequence[int]] = []
    reports = HangReports(asked.append)
    told = [reports.look(those, [], tmp_path) for _ in range(2)]
    assert told[0][0].startswith("rank 1 on host a has made no progress") and told[1] == []
    assert asked == [[]]


def test_the_end_of_a_run_points_to_the_report_of_the_phase_it_ended_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank_0.log").touch()
    (logs / "rank_0.phase").write_text("update, step 2")
    Failure("error", "RuntimeError: timed out").write(logs / "rank_0.error")
    outcome = Outcome([EndedRank(0, 1, str(logs / "rank_0.log"), "a")], [0])
    os.utime(logs / "rank_0.phase", (1.0, time.time() - 100))
    HangReports(lambda silent: None).explained("rank 1 hangs", [1], beats(), [], tmp_path)
    written = tmp_path / "hangs" / "step_2.txt"
    assert newest_report(tmp_path, time.time() - 50) == (written, "rank 1 hangs")
    assert conclude(outcome, logs) == 1
    assert f"state of all ranks before that: {written}" in capsys.readouterr().err
    os.utime(logs / "rank_0.phase", (1.0, time.time() + 100))  # it went on since
    conclude(outcome, logs)
    assert "state of all ranks" not in capsys.readouterr().err


def test_find_hang_needs_no_call_of_ranks_that_make_progress() -> None:
    those = beats(r0=waits_in(call(5)), r1={"idle_s": 0.0})
    assert find_hang(those, {0}) is None


def test_a_line_tells_who_calls_a_module_of_python() -> None:
    event = threading.Event()

    def waits() -> None:
        event.wait()  # two frames of threading.py

    thread = threading.Thread(target=waits)
    thread.start()
    told, ends = "", time.monotonic() + 10
    while told.count("<") < 1 and time.monotonic() < ends:
        assert thread.ident is not None
        told, in_collective, compiles = position(thread.ident, "")
    event.set()
    thread.join()
    lines = told.split(" < ")
    assert lines[0].startswith("threading.py:") and lines[1].endswith("in waits"), told
    assert not in_collective and not compiles


def test_who_is_missing_is_found_once_for_all_that_wait_in_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a thousand ranks each would look at all the others."""
    num, looked = 64, list[Wait]()

    def noted(wait: Wait, beats: Sequence[Beat]) -> list[int]:
        looked.append(wait)
        return missing_ranks(wait, beats)

    wait = Wait("engines", 3, range(num), "generation", 40.0)
    beats = [
        Beat(1, "a", "a/1", "generate, step 2", entered={"engines": 3}, wait=wait, idle_s=40.0)
        for _ in range(num - 1)
    ]
    beats.append(Beat(1, "a", "a/1", "generate, step 2", entered={"engines": 2}, idle_s=40.0))
    monkeypatch.setattr(hang, "missing_ranks", noted)
    found = find_hang(beats, set(range(num)))
    assert found is not None and list(found.suspects) == [num - 1]
    assert len(looked) == 1
