"""Ranks that have ended and hold memory yet, and the ranks of the next start, which wait for it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from hybridrl.services.launch import leaving as leaving_module
from hybridrl.services.launch.leaving import GATE_FD, Leaving, is_killed, wait_for_gate


def process_of(*program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(program, stdout=subprocess.PIPE)


def ended(*codes: str) -> list[subprocess.Popen[bytes]]:
    """Processes that have ended, and that nobody has waited for."""
    found = [process_of(sys.executable, "-c", f"import os, signal; {code}") for code in codes]
    for process in found:
        assert process.stdout is not None and process.stdout.read() == b""
    return found


def test_a_killed_process_is_known_before_it_is_gone() -> None:
    kill = "os.kill(os.getpid(), signal.{})"
    sigkill, sigterm, own = ended(kill.format("SIGKILL"), kill.format("SIGTERM"), "os._exit(9)")
    alive = process_of("sleep", "60")
    found = [is_killed(one.pid) for one in (sigkill, sigterm, own, alive)]
    assert found == [True, False, False, False]
    alive.kill()
    assert is_killed(alive.pid)  # at once
    for one in (sigkill, sigterm, own, alive):
        one.wait()
    assert not is_killed(alive.pid)


def test_the_gate_opens_when_all_processes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving, processes = Leaving(), [process_of("sleep", "0.3"), process_of("sleep", "0.9")]
    assert leaving.gate() is None
    leaving.take([(f"rank {index}", one) for index, one in enumerate(processes)])
    gate = leaving.gate()
    assert gate is not None
    monkeypatch.setenv(GATE_FD, str(os.dup(gate)))
    os.close(gate)
    begun = time.monotonic()
    wait_for_gate()
    took, codes = time.monotonic() - begun, [one.returncode for one in processes]
    assert codes == [0, 0] and took > 0.5
    assert GATE_FD not in os.environ  # children of a rank have no such descriptor
    wait_for_gate()
    assert leaving.gate() is None


def test_a_process_that_takes_long_to_go_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leaving_module, "SLOW_S", 0.1)
    leaving, process = Leaving(), process_of("sleep", "0.5")
    leaving.take([("rank 3", process)])
    leaving.wait()
    assert process.returncode == 0
    said = capsys.readouterr().err
    assert f"rank 3 has ended, and process {process.pid} of it still holds memory" in said


class Closed:
    """A console that is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_the_gate_opens_also_where_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_module, "SLOW_S", 0.1)
    monkeypatch.setattr(sys, "stderr", Closed())
    leaving, process = Leaving(), process_of("sleep", "0.5")
    leaving.take([("rank 3", process)])
    gate = leaving.gate()
    assert gate is not None
    with os.fdopen(gate, "rb") as pipe:
        assert select.select([pipe], [], [], 10)[0] == [pipe]
    assert process.returncode == 0
