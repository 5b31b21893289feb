"""Entry point of a process that calls a user's agent function: reads the function's options, then
tasks, and writes reports, one JSON object per line. Imports only the standard library and modules
of hybridrl that need nothing else, because the process may run in a separate environment.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hybridrl.agents.tasks import AgentTask, shorten_log
from hybridrl.config.own_code import imported

PR_SET_PDEATHSIG = 1
LOG: contextvars.ContextVar[str | None] = contextvars.ContextVar("LOG", default=None)


class _Output:
    """Appends text to the current call's log, or to `other`; ignores errors."""

    def __init__(self, other: TextIO) -> None:
        self._other = other

    def write(self, text: str) -> int:
        with suppress(OSError):  # the folder was removed, or the disk is full
            if (log := LOG.get()) is None:
                self._other.write(text)
            else:
                with Path(log).open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
                    file.flush()
                    shorten_log(file.fileno())
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._other.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def _number_or_text(reward: Any) -> float | str | None:
    reward = reward.item() if hasattr(reward, "item") else reward
    if reward is None or (isinstance(reward, int | float) and abs(reward) <= sys.float_info.max):
        return reward
    return _sendable(str(reward))


def _described(error: BaseException) -> str:
    """Prints an error of the user's code to the log. Returns its class and its first line; those of
    the first of several errors, which task groups raise together.
    """
    with suppress(Exception):  # its text is made by the user's code
        traceback.print_exception(error)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name = type(error).__name__
    with suppress(Exception):
        lines = str(error).splitlines()
        return f"{name}: {_sendable(lines[0]) if lines else ''}"
    return name


def _sendable(text: str) -> str:
    """Returns the beginning of a text, without surrogates, which the receiver refuses."""
    return text[:300].encode("utf-8", "backslashreplace").decode("utf-8")


async def main(path: str) -> None:
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
            reward = _number_or_text(reward)
        except asyncio.CancelledError:
            error = "CancelledError"
        except BaseException as raised:  # the user's code may raise anything
            reward, error = None, _described(raised)
        finally:
            del running[task.key]
            report = {"key": task.key, "reward": reward, "error": error}
            answers.write(json.dumps(report).encode() + b"\n")
            answers.flush()

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
