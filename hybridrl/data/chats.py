"""Renders texts and messages with the tokenizer's chat template, and marks the learned text.

Does not import torch. `{% generation %}` blocks of a template mark the assistant's text, as in
transformers. With other templates, the text of a turn is the rendered conversation up to and
including the turn, minus the model's input: the earlier messages and the generation prompt.
Consecutive turns form one sample if later messages do not change how the earlier ones are rendered;
if they do (for example, without its reasoning), the later turn begins a new sample.
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
from hybridrl.errors import BadRowError, DataError, error_text, short

MESSAGES = "messages"
"""Column that stores the messages of a chat for rewards that read them."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENED = re.compile(r"<(\w+)>\s*\Z")  # a tag at the end of the generation prompt, such as <think>
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of reasoning in messages
_PROBE = "\x02\x03"  # text that no template alters and no row contains

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chat:
    """A prompt and a response in one text.

    Args:
        lacks_end: Whether an end token must be added, because none follows the last run.
        is_marked: Whether generation blocks mark the spans. If so, a token that contains the first
            character of a run belongs to the run. If not, no token extends across the start of a
            run, because the prompt's tokens end there during generation.
    """

    text: str
    spans: Spans
    lacks_end: bool
    is_marked: bool = False


@dataclass
class ChatCounts:
    """Counts for the report on chats with responses.

    Args:
        num_split, num_samples: Number of rows that were split, and of the resulting samples.
        num_unread: Number of turns with reasoning that the template leaves out.
    """

    num_split: int = 0
    num_samples: int = 0
    num_unclosed: int = 0
    num_unread: int = 0

    def report(self) -> str:
        """Returns text to append to the line that reports the number of prompts."""
        line = ""
        if self.num_split:
            line += f"; {self.num_split} chats became {self.num_samples} samples, because the chat "
            line += "template renders earlier turns differently when others follow "
            line += "(data.split_turns)"
        if self.num_unclosed:
            line += f"; {self.num_unclosed} responses do not close the reasoning that the chat "
            line += "template's generation prompt opens"
        if self.num_unread:
            line += f"; {self.num_unread} turns have reasoning that the chat template leaves out"
        return line


def render_chats(
    rows: Iterable[Row],
    config: DataConfig,
    tokenizer: Any,
    responses: Sequence[str],
    counts: ChatCounts,
    bad: BadRows,
    may_split: bool,
) -> Iterator[Row]:
    """Yields rows with the text that the model receives: rendered messages, and rendered texts if
    `data.chat_template` is set. Raises DataError if the template is missing or renders no tools.

    Args:
        rows: Rows whose prompt and responses are texts (messages of user and assistant) or
            messages.
        responses: Columns of the responses; each value becomes a Chat.
        bad: Collects rows whose messages the template rejects; these rows are not yielded.
        may_split: Whether a row may be split into several samples; False if all of its samples
            would have one label.
    """
    render = None
    for row in rows:
        parts = [row.columns[name] for name in (config.prompt_key, *responses)]
        if not config.chat_template and all(isinstance(part, str) for part in parts):
            yield row
            continue
        if render is None:
            render = _ChatRenderer(tokenizer, row, config, counts, may_split)
        try:
            yield from render.render_row(row, responses)
        except BadRowError as error:
            bad.add(row.source, error)


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant after the input `before`; `text` is learned from there to `end`."""

    before: str
    text: str
    end: int
    lacks_end: bool


class _ChatRenderer:
    def __init__(
        self, tokenizer: Any, row: Row, config: DataConfig, counts: ChatCounts, may_split: bool
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:  # not every TextEncoder has one
            place, got = "data.chat_template", "true, with a tokenizer that has no chat template"
            if not config.chat_template:
                place, got = row.place, "messages, with a tokenizer that has no chat template"
            raise DataError(
                place,
                got,
                "texts, or a tokenizer with a chat template",
                "Set data.chat_template=false and use texts, or set model.tokenizer to a tokenizer "
                "with chat_template.",
            )
        self._tokenizer, self._config = tokenizer, config
        self._counts, self._may_split = counts, may_split
        found = getattr(tokenizer, "added_tokens_decoder", {}).values()  # some TextEncoders lack it
        special = [str(token) for token in found if token.special]
        self._ends = tuple({*special, *getattr(tokenizer, "all_special_tokens", ())} - {""})
        self._tails: dict[str, str] = {}
        check_template_arguments(config.template_arguments, tokenizer)

    def render_row(self, row: Row, responses: Sequence[str]) -> Iterator[Row]:
        """Yields the row with rendered texts and Chats, as several rows if turns need it."""
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
            # The prompts of later samples contain more turns than the row's prompt.
            own = given if num == 1 else None
            yield replace(row, columns={**columns, **texts}, is_rendered=True, given=own)

    def _cannot_split(self, row: Row) -> DataError:
        got = "turns of the assistant that the chat template renders differently when others follow"
        if self._may_split:
            remedy = "Set data.split_turns=true, which makes each such turn a sample, or mark "
            remedy += "the assistant's text in the template with {% generation %}."
            return DataError(row.place, got, "turns that render the same", remedy)
        allowed = "one turn in each response of a pair or of a labelled row"
        remedy = "Put each turn in its own row, with the turns before it in the prompt, or mark "
        remedy += "the assistant's text in the template with {% generation %}."
        return BadRowError(row.place, got, allowed, remedy)

    def _template(self, row: Row, tools: Any) -> str:
        found = self._tokenizer.chat_template
        if not isinstance(found, str):  # several templates, by name
            found = self._tokenizer.get_chat_template(None, tools)
        if tools is not None and "tools" not in found:
            allowed = "no tools, because the tokenizer's chat template does not render them"
            remedy = "Set model.tokenizer to a tokenizer with tool calls, or change data.tools_key."
            raise DataError(row.place, f"{self._config.tools_key} of a chat", allowed, remedy)
        return str(found)

    def _chats(
        self, row: Row, template: str, prompt: list[Message], response: list[Message], tools: Any
    ) -> list[Chat]:
        messages = [*prompt, *response]
        if _GENERATION.search(template):
            chats = [self._marked(row, template, messages, prompt, tools)]
        else:
            chats = self._by_turns(row, template, messages, len(prompt), tools)
        for chat in chats:
            if not chat.spans or chat.spans[0][0] == 0:
                got = "a chat without a prompt" if chat.spans else "no text that the template marks"
                allowed = "messages of other roles, followed by text of the assistant"
                raise BadRowError(row.place, got, allowed, "Fix that row, or the chat template.")
        return chats

    def _marked(
        self, row: Row, template: str, messages: list[Message], prompt: list[Message], tools: Any
    ) -> Chat:
        text, spans = self._render(row, template, messages, tools, marks=True)
        # The model does not learn the assistant's turns in the prompt.
        has_turns = any(message["role"] == ASSISTANT for message in prompt)
        before = self._render(row, template, prompt, tools, marks=True)[1] if has_turns else ()
        spans = tuple((a, b) for a, b in spans[len(before) :] if b > a)
        return Chat(text, spans, lacks_end=False, is_marked=True)

    def _by_turns(
        self, row: Row, template: str, messages: list[Message], first: int, tools: Any
    ) -> list[Chat]:
        """Returns samples of consecutive turns, from `first` on, that later turns do not change."""
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
        """Returns the text to produce if the finished turn lacks the generation prompt's open tag
        (`<think>` for DeepSeek-R1): what follows its common beginning with the generation prompt.
        If the template cuts off part of the message (everything up to `</think>`), it is the whole
        message without a repeated opening tag, plus the text that the template appends.
        """
        *earlier, message = messages
        closed = self._without_tail(template, self._render(row, template, earlier, tools)[0])
        num = len(os.path.commonprefix([before, finished]))
        if num < len(closed) or not before.startswith(closed):
            given, has = (short(text[max(num - 20, 0) : num + 40]) for text in (before, finished))
            raise BadRowError(
                row.place,
                f"message {len(messages)} of a chat, before which the template's generation prompt "
                f"renders {given} and the finished turn {has}",
                "a template that renders the messages before a turn identically in both cases",
                "Mark the assistant's text in the template with {% generation %}.",
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
                raise BadRowError(
                    row.place,
                    f"a call to {short(name)}, which the chat template leaves out",
                    "calls that the chat template renders",
                    "Remove that row, or set model.tokenizer to a tokenizer whose template renders "
                    "calls.",
                )

    def _without_tail(self, template: str, text: str) -> str:
        """Removes the token that a template appends to every chat, as Phi-3 does."""
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
        except BadRowError:
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
        """Returns the text and, with `marks`, the spans of `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = getattr(self._tokenizer, "special_tokens_map", {})  # some TextEncoders lack it
        try:
            texts, found = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=is_open,
                **{**special, **self._config.template_arguments},
            )
        except Exception as error:  # a template may raise any exception
            got = f"messages that the chat template rejects: {error_text(error, 160)}"
            raise BadRowError(
                row.place, got, "messages that the chat template renders", "Fix that row."
            ) from error
        return texts[0], tuple(found[0]) if marks else ()


def check_template_arguments(arguments: Mapping[str, object], tokenizer: Any) -> None:
    """Raises DataError if the tokenizer's chat template does not read one of the arguments."""
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
    """Tokens of a prompt and of its response up to the last learned one; gaps as in `Prompt`."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    gaps: tuple[int, ...] = ()


def token_runs(offsets: Sequence[Sequence[int]], spans: Spans) -> list[tuple[int, int]]:
    """Returns the first token and the end of each span, without spans that contain no token.

    A token that contains a span's first character belongs to the span, as in transformers.
    `offsets` are the first character and the end of each token, in ascending order.
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
    """Splits a chat's tokens; by default, the prompt is everything before the first learned one."""
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
    """Returns how many tokens both chats of a pair share before the first learned token."""
    most = min(runs[0][0] for _, runs in sides)
    for (first, _), (second, _) in pairwise(sides):
        most = next((i for i in range(most) if first[i] != second[i]), most)
    return most


def chats_of(columns: Mapping[str, object], names: Sequence[str]) -> list[Chat]:
    return [chat for name in names if isinstance(chat := columns[name], Chat)]
