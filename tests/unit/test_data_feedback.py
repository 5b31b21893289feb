"""Preference pairs and labelled responses: what rows must say, and what a step gets of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridrl.config.schema import DataConfig
from hybridrl.contracts.batch import UNRELATED
from hybridrl.data.prompts import PromptSource, load_prompts
from hybridrl.data.supervised import supervised_batch
from hybridrl.errors import DataError

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "three"}
GOOD = {"prompt": "1+1=", "response": "2", "label": True}
BAD = {"prompt": "1+2=", "response": "44", "label": False}


class Letters:
    """A tokenizer of one token a letter; spaces give none."""

    eos_token_id: int | None = 1

    def __call__(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(c) for c in t if c != " "] for t in text]}


Load = Callable[..., object]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads these rows from a file, as responses of at most 6 tokens."""

    def load_rows(feedback, *rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig(prompts=(str(path),), max_prompt_tokens=8, **keys)
        return load_prompts(config, Letters(), max_response_tokens=6, feedback=feedback)

    return load_rows


def letters(text: str) -> tuple[int, ...]:
    return (*map(ord, text), 1)


def test_a_pair_has_both_sides_with_the_end_token(load: Load) -> None:
    keys = {"prompt_key": "q", "chosen_key": "a", "rejected_key": "b"}
    row = {"q": "1+1=", "a": "2", "b": "three", "chosen": "kept"}
    for prompt in (load("pairs", PAIR).prompts[0], load("pairs", row, **keys).prompts[0]):
        assert prompt.response_tokens == letters("2")
        assert prompt.rejected_tokens == letters("three")
    assert prompt.columns == {"chosen": "kept"}


def test_pairs_with_a_side_that_is_too_long_are_left_out_and_counted(load: Load) -> None:
    rows = [PAIR, {**PAIR, "rejected": "sixsix"}, {**PAIR, "chosen": "sixsix"}]
    loaded = load("pairs", *rows, {**PAIR, "prompt": "1+1+1+1+1="})
    assert [p.prompt_id for p in loaded.prompts] == [0]
    assert [tokens for _, tokens in loaded.left_out.places] == [7, 7, 10]
    assert "3 left out as longer than data.max_prompt_tokens=8 or a response of 6" in (
        loaded.report()
    )


@pytest.mark.parametrize(
    ("feedback", "row", "said"),
    [
        (
            "pairs",
            {**PAIR, "rejected": "2"},
            "equal responses in 'chosen' and 'rejected'.*Remove that",
        ),
        (
            "pairs",
            {**PAIR, "rejected": " 2"},
            "equal responses in 'chosen' and 'rejected'.*in tokens",
        ),
        ("pairs", {"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ("pairs", {**PAIR, "chosen": 2}, "chosen = 2.*a text"),
        ("pairs", {**PAIR, "rejected": ""}, "rejected = ''"),
        ("labels", {**GOOD, "label": 1}, "label = 1.*true or false.*Fix that row"),
        ("labels", {**GOOD, "label": "true"}, "label = 'true'"),
        ("labels", {**GOOD, "label": None}, "null"),
        ("labels", {"prompt": "a", "response": "b"}, "no column 'label'"),
    ],
)
def test_a_bad_row_is_named(load: Load, feedback: str, row: dict, said: str) -> None:
    good = [PAIR] if feedback == "pairs" else [GOOD, BAD]
    with pytest.raises(DataError, match=said) as caught:
        load(feedback, *good, row, on_bad_row="stop")
    assert caught.value.name.endswith(f"rows.jsonl:{len(good) + 1}")


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        ([GOOD, GOOD], "false"),
        ([BAD], "true"),
        ([GOOD, {**BAD, "response": "far too long"}], "false"),
    ],
)
def test_labels_of_one_class_are_refused(load: Load, rows: list, missing: str) -> None:
    with pytest.raises(DataError, match=f"no row with label = {missing}.*Add rows") as caught:
        load("labels", *rows)
    assert caught.value.name.endswith("rows.jsonl")


def test_a_step_of_pairs_holds_both_sides_in_one_group(load: Load) -> None:
    prompts = load("pairs", PAIR, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}).prompts
    batch = supervised_batch(prompts, "pairs")
    assert batch.group_B.tolist() == [0, 1, 0, 1]
    assert batch.reward_B.tolist() == [1, 1, 0, 0]
    assert batch.sample_ids_B.tolist() == [0, 1, 2, 3]
    sides = [part.tolist() for part in batch.tokens_T.split(batch.lengths_B.tolist())]
    assert sides[2] == [*map(ord, "1+1="), *letters("three")]
    assert sides[1] == [*map(ord, "2+2="), *letters("4")]


def test_a_step_of_labels_has_each_prompt_with_the_next_ones_response(load: Load) -> None:
    third = {"prompt": "5=", "response": "5", "label": True, "answer": "5"}
    prompts = load("labels", GOOD, BAD, third).prompts
    batch = supervised_batch(prompts, "labels")
    assert batch.reward_B[:3].tolist() == [1, 0, 1]
    assert batch.reward_parts[UNRELATED].tolist() == [0, 0, 0, 1, 1, 1]
    found = [part.tolist() for part in batch.tokens_T.split(batch.lengths_B.tolist())]
    assert found[:3] == [[*p.tokens, *p.response_tokens] for p in prompts]
    assert found[3:] == [
        [*p.tokens, *q.response_tokens]
        for p, q in zip(prompts, (prompts[1], prompts[2], prompts[0]), strict=True)
    ]
    assert torch.equal(batch.group_B, torch.tensor([0, 1, 2] * 2))


def test_a_source_of_other_rejected_responses_is_another_source(load: Load) -> None:
    state = PromptSource(load("pairs", PAIR).prompts, seed=0, shuffle=True).state()
    other = load("pairs", {**PAIR, "rejected": "four"}).prompts
    with pytest.raises(DataError, match="differ from the checkpoint's"):
        PromptSource(other, seed=0, shuffle=True).load_state(state)


def test_an_unrelated_response_is_to_another_prompt(load: Load) -> None:
    again = {**GOOD, "response": "two", "label": False}
    batch = supervised_batch(load("labels", GOOD, again, BAD).prompts, "labels")
    found = [part.tolist() for part in batch.tokens_T.split(batch.lengths_B.tolist())]
    # The next row has the same prompt: its response would not be unrelated.
    assert found[3] == found[4] == [*map(ord, "1+1="), *letters("44")]
    assert found[5] == [*map(ord, "1+2="), *letters("2")]


def test_a_source_of_other_labels_is_another_source(load: Load) -> None:
    state = PromptSource(load("labels", GOOD, BAD).prompts, seed=0, shuffle=True).state()
    other = load("labels", {**GOOD, "label": False}, {**BAD, "label": True}).prompts
    with pytest.raises(DataError, match="differ from the checkpoint's"):
        PromptSource(other, seed=0, shuffle=True).load_state(state)
