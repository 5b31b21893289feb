"""Chats: texts and messages, rendered by the tokenizer's template, and which part of the text is
learned. No torch.

Owns the marks of what the assistant says. A template with the blocks `{% generation %}` says it
itself, and is read as transformers reads it. Of others it is found by prefixes: what the template
makes of the messages before a turn, with the assistant's beginning, and of those up to it. The
template must render these alike within the whole chat; one that renders earlier turns otherwise
when others follow is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hybridrl.config.schema import DataConfig
from hybridrl.data.messages import ASSISTANT, Message
from hybridrl.data.rows import Row
from hybridrl.errors import DataError, said

MESSAGES = "messages"
"""The column that keeps the messages of a chat, for rewards that look at them."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chat:
    """A prompt and a response in one text.

    Args:
        text: as the template renders it.
        spans: first character of each run that is learned, and the one after its last; ascending.
        lacks_end: no token ends the last run, so that one has to be added.
    """

    text: str
    spans: Spans
    lacks_end: bool


def as_chats(
    rows: Iterable[Row], config: DataConfig, tokenizer: Any, responses: Sequence[str] = ()
) -> Iterator[Row]:
    """Passes rows on with the text that the model is to see, where they are messages or all are to
    be chats.

    Args:
        rows: whose prompt is a text, the user's message, or a list of messages, and whose responses
            are a text, the assistant's message, or a list of messages.
        config: names the columns and the system message.
        tokenizer: of transformers, with a chat template.
        responses: columns of the responses, whose content becomes a Chat.

    Raises:
        DataError: the tokenizer has no template, or it does not take a row's messages or tools.
    """
    render = None
    for row in rows:
        parts = [row.columns[name] for name in (config.prompt_key, *responses)]
        if not config.chat_template and all(isinstance(part, str) for part in parts):
            yield row
            continue
        render = render or _Rendering(tokenizer, row, config)
        yield render.rendered(row, responses)


class _Rendering:
    """A tokenizer's template.

    Args:
        tokenizer: of the run.
        row: the first that is a chat.
        config: of the data.
    """

    def __init__(self, tokenizer: Any, row: Row, config: DataConfig) -> None:
        if getattr(tokenizer, "chat_template", None) is None:  # not every TextEncoder has one
            place, got = "data.chat_template", "true, with a tokenizer that has no template"
            if not config.chat_template:
                place, got = row.place, "messages, with a tokenizer that has no template"
            raise DataError(
                place,
                got,
                "chats only for a model that was trained on them",
                "Set data.chat_template=false and give texts, or set model.tokenizer to one with "
                "chat_template.",
            )
        self._tokenizer, self._config = tokenizer, config
        found = getattr(tokenizer, "added_tokens_decoder", {}).values()  # as above
        special = [str(token) for token in found if token.special]
        self._ends = tuple({*special, *getattr(tokenizer, "all_special_tokens", ())} - {""})

    def rendered(self, row: Row, responses: Sequence[str]) -> Row:
        """Returns a row with texts and Chats."""
        config, columns = self._config, dict(row.columns)
        tools: Any = columns.get(config.tools_key)
        messages = _messages(columns[config.prompt_key], config.system_prompt)
        template = self._template(row, tools)
        for name in responses:
            response: Any = columns[name]
            if isinstance(response, str):
                response = [{"role": ASSISTANT, "content": response}]
            columns[name] = self._chat(row, template, messages, response, tools)
        if responses:
            columns[config.prompt_key] = chats_of(columns, responses)[0].text
        else:
            columns[MESSAGES] = messages
            columns[config.prompt_key] = self._render(row, template, messages, tools, True)[0]
        return replace(row, columns=columns)

    def _template(self, row: Row, tools: Any) -> str:
        found = self._tokenizer.chat_template
        if not isinstance(found, str):  # several, by name
            found = self._tokenizer.get_chat_template(None, tools)
        if tools is not None and "tools" not in found:
            allowed = "no tools with this tokenizer, whose template does not read them"
            remedy = "Set model.tokenizer to one of a model that calls tools, or data.tools_key."
            raise DataError(row.place, f"{self._config.tools_key} of a chat", allowed, remedy)
        return str(found)

    def _chat(
        self, row: Row, template: str, prompt: list[Message], response: list[Message], tools: Any
    ) -> Chat:
        messages = [*prompt, *response]
        if _GENERATION.search(template):
            text, spans = self._render(row, template, messages, tools, marks=True)
            # Turns of the assistant in the prompt are not learned.
            has_turns = any(message["role"] == ASSISTANT for message in prompt)
            before = self._render(row, template, prompt, tools, marks=True)[1] if has_turns else ()
            spans = tuple((a, b) for a, b in spans[len(before) :] if b > a)
            lacks_end = False
        else:
            text, spans, lacks_end = self._by_prefix(row, template, messages, len(prompt), tools)
        if not spans or spans[0][0] == 0:
            got = "a chat of which the template marks nothing" if not spans else "a chat without a "
            got += "" if not spans else "prompt"
            allowed = "text of the assistant after some of others"
            raise DataError(row.place, got, allowed, "Mend that row, or the chat template.")
        return Chat(text, spans, lacks_end)

    def _by_prefix(
        self, row: Row, template: str, messages: list[Message], first: int, tools: Any
    ) -> tuple[str, Spans, bool]:
        """Returns the text, the spans of the assistant's messages from `first` on, and whether no
        token ends the last. A span ends with the last special token of its turn, if only white
        space follows that.
        """
        text = self._render(row, template, messages, tools)[0]
        spans, lacks_end = [], False
        for number, message in enumerate(messages):
            if number < first or message["role"] != ASSISTANT:
                continue
            before = self._render(row, template, messages[:number], tools, True)[0]
            until = self._render(row, template, messages[: number + 1], tools)[0]
            if not until.startswith(before) or not text.startswith(until):
                raise DataError(
                    row.place,
                    f"message {number + 1} of a chat, which the template renders otherwise when "
                    "others follow",
                    "a template that renders a turn alike wherever it stands, or marks what the "
                    "assistant says by {% generation %}",
                    "Mark it in the template, or give rows of one response.",
                )
            end = len(until.rstrip())
            lacks_end = not until[len(before) : end].endswith(self._ends)
            spans.append((len(before), len(until) if lacks_end else end))
        return text, tuple(spans), lacks_end

    def _render(
        self,
        row: Row,
        template: str,
        messages: list[Message],
        tools: Any,
        is_open: bool = False,
        marks: bool = False,
    ) -> tuple[str, Spans]:
        """Returns the text of messages, and with `marks` what `{% generation %}` is around.

        Args:
            is_open: ends with the beginning of the assistant's turn.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        special = getattr(self._tokenizer, "special_tokens_map", {})  # as above
        try:
            texts, found = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=is_open,
                **special,
            )
        except Exception as error:  # whatever a template raises
            shown = f"messages that the template refuses: {said(error, 160)}"
            raise DataError(row.place, shown, "messages that it takes", "Mend that row.") from error
        return texts[0], tuple(found[0]) if marks else ()


def _messages(value: object, system: str | None) -> list[Message]:
    if isinstance(value, list):
        messages = [dict(message) for message in value]
    else:
        messages = [{"role": "user", "content": str(value)}]
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


@dataclass(frozen=True)
class Sample:
    """The tokens of a prompt and a response.

    Args:
        prompt: at least one.
        response: what follows, to the last that is learned.
        gaps: where in the response runs of tokens begin and end that are not learned, flat.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    gaps: tuple[int, ...] = ()


def learned(offsets: Sequence[Sequence[int]], spans: Spans) -> list[tuple[int, int]]:
    """Returns the first token of each span and the one after its last; spans without one are left
    out. The token that a span's first character is in belongs to it, as in transformers.

    Args:
        offsets: of each token its first character and the one after its last, ascending.
        spans: as of Chat.
    """
    found: list[tuple[int, int]] = []
    place = 0
    for begin, end in spans:
        while place < len(offsets) and offsets[place][1] <= begin:
            place += 1
        first = place
        while place < len(offsets) and offsets[place][0] < end:
            place += 1
        if place > first:
            found.append((first, place))
    return found


def sample(
    tokens: Sequence[int], runs: Sequence[tuple[int, int]], num_prompt: int | None = None
) -> Sample:
    """Cuts a chat's tokens before those that are learned.

    Args:
        tokens: of the whole text.
        runs: as of `learned`, at least one.
        num_prompt: tokens of the prompt, where others go before the first that is learned too.
    """
    start = runs[0][0] if num_prompt is None else num_prompt
    bounds = [start, *(place for run in runs for place in run)]
    gaps = [
        place - start
        for begin, end in zip(bounds[::2], bounds[1::2], strict=False)
        if end > begin
        for place in (begin, end)
    ]
    return Sample(tuple(tokens[:start]), tuple(tokens[start : runs[-1][1]]), tuple(gaps))


def shared_prompt(sides: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> int:
    """Returns how many tokens the chats of a pair have alike, at most those before the first that
    is learned: the pair's prompt.
    """
    most = min(runs[0][0] for _, runs in sides)
    for (first, _), (second, _) in pairwise(sides):
        most = next((i for i in range(most) if first[i] != second[i]), most)
    return most


def chats_of(columns: Mapping[str, object], names: Sequence[str]) -> list[Chat]:
    """Returns the Chats among a row's columns of responses; none where it has texts."""
    found = (columns[name] for name in names)
    return [one for one in found if isinstance(one, Chat)]
