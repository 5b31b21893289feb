"""Reads public evaluation sets in their published form into prompts and answers. No torch.

A form defines which columns a row has and how the question is worded. The sources are the same as
for `data.prompts`. Rows keep their other columns.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from string import ascii_uppercase
from typing import Any

from hybridrl.config.data import DataConfig
from hybridrl.config.evaluation import EvalSetConfig
from hybridrl.data.forms import formed_rows
from hybridrl.data.images import IMAGES, images_of, refuse_images
from hybridrl.data.rows import Row, raw_rows, refuse_videos
from hybridrl.errors import DataError, short

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Form:
    """A published row format.

    Args:
        instruction: Text appended to each question, unless the config section sets another.
    """

    instruction: str
    read: Callable[[Mapping[str, Any]], tuple[str, Any]]
    columns: str


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, Any]:
    return row["question"], row["answer"]


def _math(row: Mapping[str, Any]) -> tuple[str, Any]:
    return row["problem"], row["answer"]


def _aime(row: Mapping[str, Any]) -> tuple[str, Any]:
    columns = {key.lower(): value for key, value in row.items()}
    problem = columns["problem"] if "problem" in columns else columns["question"]
    return problem, int(columns["answer"])


def _choices(row: Mapping[str, Any]) -> tuple[str, Any]:
    choices, answer = row["options"] if "options" in row else row["choices"], row.get("answer")
    if isinstance(choices, str):
        choices = _list_in_text(choices)
    if isinstance(choices, Mapping):  # ARC: texts and their labels, letters or digits
        labels, choices = list(choices["label"]), choices["text"]
        answer = ascii_uppercase[labels.index(row["answerKey"])]
    elif "answer_index" in row:
        answer = ascii_uppercase[row["answer_index"]]
    elif isinstance(answer, int):
        answer = ascii_uppercase[answer]
    if str(answer) not in ascii_uppercase[: len(choices)] or not str(answer):
        raise ValueError(f"answer {answer!r}, with {len(choices)} choices")
    lines = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices, strict=False)]
    return "\n".join([row["question"], *lines]), answer


def _list_in_text(text: str) -> list[Any]:
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"options {short(text)}, which are not a list") from error
    if not isinstance(found, list):
        raise TypeError(f"options {short(text)}, which are not a list")
    return found


def _ifeval(row: Mapping[str, Any]) -> tuple[str, Any]:
    if not isinstance(row["instruction_id_list"], list):
        raise TypeError("instruction_id_list is not a list")
    return row["prompt"], None


FORMS: Mapping[str, Form] = {
    "gsm8k": Form(
        "Please reason step by step, and give the final answer as a number after ####.",
        _gsm8k,
        "question, answer",
    ),
    "math": Form(BOXED, _math, "problem, answer"),
    "aime": Form(BOXED, _aime, "problem or question, and answer, a whole number"),
    "choices": Form(
        'End with the letter of the right choice, as in "Answer: A".',
        _choices,
        "question, choices or options, and answer, answer_index or answerKey",
    ),
    "ifeval": Form("", _ifeval, "prompt, instruction_id_list, kwargs"),
}


def set_rows(
    section: EvalSetConfig, data: DataConfig, reads_images: bool = False
) -> Iterator[dict[str, object]]:
    """Yields each row of an evaluation set as `prompt`, `answer` and its other columns; `data` has
    the column names of the form `prompts`. Raises DataError for the first row that does not have
    the form.
    """
    paths, is_own = section.path or (), section.form == "prompts"
    rows = (
        formed_rows(paths, data, "prompts", reads_images=reads_images)
        if is_own
        else raw_rows(paths)
    )
    for given in islice(rows, section.limit):
        row = given if is_own else _with_images(given, reads_images)
        if is_own:
            columns = dict(row.columns)
            prompt, answer = columns[data.prompt_key], columns.get(data.answer_key)
            instruction = section.instruction or ""
        else:
            form = FORMS[section.form]
            prompt, answer = _read_form(row, section.form, form)
            instruction = form.instruction if section.instruction is None else section.instruction
        prompt = _instructed(prompt, instruction) if instruction else prompt
        # In published sets, columns with these names mean something else.
        others = {k: v for k, v in row.columns.items() if k not in ("prompt", "answer", "label")}
        answers = {} if answer is None else {"answer": answer}
        images = {IMAGES: list(row.images)} if is_own and row.images else {}
        yield {**others, "prompt": prompt, **answers, **images}


def _instructed(prompt: Any, instruction: str) -> Any:
    """Returns a prompt with an instruction at the end of its text, or of its last user message."""
    if isinstance(prompt, str):
        return f"{prompt}\n{instruction}"
    messages = list(prompt)
    places = [place for place, one in enumerate(messages) if one["role"] == "user"]
    for place in places[-1:]:
        content, added = messages[place]["content"], f"\n{instruction}"
        if isinstance(content, str):
            content += added
        else:
            content = [*content, {"type": "text", "text": added}]
        messages[place] = {**messages[place], "content": content}
    return messages


def _with_images(row: Row, reads_images: bool) -> Row:
    refuse_videos(row)
    media = images_of(row, row.columns)
    names = {index: f"image_{number}" for number, index in media.numbers.items()}
    others = [image for index, image in enumerate(media.images) if index not in names]
    columns: dict[str, object] = {name: media.images[index] for index, name in names.items()}
    columns |= {IMAGES: others} if others else {}
    row = replace(row, columns={**media.columns, **columns}, images=tuple(media.images))
    if row.images and not reads_images:
        raise refuse_images(row)
    return row


def _read_form(row: Row, name: str, form: Form) -> tuple[str, Any]:
    try:
        question, answer = form.read(row.columns)
        if not isinstance(question, str) or not question:
            raise TypeError(f"question {short(question)}")
        return question, answer
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        fault = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            row.place,
            f"{short(fault, 120)} among {short(sorted(map(str, row.columns)), 200)}",
            f"a row of form {name}, with {form.columns}",
            "Fix that row, or set another form.",
        ) from error


def set_data(data: DataConfig, section: EvalSetConfig) -> DataConfig:
    """Returns a data section for reading the rows from `set_rows`, otherwise as in training."""
    # Results are comparable only if every row is evaluated.
    keys: dict[str, object] = {"prompt_key": "prompt", "answer_key": "answer", "on_bad_row": "stop"}
    return data.model_copy(update={**keys, "prompts": section.path})
