"""Chats: texts and messages, rendered by the tokenizer's template, and which part of the text is
learned. No torch.

Owns the marks of what the assistant says. A template with the blocks `{% generation %}` says it
itself, and is read as transformers reads it. With other templates a turn is what the template makes
of the messages up to it, after what the model is given to produce it: the messages before it and
the beginning of the assistant's turn (the generation prompt). Turns that later messages leave as
they are form one sample. Where a template renders an earlier turn differently once others follow
(it drops reasoning, say), a new sample begins, rendered as the model sees it when it produces that
turn.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from hybridrl.config.schema import DataConfig
from hybridrl.data.messages import ASSISTANT, Message
from hybridrl.data.rows import BadRows, Row
from hybridrl.errors import DataError, RowError, said, short

MESSAGES = "messages"
"""The column that keeps the messages of a chat, for rewards that look at them."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENED = re.compile(r"<(\w+)>\s*\Z")  # a tag that the generation prompt opens, such as <think>
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what templates call it in messages
_PROBE = "\x02\x03"  # content that no template changes and no row has

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chat:
    """A prompt and a response in one text.

    Args:
        text: as the template renders it.
        spans: first character of each run that is learned, and the one after its last; ascending.
        lacks_end: no token ends the last run, so that one has to be added.
        is_marked: the template marks what is learned: a token belongs to a run if the run's first
            character is in it. Else tokens never reach across the beginning of a run, where the
            tokens of the prompt end when the model responds.
    """

    text: str
    spans: Spans
    lacks_end: bool
    is_marked: bool = False


@dataclass
class ChatCounts:
    """What a reader of the console should know about chats with responses.

    Args:
        num_split: rows that became several samples.
        num_samples: these samples.
        num_unclosed: turns that never close the tag that the generation prompt opens.
        num_unread: turns with reasoning that the template leaves out.
    """

    num_split: int = 0
    num_samples: int = 0
    num_unclosed: int = 0
    num_unread: int = 0

    def report(self) -> str:
        """Returns what follows the number of prompts in the line for the user."""
        line = ""
        if self.num_split:
            line += f"; {self.num_split} chats became {self.num_samples} samples, because the chat "
            line += "template changes earlier turns when others follow (data.split_turns)"
        if self.num_unclosed:
            line += f"; {self.num_unclosed} responses never close the reasoning that the chat "
            line += "template's generation prompt opens"
        if self.num_unread:
            line += f"; {self.num_unread} turns have reasoning that the chat template leaves out"
        return line


def as_chats(
    rows: Iterable[Row],
    config: DataConfig,
    tokenizer: Any,
    responses: Sequence[str],
    counts: ChatCounts,
    bad: BadRows,
    may_split: bool,
) -> Iterator[Row]:
    """Passes rows on with the text that the model is to see, where they are messages or all are to
    be chats.

    Args:
        rows: whose prompt is a text, the user's message, or a list of messages, and whose responses
            are a text, the assistant's message, or a list of messages.
        config: names the columns, the system message and the template's arguments.
        tokenizer: of transformers, with a chat template.
        responses: columns of the responses, whose content becomes a Chat.
        counts: is added to.
        bad: counts rows whose messages the template does not take, which are left out.
        may_split: whether a row may become several samples. False for rows that say something of
            the whole response, such as a label.

    Raises:
        DataError: the tokenizer has no template, or none that takes a row's tools.
    """
    render = None
    for row in rows:
        parts = [row.columns[name] for name in (config.prompt_key, *responses)]
        if not config.chat_template and all(isinstance(part, str) for part in parts):
            yield row
            continue
        if render is None:
            render = _Rendering(tokenizer, row, config, counts, may_split)
        try:
            yield from render.rendered(row, responses)
        except RowError as error:
            bad.add(row.source, error)


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant.

    Args:
        before: the text that the model is given.
        text: that and what it is to produce.
        end: characters of `text` up to the end of what is learned.
        lacks_end: no special token ends it.
    """

    before: str
    text: str
    end: int
    lacks_end: bool


class _Rendering:
    """A tokenizer's template.

    Args:
        tokenizer: of the run.
        row: the first that is a chat.
        config: of the data.
        counts: is added to.
        may_split: as of `as_chats`.
    """

    def __init__(
        self, tokenizer: Any, row: Row, config: DataConfig, counts: ChatCounts, may_split: bool
    ) -> None:
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
        self._counts, self._may_split = counts, may_split
        found = getattr(tokenizer, "added_tokens_decoder", {}).values()  # as above
        special = [str(token) for token in found if token.special]
        self._ends = tuple({*special, *getattr(tokenizer, "all_special_tokens", ())} - {""})
        self._tails: dict[str, str] = {}
        check_template_arguments(config.template_arguments, tokenizer)

    def rendered(self, row: Row, responses: Sequence[str]) -> Iterator[Row]:
        """Yields a row with texts and Chats, or several where its turns must be apart."""
        config, columns = self._config, dict(row.columns)
        tools: Any = columns.get(config.tools_key)
        messages = _messages(columns[config.prompt_key], config.system_prompt)
        template = self._template(row, tools)
        given: Any = columns[config.prompt_key]
        if not responses:
            columns[MESSAGES] = messages
            columns[config.prompt_key] = self._render(row, template, messages, tools, True)[0]
            yield replace(row, columns=columns, is_rendered=True, given=given)
            return
        sides = []
        for name in responses:
            response: Any = columns[name]
            if isinstance(response, str):
                response = [{"role": ASSISTANT, "content": response}]
            sides.append(self._chats(row, template, messages, response, tools))
        num = max(map(len, sides))
        if num > 1 and not (self._may_split and config.split_turns):
            raise self._cannot_split(row)
        if num > 1:
            self._counts.num_split += 1
            self._counts.num_samples += num
        for chats in zip(*sides, strict=True):
            texts = {config.prompt_key: chats[0].text, **dict(zip(responses, chats, strict=True))}
            # A further sample of a row begins with turns that the row's prompt has not.
            own = given if num == 1 else None
            yield replace(row, columns={**columns, **texts}, is_rendered=True, given=own)

    def _cannot_split(self, row: Row) -> DataError:
        got = "turns of the assistant that the chat template renders differently when others follow"
        if self._may_split:
            remedy = "Set data.split_turns=true, which makes a sample of each such turn, or mark "
            remedy += "in the template what the assistant says by {% generation %}."
            return DataError(row.place, got, "turns that stay as they are", remedy)
        allowed = "one turn in each response of such rows, for what they say is of the whole"
        remedy = "Give each turn a row of its own, with the turns before it in the prompt, or mark "
        remedy += "in the template what the assistant says by {% generation %}."
        return RowError(row.place, got, allowed, remedy)

    def _template(self, row: Row, tools: Any) -> str:
        found = self._tokenizer.chat_template
        if not isinstance(found, str):  # several, by name
            found = self._tokenizer.get_chat_template(None, tools)
        if tools is not None and "tools" not in found:
            allowed = "no tools with this tokenizer, whose template does not read them"
            remedy = "Set model.tokenizer to one of a model that calls tools, or data.tools_key."
            raise DataError(row.place, f"{self._config.tools_key} of a chat", allowed, remedy)
        return str(found)

    def _chats(
        self, row: Row, template: str, prompt: list[Message], response: list[Message], tools: Any
    ) -> list[Chat]:
        """Returns the samples of a prompt and a response, one unless turns must be apart."""
        messages = [*prompt, *response]
        if _GENERATION.search(template):
            chats = [self._marked(row, template, messages, prompt, tools)]
        else:
            chats = self._by_turns(row, template, messages, len(prompt), tools)
        for chat in chats:
            if not chat.spans or chat.spans[0][0] == 0:
                got = "a chat of which the template marks nothing"
                got = got if not chat.spans else "a chat without a prompt"
                allowed = "text of the assistant after some of others"
                raise RowError(row.place, got, allowed, "Mend that row, or the chat template.")
        return chats

    def _marked(
        self, row: Row, template: str, messages: list[Message], prompt: list[Message], tools: Any
    ) -> Chat:
        text, spans = self._render(row, template, messages, tools, marks=True)
        # Turns of the assistant in the prompt are not learned.
        has_turns = any(message["role"] == ASSISTANT for message in prompt)
        before = self._render(row, template, prompt, tools, marks=True)[1] if has_turns else ()
        spans = tuple((a, b) for a, b in spans[len(before) :] if b > a)
        return Chat(text, spans, lacks_end=False, is_marked=True)

    def _by_turns(
        self, row: Row, template: str, messages: list[Message], first: int, tools: Any
    ) -> list[Chat]:
        """Returns the samples of the assistant's messages from `first` on: one for each run of
        turns that the template leaves as they are when the next follow.
        """
        chats: list[Chat] = []
        text, spans, lacks_end = "", list[tuple[int, int]](), False
        for number, message in enumerate(messages):
            if number < first or message["role"] != ASSISTANT:
                continue
            turn = self._turn(row, template, messages[: number + 1], tools)
            if spans and not turn.before.startswith(text):
                chats.append(Chat(text, tuple(spans), lacks_end))
                spans = []
            if turn.end > len(turn.before):
                spans.append((len(turn.before), turn.end))
            text, lacks_end = turn.text, turn.lacks_end
        if spans:
            chats.append(Chat(text, tuple(spans), lacks_end))
        return chats or [Chat(text, (), False)]

    def _turn(self, row: Row, template: str, messages: list[Message], tools: Any) -> _Turn:
        """Returns the last of these messages, which is the assistant's."""
        *earlier, message = messages
        before = self._render(row, template, earlier, tools, True)[0]
        finished = self._without_tail(template, self._render(row, template, messages, tools)[0])
        produced = finished[len(before) :]
        if not finished.startswith(before):
            produced = self._after_opening(row, template, messages, tools, before, finished)
        self._check_calls(row, message, produced)
        opened = _OPENED.search(before)
        if opened is not None and f"</{opened[1]}>" not in produced:
            self._counts.num_unclosed += 1
        thoughts = [message[key] for key in _REASONING if isinstance(message.get(key), str)]
        self._counts.num_unread += any(one.strip() not in produced for one in thoughts)
        text, end = before + produced, len((before + produced).rstrip())
        lacks_end = not text[len(before) : end].endswith(self._ends)
        return _Turn(before, text, len(text) if lacks_end else end, lacks_end)

    def _after_opening(
        self,
        row: Row,
        template: str,
        messages: list[Message],
        tools: Any,
        before: str,
        finished: str,
    ) -> str:
        """Returns what the model is to produce where the generation prompt opens the turn with text
        that the finished turn does not have: `<think>`, as of DeepSeek-R1.

        That is what the finished turn has where both differ. Where the template cuts off a part of
        the message (what comes before `</think>`), it is the whole message, without an opening that
        it repeats, and what the template puts after it.
        """
        *earlier, message = messages
        closed = self._without_tail(template, self._render(row, template, earlier, tools)[0])
        num = len(os.path.commonprefix([before, finished]))
        if num < len(closed) or not before.startswith(closed):
            given, has = (short(text[max(num - 20, 0) : num + 40]) for text in (before, finished))
            raise RowError(
                row.place,
                f"message {len(messages)} of a chat: before it the template's generation prompt "
                f"gives {given}, where the finished turn has {has}",
                "a template that renders the messages before a turn alike in both",
                "Mark in the template what the assistant says by {% generation %}.",
            )
        opening, produced, content = before[num:], finished[num:], message["content"]
        if content.strip() in finished[len(closed) :]:
            return produced
        shown = {key: value for key, value in message.items() if key not in _REASONING}
        probe = [*earlier, {**shown, "content": _PROBE}]
        marked = self._without_tail(template, self._render(row, template, probe, tools)[0])
        _, found, after = marked.partition(_PROBE)
        if not found:
            return produced
        own = content.lstrip()
        if opening.strip() and own.startswith(opening.strip()):
            own = own[len(opening.strip()) :]
            content = own.lstrip("\n") if opening.endswith("\n") else own
        return str(content + after)

    def _check_calls(self, row: Row, message: Message, produced: str) -> None:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in produced:
                raise RowError(
                    row.place,
                    f"a call of {short(name)}, which the chat template leaves out",
                    "calls that the template renders",
                    "Leave that row out, or set model.tokenizer to one whose template has them.",
                )

    def _without_tail(self, template: str, text: str) -> str:
        """Returns a text without the token that the template puts after every chat, of whatever
        role its last message is: no turn has it (Phi-3 ends chats with <|endoftext|>).
        """
        if template not in self._tails:
            self._tails[template] = self._tail(template)
        tail, kept = self._tails[template], text.rstrip()
        return kept[: -len(tail)] if tail and kept.endswith(tail) else text

    def _tail(self, template: str) -> str:
        row = Row("a chat of one message", {})
        asked = [{"role": "user", "content": _PROBE}]
        try:
            closed = self._render(row, template, asked, None)[0].rstrip()
            opened = self._render(row, template, asked, None, True)[0]
        except RowError:
            return ""
        ends = (end for end in self._ends if closed.endswith(end))
        tail = max(ends, key=len, default="")
        is_tail = tail and not opened.startswith(closed) and opened.startswith(closed[: -len(tail)])
        return tail if is_tail else ""

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
                **{**special, **self._config.template_arguments},
            )
        except Exception as error:  # whatever a template raises
            shown = f"messages that the template refuses: {said(error, 160)}"
            raise RowError(row.place, shown, "messages that it takes", "Mend that row.") from error
        return texts[0], tuple(found[0]) if marks else ()


def check_template_arguments(arguments: Mapping[str, object], tokenizer: Any) -> None:
    """Raises DataError where the tokenizer's chat template does not read one of the arguments."""
    template = str(tokenizer.chat_template)
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in arguments:
        if name not in words:
            near = get_close_matches(name, words, 1)
            raise DataError(
                f"data.template_arguments.{name}",
                short(arguments[name]),
                "arguments that the tokenizer's chat template reads",
                f"Did you mean {near[0]!r}?" if near else "Remove it.",
            )


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
