"""Checkpoint folders without a run: which is the newest, and what digests find."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.checkpoint.folders import newest_first
from hybridrl.checkpoint.manifest import DigestingFile, Manifest, verify_piece
from hybridrl.errors import CheckpointError


def test_the_newest_checkpoint_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    for step, order in ((10, 4), (20, 2), (30, 3)):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        Manifest(step=step, order=order, lineage=[], files={}).write(folder)
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
        with pytest.raises(CheckpointError, match="holds something else than was written"):
            verify_piece(file, handle, second)
