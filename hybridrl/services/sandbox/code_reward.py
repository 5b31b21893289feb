"""Reward for responses that are programs: runs each against tests in a sandbox. No torch.

contain.py isolates the program in a process without network access, with limits on time, memory,
files and processes. A program that fails, hangs or reaches a limit (counted as `limits`) scores 0.
A failure of the sandbox itself counts as a failure of the scorer.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import marshal
import os
import py_compile
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import MISSING, DataError, UserError
from hybridrl.rewards.outcome import Noted
from hybridrl.services.sandbox import verdict
from hybridrl.services.sandbox.syscalls import system_call_filter
from hybridrl.services.sandbox.visible import visible_files

MAX_OUTPUT = 1 << 20
LIMITS, UNJUDGED = "limits", "unjudged"
START = """
import os, sys
sys.path.insert(0, {folder!r})
try:
    from hybridrl.services.sandbox.contain import main
except BaseException as error:  # a folder that the sandbox or Python needs is missing
    os.write(2, f"not contained: {{error}}\\n".encode())
    os._exit({code})
del sys.path[0]
main()
"""
CONTAINED = ("contain", "judge", "program", "rpc", "values", "verdict")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NUMBERS = itertools.count()
_SETUP_LOCK = threading.Lock()


class SandboxError(Exception):
    """Raised if the sandbox could not be created, so that the program did not run."""


@dataclass(frozen=True)
class RunResult:
    """Output of a program, and its exit code or 128 plus the number of the signal that ended it."""

    code: int
    output: str
    error: str
    is_limited: bool


class Code:
    """Scores a program by the share of the row's tests that it passes.

    The program is the last ``` block of the response, or the whole response. The row's tests are a
    text with assert statements, a list of such texts, or a list of `{"input", "output"}` for
    standard input and output (without trailing white space). Asserts run in a separate process
    (judge.py). A program that exits before its asserts have run fails them.

    Args:
        tests_key: Column that contains the tests.
        partial: Whether the score is the share of passed tests, rather than 1 if all passed or 0.
        time_s: Wall-clock limit for one run, in whole seconds.
        memory_mib, disk_mib, processes: Limits per process, on files, and on their number.
        readable: Absolute paths that programs and tests may read besides Python and libraries.

    Raises:
        UserError: This host cannot isolate programs, or an option is invalid.
    """

    runs = "thread"
    notes = (LIMITS, UNJUDGED)

    def __init__(
        self,
        tests_key: str = "tests",
        partial: bool = False,
        time_s: int = 10,
        memory_mib: int = 512,
        disk_mib: int = 16,
        processes: int = 8,
        readable: Sequence[str] = (),
    ) -> None:
        self._key, self._partial, self._readable = tests_key, partial, readable
        limits = {"time_s": time_s, "memory_mib": memory_mib, "disk_mib": disk_mib}
        self._limits = {**limits, "processes": processes}
        for name, value in self._limits.items():
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"reward.options.{name}", repr(value), "a whole number from 1", f"Set {name}."
                )
        if isinstance(readable, str) or not all(
            isinstance(path, str) and path.startswith("/") and Path(path).exists()
            for path in readable
        ):
            allowed = "a list of absolute paths that exist"
            remedy = "Correct readable, or remove this option."
            raise UserError("reward.options.readable", repr(readable), allowed, remedy)
        _check_host()

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns a score from 0 to 1, with the note `limits` or `unjudged` (by the judge) if any.

        Raises:
            DataError: The row has no tests.
            SandboxError: The sandbox failed.
        """
        tests = _tests(columns.get(self._key), self._key, prompt)
        blocks = _BLOCK.findall(response)
        program = blocks[-1] if blocks else response
        passed, notes = 0, set()
        for test in tests:
            is_right, note = self._passes(program, test)
            passed += is_right
            notes.add(note)
            if not is_right and not self._partial:
                break
        score = passed / len(tests) if self._partial else float(passed == len(tests))
        note = next((name for name in self.notes if name in notes), None)
        return score if note is None else Noted(score, note)

    def check_row(self, prompt: str, columns: Mapping[str, object]) -> None:
        """Raises DataError if the row has no tests."""
        _tests(columns.get(self._key), self._key, prompt)

    def _passes(self, program: str, test: str | Mapping[str, Any]) -> tuple[bool, str | None]:
        if isinstance(test, str):
            ended = run_program(program, "", self._limits, test, self._readable)
            is_right = ended.code == verdict.PASSED
            is_unjudged = ended.code == verdict.UNJUDGED
        else:
            given, expected = str(test["input"]), str(test["output"])
            ended = run_program(program, given, self._limits, readable=self._readable)
            is_right = ended.code == 0 and _lines(ended.output) == _lines(expected)
            is_unjudged = False
        note = LIMITS if ended.is_limited else UNJUDGED if is_unjudged else None
        return is_right and not ended.is_limited, note


def run_program(
    program: str,
    given: str,
    limits: Mapping[str, int],
    tests: str | None = None,
    readable: Sequence[str] = (),
) -> RunResult:
    """Runs a Python program in the sandbox, alone or against tests.

    `given` is the standard input; `limits` are `time_s`, `memory_mib`, `disk_mib` and `processes`.
    With asserts in `tests`, `code` of the result is their verdict. `readable` is as in `Code`.

    Raises:
        SandboxError: The program could not be isolated, and did not run.
    """
    with _SETUP_LOCK:  # All threads share the folder.
        if not os.path.isdir(_code_folder().name):  # The host may remove old temporary folders.
            _code_folder.cache_clear()
        folder = os.path.realpath(_code_folder().name)
        visible = visible_files(tuple(readable))
    start = START.format(folder=folder, code=verdict.NOT_CONTAINED)
    plan = {
        "code": folder,
        "program": program.encode("utf-8", "replace").decode(),
        "limits": {**limits, "number": (os.getpid() * 1024 + next(_NUMBERS) % 1024) % (1 << 29)},
        "visible": visible,
        "filter": system_call_filter(os.uname().machine).hex(),
    }
    texts = [text.encode("utf-8", "replace") for text in (given, tests) if text is not None]
    contents = [texts[0], marshal.dumps(plan), *texts[1:]]
    with contextlib.ExitStack() as stack:
        stdin, *files = [_sealed(content, stack) for content in contents]
        numbers = [*map(str, files), *(["-1"] if tests is None else [])]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start, *numbers],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=files,
            env={},
            cwd="/",
            start_new_session=True,
        )
        try:
            # The sandbox enforces time_s; this deadline is for a sandbox that hangs itself.
            output, error, is_cut = _read(process, time.monotonic() + limits["time_s"] + 5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()
    if code == verdict.NOT_CONTAINED:
        raise SandboxError(error.strip())
    return RunResult(code, output, error, is_cut or _is_limited(code, error))


def _is_limited(code: int, error: str) -> bool:
    stopped = (signal.SIGALRM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGKILL)
    met = ("MemoryError", "Errno 28]", "Errno 27]", "Errno 11]", "can't start new thread")
    if code < 0 or code - 128 in stopped:
        return True
    return code != 0 and any(text in error[-2000:] for text in met)


@functools.cache
def _code_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder with compiled modules, because the sandbox may not see the package."""
    folder = tempfile.TemporaryDirectory(prefix="hybridrl-")
    os.chmod(folder.name, 0o755)  # if the trainer is root, the program runs as another user
    package = Path(folder.name, "hybridrl")
    sandbox = package / "services" / "sandbox"
    sandbox.mkdir(parents=True)
    for part in (package, sandbox.parent, sandbox):
        (part / "__init__.py").touch()
        os.chmod(part, 0o755)
        os.chmod(part / "__init__.py", 0o644)
    for name in CONTAINED:
        file = sandbox / f"{name}.pyc"
        source = Path(__file__).with_name(f"{name}.py")
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(source), str(file), invalidation_mode=unchecked, doraise=True)
        os.chmod(file, 0o644)
    return folder


def _sealed(content: bytes, stack: contextlib.ExitStack) -> int:
    """Creates an immutable file in memory that stays open until the stack is closed."""
    number = os.memfd_create("hybridrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, number)
    with os.fdopen(os.dup(number), "wb") as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str, bool]:
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
            is_cut |= len(found[file]) > MAX_OUTPUT
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
        name, found = f"column {key!r} of {prompt[:40]!r}", f"{str(given)[:60]!r}"
        allowed = 'a text with asserts, a list of such texts, or a list of {"input", "output"}'
        remedy = "Fix the row, or set reward.options.tests_key."
        raise DataError(name, MISSING if given is None else found, allowed, remedy)
    return tests  # type: ignore[return-value]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _check_host() -> None:
    limits = {"time_s": 10, "memory_mib": 256, "disk_mib": 1, "processes": 4}
    try:
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"{sys.platform} has no namespaces")
        ended = run_program("import json; print(json.dumps(1))", "", limits)
        if ended.output.strip() != "1":
            raise SandboxError(ended.error.strip()[-200:] or f"exit code {ended.code}")
    except (SandboxError, OSError) as error:
        allowed = "code, on a host where this user may create namespaces (user, mount, network)"
        remedy = (
            "Allow namespaces (docker: --cap-add SYS_ADMIN), or score on another host with the "
            f"function `remote`. {error}."
        )
        raise UserError("reward.function", "code", allowed, remedy) from None
