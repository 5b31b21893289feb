"""The host of agents in a process of its own, with real programs and a stand-in for the engine."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from chat_tokenizers import byte_tokenizer

from hybridrl.agents.backend import Arrivals, SamplingTerms, TurnRequest
from hybridrl.agents.host import Assignment, Finished
from hybridrl.agents.host_process import CannotMove, HostProcess, _Events
from hybridrl.agents.host_settings import HostSettings
from hybridrl.config.agent import AgentConfig
from hybridrl.errors import UserError
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

    def __init__(self, host: HostProcess) -> None:
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
    host.abort(turn.request_id)  # the program asks again
    host.end(2)
    assert host.take_finished() == []
    # A process that dies is named.
    os.kill(host.process_id, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="process that runs agents ended with exit code -9"):
        host.versions([2])
    host.close()
    assert not process.is_running()


def _arrivals(host: HostProcess) -> tuple[TurnRequest, ...]:
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
    os.kill(process.pid, signal.SIGTERM)  # a job's signal, which the rank handles
    status = Path(f"/proc/{worker.pid}/status").read_text()
    ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)  # type: ignore[index]
    assert not ignored & 1 << signal.SIGTERM - 1
    host.versions([])  # still answers
    host.close()
    assert not process.is_running() and not worker.is_running()
    assert not list((tmp_path / "logs").glob("*.agents"))


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
