"""What a process may still take of its host's memory, within the limits of its control groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hybridrl.checkpoint import host_memory
from hybridrl.checkpoint.host_memory import available_bytes


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /sys/fs/cgroup of a process in /pod/job, on a host with 1,000 bytes free."""
    own = tmp_path / "own"
    own.write_text("1:memory:/other\n0::/pod/job\n")
    root = tmp_path / "cgroup"
    (root / "pod" / "job").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "GROUPS", root)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", own)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    return root


def limit(group: Path, most: str, used: int, cached: int = 0) -> None:
    for what, text in (("max", most), ("current", str(used)), ("stat", f"inactive_file {cached}")):
        (group / f"memory.{what}").write_text(f"{text}\n")


def test_without_a_limit_it_is_what_the_host_has_free(groups: Path) -> None:
    assert available_bytes() == 1000  # no files: the root of control groups
    limit(groups / "pod" / "job", "max", 10**9)
    assert available_bytes() == 1000
    host_memory.OWN_GROUPS.unlink()
    assert available_bytes() == 1000


def test_the_smallest_limit_counts_also_of_a_group_above(groups: Path) -> None:
    limit(groups / "pod" / "job", "900", 300)
    assert available_bytes() == 600
    limit(groups / "pod", "500", 400, cached=50)
    assert available_bytes() == 150
    limit(groups / "pod", "500", 600)
    assert available_bytes() == 0
