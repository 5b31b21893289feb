"""Public evaluation sets in the form in which they were published, as rows of prompt and answer. No
torch.

A form says which columns a row has and what a model is asked. Rows come from the sources that
`data.prompts` takes. What is made of a row has `prompt` and `answer`, and the row's own columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from string import ascii_uppercase
from typing import Any

from hybridrl.config.data import DataConfig
from hybridrl.config.evaluation import EvalSetConfig
from hybridrl.data.forms import formed_rows
from hybridrl.data.rows import Row, raw_rows, refuse_images
from hybridrl.errors import DataError, short

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Form:
    """How rows of a published set are read.

    Args:
        instruction: text after each question, unless the section says another.
        read: takes a row's columns and gives the question and the answer.
        columns: that every row must have, for people.
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
    if isinstance(choices, Mapping):  # ARC: texts with labels of their own, letters or digits
        labels, choices = list(choices["label"]), choices["text"]
        answer = ascii_uppercase[labels.index(row["answerKey"])]
    elif "answer_index" in row:
        answer = ascii_uppercase[row["answer_index"]]
    elif isinstance(answer, int):
        answer = ascii_uppercase[answer]
    if str(answer) not in ascii_uppercase[: len(choices)] or not str(answer):
        raise ValueError(f"answer {answer!r} of {len(choices)} choices")
    lines = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices, strict=False)]
    return "\n".join([row["question"], *lines]), answer


def _ifeval(row: Mapping[str, Any]) -> tuple[str, Any]:
    if not isinstance(row["instruction_id_list"], list):
        raise TypeError("instruction_id_list is no list")
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


def set_rows(section: EvalSetConfig, data: DataConfig) -> Iterator[dict[str, object]]:
    """Yields the rows of an evaluation set as `prompt`, `answer` and the rows' other columns.

    Args:
        section: of the set.
        data: names the columns of the form `prompts`.

    Raises:
        DataError: naming the first row that is not of the form.
    """
    paths, is_own = section.path or (), section.form == "prompts"
    rows = formed_rows(paths, data, "prompts") if is_own else raw_rows(paths)
    for row in islice(rows, section.limit):
        if is_own:
            columns = dict(row.columns)
            prompt, answer = columns[data.prompt_key], columns.get(data.answer_key)
            told = section.instruction or ""
        else:
            refuse_images(row)
            form = FORMS[section.form]
            prompt, answer = _of_form(row, section.form, form)
            told = form.instruction if section.instruction is None else section.instruction
        if told and isinstance(prompt, str):
            prompt = f"{prompt}\n{told}"
        # A published column of the same name says something else.
        others = {k: v for k, v in row.columns.items() if k not in ("prompt", "answer", "label")}
        answers = {} if answer is None else {"answer": answer}
        yield {**others, "prompt": prompt, **answers}


def _of_form(row: Row, name: str, form: Form) -> tuple[str, Any]:
    try:
        question, answer = form.read(row.columns)
        if not isinstance(question, str) or not question:
            raise TypeError(f"question {short(question)}")
        return question, answer
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        said = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            row.place,
            f"{short(said, 120)} among {short(sorted(map(str, row.columns)), 200)}",
            f"a row of form {name}, with {form.columns}",
            "Mend that row, or set another form.",
        ) from error


def set_data(data: DataConfig, section: EvalSetConfig) -> DataConfig:
    """Returns how the rows of `set_rows` are read: chats and limits as in training."""
    # Results compare only where all rows are asked.
    keys: dict[str, object] = {"prompt_key": "prompt", "answer_key": "answer", "on_bad_row": "stop"}
    return data.model_copy(update={**keys, "prompts": section.path})
