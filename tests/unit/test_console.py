"""stdout and stderr of a run: they never fail, never block for long and never end a program.

Each case is a Python of its own, since it is about descriptors 1 and 2 and the end of a process.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl import console

PRINTS = """
import os, subprocess, sys, time
from hybridrl import console
console.STALL_S = 0.2
console.protect(console.STDOUT, console.STDERR)
file = os.fdopen(int(sys.argv[1]), "w")  # for what the test looks at
def told():
    file.write("told\\n")
    file.flush()
    sys.stdin.readline()
"""


def start(
    code: str, stdout: int, stderr: int, **given: object
) -> tuple[subprocess.Popen[str], int]:
    """Starts a Python that protects its console; returns it, and where it tells."""
    reads, writes = os.pipe()
    command = [sys.executable, "-c", PRINTS + code, str(writes)]
    process = subprocess.Popen(  # type: ignore[call-overload]
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        pass_fds=(writes,),
        text=True,
        **given,
    )
    os.close(writes)
    return process, reads


def end(process: subprocess.Popen[str], reads: int) -> str:
    """Returns what the process told until its end, which is to be a good one."""
    with os.fdopen(reads) as file:
        found = file.read()
    assert process.wait(10) == 0, found
    return found


BREAKS = """
print("before", flush=True)
print("before", file=sys.stderr)
told()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("x" * 100_000, file=stream, flush=True)
        stream.buffer.write(b"x")
        console.say("said", stream)
        console.write(1, b"copied")
done = subprocess.run(["sh", "-c", "echo 1 && echo 2 >&2 && kill -0 $$"])
file.write(f"child {done.returncode}")
print("the rest, at the end")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_neither_the_process_nor_its_children(
    unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    out, into = os.pipe()
    process, reads = start(BREAKS, into, into)
    os.close(into)
    assert os.read(reads, 5) == b"told\n"
    assert os.read(out, 100) == b"before\nbefore\n"
    os.close(out)
    process.communicate("\n")
    assert end(process, reads) == "child 0"


def test_a_closed_terminal_ends_nothing() -> None:
    master, terminal = pty.openpty()
    process, reads = start(BREAKS, terminal, terminal)
    os.close(terminal)
    assert os.read(reads, 5) == b"told\n"
    os.close(master)
    process.communicate("\n")
    assert end(process, reads) == "child 0"


def test_a_full_disk_ends_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        process, reads = start(BREAKS, full.fileno(), full.fileno())
    process.communicate("\n")
    assert end(process, reads).startswith("told\nchild")


STALLS = """
began = time.monotonic()
for _ in range(50):
    print("x" * 9_999, flush=True)
file.write(f"{time.monotonic() - began:.1f}\\n")
told()
print("after", flush=True)
"""


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_pipe_that_nobody_reads_is_waited_for_once(is_blocking: bool) -> None:
    out, into = os.pipe()
    os.set_blocking(into, is_blocking)
    process, reads = start(STALLS, into, subprocess.DEVNULL)
    os.close(into)
    began = time.monotonic()
    lines = os.read(reads, 100).split()
    assert 0.15 < float(lines[0]) < 1 and time.monotonic() - began < 5
    received = os.read(out, 20_000)
    process.communicate("\n")
    while block := os.read(out, 65_536):
        received += block
    os.close(out)
    end(process, reads)
    whole, _, rest = received.partition(b"\nhybridrl: ")
    missing = 50 * 10_000 - len(whole)
    assert 20_000 < len(whole) < 70_000 and rest.startswith(b"%d bytes of output are" % missing)
    assert rest.endswith(b"did not accept them\nafter\n")


def test_streams_of_tests_and_notebooks_stay_and_others_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout
    with console.protected():
        assert sys.stdout is before
    code = """
first = sys.stdout
with console.protected():
    assert sys.stdout is first
"""
    process, reads = start(code, subprocess.PIPE, subprocess.PIPE)
    process.communicate()
    end(process, reads)
    own = "import sys; from hybridrl import console\nbefore = sys.stdout\nwith console.protected():"
    own += "\n    assert sys.stdout is not before; print(1)\nassert sys.stdout is before; print(2)"
    done = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n2\n"
