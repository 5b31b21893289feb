"""Recognises published row formats by their keys. Does not import torch.

A row has either the columns named by `data.prompt_key`, `response_key`, `chosen_key` and
`rejected_key`, or one of the forms in FORMS. The returned rows have these columns, and each value
is a text or a list of messages. Columns named by these keys take precedence, and no form is tried
if one of the keys differs from its default. Columns that a form reads are replaced; others are
kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from hybridrl.config.data import DataConfig
from hybridrl.config.files import has_utf8, plain
from hybridrl.config.needs import Feedback
from hybridrl.data.images import Found, images_of, in_message, placed, refuse_images
from hybridrl.data.messages import ASSISTANT, Message, chat, tools_of, without_nulls
from hybridrl.data.rows import MAX_LEADING_BAD, BadRows, Row, half_pair, raw_rows, refuse_videos
from hybridrl.data.trees import DESCRIPTION as TREES
from hybridrl.data.trees import expand_trees
from hybridrl.errors import BadRowError, DataError, short

Kind = Literal["prompts", "demonstrations", "pairs", "labels"]
"""Kind of rows: prompts to generate responses for, or responses to learn from."""

_KEYS: dict[Kind, tuple[str, ...]] = {
    "prompts": ("prompt_key",),
    "demonstrations": ("prompt_key", "response_key"),
    "pairs": ("prompt_key", "chosen_key", "rejected_key"),
    "labels": ("prompt_key", "response_key"),
}
NAME_COLUMN = "Add the column, or set its data.*_key."
_CHATS = ("messages", "conversations")
CheckRow = Callable[[str, Mapping[str, object]], None]
"""Takes the text of a prompt and the columns of its row; raises DataError if responses to it cannot
be scored.
"""
Text = str | list[Message]
Parts = list[Text]
"""The prompt, followed by the response or both sides of a pair: one part per key of the kind."""


def kind_of(feedback: Feedback | None, has_responses: bool) -> Kind:
    if not has_responses:
        return "prompts"
    return "demonstrations" if feedback is None else feedback


def text_columns(config: DataConfig, kind: Kind) -> list[str]:
    """Returns the columns of normalized rows of this kind, beginning with the prompt."""
    return [getattr(config, key) for key in _KEYS[kind]]


def formed_rows(
    source: Sequence[str] | Iterable[Mapping[str, object]],
    config: DataConfig,
    kind: Kind,
    required: Sequence[str] = (),
    bad: BadRows | None = None,
    reads_images: bool = False,
) -> Iterator[Row]:
    """Reads rows in any known form from sources or from memory, in order.

    Args:
        required: Further columns that must not be missing or null in any row.
        bad: Collects unusable rows, which are not yielded; the caller must call `bad.check` after
            the last row. If None, every row must be usable.
        reads_images: Whether the model reads images; otherwise rows with images stop the run.

    Raises:
        DataError: A source or, without `bad`, a row is unusable; names the file and line.
    """
    counted, good = BadRows("stop") if bad is None else bad, set[int]()
    rows = raw_rows(source)
    rows = rows if _has_own_keys(config, kind) else expand_trees(rows, kind, counted)
    for number, row in enumerate(rows):
        try:
            found = normalize_row(replace(row, number=number), config, kind, reads_images)
            if found.images and not reads_images:
                raise refuse_images(found)
            for name in required:
                if found.columns.get(name) is None:
                    raise missing(row, name)
        except BadRowError as error:
            counted.add(row.source, error)
            if row.source not in good:
                counted.check(good, MAX_LEADING_BAD)
            continue
        good.add(row.source)
        yield found
    if bad is None:
        counted.check(good)


def validate_file(
    path: str,
    config: DataConfig,
    kind: Kind = "prompts",
    required: Sequence[str] = (),
    check: CheckRow | None = None,
    reads_images: bool = False,
) -> int:
    """Reads every row of one source and returns the number of usable rows; see `formed_rows`.

    `check` is called for each row. If set, a missing required column raises an error. Raises
    DataError for a source that is unreadable or has only bad rows, or if `data.on_bad_row` is
    'stop'.
    """
    bad, num = BadRows(config.on_bad_row), 0
    # A run does not drop rows without an answer, so this function must keep such rows too.
    columns = required if check is None else ()
    for row in formed_rows([path], config, kind, columns, bad, reads_images):
        num += 1
        if check is not None:
            for name in required:
                if row.columns.get(name) is None:
                    raise missing(row, name)
            try:
                check("", {**row.columns, "answer": row.columns.get(config.answer_key)})
            except DataError as error:
                raise DataError(row.place, error.value, error.allowed, error.remedy) from error
    bad.check([0] if num else [])
    return num


def normalize_row(row: Row, config: DataConfig, kind: Kind, reads_images: bool) -> Row:
    """Returns a row in its kind's columns. Raises BadRowError, or DataError for videos."""
    refuse_videos(row)
    names = text_columns(config, kind)
    columns = {key: value for key, value in row.columns.items() if value is not None}
    media = images_of(row, columns, with_numbers=reads_images)
    row, columns = replace(row, columns=_without(row.columns, media)), media.columns
    read = without_nulls(columns) if row.is_arrow else columns
    parts = [
        _checked(row, name, part)
        for name, part in zip(names, _parts(row, config, kind, read), strict=True)
    ]
    parts, images = placed(row, parts, media)
    if images and config.chat_template and isinstance(parts[0], str):
        parts[0] = in_message(parts[0])
    others = {**_answer(config, columns), **columns}
    others |= {key: None for key in row.columns if key not in others}
    if config.chat_template or not all(isinstance(part, str) for part in parts):
        for key in _CHATS:  # chats.py stores the prompt's messages under the first of these keys
            others.pop(key, None)
        others.pop(config.tools_key, None)
        tools = tools_of(row.place, config.tools_key, read.get(config.tools_key))
        others |= {} if tools is None else {config.tools_key: tools}
    columns = {**others, **dict(zip(names, parts, strict=True))}
    return replace(row, columns=columns, images=images)


def _without(columns: Mapping[str, object], media: Found) -> dict[str, object]:
    return {key: value for key, value in columns.items() if value is None or key in media.columns}


def _answer(config: DataConfig, columns: Mapping[str, Any]) -> dict[str, Any]:
    rule = columns.get("reward_model")
    is_default = config.answer_key == DataConfig.model_fields["answer_key"].default
    if not is_default or not isinstance(rule, Mapping) or rule.get("ground_truth") is None:
        return {}
    return {config.answer_key: rule["ground_truth"]}


def missing(row: Row, name: str, needed: Sequence[str] = ()) -> BadRowError:
    """Returns the error for a row without the column `name`, one of those that are `needed`."""
    present = sorted(map(str, row.columns))
    near = get_close_matches(name, [key for key in present if key != name], 1)
    hint = f"Did you mean {short(near[0])}? " if near else ""
    got = "null" if name in row.columns else f"no column {short(name)} among {short(present, 300)}"
    *others, last = map(short, needed or [name])
    listed = f"columns {', '.join(others)} and {last}" if others else f"column {last}"
    allowed = f"the {listed} in every row"
    return BadRowError(row.place, got, allowed, f"{hint}{NAME_COLUMN}")


def _parts(row: Row, config: DataConfig, kind: Kind, columns: Mapping[str, object]) -> Parts:
    names = text_columns(config, kind)
    absent = [name for name in names if name not in columns]
    if not absent:
        parts: Any = [columns[name] for name in names]
        if kind == "pairs" and not all(isinstance(part, str) for part in parts):
            return _pair(row, config, columns)
        return list(parts)
    is_chat = not isinstance(columns.get(names[0], ""), str)
    if is_chat and absent == [config.response_key]:  # a whole conversation
        return _split(row, names[0], columns, is_last=kind == "labels")
    has_own = _has_own_keys(config, kind)
    fitting = [
        form
        for form in ([] if has_own else FORMS)
        if kind in form.parts and columns.keys() >= set(form.needed) and form.fits(columns)
    ]
    if not fitting:
        error = missing(row, absent[0], names)
        if has_own:
            raise error
        forms = "; ".join(form.text() for form in FORMS if kind in form.parts)
        forms += "" if kind == "labels" else f"; {TREES}"
        raise BadRowError(row.place, error.value, f"{error.allowed}, or {forms}", error.remedy)
    return fitting[0].parts[kind](row, config, columns)


def _has_own_keys(config: DataConfig, kind: Kind) -> bool:
    defaults = DataConfig.model_fields
    return any(getattr(config, key) != defaults[key].default for key in _KEYS[kind])


def _checked(row: Row, name: str, value: Text) -> Text:
    if isinstance(value, list | tuple):
        return chat(row.place, name, value)
    if not isinstance(value, str) or not value:
        got = f"{plain(name)} = {short(value)}"
        raise BadRowError(row.place, got, "a text that is not empty, or messages", "Fix that row.")
    if not has_utf8(value):
        raise half_pair(row, name, value)
    return value


# Functions that extract prompt and responses from the forms.


def _conversation(row: Row, key: str, columns: Mapping[str, Any]) -> list[Message]:
    messages, system = chat(row.place, key, columns[key]), columns.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _split(row: Row, key: str, columns: Mapping[str, Any], is_last: bool) -> Parts:
    return _split_messages(row, key, _conversation(row, key, columns), is_last)


def _split_messages(row: Row, name: str, messages: list[Message], is_last: bool = False) -> Parts:
    """Splits a conversation, up to its last answer, before the assistant's first (or last) one."""
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    first = turns[-1 if is_last else 0] if turns else 0
    if first == 0:
        fault = "the assistant's message first" if turns else "no message of the assistant"
        allowed = "a message of the user, followed by a message of the assistant"
        remedy = "Fix or remove that row."
        raise BadRowError(row.place, f"{plain(name)} has {fault}", allowed, remedy)
    return [messages[:first], messages[first : turns[-1] + 1]]


def _prompt_messages(row: Row, key: str, columns: Mapping[str, Any]) -> Parts:
    """Returns the messages without the assistant's final turns, which the policy must generate."""
    messages = _conversation(row, key, columns)
    while messages and messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        got = f"{plain(key)} has only messages of the assistant"
        raise BadRowError(row.place, got, "a message of the user", "Fix or remove that row.")
    return [messages]


def _pair(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    """Returns the messages with which both sides begin, and each side's remaining messages.

    If a side begins with a message from the assistant, the row's prompt is put before it.
    """
    name, sides = config.prompt_key, []
    given = columns.get(name)
    asked = [] if given is None else _as_chat(row, name, given, "user")
    for key in (config.chosen_key, config.rejected_key):
        side = _as_chat(row, key, columns[key], ASSISTANT)
        if side[0]["role"] == ASSISTANT:
            side = [*asked, *side]
        elif isinstance(given, list | tuple) and side[: len(asked)] != asked:
            got = f"{plain(key)} does not begin with the messages of {plain(name)}"
            allowed = "the messages of the prompt first, or only the assistant's"
            raise BadRowError(row.place, got, allowed, "Fix that row.")
        sides.append(side)
    better, worse = sides
    most = min(len(better), len(worse)) - 1
    num = next((i for i in range(most) if better[i] != worse[i]), most)
    while num and not better[num]["role"] == worse[num]["role"] == ASSISTANT:
        num -= 1
    if num == 0:
        got = "two responses whose first difference is not in a message of the assistant"
        allowed = "two responses whose messages are identical up to a message of the assistant"
        raise BadRowError(row.place, got, allowed, "Fix or remove that row.")
    return [better[:num], *(_to_last_turn(side[num:]) for side in sides)]


def _to_last_turn(messages: list[Message]) -> list[Message]:
    last = max(i for i, message in enumerate(messages) if message["role"] == ASSISTANT)
    return messages[: last + 1]


def _as_chat(row: Row, name: str, value: object, role: str) -> list[Message]:
    if isinstance(value, str):
        return chat(row.place, name, [{"role": role, "content": value}])
    return chat(row.place, name, value)


_TURN = re.compile(r"(?:\A|\n\n|\n?(?=###))(?:### )?(Human|Assistant):", re.MULTILINE)
_TALKERS = {"Human": "user", "Assistant": ASSISTANT}


def _is_transcript(text: object) -> bool:
    if not isinstance(text, str):
        return False
    first = _TURN.search(text)
    return first is not None and not text[: first.start()].strip() and "Assistant:" in text


def _transcript_messages(row: Row, name: str, value: object) -> list[Message]:
    text = str(value)
    turns = list(_TURN.finditer(text))
    ends = [*(turn.start() for turn in turns[1:]), len(text)]
    if not turns or not _is_transcript(value):
        got = f"{plain(name)} = {short(value)}"
        raise BadRowError(row.place, got, "turns after 'Human:' and 'Assistant:'", "Fix that row.")
    found = [
        {"role": _TALKERS[turn[1]], "content": text[turn.end() : end].strip()}
        for turn, end in zip(turns, ends, strict=True)
    ]
    return chat(row.place, name, found)


def _cut_at_last(row: Row, name: str, value: object) -> tuple[str, str]:
    _transcript_messages(row, name, value)
    text, turns = str(value), list(_TURN.finditer(str(value)))
    end = max((turn.end() for turn in turns if turn[1] == "Assistant"), default=0)
    return text[:end], text[end:]


def _transcript_demonstration(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    if config.chat_template:
        return _split_messages(row, "text", _transcript_messages(row, "text", columns["text"]))
    return list(_cut_at_last(row, "text", columns["text"]))


def _transcript_pair(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    keys = config.chosen_key, config.rejected_key
    if config.chat_template:
        sides = {key: _transcript_messages(row, key, columns[key]) for key in keys}
        return _pair(row, config, sides)
    (asked, better), (other, worse) = (_cut_at_last(row, key, columns[key]) for key in keys)
    if asked != other:
        got = f"{keys[0]} and {keys[1]} that differ before the last turn"
        remedy = "Set data.chat_template=true, which learns from all turns, or remove that row."
        raise BadRowError(
            row.place, got, "texts that are identical up to the last 'Assistant:'", remedy
        )
    return [asked, better, worse]


def _prompt(columns: Mapping[str, Any], key: str) -> Any:
    """Returns a prompt with the input or context of Alpaca and Dolly rows, and the system text."""
    asked, more = columns[key], columns.get("input") or columns.get("context")
    if key == "instruction" and isinstance(asked, str) and isinstance(more, str) and more.strip():
        asked = f"{asked}\n\n{more}"
    system = columns.get("system") or columns.get("system_prompt")
    if isinstance(system, str) and system.strip() and isinstance(asked, str):
        return [{"role": "system", "content": system}, {"role": "user", "content": asked}]
    return asked


def _call_demonstration(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    calls = {"role": ASSISTANT, "tool_calls": columns["answers"]}
    return [[{"role": "user", "content": columns["query"]}], [calls]]


ToParts = Callable[[Row, DataConfig, Mapping[str, Any]], Parts]


@dataclass(frozen=True)
class Form:
    """A published row format, with a description for messages.

    Args:
        parts: For each kind, the function that extracts the prompt and responses from a row.
    """

    description: str
    needed: tuple[str, ...]
    parts: Mapping[Kind, ToParts]
    fits: Callable[[Mapping[str, Any]], bool] = lambda columns: True

    def text(self) -> str:
        return f"{' and '.join(self.needed)} ({self.description})"


def _chat_form(description: str, key: str) -> Form:
    return Form(
        description,
        (key,),
        {
            "prompts": lambda row, config, columns: _prompt_messages(row, key, columns),
            "demonstrations": lambda row, config, columns: _split(row, key, columns, is_last=False),
            "labels": lambda row, config, columns: _split(row, key, columns, is_last=True),
        },
    )


def _text_form(description: str, prompt: str, response: str) -> Form:
    def parts(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
        return [_prompt(columns, prompt), columns[response]]

    return Form(description, (prompt, response), {"demonstrations": parts, "labels": parts})


def _prompt_form(description: str, key: str) -> Form:
    return Form(
        description, (key,), {"prompts": lambda row, config, columns: [_prompt(columns, key)]}
    )


_SIDES = ("chosen", "rejected")
FORMS: tuple[Form, ...] = (
    _chat_form("a list of role and content", "messages"),
    _chat_form("ShareGPT, a list of from and value", "conversations"),
    Form(
        "HH-RLHF, turns after 'Human:' and 'Assistant:'",
        _SIDES,
        {"pairs": _transcript_pair},
        fits=lambda columns: all(_is_transcript(columns[side]) for side in _SIDES),
    ),
    Form(
        "Orca pairs",
        ("question", *_SIDES),
        {
            "pairs": lambda row, config, columns: _pair(
                row, config, {**columns, config.prompt_key: _prompt(columns, "question")}
            )
        },
    ),
    Form(
        "two lists of messages that begin identically",
        _SIDES,
        {"pairs": _pair},
        fits=lambda columns: not any(isinstance(columns[side], str) for side in _SIDES),
    ),
    _text_form("TRL", "prompt", "completion"),
    _text_form("Alpaca", "instruction", "output"),
    _text_form("Dolly", "instruction", "response"),
    Form("xLAM", ("query", "tools", "answers"), {"demonstrations": _call_demonstration}),
    _text_form("NuminaMath", "problem", "solution"),
    _text_form("OpenOrca", "question", "response"),
    _text_form("GSM8K", "question", "answer"),
    Form(
        "Guanaco, turns after '### Human:' and '### Assistant:'",
        ("text",),
        {"demonstrations": _transcript_demonstration},
        fits=lambda columns: _is_transcript(columns["text"]),
    ),
    _prompt_form("GSM8K, OpenOrca", "question"),
    _prompt_form("NuminaMath, MATH", "problem"),
    _prompt_form("Alpaca, Dolly", "instruction"),
)
"""All forms, in the order in which they are tried on a row."""
