"""The forms of rows that data sets are published in, recognised by their keys. No torch.

Owns the table of forms. A row is given in the columns that `data.prompt_key`, `response_key`,
`chosen_key` and `rejected_key` name, or in a form of FORMS; what comes out of here has these
columns, each a text or a list of messages. The columns by key go before forms, and where one of
these keys is not its default no form is looked for. What a form has read is gone from the columns;
others stay.
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
from hybridrl.data.messages import ASSISTANT, Message, chat, tools_of, without_nulls
from hybridrl.data.rows import (
    MAX_BAD_AT_FIRST,
    BadRows,
    Row,
    half_pair,
    raw_rows,
    refuse_images,
)
from hybridrl.data.trees import SAID as TREES
from hybridrl.data.trees import unfolded
from hybridrl.errors import DataError, RowError, short

Kind = Literal["prompts", "demonstrations", "pairs", "labels"]
"""What is asked of rows: prompts to respond to, or responses to learn from."""

_KEYS: dict[Kind, tuple[str, ...]] = {
    "prompts": ("prompt_key",),
    "demonstrations": ("prompt_key", "response_key"),
    "pairs": ("prompt_key", "chosen_key", "rejected_key"),
    "labels": ("prompt_key", "response_key"),
}
_CHATS = ("messages", "conversations")
CheckRow = Callable[[str, Mapping[str, object]], None]
"""Takes a prompt's text and its row's columns; raises DataError for a row that nothing can be made
of."""
Text = str | list[Message]
Parts = list[Text]
"""The prompt, then the response or both sides of a pair; as many as the kind has keys."""


def kind_of(feedback: Feedback | None, has_responses: bool) -> Kind:
    """Returns what an algorithm asks of rows."""
    if not has_responses:
        return "prompts"
    return "demonstrations" if feedback is None else feedback


def text_columns(config: DataConfig, kind: Kind) -> list[str]:
    """Returns the columns that rows of this kind are brought into, the prompt's first."""
    return [getattr(config, key) for key in _KEYS[kind]]


def formed_rows(
    source: Sequence[str] | Iterable[Mapping[str, object]],
    config: DataConfig,
    kind: Kind,
    required: Sequence[str] = (),
    bad: BadRows | None = None,
) -> Iterator[Row]:
    """Reads rows of any form from sources, or from memory, in order.

    Args:
        source: as of `raw_rows`.
        config: the keys of the columns.
        kind: what is asked of the rows.
        required: further columns that every row must have, of any kind but null.
        bad: counts the rows that cannot be used, which are left out; whoever gave it asks it to
            check after the last row. None: the rows must all be good.

    Raises:
        DataError: names the file and line of a source that cannot be read, or, without `bad`, of
            bad rows.
    """
    counted, good = BadRows("stop") if bad is None else bad, set[int]()
    rows = raw_rows(source)
    rows = rows if _has_own_keys(config, kind) else unfolded(rows, kind, counted)
    for number, row in enumerate(rows):
        try:
            found = formed(replace(row, number=number), config, kind)
            for name in required:
                if found.columns.get(name) is None:
                    raise missing(row, name)
        except RowError as error:
            counted.add(row.source, error)
            if row.source not in good:
                counted.check(good, MAX_BAD_AT_FIRST)
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
) -> int:
    """Reads every row of one source and returns the number of those that can be used; arguments as
    of `formed_rows`.

    Args:
        check: is asked about each row; with it a row without a required column is refused.

    Raises:
        DataError: the source cannot be read, or has bad rows and `data.on_bad_row` is 'stop', or no
            others.
    """
    bad, num = BadRows(config.on_bad_row), 0
    # Without its answer a row is read all the same later, so that it cannot be left out here.
    for row in formed_rows([path], config, kind, required if check is None else (), bad):
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


def formed(row: Row, config: DataConfig, kind: Kind) -> Row:
    """Returns a row with the columns that its kind has, each a text or messages.

    Raises:
        RowError: it has no known form, or is not what its form says.
        DataError: it has images.
    """
    refuse_images(row)
    names = text_columns(config, kind)
    columns = {key: value for key, value in row.columns.items() if value is not None}
    read = without_nulls(columns) if row.is_arrow else columns
    parts = [
        _checked(row, name, part)
        for name, part in zip(names, _parts(row, config, kind, read), strict=True)
    ]
    others = {**_answer(config, columns), **columns}
    others |= {key: None for key in row.columns if key not in others}
    if config.chat_template or not all(isinstance(part, str) for part in parts):
        for key in _CHATS:  # what a chat of the prompt is kept as has the first of these names
            others.pop(key, None)
        others.pop(config.tools_key, None)
        tools = tools_of(row.place, config.tools_key, read.get(config.tools_key))
        others |= {} if tools is None else {config.tools_key: tools}
    return replace(row, columns={**others, **dict(zip(names, parts, strict=True))})


def _answer(config: DataConfig, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of a row that has it in a column of its own, as verl's data sets do."""
    rule = columns.get("reward_model")
    is_default = config.answer_key == DataConfig.model_fields["answer_key"].default
    if not is_default or not isinstance(rule, Mapping) or rule.get("ground_truth") is None:
        return {}
    return {config.answer_key: rule["ground_truth"]}


def missing(row: Row, name: str) -> RowError:
    """Returns the error of a row without a column."""
    present = sorted(map(str, row.columns))
    near = get_close_matches(name, [key for key in present if key != name], 1)
    hint = f"Did you mean {short(near[0])}? " if near else ""
    got = "null" if name in row.columns else f"no column {short(name)} among {short(present, 300)}"
    allowed = f"the column {short(name)} in every row"
    return RowError(row.place, got, allowed, f"{hint}Add it, or set the data.*_key that names it.")


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
    form = None if has_own else _form(columns, kind)
    if form is None:
        error = missing(row, absent[0])
        if has_own:
            raise error
        forms = "; ".join(one.text() for one in FORMS if kind in one.parts)
        forms += "" if kind == "labels" else f"; {TREES}"
        raise RowError(row.place, error.value, f"{error.allowed}, or {forms}", error.remedy)
    return form.parts[kind](row, config, columns)


def _has_own_keys(config: DataConfig, kind: Kind) -> bool:
    defaults = DataConfig.model_fields
    return any(getattr(config, key) != defaults[key].default for key in _KEYS[kind])


def _form(columns: Mapping[str, object], kind: Kind) -> Form | None:
    for form in FORMS:
        if kind in form.parts and columns.keys() >= set(form.needed) and form.fits(columns):
            return form
    return None


def _checked(row: Row, name: str, value: Text) -> Text:
    """Returns a text that is not empty, or messages."""
    if isinstance(value, str):
        if not value:
            got = f"{plain(name)} = {short(value)}"
            raise RowError(row.place, got, "a text that is not empty", "Mend that row.")
        if not has_utf8(value):
            raise half_pair(row, name, value)
        return value
    if not isinstance(value, list | tuple):
        got = f"{plain(name)} = {short(value)}"
        raise RowError(row.place, got, "a text that is not empty, or messages", "Mend that row.")
    return chat(row.place, name, value)


# What the parts of each form are.


def _conversation(row: Row, key: str, columns: Mapping[str, Any]) -> list[Message]:
    messages, system = chat(row.place, key, columns[key]), columns.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _split(row: Row, key: str, columns: Mapping[str, Any], is_last: bool) -> Parts:
    return _cut(row, key, _conversation(row, key, columns), is_last)


def _cut(row: Row, name: str, messages: list[Message], is_last: bool = False) -> Parts:
    """Returns the messages before the first (or last) of the assistant, and those from there on to
    the assistant's last.
    """
    turns = [number for number, one in enumerate(messages) if one["role"] == ASSISTANT]
    first = turns[-1 if is_last else 0] if turns else 0
    if first == 0:
        what = "no message of the assistant" if not turns else "the assistant's message first"
        allowed = "a message of the user, then the assistant's"
        remedy = "Mend that row, or leave it out."
        raise RowError(row.place, f"{plain(name)} has {what}", allowed, remedy)
    return [messages[:first], messages[first : turns[-1] + 1]]


def _asked(row: Row, key: str, columns: Mapping[str, Any]) -> Parts:
    """Returns the messages without the assistant's last turn, which the policy is to make."""
    messages = _conversation(row, key, columns)
    while messages and messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        got = f"{plain(key)} has messages of the assistant alone"
        raise RowError(row.place, got, "a message of the user", "Mend that row, or leave it out.")
    return [messages]


def _pair(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    """Returns the messages that both sides begin with, and the rest of each. A prompt goes before
    sides that begin with the assistant.
    """
    name, sides = config.prompt_key, []
    given = columns.get(name)
    asked = [] if given is None else _as_chat(row, name, given, "user")
    for key in (config.chosen_key, config.rejected_key):
        side = _as_chat(row, key, columns[key], ASSISTANT)
        if side[0]["role"] == ASSISTANT:
            side = [*asked, *side]
        elif isinstance(given, list | tuple) and side[: len(asked)] != asked:
            got = f"{plain(key)} does not begin as {plain(name)} does"
            allowed = "the messages of the prompt first, or the assistant's alone"
            raise RowError(row.place, got, allowed, "Mend that row.")
        sides.append(side)
    better, worse = sides
    most = min(len(better), len(worse)) - 1
    num = next((i for i in range(most) if better[i] != worse[i]), most)
    while num and not better[num]["role"] == worse[num]["role"] == ASSISTANT:
        num -= 1
    if num == 0:
        got = "sides that do not part with a message of the assistant"
        allowed = "the same messages up to one of the assistant, in both sides"
        raise RowError(row.place, got, allowed, "Mend that row, or leave it out.")
    return [better[:num], *(_to_last_turn(side[num:]) for side in sides)]


def _to_last_turn(messages: list[Message]) -> list[Message]:
    last = max(number for number, one in enumerate(messages) if one["role"] == ASSISTANT)
    return messages[: last + 1]


def _as_chat(row: Row, name: str, value: object, role: str) -> list[Message]:
    if isinstance(value, str):
        return chat(row.place, name, [{"role": role, "content": value}])
    return chat(row.place, name, value)


_TURN = re.compile(r"(?:\A|\n\n|\n?(?=###))(?:### )?(Human|Assistant):", re.MULTILINE)
_TALKERS = {"Human": "user", "Assistant": ASSISTANT}


def _is_dialogue(text: object) -> bool:
    """Whether a text is turns after "Human:" and "Assistant:", as HH-RLHF and Guanaco have it."""
    if not isinstance(text, str):
        return False
    first = _TURN.search(text)
    return first is not None and not text[: first.start()].strip() and "Assistant:" in text


def _dialogue(row: Row, name: str, value: object) -> list[Message]:
    text = str(value)
    turns = list(_TURN.finditer(text))
    ends = [*(turn.start() for turn in turns[1:]), len(text)]
    if not turns or not _is_dialogue(value):
        got = f"{plain(name)} = {short(value)}"
        raise RowError(row.place, got, "turns after 'Human:' and 'Assistant:'", "Mend that row.")
    found = [
        {"role": _TALKERS[turn[1]], "content": text[turn.end() : end].strip()}
        for turn, end in zip(turns, ends, strict=True)
    ]
    return chat(row.place, name, found)


def _cut_at_last(row: Row, name: str, value: object) -> tuple[str, str]:
    """Returns a dialogue up to its last "Assistant:", and what follows."""
    _dialogue(row, name, value)
    text, turns = str(value), list(_TURN.finditer(str(value)))
    end = max((turn.end() for turn in turns if turn[1] == "Assistant"), default=0)
    return text[:end], text[end:]


def _dialogue_demonstration(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    if config.chat_template:
        return _cut(row, "text", _dialogue(row, "text", columns["text"]))
    return list(_cut_at_last(row, "text", columns["text"]))


def _dialogue_pair(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
    keys = config.chosen_key, config.rejected_key
    if config.chat_template:
        sides = {key: _dialogue(row, key, columns[key]) for key in keys}
        return _pair(row, config, sides)
    (asked, better), (other, worse) = (_cut_at_last(row, key, columns[key]) for key in keys)
    if asked != other:
        got = f"{keys[0]} and {keys[1]} that differ before the last turn"
        remedy = "Set data.chat_template=true, which learns from all turns, or leave that row out."
        raise RowError(row.place, got, "one dialogue up to the last 'Assistant:'", remedy)
    return [asked, better, worse]


def _prompt(columns: Mapping[str, Any], key: str) -> Any:
    """Returns a prompt's text with what Alpaca and Dolly have beside it, or as the messages of
    system and user where the row has a system's text.
    """
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


Making = Callable[[Row, DataConfig, Mapping[str, Any]], Parts]


@dataclass(frozen=True)
class Form:
    """A form of rows.

    Args:
        said: what it is, for messages.
        needed: keys that a row of it has.
        parts: by kind, what gives a row's prompt and responses.
        fits: whether what stands there is of the form.
    """

    said: str
    needed: tuple[str, ...]
    parts: Mapping[Kind, Making]
    fits: Callable[[Mapping[str, Any]], bool] = lambda columns: True

    def text(self) -> str:
        """Returns what the form is, for messages."""
        return f"{' and '.join(self.needed)} ({self.said})"


def _chat_form(said: str, key: str) -> Form:
    return Form(
        said,
        (key,),
        {
            "prompts": lambda row, config, columns: _asked(row, key, columns),
            "demonstrations": lambda row, config, columns: _split(row, key, columns, is_last=False),
            "labels": lambda row, config, columns: _split(row, key, columns, is_last=True),
        },
    )


def _texts_form(said: str, asked: str, told: str) -> Form:
    def parts(row: Row, config: DataConfig, columns: Mapping[str, Any]) -> Parts:
        return [_prompt(columns, asked), columns[told]]

    return Form(said, (asked, told), {"demonstrations": parts, "labels": parts})


def _prompt_form(said: str, asked: str) -> Form:
    return Form(said, (asked,), {"prompts": lambda row, config, columns: [_prompt(columns, asked)]})


_SIDES = ("chosen", "rejected")
FORMS: tuple[Form, ...] = (
    _chat_form("a list of role and content", "messages"),
    _chat_form("ShareGPT, a list of from and value", "conversations"),
    Form(
        "HH-RLHF, turns after 'Human:' and 'Assistant:'",
        _SIDES,
        {"pairs": _dialogue_pair},
        fits=lambda columns: all(_is_dialogue(columns[side]) for side in _SIDES),
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
        "two lists of messages with one beginning",
        _SIDES,
        {"pairs": _pair},
        fits=lambda columns: not any(isinstance(columns[side], str) for side in _SIDES),
    ),
    _texts_form("TRL", "prompt", "completion"),
    _texts_form("Alpaca", "instruction", "output"),
    _texts_form("Dolly", "instruction", "response"),
    Form("xLAM", ("query", "tools", "answers"), {"demonstrations": _call_demonstration}),
    _texts_form("NuminaMath", "problem", "solution"),
    _texts_form("OpenOrca", "question", "response"),
    _texts_form("GSM8K", "question", "answer"),
    Form(
        "Guanaco, turns after '### Human:' and '### Assistant:'",
        ("text",),
        {"demonstrations": _dialogue_demonstration},
        fits=lambda columns: _is_dialogue(columns["text"]),
    ),
    _prompt_form("GSM8K, OpenOrca", "question"),
    _prompt_form("NuminaMath, MATH", "problem"),
    _prompt_form("Alpaca, Dolly", "instruction"),
)
"""In the order in which a row is compared with them."""
