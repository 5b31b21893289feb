"""Tests of the folder that an engine takes for its model: its path decides what is compiled."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from hybridrl.rollout.vllm import model_folder as module
from hybridrl.rollout.vllm.model_folder import MAX_STARTS, model_folder

CONTENT = {"architectures": ["A"], "hidden_size": 8}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))
    return tmp_path


def path_of(content: dict[str, object], replica: int = 0, tp_rank: int = 0) -> Path:
    with model_folder(content, replica, tp_rank) as folder:
        assert json.loads((folder / "config.json").read_text()) == content
        assert {file.name for file in folder.iterdir()} <= {"config.json", "lock"}
        return folder


def test_a_start_finds_the_path_of_the_one_before_by_content_place_and_code(
    cache, monkeypatch
) -> None:
    first = path_of(CONTENT)
    assert first.is_relative_to(cache) and path_of(dict(reversed(CONTENT.items()))) == first
    others = {path_of(CONTENT, 1), path_of(CONTENT, 0, 1), path_of(CONTENT | {"hidden_size": 16})}
    assert len(others | {first}) == 4
    monkeypatch.setattr(module, "_code", lambda: "a later state of the package")
    assert path_of(CONTENT) not in {*others, first}


def test_processes_that_start_at_once_have_folders_of_their_own() -> None:
    with ExitStack() as starts:
        every = [starts.enter_context(model_folder(CONTENT, 0, 0)) for _ in range(MAX_STARTS + 1)]
        assert len(set(every)) == MAX_STARTS + 1
        kept, temporary = every[:-1], every[-1]
        assert temporary.parent != kept[0].parent == kept[1].parent
    assert path_of(CONTENT) == every[0] and not temporary.exists()


@pytest.mark.parametrize("damaged", [b"{}", b"\xff\xfe", b""])
def test_what_somebody_changed_is_written_anew(damaged: bytes) -> None:
    first = path_of(CONTENT)
    (first / "config.json").write_bytes(damaged)
    assert path_of(CONTENT) == first


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(
    monkeypatch, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "file"))
    found = path_of(CONTENT)
    assert not found.is_relative_to(tmp_path) and not found.exists()


def test_a_folder_that_is_right_is_taken_where_nothing_can_be_written_or_locked(
    monkeypatch,
) -> None:
    first = path_of(CONTENT)
    with monkeypatch.context() as patch:
        patch.setattr(module, "LOCK", "no/such/folder")
        assert path_of(CONTENT) == first
        assert path_of(CONTENT, 1).parent != first.parent, "its config.json was not there"

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    assert path_of(CONTENT) == first and path_of(CONTENT, 1).parent == first.parent
    assert (first / "config.json").stat().st_mode & 0o044 == 0o044


def test_a_forked_process_holds_no_folder() -> None:
    with model_folder(CONTENT, 0, 0) as first:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)  # until the pipe ends
            os._exit(0)
    try:
        assert path_of(CONTENT) == first
    finally:
        os.close(writes)
        os.waitpid(child, 0)
        os.close(reads)


def test_an_error_of_the_engine_is_not_taken_for_one_of_the_folder() -> None:
    with pytest.raises(OSError, match="its own"), model_folder(CONTENT, 0, 0):
        raise OSError("its own")


def test_what_is_there_is_not_written_again(monkeypatch) -> None:
    folder = path_of(CONTENT)
    monkeypatch.setattr(module.os, "replace", lambda *paths: pytest.fail("written again"))
    assert path_of(CONTENT) == folder
