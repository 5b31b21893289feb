"""Hostfiles and what each host gets of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.cli.hostfile import Host, read_hostfile, shares
from hybridrl.cli.launch import Share
from hybridrl.cli.rank_ends import EndedRank, Outcome, conclude
from hybridrl.errors import UserError
from hybridrl.parallel.failure import Failure, PeerError


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
    for index, part in enumerate(parts):
        part.write(tmp_path / f"node_{index}.json")
    read = [Outcome.read(tmp_path / f"node_{index}.json") for index in range(2)]
    assert read == parts
    assert conclude(Outcome.together(read), tmp_path) == 1
    told = capsys.readouterr().err
    assert told.startswith("hybridrl: rank 1 on host host1 ended with code 1") and "boom" in told
    assert "boom" in (tmp_path / "rank_0.log").read_text()
    # A launcher that knows only its own rank names the other one's log all the same.
    assert conclude(parts[0], tmp_path) == 1
    assert str(tmp_path / "rank_1.log") in capsys.readouterr().err
