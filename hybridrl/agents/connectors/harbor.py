"""Plays task folders in Harbor's format: an instruction, files, and tests that give the reward.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh

The model has one tool, a shell in a sandbox. The tests are copied there after its last turn. The
agent runs outside of the sandbox. Needs only the standard library and openai.
"""

from __future__ import annotations

import json
import re
import shlex
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hybridrl.agents.connectors.limits import until_a_limit
from hybridrl.agents.task_sandbox import USUAL_ENV, Bubbles, TaskSandbox
from hybridrl.agents.tasks import AgentTask
from hybridrl.config.own_code import imported

WORKDIR, TESTS, LOGS = "/app", "/tests", "/logs"
TIMEOUT_S = 600.0  # for all commands of the agent, and for the tests, unless task.toml sets it
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
    """A task: its folder, the text for the model, and the content of task.toml."""

    folder: Path
    instruction: str
    settings: Mapping[str, Any]

    @staticmethod
    def read(folder: str | Path) -> TaskFolder:
        """Reads a folder. Raises ValueError if a file is missing or cannot be read."""
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
        """Returns the time limit of section `agent` or `verifier`, excluding the model's turns."""
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
        folder: Option of `rows`, which is not used here.
        sandbox: Async function `package.module:name` that receives a `TaskFolder` and returns a
            `TaskSandbox` with the task's image; default: bubblewrap on this host, without images.

    Raises:
        ValueError: The task is wrong, needs an image, or its tests wrote no reward.
    """
    one = TaskFolder.read(task.columns["task"])
    opened: Callable[..., Awaitable[TaskSandbox]] = imported(sandbox) if sandbox else local_sandbox
    place = await opened(one, **(sandbox_options or {}))
    try:
        with until_a_limit():
            await _solve(task, one, place, max_turns, max_tokens, command_timeout_s)
        return await _verified(one, place)
    finally:
        await place.close()


def rows(folder: str, **_: Any) -> Iterator[dict[str, Any]]:
    for settings in sorted(Path(folder).absolute().glob("*/task.toml")):
        one = TaskFolder.read(settings.parent)
        yield {"prompt": one.instruction, "task": str(one.folder)}


async def local_sandbox(task: TaskFolder, network: bool = False) -> TaskSandbox:
    """Returns a bubblewrap with a task's files. Raises ValueError if an image must be built."""
    plan = _Plan.read(task.folder)
    folders = (TESTS, LOGS, *(folder for _, folder, _ in plan.copies))
    place = Bubbles(plan.workdir, folders, plan.env, network)
    for source, folder, name in plan.copies:
        await place.put(source, f"{folder}/{name}" if name else folder)
    return place


@dataclass
class _Plan:
    """What a sandbox without images takes from a Dockerfile.

    `copies` has, for each copy, the file or folder of this host, the folder of the sandbox, and the
    name of the file there; for a folder an empty name.
    """

    dockerfile: Path
    workdir: str = WORKDIR
    env: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, str, str]] = field(default_factory=list)

    @staticmethod
    def read(task: Path) -> _Plan:
        """Reads a task's Dockerfile. Raises ValueError if a line needs a build of an image."""
        plan = _Plan(task / "environment" / "Dockerfile")
        is_there = plan.dockerfile.is_file()
        text = plan.dockerfile.read_text(encoding="utf-8") if is_there else ""
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            name, _, rest = line.strip().partition(" ")
            if name and name.upper() not in IGNORED:
                plan._follow(name.upper(), rest, line.strip())
        return plan

    def _follow(self, name: str, rest: str, line: str) -> None:
        allowed = f"{', '.join(FOLLOWED)} without options, because no image is built"
        allowed += ". Set the option sandbox."
        if name not in FOLLOWED:
            raise self._refused(line, allowed)
        try:
            words = [self._expanded(word, rest) for word in shlex.split(rest)]
        except ValueError as error:
            raise self._refused(line, f"{allowed[:-1]}: {error}") from error
        if name == "WORKDIR" and len(words) == 1:
            self.workdir = words[0]
        elif name == "ENV" and all("=" in word for word in words):
            self.env |= dict(word.split("=", 1) for word in words)
        elif name == "COPY" and len(words) == 2 and not words[0].startswith("-"):
            self._copy(words[0], words[1], line)
        else:
            raise self._refused(line, allowed)

    def _refused(self, line: str, allowed: str) -> ValueError:
        return ValueError(f"{self.dockerfile}: got {line!r}; allowed: {allowed}")

    def _expanded(self, word: str, rest: str) -> str:
        known = USUAL_ENV | self.env

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name not in known or "'" in rest or "\\" in rest:
                raise ValueError(f"{found[0]!r} is not $NAME or ${{NAME}} of {', '.join(known)}")
            return known[name]

        return re.sub(r"\$(?:(\w+)|\{(\w+)\}|)", value, word)

    def _copy(self, source: str, target: str, line: str) -> None:
        root = self.dockerfile.parent.parent.resolve() / self.dockerfile.parent.name
        file = (root / source.lstrip("/")).resolve()
        if not file.is_relative_to(root) or not file.exists():
            raise self._refused(line, f"a file or folder of {self.dockerfile.parent}")
        path = target if target.startswith("/") else f"{self.workdir}/{target.removeprefix('./')}"
        folder = path.rstrip("/").removesuffix("/.") or "/"
        name = ""
        known = {self.workdir, *(one for _, one, _ in self.copies)}
        if file.is_file():
            into = target.endswith(("/", "/.")) or target == "." or folder in known
            name = PurePosixPath(source).name if into else PurePosixPath(folder).name
            folder = folder if into else str(PurePosixPath(folder).parent)
        self.copies.append((file, folder, name))


async def _solve(
    task: AgentTask,
    folder: TaskFolder,
    place: TaskSandbox,
    max_turns: int,
    max_tokens: int | None,
    command_timeout_s: float,
) -> None:
    """Lets the model run commands until a turn has no call, or the time for commands is over."""
    client, limit = task.client(), {} if max_tokens is None else {"max_tokens": max_tokens}
    messages: list[Any] = [{"role": "user", "content": folder.instruction}]
    left_s = folder.timeout_s("agent")
    for _ in range(max_turns):
        reply = await client.chat.completions.create(
            model=task.model, messages=messages, tools=[SHELL], **limit
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            began = time.monotonic()
            text = await _called(place, call.function, min(command_timeout_s, left_s))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            left_s -= time.monotonic() - began
            if left_s <= 0:
                return
        if not message.tool_calls:
            return


async def _called(place: TaskSandbox, function: Any, timeout_s: float) -> str:
    try:
        command = json.loads(function.arguments)["command"]
    except (ValueError, KeyError, TypeError, RecursionError):
        command = None
    if function.name != "shell" or not isinstance(command, str):
        return 'Call the tool shell with a JSON object such as {"command": "ls"}.'
    try:
        ended = await place.run(["bash", "-c", command], timeout_s)
    except (OSError, ValueError) as error:  # too long, or has characters that no command has
        return f"The command cannot be run: {error}"
    code = f"took longer than {timeout_s:g} s" if ended.code is None else f"exit {ended.code}"
    return f"{ended.output[-MAX_SEEN:]}\n[{code}]"


async def _verified(folder: TaskFolder, place: TaskSandbox) -> float:
    # Nothing that the agent left outside of its working folder may take part in the tests.
    await place.clear([TESTS, f"{LOGS}/verifier"])
    await place.put(folder.folder / "tests", TESTS)
    ended = await place.run(["bash", f"{TESTS}/test.sh"], folder.timeout_s("verifier"))
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
