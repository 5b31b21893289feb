"""Rows are read and checked once for each content; what is wrong is said at every start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybridrl.config.load import load_config_dict
from hybridrl.config.needs import Needs
from hybridrl.config.schema import DataConfig
from hybridrl.data import checked_rows, prompt_store, rows
from hybridrl.data.checked_rows import ENDING, unless_checked
from hybridrl.data.prompt_store import content_key
from hybridrl.data.prompts import Reading
from hybridrl.data.sets import source_identity
from hybridrl.errors import UserError
from hybridrl.loop import preflight as validate

GOOD = [{"prompt": f"{i}=", "response": "a", "label": i % 2 == 0} for i in range(4)]
FORMS = {
    "prompts": Needs(),
    "demonstrations": Needs(rollouts=False),
    "labels": Needs(rollouts=False, feedback="labels"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))
    return prompt_store.prompts_folder()


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, name="train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


@pytest.fixture
def num_read(monkeypatch) -> list[object]:
    """The lines that were parsed so far."""
    lines: list[object] = []
    parse = rows._parse
    monkeypatch.setattr(rows, "_parse", lambda *args: lines.append(args) or parse(*args))
    return lines


def judge(*paths: str, needs: Needs = FORMS["prompts"], answer=(), **keys) -> list[UserError]:
    config = DataConfig(prompts=paths, **{"on_bad_row": "stop", **keys})
    return list(validate._rows(config, paths, needs, validate._Scored(answer)))


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_read_once_for_each_content(write, folder, num_read, form) -> None:
    path = write(GOOD)
    assert not judge(path, needs=FORMS[form])
    num_first = len(num_read)
    assert num_first >= len(GOOD)
    assert not judge(path, needs=FORMS[form])
    assert len(num_read) == num_first
    others = [needs for name, needs in FORMS.items() if name != form]
    for needs in others:  # other columns are looked for
        assert not judge(path, needs=needs)
    assert len(num_read) >= num_first + 2 * len(GOOD)
    assert len(list(folder.glob(f"*{ENDING}"))) == len(FORMS)


def test_a_changed_file_is_read_again_also_at_the_same_time_and_size(write, folder) -> None:
    path = write(GOOD)
    assert not judge(path)
    status, content = os.stat(path), Path(path).read_text()
    Path(path).write_text(content.replace('"prompt": "2="', '"prompf": "2="'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(path).st_size == status.st_size
    for _ in range(2):  # what is wrong is said each time
        (error,) = judge(path)
        assert error.name == f"{path}:3" and "Did you mean 'prompf'" in str(error)
    Path(path).write_text(content)
    assert not judge(path)


def test_other_keys_and_columns_are_looked_for(write, folder) -> None:
    path = write(GOOD)
    assert not judge(path)
    assert [error.name for error in judge(path, answer=["answer"])] == [f"{path}:1"]
    assert [error.name for error in judge(path, prompt_key="question")] == [f"{path}:1"]
    assert not judge(path)


def test_each_wrong_file_is_named_each_time(write, folder, tmp_path) -> None:
    good, bad = write(GOOD), write([*GOOD, {"prompt": 3}], "bad.jsonl")
    for _ in range(2):
        found = judge(good, bad, str(tmp_path / "none.jsonl"))
        assert [error.name for error in found] == [f"{bad}:5", str(tmp_path / "none.jsonl")]


@pytest.mark.parametrize("content", ["", "hybridrl", "0" * 200])
def test_a_damaged_mark_is_none(write, folder, num_read, content) -> None:
    path = write(GOOD)
    assert not judge(path)
    (mark,) = folder.iterdir()
    mark.write_text(content)
    num_before = len(num_read)
    assert not judge(path)
    assert len(num_read) == num_before + len(GOOD)
    assert not judge(path) and len(num_read) == num_before + len(GOOD)


def test_a_mark_of_another_content_is_none(write, folder) -> None:
    path = write(GOOD)
    assert not judge(path)
    (mark,) = folder.iterdir()
    write([{"task": "a"}])
    config = DataConfig(prompts=(path,))
    assert unless_checked(config, [path], ["something else"], lambda: []) == []
    (other,) = set(folder.iterdir()) - {mark}
    other.write_text(mark.read_text())
    assert judge(path)


def test_rows_that_change_while_they_are_read_are_not_remembered(write, folder) -> None:
    path = write(GOOD)

    def check() -> list[UserError]:
        write([{"question": "a"}])
        return []

    assert unless_checked(DataConfig(prompts=(path,)), [path], [], check) == []
    assert not list(folder.glob(f"*{ENDING}"))


def test_without_a_folder_rows_are_read_each_time(write, folder, num_read) -> None:
    path = write(GOOD)
    folder.parent.parent.mkdir()
    folder.parent.write_text("a file")
    for number in (1, 2):
        assert not judge(path)
        assert len(num_read) == number * len(GOOD)


def test_marks_that_nobody_used_for_long_are_removed(write, folder, monkeypatch) -> None:
    assert not judge(write(GOOD))
    (first,) = folder.iterdir()
    os.utime(first, (0, 0))
    assert not judge(write(GOOD))
    assert first.stat().st_mtime > 1e9  # it was used
    monkeypatch.setattr(prompt_store, "KEPT_DAYS", -1)
    assert not judge(write(GOOD[:2]))
    assert not first.exists() and len(list(folder.iterdir())) == 1


def test_a_folder_that_is_no_data_set_is_not_read_through(write, folder, tmp_path) -> None:
    write(GOOD)
    assert source_identity(str(tmp_path)) is None
    assert [error.value for error in judge(str(tmp_path))] == ["a directory"]


@pytest.mark.parametrize("name", ["n" * 9999, "a\0b", "a\0b.parquet", "none", "/dev/null"])
def test_names_of_no_file_have_no_identity(folder, name) -> None:
    assert source_identity(name) is None
    assert judge(name) and not folder.exists()


def test_the_code_that_checks_decides(write, folder, num_read, monkeypatch, tmp_path) -> None:
    path = write(GOOD)
    assert not judge(path)
    monkeypatch.setattr(checked_rows, "_CODE", [*checked_rows._CODE, Path(__file__)])
    assert not judge(path)
    assert len(num_read) == 2 * len(GOOD)


def test_whether_rows_are_checked_says_nothing_of_tokens(write, folder) -> None:
    class Unknown:
        eos_token_id = 1

    path = write(GOOD)
    assert not judge(path)
    assert content_key(Reading(DataConfig(prompts=(path,))), Unknown()) is None  # type: ignore[arg-type]


def test_a_second_start_reads_no_row(write, folder, num_read, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(validate, "_common", lambda *_, **__: [])
    monkeypatch.setattr(validate, "_check_run", lambda *_, **__: None)
    sections = {
        "run": {"name": "a", "dir": str(tmp_path / "runs")},
        "model": {"init": "none"},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": write(GOOD), "eval_prompts": write(GOOD, "eval.jsonl")},
        "steps": {"samples_per_prompt": 2},
    }
    rewarded = [{**row, "answer": "1"} for row in GOOD]
    write(rewarded), write(rewarded, "eval.jsonl")
    config = load_config_dict(sections)
    validate.validate_training(config, 1)
    num_first = len(num_read)
    assert num_first == 2 * len(GOOD)
    validate.validate_training(config, 1)
    assert len(num_read) == num_first
