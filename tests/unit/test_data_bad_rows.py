"""Rows that cannot be used are dropped and counted, or all named at once; images are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, byte_tokenizer, published_template

from hybridrl.config.evaluation import EvalSetConfig
from hybridrl.config.needs import Needs
from hybridrl.config.schema import DataConfig
from hybridrl.data import forms
from hybridrl.data.evaluation_sets import set_data, set_rows
from hybridrl.data.forms import validate_file
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import LoadedPrompts, Reading, load_prompts
from hybridrl.errors import DataError
from hybridrl.loop.row_checks import RowChecks

GOOD = {"prompt": "1+1=", "response": "2"}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path / "cache"))

    def write_rows(*rows: Mapping[str, Any], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(CHATML)


def load(tokenizer: Any, *paths: str, feedback: Any = None, **changes: Any) -> LoadedPrompts:
    config = DataConfig(prompts=paths, **changes)
    return load_prompts(config, tokenizer, max_response_tokens=99, feedback=feedback)


# What is wrong with a row, at any stage of reading it, beside rows of messages or texts.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an empty response": ({**GOOD, "response": ""}, "response = ''"),
    "an empty prompt": ({**GOOD, "prompt": ""}, "prompt = ''"),
    "a null": ({**GOOD, "response": None}, "null"),
    "a number": ({**GOOD, "response": 7}, "response = 7"),
    "no column": ({"prompt": "a"}, "no column 'response'"),
    "an unknown role": (
        {"messages": [{"role": "judge", "content": "a"}, *CHAT]},
        "the role 'judge'",
    ),
    "an empty turn": (
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}]},
        "message of the assistant without text",
    ),
    "no turn": ({"messages": CHAT[:1]}, "no message of the assistant"),
    "broken JSON in a call": (
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": "{"}]},
        "messages has '{' (Expecting",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_dropped_and_counted_or_stops(tokenizer: Any, write: Write, name: str) -> None:
    row, said = BAD[name]
    path = write(GOOD, row, {"messages": CHAT}, GOOD)
    found = load(tokenizer, path)
    assert [prompt.prompt_id for prompt in found.prompts] == [0, 2, 3]  # it moves no other
    assert f"3 prompts; 1 bad rows dropped (first: {path}:2: " in found.report()
    assert said in found.report()
    assert validate_file(path, DataConfig(), "demonstrations") == 3
    for read in (
        lambda: load(tokenizer, path, on_bad_row="stop"),
        lambda: validate_file(path, DataConfig(on_bad_row="stop"), "demonstrations"),
        lambda: load(tokenizer, write(row)),  # nothing else is there
    ):
        with pytest.raises(DataError, match=said.replace("(", r"\(")) as caught:
            read()
        assert caught.value.name.startswith(path)
    assert "on_bad_row" not in str(caught.value)  # dropping the only row would leave none


def test_all_bad_rows_are_named_in_one_message(tokenizer: Any, write: Write) -> None:
    bad = {**GOOD, "response": ""}
    path = write(GOOD, bad, bad, GOOD, {"prompt": "a"})
    for read in (
        lambda: load(tokenizer, path, on_bad_row="stop"),
        lambda: validate_file(path, DataConfig(on_bad_row="stop"), "demonstrations"),
    ):
        with pytest.raises(DataError) as caught:
            read()
        text = str(caught.value)
        assert f"{path}:2: got response = ''. 2 more rows are bad: {path}:3: response = ''" in text
        assert f"{path}:5: no column 'response'" in text
        assert text.endswith("Or set data.on_bad_row=drop to leave out and count such rows.")
    with pytest.raises(DataError, match="99 more rows are bad: .*; and 90 more; allowed") as caught:
        load(tokenizer, write(GOOD, *[bad] * 100), on_bad_row="stop")
    assert len(str(caught.value)) < 3000


def test_a_source_that_is_bad_throughout_stops_and_is_said_to_be(
    tokenizer: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write(GOOD, name="good.jsonl")
    other = write(*[{"frage": "a", "antwort": "b"}] * 7, name="other.jsonl")
    for read in (
        lambda: load(tokenizer, good, other),
        lambda: validate_file(other, DataConfig(), "demonstrations"),
    ):
        with pytest.raises(DataError, match=r"no column 'prompt'.*; all 7 rows are bad") as caught:
            read()
        assert caught.value.name == f"{other}:1"
    # A wrong key is found without reading millions of rows.
    monkeypatch.setattr(forms, "MAX_LEADING_BAD", 3)
    with pytest.raises(DataError, match="all 3 rows are bad"):
        load(tokenizer, other)
    late = write(*[{"frage": "a"}] * 2, GOOD, *[{"frage": "a"}] * 9)
    assert "11 bad rows dropped" in load(tokenizer, late).report()


def test_faults_that_only_the_tokenizer_or_the_template_finds(write: Write) -> None:
    class Letters:
        """Knows no #; spaces give no token."""

        eos_token_id = 1

        def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
            if any("#" in one for one in text):
                raise KeyError("#")
            return {"input_ids": [[ord(c) for c in one if c != " "] for one in text]}

    rows = [{"prompt": "a"}, {"prompt": "#"}, {"prompt": "  "}, {"prompt": "b"}]
    found = load_prompts(DataConfig(), Letters(), rows)
    assert [prompt.text for prompt in found.prompts] == ["a", "b"]
    assert "2 bad rows dropped (first: prompts[1]: '#', which has no tokens" in found.report()
    gemma = byte_tokenizer(published_template("gemma"), ["<end_of_turn>"], bos_token="<|im_start|>")
    system = {"messages": [{"role": "system", "content": "s"}, *CHAT]}
    found = load(gemma, write({"messages": CHAT}, system))
    assert len(found.prompts) == 1 and "System role not supported" in found.report()


@pytest.mark.parametrize(
    ("feedback", "good", "bad", "said"),
    [
        ("pairs", [PAIR], {**PAIR, "rejected": "2"}, "equal responses in"),
        ("pairs", [PAIR], {**PAIR, "chosen": ""}, "chosen = ''"),
        (
            "labels",
            [{**GOOD, "label": True}, {**GOOD, "label": False}],
            {**GOOD, "label": "yes"},
            "label = 'yes'",
        ),
    ],
)
def test_bad_pairs_and_labels_are_dropped(
    tokenizer: Any, write: Write, feedback: Any, good: list[Any], bad: Any, said: str
) -> None:
    path = write(*good, bad)
    found = load(tokenizer, path, feedback=feedback)
    assert len(found.prompts) == len(good) and said in found.report()
    needs = Needs(rollouts=False, feedback=feedback)
    for how, num in (("drop", 0), ("stop", 1)):
        config = DataConfig(prompts=(path,), on_bad_row=how)
        errors = RowChecks().training(config, [path], needs)
        assert len(errors) == num and all(said in str(error) for error in errors)


def test_dropped_rows_are_reported_of_a_file_that_is_mapped_too(
    tokenizer: Any, write: Write, tmp_path: Path
) -> None:
    reading = Reading(DataConfig(prompts=(write(GOOD, {"prompt": ""}),)), max_response_tokens=9)
    for _ in range(2):
        found = PromptStore(tokenizer, tmp_path / "kept").load(reading)
        assert "1 prompts; 1 bad rows dropped" in found.report() and found.left_out.is_anything()


def test_evaluation_sets_are_asked_whole(write: Write) -> None:
    section = EvalSetConfig(path=(write(GOOD, {"prompt": ""}),), form="prompts")
    with pytest.raises(DataError, match="prompt = ''"):
        list(set_rows(section, DataConfig()))
    assert set_data(DataConfig(), section).on_bad_row == "stop"


PICTURE = "data:image/png;base64,aaaa"
IMAGES = {
    "a column": {**GOOD, "images": [PICTURE]},
    "bytes": {**GOOD, "image": {"bytes": PICTURE, "path": None}},
    "a text": {**GOOD, "image": PICTURE},
    "a part": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": PICTURE},
                    {"type": "text", "text": "what?"},
                ],
            },
            CHAT[1],
        ]
    },
    "a url": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]},
            CHAT[1],
        ]
    },
}


@pytest.mark.parametrize("name", IMAGES)
def test_rows_with_images_are_refused(tokenizer: Any, write: Write, name: str) -> None:
    """Dropping them, or their images, would train on another task than the data has."""
    path = write(GOOD, IMAGES[name])
    kinds = {"prompts": None, "demonstrations": 9}
    for kind in kinds:
        with pytest.raises(DataError, match="the model reads no images") as caught:
            validate_file(path, DataConfig(), kind)  # type: ignore[arg-type]
        assert caught.value.name == f"{path}:2" and "Remove" in str(caught.value)
    with pytest.raises(DataError, match="the model reads no images"):
        load(tokenizer, path)


def test_columns_of_images_that_are_empty_or_no_pictures_are_none(
    tokenizer: Any, write: Write
) -> None:
    rows = [{**GOOD, "images": value} for value in (None, [], "")]
    path = write(*rows, {**GOOD, "image": "ubuntu:22.04"})
    assert len(load(tokenizer, path).prompts) == 4
