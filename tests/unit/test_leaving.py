"""Ranks that have ended and hold memory yet, and the ranks of the next start, which wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

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
