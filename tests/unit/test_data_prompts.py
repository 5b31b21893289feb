"""Prompt files: every way they can be wrong, what is left out, and resuming the order."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.schema import DataConfig
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.forms import validate_file
from hybridrl.data.prompts import PromptSource, load_prompts
from hybridrl.errors import DataError


class Letters:
    """A tokenizer of one token a letter; spaces give none."""

    eos_token_id: int | None = 1

    def __call__(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(c) for c in t if c != " "] for t in text]}


def config(**changes) -> DataConfig:
    return DataConfig(**{"prompts": "unused.jsonl", "max_prompt_tokens": 8, **changes})


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows, name="train.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines))
        return str(path)

    return write_rows


GOOD = {"prompt": "1+1=", "response": "2", "answer": "2"}
BAD_ROWS = {
    "not JSON": ("{'prompt': 1}", "expected|Expecting"),
    "cut short": ('{"prompt": "1+', "Unterminated"),
    "a list": (["1+1="], "a list"),
    "a text": ('"1+1="', "a str"),
    "no prompt column": ({"promt": "1+1=", "answer": "2"}, "Did you mean 'promt'"),
    "null prompt": ({"prompt": None}, "null"),
    "a number as prompt": ({"prompt": 5}, "prompt = 5"),
    "messages as prompt": ({"prompt": [{"role": "user"}]}, "prompt has"),
    "an empty prompt": ({"prompt": ""}, "not empty"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_an_error_that_names_file_and_line(write, bad):
    row, expected = BAD_ROWS[bad]
    path = write(GOOD, "", GOOD, row, GOOD)
    for read in (
        lambda: validate_file(path, DataConfig(on_bad_row="stop")),
        lambda: load_prompts(config(prompts=path, on_bad_row="stop"), Letters()),
    ):
        with pytest.raises(DataError, match=expected) as caught:
            read()
        assert caught.value.name == f"{path}:4"


def test_a_missing_column_names_the_columns_present(write):
    path = write({"task": "x", "answer": "y"})
    with pytest.raises(DataError, match=r"no column 'prompt' among \['answer', 'task'\]"):
        validate_file(path, DataConfig())


def test_text_that_is_not_utf8_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match="UTF-8") as caught:
        validate_file(str(path), DataConfig())
    assert caught.value.name == f"{path}:2"


def test_a_missing_file_names_the_nearest(write, tmp_path):
    path = write(GOOD)
    with pytest.raises(DataError, match="no such file.*Did you mean .*train.jsonl") as caught:
        load_prompts(config(prompts=str(tmp_path / "trains.jsonl")), Letters())
    assert caught.value.name == str(tmp_path / "trains.jsonl")
    with pytest.raises(DataError, match="a directory"):
        validate_file(str(tmp_path), DataConfig())
    assert validate_file(path, DataConfig(), required=["answer"]) == 1


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_an_error(write, lines):
    path = write(*lines)
    with pytest.raises(DataError, match="an empty file") as caught:
        load_prompts(config(prompts=path), Letters())
    assert caught.value.name == path


def test_no_source_is_an_error():
    with pytest.raises(DataError, match="data.prompts"):
        load_prompts(config(prompts=None), Letters())
    with pytest.raises(DataError, match="data.prompts"):
        load_prompts(config(), Letters(), [])


def test_a_prompt_without_tokens_is_an_error_that_names_the_line(write):
    path = write(GOOD, {"prompt": "   "})
    with pytest.raises(DataError, match="has no tokens") as caught:
        load_prompts(config(prompts=path, on_bad_row="stop"), Letters())
    assert caught.value.name == f"{path}:2"


def test_too_long_prompts_are_left_out_counted_and_reported(write):
    rows = [{"prompt": "a" * n} for n in (3, 9, 8, 12, 1)]
    path = write(*rows)
    loaded = load_prompts(config(prompts=path), Letters())
    assert [(p.prompt_id, len(p.tokens)) for p in loaded.prompts] == [(0, 3), (2, 8), (4, 1)]
    assert loaded.left_out.places == [(f"{path}:2", 9), (f"{path}:4", 12)]
    assert loaded.left_out.num == 2
    report = loaded.report()
    for part in ("3 prompts", "2 left out", "data.max_prompt_tokens=8", f"{path}:2", "9 tokens"):
        assert part in report
    assert load_prompts(config(), Letters(), [{"prompt": "a"}]).report() == "1 prompts"


def test_all_prompts_too_long_is_an_error(write):
    path = write({"prompt": "a" * 9}, {"prompt": "a" * 10})
    with pytest.raises(DataError, match="2 rows, all too long.*max_prompt_tokens=8"):
        load_prompts(config(prompts=path), Letters())


def test_columns_hold_the_rest_of_the_row_and_the_answer_under_one_name(write):
    path = write({"question": "1+1=", "solution": 2, "level": [1], "response": "x"})
    loaded = load_prompts(
        config(prompts=path, prompt_key="question", answer_key="solution"), Letters()
    )
    (prompt,) = loaded.prompts
    assert prompt.text == "1+1=" and prompt.tokens == tuple(map(ord, "1+1="))
    assert prompt.columns == {"solution": 2, "answer": 2, "level": [1], "response": "x"}
    assert prompt.response_tokens is None


def test_required_columns_may_be_of_any_kind_but_must_be_there(write):
    path = write({"prompt": "a", "answer": 2}, {"prompt": "b"})
    assert validate_file(path, DataConfig()) == 2
    with pytest.raises(DataError, match="'answer'") as caught:
        load_prompts(config(prompts=path, on_bad_row="stop"), Letters(), required=["answer"])
    assert caught.value.name == f"{path}:2"


def test_supervised_data_ends_with_the_end_token(write):
    path = write(GOOD, {"prompt": "a", "response": "12345"}, {"prompt": "b", "response": "1234"})
    loaded = load_prompts(config(prompts=path), Letters(), max_response_tokens=5)
    assert [p.response_tokens for p in loaded.prompts] == [
        (ord("2"), 1),
        (*map(ord, "1234"), 1),
    ]
    assert loaded.left_out.places == [(f"{path}:2", 6)]
    assert loaded.prompts[0].columns == {"answer": "2"}


def test_supervised_data_needs_responses_and_an_end_token(write):
    path = write({"prompt": "a"})
    with pytest.raises(DataError, match="'response'") as caught:
        load_prompts(config(prompts=path), Letters(), max_response_tokens=5)
    assert caught.value.name == f"{path}:1"
    endless = Letters()
    endless.eos_token_id = None
    with pytest.raises(DataError, match="end token"):
        load_prompts(config(), endless, [GOOD], max_response_tokens=5)


def test_several_files_and_rows_in_memory_give_the_same_prompts(write):
    rows = [{"prompt": f"p{i}"} for i in range(5)]
    paths = [write(*rows[:2], name="a.jsonl"), write(*rows[2:], name="b.jsonl")]
    from_files = load_prompts(config(prompts=paths), Letters())
    from_memory = load_prompts(config(), Letters(), rows)
    assert from_files.prompts == from_memory.prompts
    assert [p.prompt_id for p in from_files.prompts] == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"prompts\[1\]"):
        load_prompts(config(on_bad_row="stop"), Letters(), [{"prompt": "a"}, {"text": "b"}])


def test_rows_are_numbered_through_beyond_one_tokenizer_call():
    rows = [{"prompt": f"{i}"} for i in range(2500)]
    loaded = load_prompts(config(), Letters(), rows)
    assert [p.prompt_id for p in loaded.prompts] == list(range(2500))
    assert loaded.prompts[2100].tokens == tuple(map(ord, "2100"))
    assert len(load_prompts(config(), Letters(), rows, limit=1500).prompts) == 1500


def prompts(num: int) -> list[Prompt]:
    return [Prompt(i, str(i), (i,)) for i in range(num)]


def ids(taken: list[Prompt]) -> list[int]:
    return [prompt.prompt_id for prompt in taken]


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 12),
    before=st.lists(st.integers(0, 15), max_size=5),
    after=st.lists(st.integers(0, 15), max_size=5),
    seed=st.integers(0, 100),
    shuffle=st.booleans(),
)
def test_a_source_resumed_from_its_state_gives_the_same_sequence(num, before, after, seed, shuffle):
    first = PromptSource(prompts(num), seed=seed, shuffle=shuffle)
    for n in before:
        assert len(first.take(n)) == n
    state = json.loads(json.dumps(first.state()))
    second = PromptSource(prompts(num), seed=seed, shuffle=shuffle)
    second.load_state(state)
    assert second.epoch == first.epoch
    for n in after:
        assert ids(second.take(n)) == ids(first.take(n))


def test_each_epoch_gives_every_prompt_once_in_a_new_order():
    source = PromptSource(prompts(50), seed=3, shuffle=True)
    epochs = [ids(source.take(50)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != ids(PromptSource(prompts(50), seed=4, shuffle=True).take(50))
    assert epochs[0] == ids(PromptSource(prompts(50), seed=3, shuffle=True).take(50))


def test_taking_does_not_depend_on_how_it_is_cut():
    whole = PromptSource(prompts(7), seed=0, shuffle=True).take(24)
    source = PromptSource(prompts(7), seed=0, shuffle=True)
    assert ids(whole) == ids([p for n in (5, 9, 1, 9) for p in source.take(n)])


def test_without_shuffling_the_order_is_the_file_s():
    source = PromptSource(prompts(4), seed=0, shuffle=False)
    assert ids(source.take(9)) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert source.epoch == 2.25


@pytest.mark.parametrize(
    "other",
    [
        PromptSource(prompts(5), seed=1, shuffle=True),
        PromptSource(prompts(6), seed=0, shuffle=True),
        PromptSource(prompts(5), seed=0, shuffle=False),
        PromptSource([*prompts(4), Prompt(4, "4", (99,))], seed=0, shuffle=True),
    ],
)
def test_the_state_of_other_prompts_is_refused(other):
    with pytest.raises(DataError, match="checkpoint"):
        other.load_state(PromptSource(prompts(5), seed=0, shuffle=True).state())


def test_a_source_without_prompts_is_an_error():
    with pytest.raises(DataError, match="1 prompt or more"):
        PromptSource([], seed=0, shuffle=True)


def test_files_are_checked_without_torch(write):
    code = (
        "import sys; from hybridrl.data.forms import validate_file\n"
        "from hybridrl.config.data import DataConfig\n"
        "validate_file(sys.argv[1], DataConfig()); assert 'torch' not in sys.modules"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code, write(GOOD)], env=environment, check=True)
