"""Tests of the folder that an engine takes for its model: its path decides what is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.rollout import model_folder as module
from hybridrl.rollout.model_folder import model_folder

CONTENT = {"architectures": ["A"], "hidden_size": 8}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))
    return tmp_path


def path_of(content: dict[str, object], replica: int) -> Path:
    with model_folder(content, replica) as folder:
        assert json.loads((folder / "config.json").read_text()) == content
        assert [file.name for file in folder.iterdir()] == ["config.json"]
        return folder


def test_a_start_finds_the_path_of_the_one_before_by_content_and_replica(cache) -> None:
    first = path_of(CONTENT, 0)
    assert first.is_relative_to(cache) and path_of(dict(reversed(CONTENT.items())), 0) == first
    others = {path_of(CONTENT, 1), path_of(CONTENT | {"hidden_size": 16}, 0)}
    assert len(others | {first}) == 3


def test_what_somebody_changed_is_written_anew() -> None:
    first = path_of(CONTENT, 0)
    (first / "config.json").write_text("{}")
    assert path_of(CONTENT, 0) == first


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(
    monkeypatch, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "file"))
    found = path_of(CONTENT, 0)
    assert not found.is_relative_to(tmp_path) and not found.exists()


def test_an_error_of_the_engine_is_not_taken_for_one_of_the_folder() -> None:
    with pytest.raises(OSError, match="its own"), model_folder(CONTENT, 0):
        raise OSError("its own")


def test_a_replica_is_not_disturbed_by_one_that_writes_at_once(monkeypatch) -> None:
    folder = path_of(CONTENT, 0)
    monkeypatch.setattr(module.os, "replace", lambda *paths: pytest.fail("written again"))
    assert path_of(CONTENT, 0) == folder
