"""Episodes of agents on the ranks of a replica, with a real host and without an engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from test_agent_runners import Held, host_of

from hybridrl.agents.backend import SamplingTerms, TurnRequest
from hybridrl.agents.conversation import BadRequest, ContextOverflow
from hybridrl.agents.host import AgentHost
from hybridrl.agents.host_settings import HostSettings
from hybridrl.agents.samples import Budgets, pick_all
from hybridrl.agents.sessions import Session, Sessions
from hybridrl.agents.tasks import Report
from hybridrl.config.agent import AgentConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.contracts.batch import Prompt
from hybridrl.errors import UserError
from hybridrl.generation.agent_episodes import AgentEpisodes
from hybridrl.generation.responses import completion_from_json
from hybridrl.generation.saved_rollouts import saved_fields
from hybridrl.loop.agent_setup import _host, max_stop_tokens
from hybridrl.parallel.messages import pack, unpack
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rollout.engine import Completion, Request, SamplingParams

PROMPT = Prompt(0, "2+2=", (1, 2))
SAMPLING = SamplingParams(max_new_tokens=40, min_new_tokens=8, stop_token_ids=(3,))


class Link:
    """Stands in for a replica of two ranks in one process: the first rank is called first."""

    num_ranks = 1  # so that each step exchanges events

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast_object(self, value: Any) -> Any:
        self.sent.append(pack(value))
        return value


class Follower:
    num_ranks = 1

    def __init__(self, link: Link) -> None:
        self._link = link

    def broadcast_object(self, value: Any) -> Any:
        return unpack(self._link.sent.pop(0))


class Replica:
    """Two ranks with one host, whose programs end when the test says so."""

    def __init__(
        self, folder: Path, picker: Callable[..., Any] = pick_all, budgets: Budgets | None = None
    ) -> None:
        self.runner, self.sessions = Held(), Sessions(100, None)
        self.opened: list[Session] = []
        open_session = self.sessions.open

        def recorded(*args: Any, **more: Any) -> Session:
            if budgets is not None:
                args = (*args[:2], budgets)
            self.opened.append(open_session(*args, **more))
            return self.opened[-1]

        self.sessions.open = recorded  # type: ignore[method-assign]
        self.host: AgentHost = host_of(folder, self.runner, self.sessions, picker)
        self.link = Link()
        self.first = AgentEpisodes(cast(ReplicaGroup, self.link), self.host, 0)
        self.second = AgentEpisodes(cast(ReplicaGroup, Follower(self.link)), None, 0)

    def start(self, num: int = 1, is_evaluation: bool = False) -> None:
        for rank in (self.first, self.second):
            rank.start_round(is_evaluation)
            for sample in range(num):
                rank.begin(-1 if is_evaluation else 0, sample, PROMPT, SAMPLING)

    def advance(self, *done: Completion) -> tuple[list[Any], list[Request], list[int]]:
        """Returns what both ranks return: responses, requests and the stopped requests."""
        found = self.first.advance(done, False)
        assert self.second.advance(done, False) == found
        stopped = list(self.first.take_stopped())
        assert list(self.second.take_stopped()) == stopped
        return *found, stopped

    def request(self, key: int = 0, max_new_tokens: int = 20) -> int:
        """Requests a turn as the endpoint does. Returns its number."""
        prepared = self.opened[key].prepare_tokens((1, 2), None)
        number = self.sessions.next_request_id()
        turn = TurnRequest(number, "s", key, prepared.turn, (1, 2), max_new_tokens)
        self.host._queue.submit(turn)
        return number

    def commit(self, key: int = 0) -> None:
        """Adds a finished turn to the session of an episode."""
        prepared = self.opened[key].prepare_tokens((1, 2), None)
        self.opened[key].commit(prepared, completion(99)).is_delivered = True


def completion(number: int) -> Completion:
    return Completion(number, (5, 3), (-1.0, -1.0), "stop", 0)


def test_a_turn_shorter_than_the_minimum_lowers_the_minimum(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.start(2)
    replica.request(max_new_tokens=5)
    replica.request(max_new_tokens=20)
    replica.runner.done[1](Report(1.0))  # without a turn
    _, requests, _ = replica.advance()
    lengths = [(one.sampling.min_new_tokens, one.sampling.max_new_tokens) for one in requests]
    assert sorted(lengths) == [(1, 1), (5, 5), (8, 20)]


def test_with_many_requests_new_ones_wait_for_each_other(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.start(2)
    numbers = [replica.request() for _ in range(70)]
    assert len(replica.advance()[1]) == 70  # at the beginning, the engine is empty
    numbers.append(replica.request())
    assert replica.advance() == ([], [], [])
    done = [completion(number) for number in numbers[:60]]
    later = [replica.request() for _ in range(60)]
    steps = [[one.request_id for one in replica.advance(*done)[1]]]
    replica.host.abort(later[0])  # it waits in the rank
    while not steps[-1]:
        steps.append([one.request_id for one in replica.advance()[1]])
    # 60 or 61 of about 71 requests wait: after 5 steps, they have lost more than 3.5 steps.
    assert len(steps) == 5 and steps[-1] == [numbers[-1], *later[1:]]
    held = replica.request()
    assert replica.advance() == ([], [], [])
    in_engine = {n: Request(n, (1, 2), 0, SAMPLING) for n in [*numbers[60:], *later[1:]]}
    for rank in (replica.first, replica.second):
        rank.leave_engine(in_engine)
        rank.start_round(is_evaluation=True)
        rank.begin(-1, 0, PROMPT, SAMPLING)
    number = replica.request(key=2)  # now, because the requests of training are paused
    assert [one.request_id for one in replica.advance()[1]] == [number]
    for rank in (replica.first, replica.second):
        assert len(rank.start_round(False, [0, 1])) == len(in_engine)
    number = replica.request()
    responses, requests = replica.first.advance((), blocks=True)  # the engine has no work
    assert [one.request_id for one in requests] == [held, number] and not responses
    assert replica.second.advance((), True) == (responses, requests)
    replica.runner.done[1](Report(1.0))  # without a turn
    (request,) = replica.advance()[1]  # a beginning that does not wait
    assert request.request_id < 0 and request.sampling.max_new_tokens == 1
    (response,) = replica.advance(completion(request.request_id))[0]
    assert response.is_substitute


def test_several_ranks_exchange_events_less_often_with_many_requests(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.start(1)
    replica.link.num_ranks = 2
    replica.second._replica.num_ranks = 2  # type: ignore[misc]
    numbers: list[int] = []
    for num, num_steps in ((3, 1), (60, 2), (200, 4)):
        numbers += [replica.request() for _ in range(num - len(numbers))]
        while replica.first._owners.keys() < {*numbers}:
            replica.advance()
        while replica.first._num_steps:
            replica.advance()
        replica.host.abort(numbers.pop())
        found = [bool(replica.advance()[2]) for _ in range(num_steps)]
        assert found == [False] * (num_steps - 1) + [True]
    number = replica.request()
    assert not replica.advance()[1]  # not yet
    found = [rank.advance((), blocks=True)[1] for rank in (replica.first, replica.second)]
    assert [[one.request_id for one in requests] for requests in found] == [[number]] * 2


def test_only_engines_with_a_maximum_limit_stop_tokens() -> None:
    rollout = RolloutConfig(engine="vllm", min_new_tokens=4)
    assert max_stop_tokens(rollout, (1, 2)) == 126
    assert max_stop_tokens(RolloutConfig(engine="vllm"), (1, 2)) is None
    assert max_stop_tokens(RolloutConfig(engine="sglang", min_new_tokens=4), (1,)) is None


@pytest.mark.parametrize("case", ["no turn", "context", "turns", "no rows", "program"])
def test_an_episode_without_rows_reports_the_reason(tmp_path: Path, case: str) -> None:
    replica = Replica(tmp_path, pick_none if case == "no rows" else pick_all, Budgets(max_turns=1))
    replica.start()
    report, expected = Report(failure=("exited with 1", "0")), "exited with 1"
    if case == "context":
        with pytest.raises(ContextOverflow):
            replica.opened[0].prepare_tokens((1,) * 200, None)
        expected = "does not fit into the context"
    elif case == "turns":
        replica.request()
        with pytest.raises(BadRequest):
            replica.request()
        expected = "reached agent.max_turns"
    elif case == "no rows":
        replica.commit()
        report, expected = Report(1.0), "chose none of the rows"
    elif case == "no turn":
        report, expected = Report(1.0), "requested no turn"
    replica.runner.done[0](report)
    _, (substitute,), _ = replica.advance()
    (response,), _, _ = replica.advance(completion(substitute.request_id))
    assert response.ended == "failure" and expected in response.failure[0]
    assert response.is_substitute and response.outcome.is_untrainable
    assert completion_from_json(json.loads(json.dumps(saved_fields(response)))) == response


def pick_none(rows: Any) -> Any:
    return []


def test_turns_of_an_episode_that_ended_are_stopped_at_once(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.start(2)
    sampled, empty = replica.request(0), replica.request(1)
    assert len(replica.advance()[1]) == 2
    replica.commit(0)
    replica.request(0)  # arrives together with the end of its episode
    for key in (0, 1):
        replica.runner.done[key](Report(1.0))
    (response,), (substitute,), stopped = replica.advance()
    assert response.request_id == 0 and sorted(stopped) == [sampled, empty]
    (response,), requests, stopped = replica.advance(completion(substitute.request_id))
    assert response.request_id == 1 and not requests and not stopped
    assert not replica.first.is_waiting


def test_errors_on_the_first_rank_are_raised_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(tmp_path, picker=lambda rows: [None])
    replica.start()
    replica.commit()
    replica.runner.done[0](Report(1.0))
    for rank in (replica.first, replica.second):
        with pytest.raises(UserError, match=r"agent\.rows"):
            rank.advance((), False)
    replica = Replica(tmp_path)
    monkeypatch.setattr(replica.runner, "start", fails)
    replica.start()
    with pytest.raises(OSError, match="no processes"):
        replica.first.advance((), False)
    with pytest.raises(RuntimeError, match="first rank raised OSError: no processes"):
        replica.second.advance((), False)


def test_a_host_that_died_is_reported_to_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(tmp_path)
    replica.start()
    ranks = (replica.first, replica.second)
    for name in ("sleep", "wake", "versions", "end"):
        monkeypatch.setattr(replica.host, name, fails)
    for rank in ranks:
        rank.finish()
        rank.start_round(False, [0])
    for rank, error in zip(ranks, (OSError, RuntimeError), strict=True):
        with pytest.raises(error, match="no processes left"):
            rank.leave_engine({})
    for rank, error in zip(ranks, (OSError, RuntimeError), strict=True):
        with pytest.raises(error, match="no processes left"):
            rank.advance((), True)
    for rank in ranks:
        rank.forget()
        assert not rank.is_waiting
    only_versions = Replica(tmp_path)
    only_versions.start()
    monkeypatch.setattr(only_versions.host, "versions", fails)
    for rank in (only_versions.first, only_versions.second):
        with pytest.raises((OSError, RuntimeError), match="no processes left"):
            rank.leave_engine({})
    monkeypatch.setattr(replica.host, "sleep", fails)
    AgentEpisodes(cast(ReplicaGroup, Link()), replica.host, 0)


def test_a_tokenizer_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    settings = HostSettings(
        agent=AgentConfig(function="own_agents:silent"),
        tokenizer=threading.Lock(),
        ends=(2,),
        vocab_size=300,
        terms=SamplingTerms(1.0, 400),
        max_row_tokens=400,
        template_arguments={},
        run_folder=tmp_path,
    )
    for num_processes in (1, 2):
        with pytest.raises(UserError, match=r"model\.tokenizer.*cannot pickle '_thread.lock'"):
            _host(settings, num_processes)


def fails(*_: Any) -> None:
    raise OSError("no processes left")


def test_an_evaluation_starts_its_programs_while_those_of_training_wait(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.start(3)  # two may run at the same time
    assert list(replica.runner.done) == [0, 1]
    replica.start(3, is_evaluation=True)
    assert list(replica.runner.done) == [0, 1, 3, 4]
    replica.runner.done[3](Report(1.0))
    assert list(replica.runner.done) == [0, 1, 3, 4, 5]
    replica.runner.done[0](Report(1.0))
    assert list(replica.runner.done) == [0, 1, 3, 4, 5, 2]


def test_an_evaluation_waits_while_turns_of_training_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(tmp_path)
    replica.start()
    replica.start(is_evaluation=True)
    replica.request(key=0)  # of training
    assert replica.advance() == ([], [], [])
    waits: list[float] = []
    monkeypatch.setattr(replica.host, "wait", waits.append)
    replica.first.advance((), True)
    assert len(waits) == 1
    for rank in (replica.first, replica.second):
        rank.start_round(False)
    replica.first.advance((), True)
    assert len(waits) == 1, "the kept turn is requested at once"
    replica.host.close()


def test_a_kept_turn_is_not_requested_if_its_program_went_away(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    replica.start()
    replica.start(is_evaluation=True)
    number = replica.request(key=0)  # of training
    assert replica.advance() == ([], [], [])
    replica.host._queue.abort(number)
    for rank in (replica.first, replica.second):
        rank.start_round(False, [0])
    assert replica.advance() == ([], [], [])
    replica.host.close()
