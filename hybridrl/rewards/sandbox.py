"""The reward of responses that are programs: they run, apart from everything, against tests.

Owns what a program is given and how its outcome becomes a score; contain.py keeps it apart: own
process, limits of time, memory, files, processes, and no network. A program that fails, hangs or
runs into a limit scores 0, and the latter is counted as `limits`; a failure of the sandbox itself
is one of the scorer. No torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import DataError, UserError
from hybridrl.rewards.contain import NOT_CONTAINED
from hybridrl.rewards.outcome import Noted

MOST_OUTPUT = 1 << 20
LIMITS = "limits"
# Runs a program and its asserts, which stand in standard input, and then prints a mark.
ASSERTS = """
import json, sys

def run():
    text, mark = json.load(sys.stdin)
    exec(compile(text, "main.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    print()
    print(mark)

run()
"""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NUMBERS = itertools.count()


class SandboxError(Exception):
    """The sandbox could not be made; the program did not run."""


@dataclass(frozen=True)
class Ended:
    """How a program ended: exit code (128 + signal), output, and whether a limit stopped it."""

    code: int
    output: str
    error: str
    is_limited: bool


class Code:
    """The share of a row's tests that the response's program passes.

    The program is the last ``` block of the response, else all of it. The row's tests are a text of
    asserts, a list of such texts, or a list of `{"input", "output"}` for standard input and output
    (compared without white space at line ends and at the end). A program that ends before its
    asserts have run has not passed them.

    Args:
        tests_key: the column of the tests.
        partial: score the share of tests passed; False: 1 if all are, else 0.
        time_s: wall-clock limit of one run, whole seconds.
        memory_mib, disk_mib, processes: further limits; memory is of each process.

    Raises:
        UserError: programs cannot be contained on this host, or an option is wrong.
    """

    runs = "thread"
    notes = (LIMITS,)

    def __init__(
        self,
        tests_key: str = "tests",
        partial: bool = False,
        time_s: int = 10,
        memory_mib: int = 512,
        disk_mib: int = 16,
        processes: int = 8,
    ) -> None:
        self._key, self._partial = tests_key, partial
        self._limits = {
            "time_s": time_s,
            "memory_mib": memory_mib,
            "disk_mib": disk_mib,
            "processes": processes,
        }
        for name, value in self._limits.items():
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"reward.options.{name}", repr(value), "a whole number from 1", f"Set {name}."
                )
        _check_host()

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns a share from 0 to 1, with the note `limits` where a run met one.

        Raises:
            DataError: the row has no tests.
            SandboxError: the sandbox failed.
        """
        tests = _tests(columns.get(self._key), self._key, prompt)
        blocks = _BLOCK.findall(response)
        program = blocks[-1] if blocks else response
        passed, is_limited = 0, False
        for test in tests:
            is_right, ended = self._passes(program, test)
            passed += is_right
            is_limited |= ended.is_limited
            if not is_right and not self._partial:
                break
        score = passed / len(tests) if self._partial else float(passed == len(tests))
        return Noted(score, LIMITS) if is_limited else score

    def _passes(self, program: str, test: str | Mapping[str, Any]) -> tuple[bool, Ended]:
        if isinstance(test, str):
            # Printed when all asserts have run, and neither to be guessed nor in a file.
            mark = secrets.token_hex(16)
            parts = json.dumps([f"{program}\n{test}\n", mark])
            ended = run_program(ASSERTS, parts, self._limits)
            is_right = ended.code == 0 and ended.output.rstrip().endswith(f"\n{mark}")
        else:
            ended = run_program(program, str(test["input"]), self._limits)
            is_right = ended.code == 0 and _lines(ended.output) == _lines(str(test["output"]))
        return is_right and not ended.is_limited, ended


def run_program(program: str, given: str, limits: Mapping[str, int]) -> Ended:
    """Runs a Python program in the sandbox.

    Args:
        program: its text.
        given: its standard input.
        limits: `time_s`, `memory_mib`, `disk_mib`, `processes`.

    Raises:
        SandboxError: it could not be contained, and did not run.
    """
    program = program.encode("utf-8", "replace").decode()
    if "\0" in program or len(program.encode()) > 120_000:  # what a command line takes
        return Ended(1, "", "not a program", False)
    number = (os.getpid() * 1024 + next(_NUMBERS) % 1024) % (1 << 29)
    numbered = json.dumps({**limits, "number": number})
    contain = str(Path(__file__).with_name("contain.py"))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stdin:
        stdin.write(given.encode("utf-8", "replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", contain, numbered, program, folder],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        try:
            # The first process of the sandbox stops it in time; this limit is for that one.
            output, error, is_cut = _read(process, time.monotonic() + limits["time_s"] + 5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
    if code == NOT_CONTAINED:
        raise SandboxError(error.strip())
    stopped = (signal.SIGALRM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGKILL)
    met = ("MemoryError", "Errno 28]", "Errno 27]", "Errno 11]", "can't start new thread")
    is_limited = is_cut or code < 0 or code - 128 in stopped
    is_limited |= code != 0 and any(text in error[-2000:] for text in met)
    return Ended(code, output, error, is_limited)


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str, bool]:
    """Returns what a process writes until it ends, and whether it was too much or took too long."""
    assert process.stdout is not None and process.stderr is not None
    found = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    out, err = found
    poll = select.poll()
    for file in found:
        poll.register(file, select.POLLIN)
    waiting, is_cut = set(found), False
    while waiting and not is_cut:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        is_cut = not ready
        for file, _ in ready:
            part = os.read(file, 1 << 16)
            found[file] += part
            is_cut |= len(found[file]) > MOST_OUTPUT
            if not part:
                poll.unregister(file)
                waiting.discard(file)
    if not is_cut:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return found[out].decode("utf-8", "replace"), found[err].decode("utf-8", "replace"), is_cut


def _tests(given: object, key: str, prompt: str) -> Sequence[str | Mapping[str, Any]]:
    tests = [given] if isinstance(given, str) else given
    is_right = isinstance(tests, Sequence) and all(
        isinstance(test, str) or (isinstance(test, Mapping) and {"input", "output"} <= set(test))
        for test in tests
    )
    if not is_right or not tests:
        raise DataError(
            f"column {key!r} of {prompt[:40]!r}",
            "nothing" if given is None else f"{str(given)[:60]!r}",
            'a text of asserts, or a list of them or of {"input", "output"}',
            "Mend that row, or set reward.options.tests_key.",
        )
    return tests  # type: ignore[return-value]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _check_host() -> None:
    """Raises UserError unless programs can be contained here."""
    limits = {"time_s": 10, "memory_mib": 256, "disk_mib": 1, "processes": 4}
    try:
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"no namespaces on {sys.platform}")
        ended = run_program("import json; print(json.dumps(1))", "", limits)
        if ended.output.strip() != "1":
            raise SandboxError(ended.error.strip()[-200:] or f"exit code {ended.code}")
    except (SandboxError, OSError) as error:
        raise UserError(
            "reward.function",
            "code",
            "code only where the kernel lets this user make namespaces (user, mount, network)",
            f"Allow them (docker: --cap-add SYS_ADMIN), or score elsewhere by remote. {error}.",
        ) from None
