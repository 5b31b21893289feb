"""What a run notes of its starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.loop.run_starts import RunStarts, commit, exit_of


def noted(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["starts"]


def test_every_start_is_noted_with_its_end(tmp_path: Path) -> None:
    first = RunStarts(tmp_path)
    first.end("finished")  # nothing has begun
    assert not (tmp_path / "run.json").exists()
    first.begin(0, 4, 1, None)
    assert "exit" not in noted(tmp_path)[0]
    first.end("stopped by a signal")
    first.end("finished")  # it has ended already
    second = RunStarts(tmp_path)
    second.begin(7, 8, 2, "H100")
    one, other = noted(tmp_path)
    assert (one["exit"], one["device"], one["is_cpu"]) == ("stopped by a signal", "CPU", True)
    assert one["began"].endswith(" UTC") and one["ended"] >= one["began"]
    assert (other["after_step"], other["world_size"], other["hosts"]) == (7, 8, 2)
    assert (other["device"], other["is_cpu"]) == ("H100", False)


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"starts": [{"beg')
    RunStarts(tmp_path).begin(0, 1, 1, None)
    assert len(noted(tmp_path)) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "stopped by a signal"),
        (SystemExit(143), "stopped by a signal"),
        (ValueError("x"), "failed: ValueError"),
    ],
)
def test_exit_says_how_a_start_ended(error: BaseException | None, text: str) -> None:
    assert exit_of(error) == text


def test_commit_is_that_of_the_checkout_or_none() -> None:
    found = commit()
    assert found is None or len(found.rstrip("+")) == 40
