"""Plays task folders in Harbor's format: an instruction, files, and tests that give the reward.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh

The model has one tool, a shell in a sandbox. The tests are copied there after its last turn. The
agent runs outside of the sandbox. Needs only the standard library and openai.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.agents.task_sandbox import Bubbles, TaskSandbox
from hybridrl.agents.tasks import AgentTask
from hybridrl.config.own_code import imported

WORKDIR, TESTS, LOGS = "/app", "/tests", "/logs"
TIMEOUT_S = 600.0  # of agent and tests if task.toml says nothing
MAX_SEEN = 10_000  # characters of a command's output that the model sees
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command with bash and returns its output and exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
# Lines of a Dockerfile that a sandbox without containers can follow or ignore.
FOLLOWED, IGNORED = ("WORKDIR", "ENV", "COPY"), ("FROM", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT")


@dataclass(frozen=True)
class TaskFolder:
    """A task.

    Args:
        folder: Its folder.
        instruction: Text for the model.
        settings: Content of task.toml.
    """

    folder: Path
    instruction: str
    settings: Mapping[str, Any]

    @staticmethod
    def read(folder: str | Path) -> TaskFolder:
        """Reads a folder.

        Raises:
            ValueError: A file is missing or cannot be read.
        """
        folder = Path(folder)
        try:
            text = (folder / "instruction.md").read_text(encoding="utf-8")
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: {error}; allowed: a task in Harbor's format") from error
        if not (folder / "tests" / "test.sh").is_file():
            raise ValueError(f"{folder}: no tests/test.sh; allowed: a task in Harbor's format")
        return TaskFolder(folder, text, settings)

    def timeout_s(self, section: str) -> float:
        """Returns the time limit of the section `agent` or `verifier`, in seconds."""
        return float(self.settings.get(section, {}).get("timeout_sec", TIMEOUT_S))


async def play(
    task: AgentTask,
    folder: str | None = None,
    sandbox: str | None = None,
    sandbox_options: Mapping[str, Any] | None = None,
    max_turns: int = 30,
    max_tokens: int | None = None,
    command_timeout_s: float = 60.0,
) -> float:
    """Plays one task and returns the reward that its tests wrote.

    Args:
        task: Task with a row that `rows` yielded.
        folder: Option of `rows`, which is not used here.
        sandbox: Async function `package.module:name` that receives a `TaskFolder` and returns a
            `TaskSandbox` with the task's image; default: bubblewrap on this host, without images.
        sandbox_options: Keyword arguments of this function.
        max_turns: Maximum number of turns.
        max_tokens: Maximum number of tokens in one turn.
        command_timeout_s: Time limit of one command, in seconds.

    Raises:
        ValueError: The task is wrong, needs an image, or its tests wrote no reward.
    """
    one = TaskFolder.read(task.columns["task"])
    opened: Callable[..., Awaitable[TaskSandbox]] = imported(sandbox) if sandbox else local_sandbox
    place = await opened(one, **(sandbox_options or {}))
    try:
        await _solve(task, one, place, max_turns, max_tokens, command_timeout_s)
        return await _verified(one, place)
    finally:
        await place.close()


def rows(folder: str, **_: Any) -> Iterator[dict[str, Any]]:
    """Yields a row for each task folder in `folder`, in order of their names."""
    for settings in sorted(Path(folder).absolute().glob("*/task.toml")):
        one = TaskFolder.read(settings.parent)
        yield {"prompt": one.instruction, "task": str(one.folder)}


async def local_sandbox(task: TaskFolder, network: bool = False) -> TaskSandbox:
    """Returns a sandbox of bubblewrap with the files of a task.

    Args:
        network: Whether commands may use the network.

    Raises:
        ValueError: The task needs an image that must be built.
    """
    workdir, env, copies = WORKDIR, dict[str, str](), list[tuple[str, str]]()
    dockerfile = task.folder / "environment" / "Dockerfile"
    text = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        words = shlex.split(rest, comments=True)
        if not name or name.startswith("#") or name.upper() in IGNORED:
            continue
        if name.upper() == "WORKDIR" and len(words) == 1:
            workdir = words[0]
        elif name.upper() == "ENV" and all("=" in word for word in words):
            env |= dict(word.split("=", 1) for word in words)
        elif name.upper() == "COPY" and len(words) == 2 and not words[0].startswith("-"):
            copies.append((words[0], words[1]))
        else:
            raise ValueError(
                f"{dockerfile}: got {line.strip()!r}; allowed: {', '.join(FOLLOWED)} without "
                "options, because no image is built. Set the option sandbox."
            )
    place = Bubbles(workdir, (TESTS, LOGS, *(_target(t, workdir) for _, t in copies)), env, network)
    for source, target in copies:
        file, path = dockerfile.parent / source, _target(target, workdir)
        if not file.is_dir() and target.endswith(("/", ".")):
            path += f"/{file.name}"
        await place.put(file, path)
    return place


async def _solve(
    task: AgentTask,
    folder: TaskFolder,
    place: TaskSandbox,
    max_turns: int,
    max_tokens: int | None,
    command_timeout_s: float,
) -> None:
    """Lets the model run commands until a turn has no call."""
    client, limit = task.client(), {} if max_tokens is None else {"max_tokens": max_tokens}
    messages: list[Any] = [{"role": "user", "content": folder.instruction}]
    for _ in range(max_turns):
        reply = await client.chat.completions.create(
            model=task.model, messages=messages, tools=[SHELL], **limit
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            text = await _called(place, call.function, command_timeout_s)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def _called(place: TaskSandbox, function: Any, timeout_s: float) -> str:
    """Returns the output of a call, or what is wrong with the call."""
    try:
        command = json.loads(function.arguments)["command"]
    except (ValueError, KeyError, TypeError):
        command = None
    if function.name != "shell" or not isinstance(command, str):
        return 'Call the tool shell with a JSON object such as {"command": "ls"}.'
    ended = await place.run(["bash", "-c", command], timeout_s)
    code = f"took longer than {timeout_s:g} s" if ended.code is None else f"exit {ended.code}"
    return f"{ended.output[-MAX_SEEN:]}\n[{code}]"


async def _verified(folder: TaskFolder, place: TaskSandbox) -> float:
    """Runs the tests and returns their reward."""
    # Nothing that the agent left may take part in the tests.
    await place.run(["find", TESTS, "-mindepth", "1", "-delete"], TIMEOUT_S)
    await place.put(folder.folder / "tests", TESTS)
    script = f"mkdir -p {LOGS}/verifier && rm -f {LOGS}/verifier/reward.* && bash {TESTS}/test.sh"
    ended = await place.run(["bash", "-c", script], folder.timeout_s("verifier"))
    text = await place.get(f"{LOGS}/verifier/reward.txt")
    found = await place.get(f"{LOGS}/verifier/reward.json")
    try:
        if text is not None:
            return float(text)
        if found is not None:
            scores = json.loads(found)
            return float(scores["reward"] if "reward" in scores else sum(scores.values()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder.folder}: the tests wrote a wrong reward: {error}") from error
    raise ValueError(f"{folder.folder}: the tests wrote no reward; output: {ended.output[-500:]}")


def _target(target: str, workdir: str) -> str:
    """Returns the folder of the sandbox into which files are copied."""
    path = target if target.startswith("/") else f"{workdir}/{target.removeprefix('./')}"
    return path.rstrip("/").removesuffix("/.") or "/"
