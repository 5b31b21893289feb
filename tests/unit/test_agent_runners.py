"""Programs and functions as agents: results, limits, and what they can see."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import threading
import time
import venv
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest

from hybridrl.agents import command, function_worker, tasks
from hybridrl.agents.backend import SamplingTerms, TurnQueue
from hybridrl.agents.check import check_agent
from hybridrl.agents.command import Bubblewrap, CommandRunner, EpisodeLogs, reported
from hybridrl.agents.functions import FunctionRunner
from hybridrl.agents.host import AgentHost, Assignment
from hybridrl.agents.samples import Budgets, pick_all
from hybridrl.agents.sessions import Sessions
from hybridrl.agents.tasks import AgentClocks, AgentTask, AwakeClock, Report
from hybridrl.config.agent import AgentConfig
from hybridrl.errors import UserError


def task_of(sample: int, step: int = 0) -> AgentTask:
    return AgentTask(
        key=sample,
        step=step,
        sample=sample,
        prompt="2+2=",
        columns={"answer": "4"},
        base_url="http://127.0.0.1:1",
        api_key=f"secret-{sample}",
        model="policy",
    )


def run_all(runner: Any, tasks: list[AgentTask], timeout_s: float = 20) -> dict[int, Report]:
    found: Queue[tuple[int, Report]] = Queue()
    for task in tasks:
        runner.start(task, lambda report, key=task.key: found.put((key, report)))
    return dict(found.get(timeout=timeout_s) for _ in tasks)


def command_runner(folder: Path, command: Any, timeout_s: float = 20, **more: Any) -> CommandRunner:
    return CommandRunner(
        command=command,
        env=more.pop("env", {}),
        timeout_s=timeout_s,
        clocks=AgentClocks(),
        logs=EpisodeLogs(folder / "agents", 2),
        **more,
    )


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


REPORTS = """
import json, os
task = json.load(open(os.environ["HYBRIDRL_TASK"]))
assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_AUTH_TOKEN"]
assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
assert task["columns"] == {"answer": "4"} and task["prompt"] == "2+2="
assert "secret" not in json.dumps(task)
open("own.txt", "w").write("x")
assert os.listdir(".") == ["own.txt"] and os.environ["HOME"] == os.getcwd()
seen = sorted(n for n in os.environ if n.startswith("HYBRIDRL_"))
print("saw", seen, os.environ["MINE"])
json.dump({"reward": task["sample"] + 0.5}, open(os.environ["HYBRIDRL_RESULT"], "w"))
"""


def test_a_program_gets_its_task_reports_a_reward_and_sees_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_TEST_SECRET", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    runner = command_runner(tmp_path, program(REPORTS), env={"MINE": "yes"})
    before = set(Path("/tmp").glob("hybridrl-agent-*"))
    found = run_all(runner, [task_of(0), task_of(1)])
    assert found == {0: Report(0.5), 1: Report(1.5)}
    log = (tmp_path / "agents" / "step_000001" / "sample_1.log").read_text()
    assert log == "saw ['HYBRIDRL_RESULT', 'HYBRIDRL_TASK'] yes\n"
    assert set(Path("/tmp").glob("hybridrl-agent-*")) <= before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("exit 3", "exited with 3"),
        ("kill -9 $$", "was ended by SIGKILL"),
        ("echo '{' > $HYBRIDRL_RESULT", "cannot be read as JSON"),
        ('echo \'{"reward": "much"}\' > $HYBRIDRL_RESULT', "reported the reward 'much'"),
        ("echo '{\"reward\": NaN}' > $HYBRIDRL_RESULT", "reward"),
        ("echo '[1]' > $HYBRIDRL_RESULT", r"wrote \[1\]"),
        ("mkfifo $HYBRIDRL_RESULT", "not a regular file"),
        ("mkdir $HYBRIDRL_RESULT", "[Ii]s a directory"),
        ("echo '{}' > other; ln -s $HOME/other $HYBRIDRL_RESULT", "symbolic links"),
        ("head -c 1048577 /dev/zero > $HYBRIDRL_RESULT", "larger than 1 MiB"),
        (["no-such-program-at-all"], "(exited with 127|could not be started)"),
    ],
)
def test_a_program_that_fails_says_how(tmp_path, command, message):
    (report,) = run_all(command_runner(tmp_path, command), [task_of(0)]).values()
    assert report.reward is None and report.failure is not None
    assert re.search(message, report.failure[0]), report.failure


def test_a_program_without_a_result_reports_no_reward(tmp_path):
    assert run_all(command_runner(tmp_path, "true"), [task_of(0)]) == {0: Report()}


def test_a_result_that_is_an_endless_file_is_refused(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), before[1]))
    try:
        (tmp_path / "result.json").symlink_to("/dev/zero")
        failure = reported(tmp_path / "result.json").failure
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert failure is not None and "symbolic links" in failure[0]


def test_all_processes_of_a_late_or_stopped_program_are_killed(tmp_path):
    command = f"sleep 60 & echo $! > {tmp_path}/child_$OPENAI_API_KEY; sleep 60"
    late = command_runner(tmp_path, command, timeout_s=0.5)
    (report,) = run_all(late, [task_of(1)]).values()
    assert report.failure is not None and "longer than 0.5 s" in report.failure[0]
    other = command_runner(tmp_path, command)
    reports: list[Report] = []
    other.start(task_of(2), reports.append)
    wait_for((tmp_path / "child_secret-2").exists)
    other.stop(2)
    children = [int((tmp_path / f"child_secret-{n}").read_text()) for n in (1, 2)]
    wait_for(lambda: not any(map(is_alive, children)))
    done = command_runner(tmp_path, f"sleep 60 & echo $! > {tmp_path}/left")
    assert run_all(done, [task_of(3)]) == {3: Report()}
    wait_for(lambda: not is_alive(int((tmp_path / "left").read_text())))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(is_met: Callable[[], bool], timeout_s: float = 20) -> None:
    until = time.monotonic() + timeout_s
    while not is_met():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_time_while_the_engine_sleeps_does_not_count(tmp_path):
    clock = AwakeClock()
    clock.sleep()
    before = clock.now()
    time.sleep(0.1)
    assert clock.now() == before
    clock.wake()
    time.sleep(0.05)
    assert 0.04 < clock.now() - before < 0.1


def test_time_of_an_evaluation_does_not_count_for_agents_of_training(tmp_path):
    found: Queue[tuple[int, Report]] = Queue()
    clocks = AgentClocks()
    # As if an evaluation had begun.
    clocks.wake(is_evaluation=True)
    runner = CommandRunner(
        command="sleep 1",
        env={},
        timeout_s=0.3,
        clocks=clocks,
        logs=EpisodeLogs(tmp_path / "agents", 0),
    )
    worker = FunctionRunner(
        path="own_agents:napping",
        options={},
        workers=1,
        timeout_s=0.3,
        clocks=clocks,
        logs=EpisodeLogs(tmp_path / "agents", 0),
    )
    for key, one, step in ((0, runner, 0), (1, worker, 0), (2, runner, -1)):
        one.start(task_of(key, step), lambda report, key=key: found.put((key, report)))
    reports = dict(found.get(timeout=20) for _ in range(3))
    assert reports[0] == Report() and reports[1] == Report(1.0)
    assert reports[2].failure is not None and "longer than 0.3 s" in reports[2].failure[0]
    clocks.wake(is_evaluation=False)
    runner.start(task_of(3), lambda report: found.put((3, report)))
    assert found.get(timeout=20)[1].failure is not None
    worker.close()


def test_an_error_while_the_next_agent_is_started_reaches_the_run(tmp_path):
    class Broken(Held):
        def start(self, task: AgentTask, done: Callable[[Report], None]) -> None:
            if task.key == 2:
                raise RuntimeError("can't start new thread")
            super().start(task, done)

    runner = Broken()
    host = host_of(tmp_path, runner, Sessions(100, None))
    for key in range(3):  # two may run at the same time
        host.begin(Assignment(key, 0, key, "2+2=", {}))
    threading.Thread(target=runner.done[0], args=[Report(1.0)]).start()
    began = time.monotonic()
    host.wait(20)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        while time.monotonic() < began + 20:
            host.take_finished()
    assert time.monotonic() < began + 5
    host.close()


def test_output_without_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "MAX_LOG_BYTES", 1 << 20)
    monkeypatch.setattr(tasks, "KEPT_LOG_BYTES", 100)
    monkeypatch.setattr(command, "POLL_S", 0.05)
    text = "import time\nprint('begin', flush=True)\n"
    text += "for _ in range(40):\n    print('x' * 200_000, flush=True)\n    time.sleep(0.02)\n"
    runner = command_runner(tmp_path, program(text + "time.sleep(0.3)\nprint('end')"))
    assert run_all(runner, [task_of(1)]) == {1: Report()}
    log = (tmp_path / "agents" / "step_000001" / "sample_1.log").read_text()
    assert log.startswith("begin") and log.endswith("end\n") and len(log) < 4 << 20
    # A program that ends before its log was looked at.
    runner = command_runner(tmp_path, program("print('begin' + 'x' * 3_000_000)"))
    assert run_all(runner, [task_of(2)]) == {2: Report()}
    assert (tmp_path / "agents" / "step_000001" / "sample_2.log").stat().st_size == 100
    file = tmp_path / "call.log"
    token = function_worker.LOG.set(str(file))
    output = function_worker._Output(sys.stderr)
    for number in range(40):
        output.write(f"{number}" + "x" * 100_000)
    function_worker.LOG.reset(token)
    assert file.stat().st_size < 2 << 20 and file.read_text().startswith("0x")


def test_logs_of_old_steps_are_removed(tmp_path):
    logs = EpisodeLogs(tmp_path, 2)
    for step in range(4):
        file = logs.file(task_of(7, step))
        assert file is not None
        file.write_text("x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    assert logs.file(task_of(0, -1)) == tmp_path / "evaluation" / "sample_0.log"
    assert EpisodeLogs(tmp_path, 0).file(task_of(0)) is None


def test_logs_of_later_steps_do_not_remove_those_of_a_resumed_run(tmp_path):
    for step in (1, *range(26, 36)):
        (tmp_path / f"step_{step:06d}").mkdir()
    first, second = EpisodeLogs(tmp_path, 10), EpisodeLogs(tmp_path, 10)  # of two processes
    for sample in range(3):
        kept = first.file(task_of(sample, 20))
        assert kept is not None
        kept.write_text("x")
        assert second.file(task_of(sample + 3, 20)) is not None and kept.read_text() == "x"
    names = [one.name for one in sorted(tmp_path.iterdir())]
    assert names == [f"step_{step:06d}" for step in (1, 21, *range(26, 36))]
    first.file(task_of(0, 35))
    names = [one.name for one in sorted(tmp_path.iterdir())]
    assert names == [f"step_{step:06d}" for step in range(27, 37)]


class LostLogs(EpisodeLogs):
    """Names a log whose folder another process has removed."""

    def file(self, task: AgentTask) -> Path | None:
        found = super().file(task)
        assert found is not None
        shutil.rmtree(found.parent)
        return found


def test_a_log_that_cannot_be_written_fails_no_episode(tmp_path):
    text = "import json, os\nprint('said')\n"
    text += "json.dump({'reward': 2.0}, open(os.environ['HYBRIDRL_RESULT'], 'w'))"
    lost = LostLogs(tmp_path / "agents", 2)
    (tmp_path / "file").write_text("")
    for logs in (lost, EpisodeLogs(tmp_path / "file", 2)):
        runner = CommandRunner(
            command=program(text), env={}, timeout_s=20, clocks=AgentClocks(), logs=logs
        )
        assert run_all(runner, [task_of(0)]) == {0: Report(2.0)}
        runner.close()
    assert (tmp_path / "agents" / "step_000001" / "sample_0.log").read_text() == "said\n"
    for name, reward in (("rewarded", 0.5), ("wrong", None)):
        calls = function_runner(tmp_path, name, logs=lost)
        (report,) = run_all(calls, [task_of(0)], 5).values()
        assert report.reward == reward
        assert report.failure is None or "raised ValueError: sample 0" in report.failure[0]
        calls.close()


def function_runner(folder: Path, name: str, timeout_s: float = 20, **options: Any) -> Any:
    logs = options.pop("logs", EpisodeLogs(folder / "agents", 2))
    return FunctionRunner(
        path=f"own_agents:{name}",
        options=options,
        workers=1,
        timeout_s=timeout_s,
        clocks=AgentClocks(),
        logs=logs,
    )


def test_functions_run_in_one_process_and_report_rewards_and_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_TEST_SECRET", "x")
    runner = function_runner(tmp_path, "rewarded", reward=0.25)
    assert run_all(runner, [task_of(n) for n in range(3)]) == {
        n: Report(n + 0.25) for n in range(3)
    }
    log = tmp_path / "agents" / "step_000001" / "sample_2.log"
    assert log.read_text() == "sample 2\n"
    runner.close()
    for name, expected in (("silent", Report()), ("variables", Report(0.0))):
        runner = function_runner(tmp_path, name)
        assert run_all(runner, [task_of(0)]) == {0: expected}
        runner.close()
    for name, message in (
        ("wrong", "raised ValueError: sample 1 is wrong"),
        ("text", "reported the reward 'much'"),
        ("unsendable", "reported the reward '{1} \\\\ud800xx"),
        ("unprintable", "raised Unprintable"),
        ("grouped", "raised KeyError: 'first'"),
        ("missing", "has no attribute 'missing'"),
    ):
        runner = function_runner(tmp_path, name)
        (report,) = run_all(runner, [task_of(1)]).values()
        assert report.failure is not None and message in report.failure[0]
        if "raised" in message:  # the log has the traceback
            assert str(tmp_path / "agents/step_000001/sample_1.log") in report.failure[0]
        runner.close()


def test_functions_that_are_late_or_end_their_process_fail_and_a_new_process_starts(tmp_path):
    late = function_runner(tmp_path, "sleeping", timeout_s=1.0)
    (report,) = run_all(late, [task_of(0)]).values()
    assert report.failure is not None and "longer than 1 s" in report.failure[0]
    late.close()
    hung = function_runner(tmp_path, "blocking", timeout_s=1.0)
    reports = run_all(hung, [task_of(0), task_of(1)])
    assert all(one.failure and "longer than 1 s" in one.failure[0] for one in reports.values())
    hung.close()
    dying = function_runner(tmp_path, "dying")
    for sample, message in ((0, "died (exit code 4)"), (1, "SystemExit"), (0, "died")):
        (report,) = run_all(dying, [task_of(sample)]).values()
        assert report.failure is not None and message in report.failure[0]
    dying.close()


def test_starting_and_stopping_do_not_wait_for_a_worker_that_does_not_read(tmp_path):
    runner = function_runner(tmp_path, "blocking", timeout_s=1.0)
    found: Queue[tuple[int, Report]] = Queue()
    is_begun = threading.Event()

    def start_all() -> None:
        for sample in range(200):  # more than a pipe holds
            task = replace(task_of(sample), columns={"answer": "4" * 2000})
            runner.start(task, lambda report, key=sample: found.put((key, report)))
        runner.stop(199)
        is_begun.set()

    threading.Thread(target=start_all, daemon=True).start()
    assert is_begun.wait(5)
    reports = dict(found.get(timeout=20) for _ in range(199))
    assert sorted(reports) == list(range(199))
    assert all(one.failure and "longer than 1 s" in one.failure[0] for one in reports.values())
    runner.close()


def test_a_worker_that_cannot_be_started_fails_its_calls(tmp_path, monkeypatch):
    runner = function_runner(tmp_path, "silent")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "no-python"))
        found: Queue[Report] = Queue()
        threading.Thread(target=runner.start, args=[task_of(0), found.put], daemon=True).start()
        failure = found.get(timeout=5).failure
        assert failure is not None and "could not be started" in failure[0]
        assert "no-python" in failure[0]
    assert run_all(runner, [task_of(1)]) == {1: Report()}
    runner.close()


def test_a_worker_outlives_the_thread_that_needed_it(tmp_path):
    runner, reports = function_runner(tmp_path, "napping"), Queue[Report]()
    log = tmp_path / "agents" / "step_000001" / "sample_0.log"

    def start() -> None:
        runner.start(task_of(0), reports.put)
        wait_for(log.exists)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert reports.get(timeout=20) == Report(1.0)
    runner.close()


def test_a_function_in_another_environment_sees_none_of_the_runs_packages(tmp_path, monkeypatch):
    venv.create(tmp_path / "own", with_pip=False)
    python = str(tmp_path / "own" / "bin" / "python")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for chosen, expected in ((None, 1.0), (python, 0.0)):
        runner = FunctionRunner(
            path="own_agents:packages",
            python=chosen,
            options={},
            workers=1,
            timeout_s=20,
            clocks=AgentClocks(),
            logs=EpisodeLogs(tmp_path / "agents", 2),
        )
        assert run_all(runner, [task_of(0)]) == {0: Report(expected)}
        runner.close()
    assert check_agent(AgentConfig(function="own_agents:packages", python=python)) == []
    for function, message in (
        ("own_agents:missing", "has no attribute 'missing'"),
        ("own_agents:os", "which cannot be called"),
        ("pydantic:BaseModel", "No module named 'pydantic'"),
    ):
        (found,) = check_agent(AgentConfig(function=function, python=python))
        assert found.name == "agent.function" and message in found.remedy
    (found,) = check_agent(AgentConfig(function="own_agents:packages", python="/no/python"))
    assert found.name == "agent.python" and found.value == "/no/python"


class Held:
    """A runner whose agents end when the test says so."""

    def __init__(self) -> None:
        self.done: dict[int, Callable[[Report], None]] = {}
        self.stopped: list[int] = []

    def start(self, task: AgentTask, done: Callable[[Report], None]) -> None:
        self.done[task.key] = done

    def stop(self, key: int) -> None:
        self.stopped.append(key)

    def close(self) -> None:
        self.done = {}


def host_of(
    folder: Path,
    runner: Held,
    sessions: Sessions,
    picker: Any = pick_all,
    endpoint: NoEndpoint | None = None,
) -> AgentHost:
    return AgentHost(
        sessions=sessions,
        queue=TurnQueue(SamplingTerms(1.0, 100)),
        endpoint=endpoint or NoEndpoint(),
        runner=runner,
        clocks=AgentClocks(),
        model="policy",
        budgets=Budgets(),
        picker=picker,
        concurrency=2,
        status_file=folder / "logs" / "rank_0.agents",
    )


def test_an_error_in_the_users_choice_of_rows_ends_the_run(tmp_path):
    def broken(rows: Any) -> Any:
        raise KeyError("no rows")

    runner = Held()
    host = host_of(tmp_path, runner, Sessions(100, None), picker=broken)
    host.begin(Assignment(0, 0, 0, "2+2=", {}))
    runner.done[0](Report(1.0))
    with pytest.raises(UserError, match="raised KeyError"):
        host.take_finished()
    host.close()


class NoEndpoint:
    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_host_limits_programs_returns_each_once_and_reports_its_state(tmp_path):
    sessions, runner = Sessions(100, None), Held()
    host = host_of(tmp_path, runner, sessions)
    queue = host._queue
    for key in range(5):
        host.begin(Assignment(key, 0, key, "2+2=", {}))
    assert list(runner.done) == [0, 1] and len(sessions) == 2
    host.take()
    status = json.loads((tmp_path / "logs" / "rank_0.agents").read_text())
    assert status == {"running": 2, "waiting": 3, "turns": 0, "ended": 0, "failed": 0}
    runner.done[0](Report(1.0))
    assert list(runner.done) == [0, 1, 2] and queue.wait(0)
    host.end(1)  # its result is not needed; the next one starts
    assert runner.stopped == [1] and list(runner.done) == [0, 1, 2, 3]
    host.end(4)
    runner.done[1](Report(1.0))
    runner.done[2](Report(failure=("fell over", "standing")))
    found = host.take_finished()
    assert [(one.key, one.reward, one.failure) for one in found] == [
        (0, 1.0, None),
        (2, None, ("fell over", "standing")),
    ]
    assert host.take_finished() == [] and host.versions([3]) == {3: Counter()}
    host.close()
    assert len(sessions) == 0 and not (tmp_path / "logs" / "rank_0.agents").exists()


def test_the_endpoint_stops_if_programs_cannot_be_ended(tmp_path):
    class Stuck(Held):
        def close(self) -> None:
            raise OSError("stuck")

    sessions, endpoint = Sessions(100, None), NoEndpoint()
    host = host_of(tmp_path, Stuck(), sessions, endpoint=endpoint)
    host.begin(Assignment(0, 0, 0, "2+2=", {}))
    with pytest.raises(OSError, match="stuck"):
        host.close()
    assert endpoint.is_closed and len(sessions) == 0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_program_in_a_sandbox_writes_only_to_its_folder(tmp_path):
    command = (
        f"touch own.txt; touch {tmp_path}/other && exit 3; touch /usr/other && exit 4; "
        "[ $(ls /proc | grep -c '^[0-9]') -gt 6 ] && exit 5; "
        "mount -o remount,rw,bind / && exit 6; "
        "echo '{\"reward\": 2.0}' > $HYBRIDRL_RESULT"
    )
    runner = command_runner(tmp_path, command, sandbox=Bubblewrap())
    assert run_all(runner, [task_of(0)]) == {0: Report(2.0)}
    assert not (tmp_path / "other").exists()


def test_a_sandbox_needs_its_program_and_binds_only_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="bwrap is not in PATH"):
        Bubblewrap()
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "bwrap", 0o755)
    command = Bubblewrap().command(["program", "word"], tmp_path / "own")
    own = str(tmp_path / "own")
    assert command[-6:] == ["--bind", own, own, "--", "program", "word"]
    assert command[command.index("--ro-bind") + 1] == "/"
