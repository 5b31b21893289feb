"""Entry point of a process that calls a user's agent function: reads the function's options, then
tasks, and writes reports, one JSON object per line. Imports only the standard library and modules
of hybridrl that need nothing else, because the process may run in an environment of its own.

All calls run concurrently in one event loop. The output of a call goes to its log file as long as
it writes through `sys.stdout` or `sys.stderr`.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from hybridrl.agents.tasks import AgentTask, shorten_log
from hybridrl.config.own_code import imported

PR_SET_PDEATHSIG = 1
LOG: contextvars.ContextVar[str | None] = contextvars.ContextVar("LOG", default=None)


class _Output:
    """Appends text to the log of the call that writes it; other text goes to `other`."""

    def __init__(self, other: TextIO) -> None:
        self._other = other

    def write(self, text: str) -> int:
        if (log := LOG.get()) is None:
            return self._other.write(text)
        with Path(log).open("a", encoding="utf-8") as file:
            num_written = file.write(text)
        shorten_log(log)
        return num_written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


async def main(path: str) -> None:
    """Calls the function `path` for each task that arrives on the standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps what the function prints apart from the reports
    sys.stdout = sys.stderr = _Output(sys.stderr)  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    options: dict[str, Any] = json.loads(await reader.readline() or b"{}")
    running: dict[int, asyncio.Task[None]] = {}

    async def call(task: AgentTask, log: str | None) -> None:
        LOG.set(log)
        reward, error = None, None
        try:
            found = imported(path)(task, **options)
            reward = await found if hasattr(found, "__await__") else found
            reward = reward.item() if hasattr(reward, "item") else reward
            json.dumps(reward)
        except asyncio.CancelledError:
            error = "CancelledError"
        except BaseException as raised:  # the user's code may raise anything
            traceback.print_exc()
            text = str(raised).splitlines()
            error = f"{type(raised).__name__}: {text[0][:300] if text else ''}"
        answers.write(json.dumps({"key": task.key, "reward": reward, "error": error}).encode())
        answers.write(b"\n")
        answers.flush()
        del running[task.key]

    while line := await reader.readline():
        message = json.loads(line)
        if "cancel" in message:
            if (one := running.get(message["cancel"])) is not None:
                one.cancel()
            continue
        task = AgentTask(**message["task"])
        running[task.key] = asyncio.create_task(call(task, message["log"]))


def check(path: str) -> None:
    """Ends the process with a message if the function cannot be imported."""
    try:
        found = imported(path)
    except ImportError as error:
        sys.exit(str(error))
    if not callable(found):
        sys.exit(f"{path} is a {type(found).__name__}, which cannot be called")


if __name__ == "__main__":
    if sys.argv[2:] == ["--check"]:
        check(sys.argv[1])
        sys.exit()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # These signals reach all processes of a terminal; the run ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(main(sys.argv[1]))
