"""Programs outside of a run that fetch tasks over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_server import Served
from test_agent_runners import NoEndpoint, host_of, task_of, wait_for

from hybridrl.agents import outside
from hybridrl.agents.host import AgentHost, Assignment
from hybridrl.agents.task_server import MAX_LOST, TaskServer
from hybridrl.agents.tasks import AgentClocks, Report
from hybridrl.errors import UserError


@dataclass
class Run:
    """A task server on a real endpoint."""

    tasks: TaskServer
    clocks: AgentClocks
    served: Served
    folder: Path
    token: str
    reports: dict[int, Report]

    def start(self, key: int) -> None:
        self.tasks.start(task_of(key), lambda report: self.reports.update({key: report}))

    def post(self, path: str, body: Any, token: str | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.served.endpoint.url}/agent/tasks/{path}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token if token is None else token}"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def refused(self, path: str, body: Any, token: str | None = None) -> int:
        with pytest.raises(urllib.error.HTTPError) as error:
            self.post(path, body, token)
        return error.value.code


@contextmanager
def a_run(folder: Path, lease_s: float = 60.0, timeout_s: float = 60.0) -> Iterator[Run]:
    clocks = AgentClocks()
    file = folder / "agents" / "replica_0.json"
    tasks = TaskServer(timeout_s=timeout_s, lease_s=lease_s, clocks=clocks, address_file=file)
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
        run.post(f"{first[2]['id']}/report", {"reward": "much"})
        run.post(f"{second[0]['id']}/report", {"reward": None})
        assert run.reports[0] == Report(0.5) and run.reports[3] == Report()
        assert "fell over" in run.reports[1].failure[0]
        assert "reported the reward 'much'" in run.reports[2].failure[0]
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
            ("take", [1]),
            ("alive", {"ids": "x"}),
        ):
            assert run.refused(path, body) == 400
        assert len(run.post("take", {})["tasks"]) == 1
    monkeypatch.setenv("HYBRIDRL_TASK_TOKEN", "short")
    with pytest.raises(UserError, match="at least 16 random characters"), a_run(tmp_path):
        pass
    monkeypatch.setenv("HYBRIDRL_TASK_TOKEN", "a-token-of-the-user")
    with a_run(tmp_path) as run:
        assert run.token == "a-token-of-the-user"


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
        (session,) = sessions.all()
        assert session.token == first["api_key"]
        wait_for(lambda: bool(run.tasks._waiting))  # its taker was not heard of
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


def test_a_program_outside_plays_tasks_until_the_run_ends(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        for key in (0, 1, 3):
            run.start(key)
        tests = Path(__file__).parent
        paths = os.pathsep.join(map(str, (tests, tests.parent, tests.parents[1])))
        program = subprocess.Popen(
            [
                *(sys.executable, "-m", "hybridrl.agents.outside", str(tmp_path)),
                *("own_agents:rewarded", "--options", '{"reward": 0.25}'),
            ],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for(lambda: len(run.reports) == 3)
        assert run.reports == {key: Report(key + 0.25) for key in (0, 1, 3)}
    out, _ = program.communicate(timeout=60)
    assert "3 tasks" in out and program.returncode == 0


def test_a_program_outside_reports_errors_and_stops_tasks_that_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "WAIT_S", 0.5)
    with a_run(tmp_path, lease_s=0.4) as run:
        for key in (1, 2, 4):
            run.start(key)

        async def play() -> None:
            (place,) = outside.addresses(str(tmp_path))
            replica = outside.Replica(*place, played, {"factor": 2.0}, 2)
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
        wrong = outside.Replica(run.served.endpoint.url, "wrong", played, {}, 1)
        with pytest.raises(outside.Gone, match="401"):
            asyncio.run(wrong.run())
    with pytest.raises(FileNotFoundError, match=r"agent\.server"):
        outside.addresses(str(tmp_path))
