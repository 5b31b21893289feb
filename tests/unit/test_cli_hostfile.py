"""Hostfiles and what each host gets of a job."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.errors import UserError
from hybridrl.parallel.failure import Failure, PeerError
from hybridrl.services.launch import connections
from hybridrl.services.launch.connections import (
    Connection,
    Host,
    ProcessConnection,
    conclude_nodes,
    wait_for_nodes,
)
from hybridrl.services.launch.hosts import SshCluster, read_hostfile, shares
from hybridrl.services.launch.hosts_job import HostsJob
from hybridrl.services.launch.local_ranks import Share
from hybridrl.services.launch.node import Order
from hybridrl.services.launch.rank_ends import (
    EndedRank,
    Outcome,
    conclude,
    has_lost_ranks,
    lost_ranks,
)


def test_a_hostfile_is_read_as_mpi_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# all\n\nnode-a slots=8 # first\n  b.example\n10.0.0.3 slots = 2\nb.example\n")
    assert read_hostfile(file) == [Host("node-a", 8), Host("b.example", 2), Host("10.0.0.3", 2)]
    with pytest.raises(UserError, match="No such file"):
        read_hostfile(tmp_path / "none")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not a text file"):
        read_hostfile(file)


@pytest.mark.parametrize(
    "line", ["a slots=two", "a slots=0", "a slots=-1", "a slots=1.5", "a max=3", "slots=2", "-x"]
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"good slots=1\n{line}\n")
    with pytest.raises(UserError, match="line 2") as caught:
        read_hostfile(file)
    assert line in str(caught.value) and "line 1" not in str(caught.value)


def test_ranks_of_hosts_are_consecutive_and_no_more_than_asked_for() -> None:
    hosts = [Host("a", 4), Host("b", 2), Host("c", 4)]
    found = shares(hosts, 10, "a", 7)
    assert found == [Share(4, 0, 10, "a", 7), Share(2, 4, 10, "a", 7), Share(4, 6, 10, "a", 7)]
    assert shares(hosts, 5, "a", 7) == [Share(4, 0, 5, "a", 7), Share(1, 4, 5, "a", 7)]
    assert shares(hosts, 4, "a", 7) == [Share(4, 0, 4, "a", 7)]


def test_the_rank_that_failed_is_named_whatever_its_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 on one host says that it lost rank 1; rank 1 on another says why it ended."""
    ranks = [EndedRank(i, 1, str(tmp_path / f"rank_{i}.log"), f"host{i}") for i in range(2)]
    Failure.of(PeerError("rank 1 died", 1)).write(tmp_path / "rank_0.error")
    Failure.of(RuntimeError("boom")).write(tmp_path / "rank_1.error")
    parts = [Outcome([ranks[0]], [0]), Outcome([ranks[1]], [1])]
    assert [Outcome.from_json(json.dumps(asdict(part))) for part in parts] == parts
    assert conclude(Outcome.together(parts), tmp_path) == 1
    told = capsys.readouterr().err
    assert told.startswith("hybridrl: rank 1 on host host1 ended with code 1") and "boom" in told
    assert "boom" in (tmp_path / "rank_0.log").read_text()
    # A launcher that knows only its own rank names the other one's log all the same.
    assert conclude(parts[0], tmp_path) == 1
    assert str(tmp_path / "rank_1.log") in capsys.readouterr().err


@pytest.mark.parametrize(("lines", "is_ended"), [("0\n", True), ("", False)])
def test_ranks_end_when_their_launcher_falls_silent(lines: str, is_ended: bool) -> None:
    """A launcher that has once said that it lives, and one of a job that is started once."""
    program = (
        "import time; from hybridrl.services.launch import node; node.LEASE_S = 0.3; "
        "received = []; node._obey(received); time.sleep(1.0); print(len(received))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(lines)
    process.stdin.flush()  # and stays open
    assert process.stdout.readline() == ("2\n" if is_ended else "0\n")
    process.stdin.close()
    process.wait()


class EndingNode(Connection):
    """A connection that ends after a while, with a code and an outcome."""

    def __init__(
        self, name: str, code: int, outcome: Outcome | None = None, after_s: float = 0.0
    ) -> None:
        super().__init__(Host(name, 1))
        self._end, self._ends = (code, outcome), time.monotonic() + after_s
        if not after_s:
            self.poll()

    def tell(self, line: bytes) -> None:
        """Takes nothing."""

    def close(self) -> None:
        """Goes on."""

    def kill(self) -> None:
        """Has ended."""

    def poll(self) -> int | None:
        if time.monotonic() >= self._ends:
            self.code, self.outcome = self._end
        return self.code


STOPPED = Outcome([], (), signal.SIGTERM)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_that_were_ended_beside_a_lost_host_were_not_stopped(
    is_stopped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other host's ranks are ended by the end of stdin, which is SIGTERM to them."""
    nodes = [EndingNode("a", 0, STOPPED), EndingNode("b", 255)]
    end = conclude_nodes(nodes, tmp_path, is_stopped)
    assert end.cut_off == ["b"] and end.code == (143 if is_stopped else 1)
    assert "connection to host b ended with code 255" in capsys.readouterr().err


def test_ranks_that_stopped_by_themselves_were_stopped(tmp_path: Path) -> None:
    """By the file `stop`, or a signal to one of them: the launcher has asked nobody."""
    end = conclude_nodes([EndingNode(name, 0, STOPPED) for name in "ab"], tmp_path, False)
    assert end.cut_off == [] and end.code == 143


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_host_whose_outcome_is_not_seen_has_failed(code: int, tmp_path: Path) -> None:
    end = conclude_nodes([EndingNode("a", 0, Outcome([])), EndingNode("b", code)], tmp_path, False)
    assert (end.code, end.cut_off) == (1, ["b"])


def test_a_host_that_refused_ends_the_job_with_its_code(tmp_path: Path) -> None:
    end = conclude_nodes([EndingNode("a", 2), EndingNode("b", 0, STOPPED)], tmp_path, False)
    assert (end.code, end.cut_off) == (2, [])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("code", "outcome", "waits"),
    [
        (0, Outcome([]), True),
        (0, STOPPED, True),
        (0, Outcome([], [0]), False),
        (2, None, False),
        (255, None, False),
    ],
)
def test_other_hosts_have_the_time_that_they_need(
    code: int,
    outcome: Outcome | None,
    waits: bool,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of host b still train, or save and close their trackers, when those of a have ended."""
    monkeypatch.setattr(connections, "GRACE_S", 0.05)
    monkeypatch.setattr(connections, "KILL_AFTER_S", 0.05)
    monkeypatch.setattr(connections, "LEAVE_S", 5.0)
    ends = EndingNode("a", code, outcome)
    still_trains = EndingNode("b", code, outcome, after_s=0.6)
    wait_for_nodes([still_trains, ends] if first else [ends, still_trains], [])
    assert (still_trains.code is not None) == waits


@pytest.mark.parametrize("printed", [b"step 1\n", b"a\0b", b""])
def test_a_node_reports_its_outcome_after_what_rank_0_prints(
    printed: bytes, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    program = f"import os; os.write(1, {printed!r})"
    order = Order(Share.whole(1), ["-c", program], str(tmp_path), {})
    command = [sys.executable, "-m", "hybridrl.services.launch.node"]
    node = ProcessConnection(Host("a", 1), command, order)
    wait_for_nodes([node], [])
    assert node.code == 0 and node.outcome is not None and node.outcome.culprits == []
    assert [rank.code for rank in node.outcome.ranks] == [0]
    assert capfdbinary.readouterr().out == printed
    node.kill()


def test_a_node_that_cannot_start_its_ranks_refuses(tmp_path: Path) -> None:
    order = Order(Share.whole(1), [], str(tmp_path / "none"), {})
    command = [sys.executable, "-m", "hybridrl.services.launch.node"]
    node = ProcessConnection(Host("a", 1), command, order)
    wait_for_nodes([node], [])
    assert (node.code, node.outcome) == (2, None)
    node.kill()


def test_a_node_that_judges_alone_looks_at_what_other_nodes_ranks_said(tmp_path: Path) -> None:
    def has_lost(code: int, other: Exception | None) -> bool:
        file = tmp_path / "rank_1.error"  # of another node
        file.unlink(missing_ok=True)
        if other is not None:
            Failure.of(other).write(file)
        own = EndedRank(0, code, str(tmp_path / "rank_0.log"), "a")
        return has_lost_ranks(Outcome([own], [0]), tmp_path)

    assert has_lost(-6, None)
    assert not has_lost(-6, RuntimeError("boom"))  # NCCL's watchdog aborts those that are left
    assert has_lost(-6, PeerError("rank 0 is silent", 0, is_lost=True))
    assert has_lost(-9, RuntimeError("gloo"))
    assert not has_lost(1, None)


def test_ranks_are_lost_that_were_killed_or_fell_silent(tmp_path: Path) -> None:
    def lost(*ends: tuple[int, Exception | None]) -> list[int]:
        ranks = []
        for index, (code, error) in enumerate(ends):
            log = tmp_path / f"rank_{index}.log"
            log.with_suffix(".error").unlink(missing_ok=True)
            if error is not None:
                Failure.of(error).write(log.with_suffix(".error"))
            ranks.append(EndedRank(index, code, str(log), "a"))
        return lost_ranks(Outcome(ranks, [rank.index for rank in ranks if rank.code]))

    assert lost((0, None), (-9, None)) == [1]
    # What others say of broken connections may look like an error of their own.
    assert lost((1, RuntimeError("gloo")), (-9, None)) == [1]
    assert lost((1, RuntimeError("boom")), (-6, None)) == []
    assert lost((1, RuntimeError("boom")), (1, PeerError("rank 0 died", 0))) == []
    assert lost((1, PeerError("rank 2 is silent", 2, is_lost=True)), (0, None), (0, None)) == [2]


def test_lost_ranks_leave_their_host(tmp_path: Path) -> None:
    """Ranks that do not come back: hosts have the same number of ranks each, on those that can."""
    hosts = [Host(name, 4) for name in "abc"]
    cluster = SshCluster(hosts, ["false"])
    job = HostsJob(cluster, hosts, shares(hosts, 12, "a", 1), 1, lambda size: size % 2 == 0)
    for lost, words in (
        ([("a", 1)], "8 ranks on b, c"),  # not nine, and four each
        ([("b", 1)], "6 ranks on a, b"),
        ([("a", 3), ("b", 3)], "4 ranks on c"),
    ):
        before, job._lost = job.where, lost
        if not job._futile.get(lost[0][0]):  # once may be by chance
            assert job.settle(False, []) and job.where == before
        assert job.settle(False, []) and job.where == words
    assert job.settle(True, []) and job.where == "12 ranks on a, b, c"


def test_a_host_that_frees_its_memory_for_a_minute_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection would be killed, and the host counted as lost and asked again."""
    now, killed = [0.0], []
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    )
    monkeypatch.setattr(connections, "time", clock)
    node: Any = SimpleNamespace(
        close=lambda: None,
        poll=lambda: 0 if now[0] > 60 else None,
        kill=lambda: killed.append(now[0]),
    )
    connections.end_nodes([node])
    assert 60 < killed[0] < 62  # of a process that has ended, without effect
