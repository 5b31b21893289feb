"""Checkpoint folders without a run: which is the newest, and what digests find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hybridrl.checkpoint.folders import Checkpoint, find_checkpoint, newest_first
from hybridrl.checkpoint.manifest import Ancestor, DigestingFile, Manifest, verify_piece
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.checkpoint.writing import put_back_replaced
from hybridrl.errors import CheckpointError, UserError
from hybridrl.loop.preflight import check_exports


def write(root: Path, step: int, order: int) -> Path:
    folder = root / f"step_{step}"
    folder.mkdir()
    Manifest(step=step, order=order, lineage=[], files={}).write(folder)
    return folder


def test_the_newest_checkpoint_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    for step, order in ((10, 4), (20, 2), (30, 3)):
        write(tmp_path, step, order)
    assert [folder.name for folder in newest_first(tmp_path)] == ["step_10", "step_30", "step_20"]


def test_a_digest_is_of_its_piece_alone_and_finds_a_flipped_bit(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    with file.open("wb", buffering=0) as handle:
        written = DigestingFile(handle)
        for content in (b"one" * 5, b"another"):
            written.write(content)
            written.end_piece()
    first, second = written.entry().pieces
    with file.open("r+b", buffering=0) as handle:
        verify_piece(file, handle, first)
        verify_piece(file, handle, second)
        handle.seek(second.offset)
        handle.write(b"A")
        verify_piece(file, handle, first)
        with pytest.raises(CheckpointError, match="content was changed at"):
            verify_piece(file, handle, second)


def test_only_checkpoints_that_the_run_went_through_are_removed(tmp_path: Path) -> None:
    folder = write(tmp_path, 10, order=2)  # in place of one that the run went through
    store = CheckpointStore(tmp_path, None, keep=1)  # type: ignore[arg-type]  # rank 0 alone removes
    newest = Ancestor(step=20, order=3)
    store._remove_old([newest, Ancestor(step=10, order=1)])
    assert folder.is_dir()
    store._remove_old([newest, Ancestor(step=10, order=2)])
    assert not folder.exists()


def test_a_reader_changes_nothing_while_a_run_replaces_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hybridrl eval` would give the name back that the run is about to give to the new one."""
    write(tmp_path, 1, order=1)
    aside = write(tmp_path, 2, order=2).rename(tmp_path / "step_2.replaced")
    store = CheckpointStore(tmp_path, None, keep=9)  # type: ignore[arg-type]  # rank 0 alone chooses
    monkeypatch.setattr(store, "_decide", lambda _, choose: choose())
    before = sorted(tmp_path.iterdir())
    assert store.newest() == find_checkpoint(tmp_path) == aside and store.newest(2) is not None
    assert Checkpoint.open(aside).manifest.step == 2
    assert sorted(tmp_path.iterdir()) == before
    write(tmp_path, 2, order=3)
    assert store.newest() == tmp_path / "step_2"
    put_back_replaced(tmp_path)
    assert aside.exists() and store.newest() == tmp_path / "step_2"
    (tmp_path / "step_2").rename(tmp_path / "gone")
    put_back_replaced(tmp_path)  # as who holds the run folder does at its start
    assert store.newest() == tmp_path / "step_2" and not aside.exists()


def test_the_weights_of_a_step_are_those_of_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, order=step)
    store = CheckpointStore(tmp_path, None, keep=9)  # type: ignore[arg-type]  # rank 0 alone chooses
    monkeypatch.setattr(store, "_decide", lambda _, choose: choose())
    newest = {step: store.newest(before_step=step) for step in (None, 4, 3, 1)}
    found = {step: folder and folder.name for step, folder in newest.items()}
    assert found == {None: "step_3", 4: "step_3", 3: "step_2", 1: None}


def test_exports_without_checkpoints_are_refused_at_the_start(tmp_path: Path) -> None:
    check_exports(tmp_path)
    (tmp_path / "exports" / "step_3").mkdir(parents=True)
    with pytest.raises(UserError, match="exports: got a folder that is not empty"):
        check_exports(tmp_path)
    shutil.rmtree(tmp_path / "exports")
    (tmp_path / "exports").write_text("")
    with pytest.raises(UserError, match="exports: got a file"):
        check_exports(tmp_path)
