"""Processes of tests that are forked are what a new start would be; else they are started anew."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fork_starts
import pytest

STARTED = Path(__file__).parents[1] / "started.py"
HELP = [sys.executable, "-m", "hybridrl.cli.main", "--version"]

pytestmark = pytest.mark.skipif(
    subprocess.Popen is not fork_starts.ForkedPopen, reason="all starts are cold here"
)


def started(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, str(STARTED), *arguments], check=False, **options)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collects the commands that were started anew."""
    found: list[object] = []
    execute = fork_starts._Popen._execute_child

    def noted(self: Any, args: Any, *rest: Any) -> None:
        if str(fork_starts.SERVER) not in args:
            found.append(args)
        execute(self, args, *rest)

    monkeypatch.setattr(fork_starts._Popen, "_execute_child", noted)
    return found


def test_a_forked_process_finds_what_its_starter_gave_it(
    tmp_path: Path, cold: list[object]
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    environment = {**os.environ, "A_VARIABLE": "given", "PYTHONDONTWRITEBYTECODE": "1"}
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[0] - 1, limit[1]))
    try:
        done = started(
            "tell",
            "more words",
            cwd=tmp_path,
            env=environment,
            input="what is read",
            start_new_session=True,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["arguments"] == ["tell", "more words"]
    assert told["folder"] == str(tmp_path) and told["variable"] == "given"
    assert told["first"] == str(STARTED.parent) and told["input"] == "what is read"
    assert told["files"] == limit[0] - 1 and told["parent"] == os.getpid()
    assert told["session"] != os.getsid(0) and not told["writes_bytecode"]
    assert cold == []


def test_random_numbers_of_forked_processes_differ() -> None:
    told = [json.loads(started("tell", input="").stdout) for _ in range(2)]
    assert told[0]["random"] != told[1]["random"] and told[0]["torch"] != told[1]["torch"]


def test_codes_are_those_of_their_processes_when_threads_start_them() -> None:
    with ThreadPoolExecutor(4) as pool:
        wanted = [number % 7 for number in range(12)]
        codes = list(pool.map(lambda code: started("end", str(code)).returncode, wanted))
    assert codes == wanted


def test_errors_and_signals_end_a_forked_process_as_any_other() -> None:
    failed = started("raise")
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: as it was told\n")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, str(STARTED), "sleep"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "sleeping\n"
        process.send_signal(number)
        assert process.wait(10) == -number
        process.stdout.close()


@pytest.mark.parametrize(("unbuffered", "said"), [("1", "before the end\n"), ("", "")])
def test_what_was_printed_before_a_sudden_end(unbuffered: str, said: str) -> None:
    done = started("cut", env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stdout) == (5, said)


def test_what_a_fork_could_not_show_is_started_anew(tmp_path: Path, cold: list[object]) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit(7)")
    hidden = subprocess.run(HELP, cwd=tmp_path, capture_output=True, check=False)
    assert hidden.returncode == 7
    at_import = subprocess.run(
        HELP, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, check=False
    )
    assert at_import.returncode == 0
    assert len(cold) == 2


def test_the_server_outlives_the_thread_that_used_it_first() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(started("end", "3").returncode))
    thread.start()
    thread.join()
    assert [*codes, started("end", "4").returncode] == [3, 4]
