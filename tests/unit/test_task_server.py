"""Programs outside of a run that fetch tasks over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from agent_server import Served
from test_agent_runners import NoEndpoint, host_of, task_of, wait_for

from hybridrl.agents import outside, task_server
from hybridrl.agents.host import AgentHost, Assignment
from hybridrl.agents.task_server import MAX_LOST, TaskServer
from hybridrl.agents.tasks import AgentClocks, Report, take_token
from hybridrl.config.agent import AgentConfig
from hybridrl.errors import UserError
from hybridrl.loop.agent_setup import check_hosts


@dataclass
class Run:
    """A task server on a real endpoint."""

    tasks: TaskServer
    clocks: AgentClocks
    served: Served
    folder: Path
    token: str
    reports: dict[int, Report]

    def start(self, key: int, **changes: Any) -> None:
        task = replace(task_of(key), **changes)
        self.tasks.start(task, lambda report: self.reports.update({key: report}))

    def post(
        self, path: str, body: Any, token: str | None = None, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.served.endpoint.url}/agent/tasks/{path}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token if token is None else token}"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def refused(self, path: str, body: Any, token: str | None = None) -> int:
        with pytest.raises(urllib.error.HTTPError) as error:
            self.post(path, body, token)
        return error.value.code


@contextmanager
def a_run(
    folder: Path,
    lease_s: float = 60.0,
    timeout_s: float = 60.0,
    number: int = 0,
    own_token: str | None = None,
) -> Iterator[Run]:
    clocks = AgentClocks()
    file = folder / "agents" / f"replica_{number}.json"
    tasks = TaskServer(
        timeout_s=timeout_s, lease_s=lease_s, clocks=clocks, address_file=file, token=own_token
    )
    with Served(more_routes=tasks.routes()) as served:
        tasks.publish(served.endpoint.url)
        token = json.loads(file.read_text())["token"]
        yield Run(tasks, clocks, served, folder, token, {})
        tasks.close()
    assert not file.exists()


def test_tasks_are_given_once_and_their_results_are_taken_once(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        for key in range(4):
            run.start(key)
        first = run.post("take", {"max": 3})["tasks"]
        second = run.post("take", {"max": 3, "wait_s": 5})["tasks"]
        assert [one["sample"] for one in (*first, *second)] == [0, 1, 2, 3]
        assert first[0]["prompt"] == "2+2=" and first[0]["columns"] == {"answer": "4"}
        assert first[0]["api_key"] == "secret-0" and not first[0]["is_evaluation"]
        assert run.post("take", {}) == {"tasks": []}
        run.post(f"{first[0]['id']}/report", {"reward": 0.5})
        run.post(f"{first[1]['id']}/report", {"error": "fell over"})
        run.post(f"{first[2]['id']}/report", {"reward": 10**400})
        run.post(f"{second[0]['id']}/report", {"reward": None})
        assert run.reports[0] == Report(0.5) and run.reports[3] == Report()
        assert "fell over" in run.reports[1].failure[0]
        assert "reported the reward an integer" in run.reports[2].failure[0]
        assert run.refused(f"{first[0]['id']}/report", {"reward": 1}) == 410
        assert run.reports[0] == Report(0.5)


def test_only_the_token_of_the_run_gets_tasks(tmp_path: Path, monkeypatch: Any) -> None:
    with a_run(tmp_path) as run:
        file = tmp_path / "agents" / "replica_0.json"
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        run.start(0)
        session = run.served.sessions.open(1).token  # an agent's own key is not enough
        for token in ("", "wrong", session):
            for path in ("take", "alive", "x/report", "x/give_back"):
                assert run.refused(path, {"ids": []}, token) == 401
        for path, body in (
            ("take", {"max": "2"}),
            ("take", {"wait_s": 1e9}),
            ("take", {"is_evaluation": 1}),
            ("take", [1]),
            ("alive", {"ids": "x"}),
        ):
            assert run.refused(path, body) == 400
        assert len(run.post("take", {})["tasks"]) == 1
    with (
        pytest.raises(UserError, match="at least 16 random characters"),
        a_run(tmp_path, own_token="short"),
    ):
        pass
    monkeypatch.setenv("HYBRIDRL_TASK_TOKEN", "a-token-of-the-user")
    with a_run(tmp_path, own_token=take_token()) as run:
        assert run.token == "a-token-of-the-user"
    assert "HYBRIDRL_TASK_TOKEN" not in os.environ


def test_late_tasks_fail_and_lost_tasks_are_given_to_others(tmp_path: Path) -> None:
    with a_run(tmp_path, timeout_s=0.5) as run:
        run.start(0)
        (late,) = run.post("take", {})["tasks"]
        run.clocks.sleep()  # time while the engine sleeps does not count
        time.sleep(1.2)
        assert run.reports == {} and run.post("alive", {"ids": [late["id"]]}) == {"stopped": []}
        run.clocks.wake(is_evaluation=False)
        wait_for(lambda: 0 in run.reports)
        assert "longer than 0.5 s" in run.reports[0].failure[0]
        assert run.post("alive", {"ids": [late["id"]]}) == {"stopped": [late["id"]]}
        assert run.refused(f"{late['id']}/report", {"reward": 1}) == 410
    with a_run(tmp_path, lease_s=0.3) as run:
        for num in range(1, MAX_LOST + 1):
            run.reports.clear()
            run.start(0)
            (lost,) = run.post("take", {})["tasks"]
            wait_for(lambda: 0 in run.reports)
            assert run.reports[0].begins_again == (num < MAX_LOST)
        assert f"{MAX_LOST} times" in run.reports[0].failure[0]
        run.start(1)
        (given,) = run.post("take", {})["tasks"]
        run.post(f"{given['id']}/give_back", {})
        assert run.reports[1] == Report(begins_again=True)
        run.start(2)
        run.post("take", {})
        run.tasks.stop(2)
        time.sleep(0.8)
        assert 2 not in run.reports


def test_an_episode_that_is_given_back_begins_again_without_its_turns(tmp_path: Path) -> None:
    with a_run(tmp_path, lease_s=0.4) as run:
        sessions = run.served.sessions
        host: AgentHost = host_of(tmp_path, run.tasks, sessions, endpoint=NoEndpoint())
        host.begin(Assignment(7, 0, 3, "2+2=", {}))
        (first,) = run.post("take", {})["tasks"]
        (session,) = sessions._open.values()
        assert session.token == first["api_key"]
        wait_for(lambda: any(run.tasks._waiting.values()))  # its taker was not heard of
        (again,) = run.post("take", {})["tasks"]
        assert again["sample"] == first["sample"] and again["api_key"] != first["api_key"]
        assert not session.is_open and len(sessions) == 1
        run.post(f"{again['id']}/report", {"reward": 1.0})
        (finished,) = host.take_finished()
        assert finished.key == 7 and finished.reward == 1.0 and not finished.result.rows
        host.close()


async def played(task: Any, factor: float = 1.0) -> float | None:
    if task.sample == 1:
        raise ValueError("wrong\nsecond line")
    if task.sample == 2:
        await asyncio.sleep(60)
    return factor * task.sample


def program_outside(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    tests = Path(__file__).parent
    paths = os.pathsep.join(map(str, (tests, tests.parent, tests.parents[1])))
    return subprocess.Popen(
        [sys.executable, "-m", "hybridrl.agents.outside", str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_program_outside_plays_tasks_until_the_run_ends(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        for key in (0, 1, 3):
            run.start(key)
        options = ("--options", '{"reward": 0.25}')
        program = program_outside(tmp_path, "own_agents:rewarded", *options)
        wait_for(lambda: len(run.reports) == 3)
        assert run.reports == {key: Report(key + 0.25) for key in (0, 1, 3)}
    out, _ = program.communicate(timeout=60)
    assert "3 tasks" in out and program.returncode == 0


def test_a_program_outside_that_is_ended_gives_its_tasks_back(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        run.start(0)
        program = program_outside(tmp_path, "own_agents:sleeping")
        wait_for(lambda: bool(run.tasks._taken))
        time.sleep(0.5)
        program.terminate()
        wait_for(lambda: 0 in run.reports)
        assert run.reports[0] == Report(begins_again=True)
    assert program.wait(30) == 128 + signal.SIGTERM


def test_a_program_outside_reports_errors_and_stops_tasks_that_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "WAIT_S", 0.5)
    with a_run(tmp_path, lease_s=0.4) as run:
        for key in (1, 2, 4):
            run.start(key)

        async def play() -> None:
            (place,) = outside.addresses(str(tmp_path))
            replica = outside.Replica(place, played, {"factor": 2.0}, 2)
            playing = asyncio.create_task(replica.run())
            while len(run.reports) < 2:
                await asyncio.sleep(0.02)
            await asyncio.sleep(1.0)  # longer than the lease
            assert 2 not in run.reports and len(replica._running) == 1
            run.tasks.stop(2)
            while replica._running:
                await asyncio.sleep(0.02)
            playing.cancel()

        asyncio.run(asyncio.wait_for(play(), 20))
        assert run.reports[4] == Report(8.0)
        assert "ValueError: wrong" in run.reports[1].failure[0]
        address = outside.Address(run.served.endpoint.url, "wrong")
        wrong = outside.Replica(address, played, {}, 1)
        with pytest.raises(outside.Gone, match="401"):
            asyncio.run(wrong.run())
    with pytest.raises(FileNotFoundError, match=r"agent\.server"):
        outside.addresses(str(tmp_path))


def test_evaluations_have_room_while_tasks_of_training_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "WAIT_S", 0.5)

    async def play(task: Any) -> float:
        if not task.is_evaluation:
            await asyncio.sleep(60)  # its turns are held while the evaluation runs
        return 1.0

    async def play_evaluation(run: Run) -> None:
        (place,) = outside.addresses(str(run.folder))
        playing = asyncio.create_task(outside.Replica(place, play, {}, 1).run())
        while 2 not in run.reports:
            await asyncio.sleep(0.02)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    with a_run(tmp_path) as run:
        run.start(0)
        run.start(1)
        run.start(2, step=-1, columns={"day": date(2026, 1, 2), "price": Decimal("1.5")})
        assert run.post("take", {"is_evaluation": None, "max": 0})["tasks"] == []
        asyncio.run(asyncio.wait_for(play_evaluation(run), 20))
        assert run.reports == {2: Report(1.0), 0: Report(begins_again=True)}
        run.start(3, step=-1)
        assert run.post("take", {"is_evaluation": False})["tasks"][0]["sample"] == 1
        assert run.post("take", {})["tasks"][0]["is_evaluation"]


def test_a_report_arrives_although_its_client_goes_away(tmp_path: Path) -> None:
    async def report(run: Run, number: str) -> None:
        busy = threading.Event()
        loop = run.served.endpoint._loop
        for _ in range(64):  # keeps the threads of the endpoint's loop busy
            loop.call_soon_threadsafe(loop.run_in_executor, None, busy.wait)
        post = asyncio.to_thread(run.post, f"{number}/report", {"reward": 1.0}, None, 0.5)
        with pytest.raises(OSError):
            await post
        await asyncio.sleep(0.3)
        busy.set()

    with a_run(tmp_path) as run:
        run.start(0)
        (one,) = run.post("take", {})["tasks"]
        asyncio.run(report(run, one["id"]))
        wait_for(lambda: 0 in run.reports)
        assert run.reports[0] == Report(1.0)


def test_a_program_outside_reports_again_and_survives_a_pause_of_the_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WAIT_S", 0.3), ("RETRY_S", 0.1), ("GIVE_UP_S", 5.0)):
        monkeypatch.setattr(outside, name, value)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    send, fails = outside.Connection.send, Counter[str]()

    def flaky(self: outside.Connection, path: str, body: Any) -> dict[str, Any]:
        kind = path.rpartition("/")[2]
        fails[kind] += 1
        if kind != "alive" and fails[kind] <= 3:
            raise OSError("no route")
        return send(self, path, body)

    async def play(task: Any) -> float:
        if task.sample == 1:
            raise asyncio.CancelledError
        time.sleep(1.0)  # blocks the loop for longer than the lease
        return 1.0

    monkeypatch.setattr(outside.Connection, "send", flaky)
    with a_run(tmp_path, lease_s=0.6) as run:

        async def main() -> int:
            playing = asyncio.create_task(outside.play_all(str(tmp_path), play))
            while len(run.reports) < 2:
                await asyncio.sleep(0.02)
            run.tasks.close()
            return await playing

        run.start(0)
        run.start(1)
        assert asyncio.run(asyncio.wait_for(main(), 30)) == 2
        assert run.reports[0] == Report(1.0)
        assert "CancelledError" in run.reports[1].failure[0]


def test_a_program_outside_finds_replicas_that_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WAIT_S", 0.3), ("RETRY_S", 0.1), ("GIVE_UP_S", 0.5)):
        monkeypatch.setattr(outside, name, value)

    async def play(task: Any) -> float:
        return 1.0

    async def main() -> int:
        playing = asyncio.create_task(outside.play_all(str(tmp_path), play))
        await asyncio.sleep(0.5)
        with a_run(tmp_path, number=1) as run:
            run.start(0)
            while 0 not in run.reports:
                await asyncio.sleep(0.02)
            first.tasks.close()
        return await playing

    with a_run(tmp_path) as first:
        assert asyncio.run(asyncio.wait_for(main(), 30)) == 1
    nowhere = outside.Replica(outside.Address("http://127.0.0.1:9", "t"), play, {}, 1)
    with pytest.raises(outside.Gone, match="127.0.0.1:9 has not answered"):
        asyncio.run(nowhere.run())


def test_a_message_says_that_no_program_asks_for_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task_server, "UNHEARD_S", 0.2)
    with a_run(tmp_path) as run:
        run.start(0)
        time.sleep(1.6)
    assert capsys.readouterr().err.count("1 tasks of agents wait") == 1


def test_replicas_on_several_hosts_must_not_listen_on_loopback() -> None:
    check_hosts(AgentConfig(server=True), 1)
    check_hosts(AgentConfig(server=True, host="0.0.0.0"), 2)
    check_hosts(AgentConfig(function="a:b"), 2)
    with pytest.raises(UserError, match="on 2 hosts, an address that other hosts can reach"):
        check_hosts(AgentConfig(server=True), 2)
