"""The host of agents in a process of its own, with real programs and a stand-in for the engine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import psutil
import pytest
from chat_tokenizers import byte_tokenizer

from hybridrl.agents import host_process
from hybridrl.agents.backend import Arrivals, SamplingTerms, TurnRequest
from hybridrl.agents.host import Assignment, Finished
from hybridrl.agents.host_pool import HostPool, num_processes, settings_of_parts
from hybridrl.agents.host_process import (
    CLOSE_S,
    CannotMove,
    HostProcess,
    _Answer,
    _Call,
    _Events,
    _Link,
    _serve,
)
from hybridrl.agents.host_settings import HostSettings
from hybridrl.config.agent import AgentConfig
from hybridrl.errors import UserError
from hybridrl.parallel.stop_signals import noted_signals
from hybridrl.rollout.engine import Completion


def settings_of(folder: Path, function: str, tokenizer: Any = None) -> HostSettings:
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    return HostSettings(
        agent=AgentConfig(function=function, max_turns=5),
        tokenizer=tokenizer,
        ends=(2,),
        vocab_size=300,
        terms=SamplingTerms(1.0, 400),
        max_row_tokens=400,
        template_arguments={},
        run_folder=folder,
    )


class Engine:
    """Answers turns with known tokens."""

    def __init__(self, host: HostProcess | HostPool) -> None:
        self.host = host
        self.turns: dict[int, list[tuple[TurnRequest, Completion]]] = {}  # by episode
        self.held: list[TurnRequest] = []

    def play(self, num_episodes: int, holds: int | None = None) -> list[Finished]:
        """Returns finished episodes. Turns of the episode `holds` are not answered."""
        found: list[Finished] = []
        until = time.monotonic() + 60
        while len(found) < num_episodes:
            assert time.monotonic() < until
            self.host.wait(1.0)
            done = []
            for turn in self.host.take().requests:
                if turn.sample_key == holds:
                    self.held.append(turn)
                    continue
                number = turn.request_id
                tokens, logps = (60 + number % 20, 61, 2), (-0.5 - number, -1.5, -2.5)
                one = Completion(number, tokens, logps, "stop", turn.turn)
                self.turns.setdefault(turn.sample_key, []).append((turn, one))
                done.append(one)
            if done:
                self.host.finish(done)
            found += self.host.take_finished()
        return found


def test_a_host_in_another_process_returns_what_was_sampled(tmp_path: Path) -> None:
    host = HostProcess(settings_of(tmp_path, "own_agents:branching"))
    process, engine = psutil.Process(host.process_id), Engine(host)
    host.wake(is_evaluation=False)
    for key in range(3):
        host.begin(Assignment(key, 0, key, "2+2=", {"answer": object()}))
    found = sorted(engine.play(2, holds=2), key=lambda one: one.key)
    assert [(one.key, one.reward, one.failure) for one in found] == [(0, 0.0, None), (1, 1.0, None)]
    for one in found:
        assert one.result.num_turns == 5 and len(one.result.rows) == 3
        assert not any(row.messages or row.text for row in one.result.rows), "not used by the rank"
        trained = Counter(
            (token, logp)
            for row in one.result.rows
            for token, logp, is_observed in zip(row.tokens, row.logps, row.observed, strict=True)
            if not is_observed
        )
        turns = engine.turns[one.key]
        sampled = [pair for _, done in turns for pair in zip(done.tokens, done.logps, strict=True)]
        assert trained == Counter(sampled)
        for row in one.result.rows:
            whole = row.prompt + row.tokens
            ends = [len(row.prompt) + span.start for span in row.spans]
            assert all(any(whole[:end] == turn.tokens for turn, _ in turns) for end in ends)
    (turn,) = engine.held
    host.finish([Completion(turn.request_id, (60, 2), (-1.0, -1.0), "stop", 7)])
    (turn,) = _arrivals(host)  # the program's second turn
    assert host.versions([2, 9]) == {2: Counter({7: 2})}
    host.sleep()
    host.abort(turn.request_id)
    (again,) = _arrivals(host)  # the program asks again
    assert (again.sample_key, again.tokens) == (2, turn.tokens)
    assert again.request_id != turn.request_id
    host.end(2)
    assert host.versions([2]) == {} and host.take_finished() == []
    # A process that dies is named.
    os.kill(host.process_id, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="process that runs agents ended with exit code -9"):
        host.versions([2])
    host.close()
    assert not process.is_running()


def test_several_processes_divide_the_episodes(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "own_agents:branching")
    agent = settings.agent.model_copy(update={"concurrency": 3, "workers": 2})
    pool = HostPool.start(replace(settings, agent=agent), 2)
    try:
        processes, engine = [psutil.Process(one) for one in pool.process_ids], Engine(pool)
        assert len({one.pid for one in processes}) == 2
        pool.wake(is_evaluation=False)
        for key in range(5):
            pool.begin(Assignment(key, 0, key, "2+2=", {}))
        found = sorted(engine.play(4, holds=4), key=lambda one: one.key)
        assert [(one.key, one.reward) for one in found] == [(k, float(k % 2)) for k in range(4)]
        for one in found:
            turns = engine.turns[one.key]
            assert {turn.request_id % 2 for turn, _ in turns} == {one.key % 2}
            sampled = Counter(token for _, done in turns for token in done.tokens)
            rows = one.result.rows
            pairs = [pair for row in rows for pair in zip(row.tokens, row.observed, strict=True)]
            assert Counter(token for token, is_observed in pairs if not is_observed) == sampled
        numbers = [turn.request_id for turns in engine.turns.values() for turn, _ in turns]
        assert len({*numbers}) == 20
        assert len(list((tmp_path / "logs").glob("rank_0*.agents"))) == 2
        (turn,) = engine.held or _arrivals(pool)
        pool.finish([Completion(turn.request_id, (60, 2), (-1.0, -1.0), "stop", 7)])
        (turn,) = _arrivals(pool)
        assert pool.versions([1, 4]) == {4: Counter({7: 2})}
        pool.sleep()
        pool.abort(turn.request_id)
        (turn,) = _arrivals(pool)
        assert turn.sample_key == 4
        pool.end(4)
        assert pool.versions([4]) == {}
        os.kill(pool.process_ids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="ended with exit code -9"):
            while time.monotonic() < began + 20:
                pool.wait(1.0)
                pool.take()
    finally:
        pool.close()
    assert not any(one.is_running() for one in processes)


def test_an_error_of_one_process_ends_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"agent\.function"):
        HostPool.start(settings_of(tmp_path, "own_agents:nothing_there"), 2)
    # Children of other tests may have ended without having been waited for.
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    assert not [one for one in alive if "host_process" in str(one.cmdline())]


def test_processes_follow_from_programs_and_cores() -> None:
    def number(num_cores: int, **agent: Any) -> int:
        return num_processes(AgentConfig(**agent), num_cores)

    many = {"function": "a:b", "concurrency": 256, "workers": 8}
    assert [number(cores, **many) for cores in (2, 8, 16, 64)] == [1, 2, 4, 4]
    assert number(64, **{**many, "concurrency": 65}) == 2
    assert number(64, **{**many, "workers": 3}) == 3
    assert number(64, **{**many, "port": 5000}) == 1
    assert number(64, command=["x"], concurrency=256) == 4
    assert number(64, server=True, concurrency=256) == 1
    parts = settings_of_parts(settings_of(Path(), "a:b"), 3)
    shares = [(one.agent.concurrency, one.agent.workers, one.part) for one in parts]
    whole = AgentConfig(function="a:b").concurrency
    assert sum(share[0] for share in shares) == whole and [s[1:] for s in shares] == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def _arrivals(host: HostProcess | HostPool) -> tuple[TurnRequest, ...]:
    until = time.monotonic() + 30
    while not (found := host.take().requests):
        assert time.monotonic() < until
        host.wait(0.1)
    return found


def test_turns_that_were_stopped_before_they_were_taken_are_left_out() -> None:
    host = object.__new__(HostProcess)
    host._arrived, host._aborted, host._finished, host._error = [], [], [], None
    turns = [TurnRequest(number, "s", 0, number, (1,), 5) for number in range(3)]
    host._note(_Events(Arrivals(tuple(turns[:2]), (7,))))
    host._note(_Events(Arrivals(tuple(turns[2:]), (1, 8))))
    assert host._arrived == [turns[0], turns[2]] and host._aborted == [7, 8]


def test_a_process_ends_with_its_programs_when_the_rank_closes_it(tmp_path: Path) -> None:
    host = HostProcess(settings_of(tmp_path, "own_agents:sleeping"))
    host.wake(is_evaluation=True)
    host.begin(Assignment(0, -1, 0, "2+2=", {}))
    process = psutil.Process(host.process_id)
    until = time.monotonic() + 30
    while not process.children():
        assert time.monotonic() < until
        time.sleep(0.05)
    (worker,) = process.children()
    for number in noted_signals():  # the rank handles them
        os.kill(process.pid, number)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)  # type: ignore[index]
    assert not ignored & 1 << signal.SIGTERM - 1
    host.versions([])  # still answers
    inherited = os.dup(host._link.connection.fileno())  # as in a process forked from the rank
    try:
        began = time.monotonic()
        host.close()
        assert time.monotonic() - began < CLOSE_S / 2 and host._process.returncode == 0
    finally:
        os.close(inherited)
    assert not process.is_running() and not worker.is_running()
    assert not list((tmp_path / "logs").glob("*.agents"))


class Broken:
    """A host whose calls raise, and whose events fill the connection."""

    def __init__(self, events: str = "", fails: bool = False) -> None:
        self.events, self.fails = events, fails
        self.num_waits, self.num_takes, self.is_closed = 0, 0, False
        self.woken = threading.Event()

    def take(self) -> Any:
        self.num_takes += 1
        if self.fails:
            raise KeyError("no queue")
        turn = TurnRequest(0, "s", 0, 0, (1,), 5, stop_strings=(self.events,))
        return Arrivals((turn,)) if self.events else Arrivals()

    def take_finished(self) -> list[Finished]:
        return []

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1
        if not self.events and not self.fails:
            self.woken.wait(timeout_s)
            self.woken.clear()

    def end_wait(self) -> None:
        self.woken.set()

    def begin(self, number: int) -> None:
        raise OSError(f"no folder {number}")

    def versions(self, keys: Any) -> dict[int, Counter[int]]:
        if keys:
            raise KeyError("no such key")
        return {}

    def close(self) -> None:
        self.is_closed = True


def served(host: Broken) -> tuple[Connection, threading.Thread]:
    """Returns the rank's side of a connection to a host that a thread serves."""
    ours, theirs = Pipe()

    def serve() -> None:
        with theirs:
            _serve(cast(Any, host), theirs, os.getppid())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return ours, thread


def received(link: Connection) -> Any:
    assert link.poll(20)
    return link.recv()


def test_a_host_with_errors_reads_calls_although_the_rank_reads_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = Broken("x" * 10**6)
    ours, thread = served(host)

    def call() -> None:
        for number in range(3000):
            ours.send(_Call("begin", (number,)))

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive(), "neither side reads"
    while (events := received(ours)).error is None:
        pass
    assert str(events.error) == "the host of agents raised OSError: no folder 0"
    assert "in begin" in capsys.readouterr().err, "the traceback is lost"
    # No events follow the error, but calls are answered, also with errors.
    for number, keys in enumerate([(), (1,)]):
        ours.send(_Call("versions", (keys,), number))
    assert received(ours) == _Answer(0, {})
    failed = received(ours)
    assert failed.number == 1 and "no such key" in str(failed.error)
    ours.close()
    thread.join(20)
    assert host.is_closed and not thread.is_alive()


def test_the_first_error_of_events_reaches_the_rank_once() -> None:
    host = Broken(fails=True)
    ours, thread = served(host)
    assert "no queue" in str(received(ours).error)
    ours.send(_Call("versions", ((),), 5))
    assert received(ours) == _Answer(5, {})
    time.sleep(0.2)  # many rounds, if the thread does not wait
    assert host.num_waits == host.num_takes == 1, "the thread waits for events that are not sent"
    ours.close()
    thread.join(20)
    assert host.is_closed


def unstarted(link: _Link) -> HostProcess:
    """Returns the rank's part of a host process."""
    host = object.__new__(HostProcess)
    host._link, host._process = link, link._process
    host._received, host._numbers = threading.RLock(), iter(range(9))  # type: ignore[assignment]
    host._arrived, host._aborted, host._finished, host._error = [], [], [], None
    host._answers = {}
    return host


def test_answers_belong_to_their_calls() -> None:
    ours, theirs = Pipe()
    host = unstarted(_Link(ours, cast(Any, None)))
    next(host._numbers)  # a call that was interrupted before its answer came
    theirs.send(_Answer(0, {1: Counter({1: 1})}))
    theirs.send(_Answer(1, error=RuntimeError("no such key")))
    with pytest.raises(RuntimeError, match="no such key"):
        host.versions([2])
    theirs.send(_Answer(2, {2: Counter({3: 4})}))
    assert host.versions([2]) == {2: Counter({3: 4})}


def test_an_interrupted_transfer_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    host = unstarted(_Link(ours, cast(Any, None)))

    def interrupted(connection: Connection) -> bytes:
        raise KeyboardInterrupt

    theirs.send(_Events())
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Connection, "recv_bytes", interrupted)
        host.take()
    for call in (host.take, host.sleep, lambda: host.versions([])):
        with pytest.raises(RuntimeError, match="was interrupted"):
            call()


@pytest.mark.parametrize(
    ("program", "message"),
    [("raise SystemExit(7)", "ended with exit code 7"), ("input()", "did not start within 0.2 s")],
)
def test_a_process_that_does_not_start_is_named_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    processes = []

    def spawned(file: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[file]))
        return processes[-1]

    monkeypatch.setattr(host_process, "_spawn", spawned)
    monkeypatch.setattr(host_process, "CLOSE_S", 0.1)
    if "input" in program:
        monkeypatch.setattr(host_process, "START_S", 0.2)
    with pytest.raises(RuntimeError, match=message):
        HostProcess(settings_of(tmp_path, "own_agents:silent"))
    assert processes[0].returncode is not None, "the process was not closed"


@pytest.mark.full
def test_errors_at_the_start_reach_the_rank(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="own_agents:no_such_function"):
        HostProcess(settings_of(tmp_path, "own_agents:no_such_function"))
    with pytest.raises(CannotMove, match="pickle"):
        HostProcess(settings_of(tmp_path, "own_agents:silent", tokenizer=lambda: None))
    module = ModuleType("only_in_this_process")
    kind = type("Tokenizer", (), {"__module__": module.__name__})
    module.Tokenizer = kind  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(CannotMove, match="only_in_this_process"):
            HostProcess(settings_of(tmp_path, "own_agents:silent", tokenizer=kind()))
    finally:
        del sys.modules[module.__name__]
