"""Connectors with the real packages, in environments named by variables; the model is scripted."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_server import Served
from agent_templates import tokenizer_of
from test_agent_runners import run_all, task_of

from hybridrl.agents.command import EpisodeLogs
from hybridrl.agents.connectors import write_rows
from hybridrl.agents.functions import FunctionRunner
from hybridrl.agents.tasks import AgentClocks, AgentTask, Report
from hybridrl.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples" / "connectors"


def python_of(name: str) -> str:
    """Returns the interpreter of an environment with a package; skips the test without one."""
    variable = f"HYBRIDRL_TEST_{name.upper()}_PYTHON"
    if (python := os.environ.get(variable)) is None:
        pytest.skip(f"{variable} names no interpreter of an environment with {name}")
    return python


@contextmanager
def playing(folder: Path, name: str, **options: Any) -> Iterator[Any]:
    """Context manager that yields a function: it plays a row and returns report and session."""
    runner = FunctionRunner(
        path=f"hybridrl.agents.connectors.{name}:play",
        python=python_of(name),
        options=options,
        workers=1,
        timeout_s=300,
        clocks=AgentClocks(),
        logs=EpisodeLogs(folder / "agents", 2),
    )
    with Served() as served:

        def play(prompt: str, **columns: Any) -> tuple[Report, Any]:
            session = served.sessions.open(0)
            task = AgentTask(
                **{
                    **{n: getattr(task_of(0), n) for n in ("key", "step", "sample", "model")},
                    "prompt": prompt,
                    "columns": columns,
                    "base_url": served.endpoint.url,
                    "api_key": session.token,
                }
            )
            (report,) = run_all(runner, [task], timeout_s=300).values()
            return report, served.close(session)

        yield play
    runner.close()


@pytest.mark.parametrize(
    ("text", "form", "action"),
    [
        ("5", "string", {"answer": "5"}),
        ("5", "integer", {"answer": 5}),
        ('"5"', "string", {"answer": "5"}),
        ("```\nhello\n```", "string", {"answer": "hello"}),
        ('{"answer": 5}', "string", {"answer": 5}),
        ("[" * 100_000, "string", {"answer": "[" * 100_000}),
    ],
)
def test_turns_become_actions(
    monkeypatch: pytest.MonkeyPatch, text: str, form: str, action: Any
) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", SimpleNamespace(GenericEnvClient=None))
    openenv = importlib.import_module("hybridrl.agents.connectors.openenv")
    monkeypatch.delitem(sys.modules, "hybridrl.agents.connectors.openenv")
    schema = {"properties": {"answer": {"type": form}}, "required": ["answer"]}
    assert openenv.action_of(text, schema) == action
    assert openenv.action_of("x", {"required": ["answer", "other"]}) is None


def test_failed_calls_of_tools_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(Client=None, StdioServerParameters=None)
    monkeypatch.setitem(sys.modules, "mcp", names)
    mcp = importlib.import_module("hybridrl.agents.connectors.mcp")
    monkeypatch.delitem(sys.modules, "hybridrl.agents.connectors.mcp")

    async def call_tool(name: str, given: Any) -> Any:
        raise RuntimeError("wrong arguments")

    tools = mcp.Tools({"add": SimpleNamespace(call_tool=call_tool)}, [])
    answers = {
        "{}": "The tool failed: wrong arguments",
        "[" * 100_000: "not valid JSON",
        "[]": "must",
    }
    for given, answer in answers.items():
        assert answer in asyncio.run(tools.call("add", given))


def test_mcp_tools_are_called_until_the_model_answers(tmp_path: Path) -> None:
    python = python_of("mcp")
    server = {"command": python, "args": [str(EXAMPLES / "mcp_calculator.py")]}
    with playing(tmp_path, "mcp", servers={"calculator": server}) as play:
        report, result = play("add 17 25")
        assert report == Report()
        (row,) = result.rows
        assert row.num_turns == 2 and "The result is 42." in row.text
        assert [tool["function"]["name"] for tool in row.tools] == ["add"]


def test_openenv_gives_the_sum_of_the_rewards(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [python_of("openenv"), str(EXAMPLES / "openenv_game.py"), str(port)]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            time.sleep(0.1)
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert server.poll() is None
        with playing(tmp_path, "openenv", url=url, observation="text", max_turns=5) as play:
            report, result = play("Play.", reset={"seed": 1})
        assert report.failure is None and report.reward == pytest.approx(-0.3)
        (row,) = result.rows
        assert row.num_turns == 3 and "That is wrong." in str(row.messages)
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("client", ["chat", "tokens"])
@pytest.mark.parametrize("task_set", ["glossary", "reverse_text"])
def test_a_task_set_of_verifiers_runs_unchanged(tmp_path: Path, client: str, task_set: str) -> None:
    """The environment also contains these task sets from verifiers' repository."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3}
    env = {"taskset": {"id": task_set}, "agent": agent}
    more: dict[str, Any] = {}
    if client == "tokens":
        tokenizer_of("qwen3").save_pretrained(tmp_path / "tokenizer")
        more = {"client": client, "tokenizer": str(tmp_path / "tokenizer")}
        if task_set == "glossary":  # it has tools, which the default renderer does not know
            more["renderer"] = {"name": "qwen3"}
    task = {"idx": 0, "prompt": "Say something.", "answer": "first computer programmer"}
    with playing(tmp_path, "verifiers", env=env, **more) as play:
        report, result = play(f"{task_set} 0", task=task)
    assert report == Report(0.0), report
    (row,) = result.rows
    assert row.num_turns == 1 and bool(row.messages) == (client == "chat")


@pytest.mark.parametrize("client", ["chat", "tokens"])
def test_tools_of_a_task_set_of_verifiers_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3}
    more: dict[str, Any] = {}
    if client == "tokens":
        tokenizer_of("qwen3").save_pretrained(tmp_path / "tokenizer")
        more = {"client": client, "tokenizer": str(tmp_path / "tokenizer")}
        more["renderer"] = {"name": "qwen3"}
    task = {"idx": 0, "prompt": "add 17 25", "answer": "42"}
    env = {"taskset": {"id": "verifiers_sums"}, "agent": agent}
    with playing(tmp_path, "verifiers", env=env, **more) as play:
        report, result = play("verifiers_sums 0", task=task)
    assert report == Report(1.0), report
    (row,) = result.rows  # one conversation, whose second turn continues the first
    assert row.num_turns == 2 and bool(row.messages) == (client == "chat")
    text = tokenizer_of("qwen3").decode([*row.prompt, *row.tokens])
    assert "<tool_response>\n42\n</tool_response>" in text and "The result is 42." in text


def test_rows_are_written_without_showing_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows_module.py").write_text(
        "import sys\n"
        "def rows(secret, num):\n"
        "    assert secret not in open('/proc/self/cmdline').read()\n"
        "    if num < 0:\n"
        "        raise ValueError('num is negative')\n"
        "    for row in range(num):\n"
        "        print('noise')\n"
        "        yield {'prompt': str(row)}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(num: int, python: str = sys.executable) -> int:
        options = {"secret": "hidden-value", "num": num}
        agent = SimpleNamespace(function="rows_module:play", python=python, options=options)
        config = SimpleNamespace(agent=agent)
        monkeypatch.setattr(write_rows, "load_config", lambda file, changes: config)
        return write_rows.main("run.yaml", str(tmp_path / "data" / "rows.jsonl"), 2)

    assert write(3) == 2
    assert (tmp_path / "data" / "rows.jsonl").read_text().count("prompt") == 2
    with pytest.raises(UserError, match="num is negative") as error:
        write(-1)
    assert "hidden-value" not in str(error.value)
    with pytest.raises(UserError, match=r"agent\.python"):
        write(1, str(tmp_path / "no_python"))
    (tmp_path / "rows_module.py").write_text("play = rules = None\n")
    with pytest.raises(UserError, match="a connector whose module has a function `rows`") as error:
        write(1)
    assert error.value.name == "agent.function"


@pytest.mark.parametrize("words", [[], ["run.yaml"], ["run.yaml", "out.jsonl", "many"]])
def test_wrong_arguments_of_write_rows_are_answered_with_its_usage(words):
    module = [sys.executable, "-m", "hybridrl.agents.connectors.write_rows"]
    done = subprocess.run([*module, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip() == write_rows.USAGE
