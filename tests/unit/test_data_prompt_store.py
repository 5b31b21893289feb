"""Prompts in a file: what comes back, when it is written again, and which rows are read again."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrl.config.load import load_config_dict
from hybridrl.config.needs import Needs
from hybridrl.config.schema import DataConfig
from hybridrl.contracts.prompts import Content, Prompt
from hybridrl.data import prompt_files, prompt_store, rows
from hybridrl.data.mixture import hold_out, prompt_source
from hybridrl.data.prompt_files import (
    MappedPrompts,
    digests,
    is_intact,
    read_prompts,
    write_prompts,
)
from hybridrl.data.prompt_store import CHECKED, PromptStore, prompts_folder, unless_checked
from hybridrl.data.prompts import PromptSource, Reading, in_memory
from hybridrl.data.sets import source_identity
from hybridrl.errors import DataError, UserError
from hybridrl.loop import preflight as validate
from hybridrl.loop.row_checks import RowChecks

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
CHARACTERS = [chr(c) for c in range(32, 127)]


def letters(first: int = 2) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of one token a letter, numbered from `first` on."""
    words = {"<unk>": 0, "<end>": 1} | {c: first + i for i, c in enumerate(CHARACTERS)}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>", unk_token="<unk>")


ROWS = [
    {"prompt": "1+1=", "answer": "2", "n": 1, "f": 1.0, "deep": {"a": [None, True, {"b": "ü"}]}},
    {"prompt": "x" * 40, "answer": "too long"},
    {"prompt": "grüße 😀", "answer": 10**30, "null": None, "prompts": []},
    {"prompt": "é", "answer": -0.5},
]
SIDES = [
    {"prompt": f"p{i}", "chosen": f"yes{i}", "rejected": "no", "by": i, "label": i % 2 == 0}
    for i in range(9)
]


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


def reading(*paths: str, **changes) -> Reading:
    limits = {k: changes.pop(k) for k in ("max_response_tokens", "feedback") if k in changes}
    return Reading(DataConfig(**{"prompts": paths, "max_prompt_tokens": 8, **changes}), **limits)


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


CASES = {
    "prompts": (ROWS, {}),
    "demonstrations": (SIDES, {"response_key": "chosen", "max_response_tokens": 9}),
    "pairs": (SIDES, {"feedback": "pairs", "margin_key": "by", "max_response_tokens": 9}),
    "labels": (
        SIDES,
        {"feedback": "labels", "response_key": "chosen", "max_response_tokens": 9},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_prompts_of_the_list(write, tmp_path, case) -> None:
    rows, changes = CASES[case]
    asked = reading(write(rows), **changes)
    expected, folder = in_memory(asked, letters()), tmp_path / "kept"
    for _ in ("written", "found again"):
        store = PromptStore(letters(), folder)
        found = store.load(asked)
        assert isinstance(found.prompts, MappedPrompts)
        assert tuple(found.prompts) == expected.prompts and [*found.sources] == [*expected.sources]
        assert found.report() == expected.report() and found.left_out == expected.left_out
        for prompt, other in zip(found.prompts, expected.prompts, strict=True):
            assert json.dumps(prompt.columns) == json.dumps(other.columns)  # order and types too
    assert "tokenized" not in " ".join(store.notes)
    follower = PromptStore(letters(), folder / "not here")
    follower.follow(store.files)
    assert tuple(follower.load(asked).prompts) == expected.prompts
    for shuffle in (True, False):
        of_list, of_file = (
            PromptSource(prompts, seed=3, shuffle=shuffle)
            for prompts in (expected.prompts, found.prompts)
        )
        assert of_file.take(25) == of_list.take(25) and of_file.state() == of_list.state()


def test_contents_come_back_and_belong_to_the_identity(tmp_path) -> None:
    def prompt(key: str) -> Prompt:
        content = Content("image", 1, 2, key, {"bytes": np.arange(3, dtype=np.uint8)})
        return Prompt(0, "a", (1, 2, 2, 3), contents=(content,))

    write_prompts(tmp_path / "a", [(prompt("k"), 0), (prompt("l"), 0)], lambda: b"")
    prompts, _ = read_prompts(tmp_path / "a")
    assert tuple(prompts) == (prompt("k"), prompt("l"))
    assert prompts[0].contents[0].arrays["bytes"].tolist() == [0, 1, 2]
    assert len(set(digests(prompts).tolist())) == 2


def test_the_quickstart_is_as_from_a_list(tmp_path) -> None:
    files = [str(file) for file in sorted(QUICKSTART.glob("*.jsonl"))]
    assert files
    asked = reading(*files, max_prompt_tokens=64, weights=[*range(1, len(files) + 1)])
    of_list, of_file = in_memory(asked, letters()), PromptStore(letters(), tmp_path).load(asked)
    sources = [prompt_source(found, asked.config, 0) for found in (of_list, of_file)]
    assert sources[0].take(500) == sources[1].take(500)
    assert sources[0].state() == sources[1].state()
    for kept, other in zip(hold_out(of_list, 0.2), hold_out(of_file, 0.2), strict=True):
        prompts, others = (getattr(side, "prompts", side) for side in (kept, other))
        assert tuple(prompts) == tuple(others)


# In checkpoints: with another value none of them continues. The second two are of older releases.
FINGERPRINTS = {
    "prompts": "2:a8333ab00ebd99b8 2:344d11a0dd7d33cf a1afee3905b3eb1b 998be62065f13733",
    "demonstrations": "2:8dea239dc755c3ca 2:bba95515ec61cbfa 571551900d68b833 55094776910fc82f",
    "pairs": "2:98fc822c6e7ba8ce 2:0f219bf699e00bcf 2e7e61c45329e4b5 bf2fe0880b6b6a5a",
    "labels": "2:8dea239dc755c3ca 2:bba95515ec61cbfa 571551900d68b833 55094776910fc82f",
}


@pytest.mark.parametrize("case", CASES)
def test_fingerprints_stay_what_they_were(write, tmp_path, case) -> None:
    rows, changes = CASES[case]
    asked = reading(write(rows), **changes)
    for prompts in (
        in_memory(asked, letters()).prompts,
        PromptStore(letters(), tmp_path / "kept").load(asked).prompts,
    ):
        sources = [PromptSource(prompts, seed=3, shuffle=shuffle) for shuffle in (True, False)]
        states = [source.state() for source in sources]
        older = [source.older_fingerprint() for source in sources]
        assert [state["fingerprint"] for state in states] + older == FINGERPRINTS[case].split()
        for source, state, fingerprint in zip(sources, states, older, strict=True):
            expected = source.take(2)
            source.load_state({**state, "fingerprint": fingerprint})
            assert source.take(2) == expected
        with pytest.raises(DataError, match="differ from the checkpoint's"):
            sources[0].load_state({**states[0], "fingerprint": older[1]})


def quickstart() -> Reading:
    files = [str(QUICKSTART / f"{name}.jsonl") for name in ("heldout", "sft", "train")]
    return reading(*files, max_prompt_tokens=64, weights=[1, 2, 3])


def test_the_quickstarts_order_and_held_out_prompts_stay_what_they_were(tmp_path) -> None:
    found = PromptStore(letters(), tmp_path).load(quickstart())
    mixed = prompt_source(found, quickstart().config, 0)
    assert mixed.older_fingerprint() == "9146e5f81f51c076"
    mixed.load_state({**mixed.state(), "fingerprint": "9146e5f81f51c076"})
    kept, held = hold_out(found, 0.2)
    sources = [PromptSource(side, seed=0, shuffle=True) for side in (kept.prompts, held)]
    assert [len(source) for source in sources] == [8038, 1962]
    fingerprints = [source.older_fingerprint() for source in sources]
    assert fingerprints == ["a629943a457157b4", "3e23b3761f9af520"]
    first = [prompt.prompt_id for prompt in sources[0].take(8)]
    assert first == [6750, 9013, 9092, 4183, 7381, 3571, 131, 9112]


def test_no_prompt_is_made_before_it_is_taken(tmp_path, monkeypatch) -> None:
    found = PromptStore(letters(), tmp_path).load(quickstart())
    monkeypatch.setattr(prompt_files, "Prompt", lambda **_: pytest.fail("a prompt was made"))
    kept, _ = hold_out(found, 0.2)
    prompt_source(kept, quickstart().config, 0)


def test_what_decides_the_content_makes_another_file(write, tmp_path) -> None:
    path, folder = write(ROWS), tmp_path / "kept"

    def num_files(asked: Reading, tokenizer=None) -> int:
        PromptStore(tokenizer or letters(), folder).load(asked)
        return len(list(folder.iterdir()))

    assert num_files(reading(path)) == num_files(reading(path)) == 1
    assert num_files(reading(path, shuffle=False, eval_share=0.5)) == 1
    assert num_files(reading(path), letters(first=7)) == 2
    assert num_files(reading(path, max_prompt_tokens=50)) == 3
    assert num_files(reading(path, answer_key="n")) == 4
    write([*ROWS, {"prompt": "new"}])
    assert num_files(reading(path)) == 5


def damage(file: Path, start: int, length: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    if length is None:
        del content[start:]
    else:
        content[start : start + length] = bytes(255 - byte for byte in content[start:][:length])
    file.write_bytes(content)


DAMAGES = {"empty": (0, None), "cut short": (-9, None), "wrong content": (700, 1)}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_is_noticed_and_written_again(write, tmp_path, case) -> None:
    asked, folder = reading(write(ROWS)), tmp_path / "kept"
    expected = tuple(PromptStore(letters(), folder).load(asked).prompts)
    damage(only_file(folder), *DAMAGES[case])
    store = PromptStore(letters(), folder)
    assert tuple(store.load(asked).prompts) == expected
    assert "written again" in store.notes[0] and "tokenized into" in store.notes[1]
    assert is_intact(only_file(folder))


def build(path: str, folder: Path, barrier) -> None:
    """Loads in a process of its own, at the same time as another."""
    barrier.wait()
    found = PromptStore(letters(), folder).load(reading(path))
    assert [prompt.prompt_id for prompt in found.prompts] == [0, 2, 3]


def test_two_processes_may_write_at_once(write, tmp_path) -> None:
    path, folder = write(ROWS), tmp_path / "kept"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    jobs = [context.Process(target=build, args=(path, folder, barrier)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert is_intact(only_file(folder))


def test_a_folder_that_cannot_be_written_is_told_and_another_is_taken(write, tmp_path) -> None:
    asked, blocked = reading(write(ROWS)), tmp_path / "kept"
    blocked.write_text("a file")
    store = PromptStore(letters(), blocked)
    found = store.load(asked)
    assert tuple(found.prompts) == in_memory(asked, letters()).prompts
    assert "cannot be written" in store.notes[0] and "HYBRIDRL_CACHE" in store.notes[0]
    assert store.files[0] is not None and Path(store.files[0]).exists()
    store.close()
    assert not Path(store.files[0]).exists() and len(list(found.prompts)) == 3


def test_rows_that_a_file_cannot_hold_stay_in_memory(tmp_path) -> None:
    config = DataConfig(max_prompt_tokens=8)
    for value in ((1, 2), b"x", {1: "x"}, Path("x")):
        store = PromptStore(letters(), tmp_path)
        found = store.load(Reading(config, [{"prompt": "a", "other": value}]))
        assert found.prompts[0].columns == {"other": value} and store.files == [None]
        assert "in memory" in store.notes[0]
        store.close()
    store = PromptStore(letters(), tmp_path)
    once = store.load(Reading(config, iter([{"prompt": "a"}])))
    assert len(once.prompts) == 1 and store.files == [None] and not store.notes


def test_an_unknown_tokenizer_is_asked_at_each_start(write, tmp_path) -> None:
    class Own:
        eos_token_id = 1

        def __call__(self, text, *, add_special_tokens):
            return {"input_ids": [[ord(c) for c in one] for one in text]}

    store = PromptStore(Own(), tmp_path / "kept")
    assert len(store.load(reading(write(ROWS))).prompts) == 3
    assert "at each start" in store.notes[0] and not (tmp_path / "kept").exists()
    store.close()


def test_bad_rows_and_unreadable_sources_are_the_errors_of_the_list(write, tmp_path) -> None:
    path, store = write([ROWS[0], {"prompt": ""}]), PromptStore(letters(), tmp_path / "kept")
    with pytest.raises(DataError, match="not empty") as caught:
        store.load(reading(path, on_bad_row="stop"))
    assert caught.value.name == f"{path}:2" and not list((tmp_path / "kept").iterdir())
    with pytest.raises(DataError, match="no such file"):
        store.load(reading(str(tmp_path / "none.jsonl")))
    store.close()


def test_files_that_nobody_used_for_long_are_removed(write, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "kept"
    PromptStore(letters(), folder).load(reading(write(ROWS)))
    first = only_file(folder)
    monkeypatch.setattr(prompt_store, "KEPT_DAYS", -1)
    PromptStore(letters(), folder).load(reading(write(SIDES)))
    assert not first.exists() and len(list(folder.iterdir())) == 1


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("HYBRIDRL_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/x")
    assert prompts_folder() == Path("/home/x/.cache/hybridrl/prompts")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert prompts_folder() == Path("/c/hybridrl/prompts")
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))
    assert prompts_folder() == tmp_path / "hybridrl" / "prompts"


GOOD = [{"prompt": f"{i}=", "response": "a", "label": i % 2 == 0} for i in range(4)]
NEEDS = {
    "prompts": Needs(),
    "demonstrations": Needs(rollouts=False),
    "labels": Needs(rollouts=False, feedback="labels"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))
    return prompts_folder()


@pytest.fixture
def num_read(monkeypatch) -> list[object]:
    """The lines that were parsed so far."""
    lines: list[object] = []
    parse = rows._parse
    monkeypatch.setattr(rows, "_parse", lambda *args: lines.append(args) or parse(*args))
    return lines


def judge(*paths: str, needs: Needs = NEEDS["prompts"], answer=(), **keys) -> list[UserError]:
    config = DataConfig(prompts=paths, **{"on_bad_row": "stop", **keys})
    return RowChecks(answer).training(config, paths, needs)


def test_rows_are_checked_once_for_each_content_and_what_is_looked_for(
    write, folder, num_read
) -> None:
    path = write(GOOD)
    for needs in NEEDS.values():
        num_before = len(num_read)
        assert not judge(path, needs=needs)
        assert len(num_read) >= num_before + len(GOOD)
        num_before = len(num_read)
        assert not judge(path, needs=needs)
        assert len(num_read) == num_before
    assert len(list(folder.glob(f"*{CHECKED}"))) == len(NEEDS)
    assert [error.name for error in judge(path, answer=["answer"])] == [f"{path}:1"]
    assert [error.name for error in judge(path, prompt_key="question")] == [f"{path}:1"]


def test_a_changed_file_is_checked_again_also_at_the_same_time_and_size(write, folder) -> None:
    path = write(GOOD)
    assert not judge(path)
    status, content = os.stat(path), Path(path).read_text()
    Path(path).write_text(content.replace('"prompt": "2="', '"prompf": "2="'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):  # what is wrong is said each time
        (error,) = judge(path)
        assert error.name == f"{path}:3" and "Did you mean 'prompf'" in str(error)
    Path(path).write_text(content)
    assert not judge(path)


def test_rows_that_change_while_they_are_read_are_not_remembered(write, folder) -> None:
    path = write(GOOD)

    def check() -> list[UserError]:
        write([{"question": "a"}])
        return []

    assert unless_checked(DataConfig(prompts=(path,)), [path], [], check) == []
    assert not list(folder.glob(f"*{CHECKED}"))


def test_without_a_folder_rows_are_checked_each_time(write, folder, num_read) -> None:
    path = write(GOOD)
    folder.parent.parent.mkdir()
    folder.parent.write_text("a file")
    for number in (1, 2):
        assert not judge(path)
        assert len(num_read) == number * len(GOOD)


@pytest.mark.parametrize("name", ["n" * 9999, "a\0b", "a\0b.parquet", "none", "/dev/null", "."])
def test_names_of_no_file_have_no_identity(folder, name) -> None:
    assert source_identity(name) is None
    assert judge(name) and not folder.exists()


def test_a_second_start_reads_no_row(write, folder, num_read, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(validate, "_common", lambda *_, **__: [])
    monkeypatch.setattr(validate, "_check_run", lambda *_, **__: None)
    rewarded = [{**row, "answer": "1"} for row in GOOD]
    sections = {
        "run": {"name": "a", "dir": str(tmp_path / "runs")},
        "model": {"init": "none"},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": write(rewarded), "eval_prompts": write(rewarded, "eval.jsonl")},
        "steps": {"samples_per_prompt": 2},
    }
    for _ in range(2):
        validate.validate_training(load_config_dict(sections), 1)
        assert len(num_read) == 2 * len(GOOD)
