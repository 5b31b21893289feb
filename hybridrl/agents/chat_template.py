"""Renders conversations with a model's chat template so that sampled tokens stay as they are.

The first request is rendered whole. Later ones keep the tokens that the engine received and
sampled, and only new messages are rendered, together with what the template writes before them:
Qwen's writes a line break after the end token, GLM's begins the next message with the token at
which the model stops, and gpt-oss's replaces the end token. Does not import torch.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.agents.conversation import (
    ASSISTANT,
    SYSTEM,
    USER,
    BadRequest,
    ContextOverflow,
    Conversation,
    images_of,
)
from hybridrl.agents.samples import Message
from hybridrl.contracts.prompts import Content
from hybridrl.data.images import ImageTokens, with_features
from hybridrl.data.text_tokens import Encode, TextTokens
from hybridrl.environments.image_parts import IMAGE, TEXT
from hybridrl.errors import error_text

_OPENED = re.compile(r"<think>\s*\Z")
# If a text has more characters per token of the context, only its beginning is tokenized at first,
# so that a file of many megabytes does not stop the endpoint for a minute. Languages have 1 to 6;
# tokens of 100 blanks exist, so the beginning is doubled while it has too few tokens.
_CHARACTERS_PER_TOKEN = 8
# The beginning of a text may have a few tokens that the whole text merges.
_NUM_UNSURE = 64
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


class TemplateError(BadRequest):
    """The chat template rejects the messages."""


@dataclass(frozen=True)
class Rendered:
    """Tokens that the model receives after the tokens of an earlier turn.

    Args:
        opens_reasoning: Whether the tokens end with an open `<think>`, so that the turn begins
            inside the reasoning.
        num_dropped: Number of tokens at the end of the earlier turn that the template replaces: 1
            if it ends turns with another token than the sampled one, otherwise 0.
        contents: Images, at their places among `tokens`.
    """

    tokens: tuple[int, ...]
    opens_reasoning: bool
    num_dropped: int = 0
    contents: tuple[Content, ...] = ()


class ChatTemplate:
    """Renders conversations.

    Args:
        tokenizer: Tokenizer with a chat template; used from one thread only.
        images: How the model's tokens contain images; None if it reads only text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        arguments: Mapping[str, Any] | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        self._tokenizer, self._arguments, self.images = tokenizer, dict(arguments or {}), images
        self._encoder = TextTokens(tokenizer)
        self._stops = {token: str(tokenizer.decode([token])) for token in stop_token_ids}
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._control = [token.content for token in added if token.special]
        # Few texts have the beginning of any control token, of which there may be hundreds.
        starts = sorted({re.escape(token[:2]) for token in self._control if token})
        self._has_control_start = re.compile("|".join(starts) or r"(?!)").search
        self._mark = f"mark-{secrets.token_hex(16)}"
        text = str(getattr(tokenizer, "chat_template", None) or "")
        self._reasoning_key = (
            "thinking"
            if ".thinking" in text and "reasoning_content" not in text
            else "reasoning_content"
        )
        self.arguments_as_text = self._needs_text_arguments()
        self.allows_late_system = self._keeps_late_system()

    @property
    def source(self) -> str:
        return str(self._tokenizer.chat_template)

    def whole(self, conversation: Conversation, max_tokens: int) -> Rendered:
        """Returns the tokens of a new conversation.

        Raises:
            TemplateError: The template rejects the messages.
            ContextOverflow: The messages are so much longer than `max_tokens` that their end was
                not tokenized.
        """
        text = self.text(conversation, self.prepared(conversation.messages), opens_turn=True)
        tokens = self._encoded(self._encoder.plain, text, max_tokens)
        tokens, contents = self._with_images(tokens, conversation.messages)
        return Rendered(tokens, _OPENED.search(text) is not None, contents=contents)

    def continuation(
        self, conversation: Conversation, num_known: int, last: int | None, max_tokens: int
    ) -> Rendered | None:
        """Returns the tokens that follow a turn, message `num_known - 1`, which ended with token
        `last`.

        Returns:
            None if the template does not render the turn, so that its end cannot be found.

        Raises:
            TemplateError, ContextOverflow: See `whole`.
        """
        text = self.text_after(conversation, num_known)
        if text is None:
            return None
        num_dropped = 0
        if last is not None and last in self._stops:
            end = self._stops[last]
            if any(stop and text.lstrip().startswith(stop) for stop in self._stops.values()):
                text = text.lstrip()  # the template of Llama 2 inserts a space
            if end and text.startswith(end):
                text = text[len(end) :]
            else:
                num_dropped = 1
        tokens = self._encoded(self._encoder.continued, text, max_tokens)
        tokens, contents = self._with_images(tokens, conversation.messages[num_known:])
        return Rendered(tokens, _OPENED.search(text) is not None, num_dropped, contents)

    def text_after(self, conversation: Conversation, num_known: int) -> str | None:
        """Returns the text that the template renders after the turn `num_known - 1`, from its end
        token on; None if the template does not render the turn.
        """
        messages = self.prepared(conversation.messages)
        before, new = messages[: num_known - 1], messages[num_known:]
        turn = messages[num_known - 1]
        if calls := turn.get("tool_calls"):
            marked = [self._marked_call(call) for call in calls]
            calling = {"role": ASSISTANT, "content": turn["content"], "tool_calls": marked}
            known = [*before, calling]
            _, found, after = self.text(conversation, [*known, *new], True).rpartition(self._mark)
            if found:
                # The text of the calls goes on after the mark: find where it ends.
                rest = self.text(conversation, known, False).rpartition(self._mark)[2]
                if not after.startswith(rest):
                    return None
                return rest[self._end_of_turn(rest) :] + after[len(rest) :]
        # The turn has no calls, or the template does not render them.
        marked_turn = {"role": ASSISTANT, "content": self._mark}
        text = self.text(conversation, [*before, marked_turn, *new], True)
        _, found, after = text.rpartition(self._mark)
        return after if found else None

    def text(
        self, conversation: Conversation, messages: Sequence[Message], opens_turn: bool
    ) -> str:
        """Renders messages with the conversation's tools and arguments, and with `opens_turn` the
        beginning of the assistant's turn. Raises TemplateError if the template rejects them.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=[self._harmless(tool) for tool in conversation.tools] or None,
                tokenize=False,
                add_generation_prompt=opens_turn,
                **{**self._arguments, **conversation.arguments},
            )
        except Exception as error:  # a template may raise any error, or be missing
            reason = error_text(error, 200)
            raise TemplateError(
                f"The model's chat template rejects these messages: {reason}", "messages"
            ) from error
        return text

    def prepared(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        found = []
        for place, message in enumerate(messages):
            ready: dict[str, Any] = self._harmless(message)
            if message["role"] == SYSTEM and place and not self.allows_late_system:
                ready = {"role": USER, "content": _REMINDER.format(ready["content"])}
            if "reasoning_content" in ready and self._reasoning_key != "reasoning_content":
                ready[self._reasoning_key] = ready.pop("reasoning_content")
            if calls := ready.get("tool_calls"):
                ready["tool_calls"] = [self._ready_call(call) for call in calls]
            if not isinstance(ready["content"], str):
                ready["content"] = [
                    part if part["type"] == TEXT else {"type": IMAGE} for part in ready["content"]
                ]
            found.append(ready)
        return found

    def without_end(self, text: str) -> str:
        for stop in self._stops.values():
            if stop and text.endswith(stop):
                return text[: -len(stop)]
        return text

    def _with_images(
        self, tokens: tuple[int, ...], messages: Sequence[Message]
    ) -> tuple[tuple[int, ...], tuple[Content, ...]]:
        """Repeats placeholders for the features of the images in `messages`, which were rendered as
        `tokens`. Raises TemplateError unless the template wrote one for each image.
        """
        contents = list(images_of(messages))
        if self.images is None:
            assert not contents, "parts with images are refused"
            return tokens, ()
        placeholder = self.images.placeholder
        if (num := tokens.count(placeholder)) != len(contents):
            raise TemplateError(
                f"The model's chat template writes {num} placeholders for the {len(contents)} "
                "images in these messages.",
                "messages",
            )
        found, placed = with_features(tokens, contents, placeholder)
        return tuple(found), placed

    def _ready_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments_as_text and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": function}

    def _marked_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments: Any = {"x": self._mark}
        if self.arguments_as_text:
            arguments = json.dumps(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _end_of_turn(self, text: str) -> int:
        """Returns where the end token at the end begins, or else the length without white space."""
        for stop in self._stops.values():
            place = text.rfind(stop) if stop else -1
            if place >= 0 and not text[place + len(stop) :].strip():
                return place
        return len(text.rstrip())

    def _harmless(self, value: Any) -> Any:
        """Spaces out control tokens: a tool's output must not begin another role's message."""
        if isinstance(value, str):
            if self._has_control_start(value) is None:
                return value
            for token in self._control:
                if token in value:
                    value = value.replace(token, f"{token[:1]} {token[1:]}")
            return value
        if isinstance(value, Mapping):
            return {name: self._harmless(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._harmless(one) for one in value]
        return value

    def _encoded(self, encode: Encode, text: str, max_tokens: int) -> tuple[int, ...]:
        longest = _CHARACTERS_PER_TOKEN * max(max_tokens, 1)
        try:
            while len(text) > longest:
                num = len(encode([text[:longest]])[0]) - _NUM_UNSURE
                if num >= max_tokens:
                    raise ContextOverflow(num, max_tokens, is_bound=True)
                longest *= 2
            return tuple(encode([text])[0])
        except ContextOverflow:
            raise
        except Exception as error:  # tokenizers have no exception class for unknown words
            reason = error_text(error, 200)
            raise TemplateError(
                f"The model's tokenizer cannot encode these messages: {reason}", "messages"
            ) from error

    def _needs_text_arguments(self) -> bool:
        for arguments in ({"probe": True}, '{"probe": true}'):
            try:
                text = self._raw([_user(), _calling(arguments), _result()])
            except Exception:  # a template may raise any error
                continue
            if "'probe'" not in text:
                return isinstance(arguments, str)
        return False

    def _keeps_late_system(self) -> bool:
        """Whether a system message stays in its place; some templates reject or move it."""
        turn, late = (
            {"role": ASSISTANT, "content": self._mark},
            {"role": SYSTEM, "content": "probe"},
        )
        try:
            text = self._raw([_user(), turn, late, _user()])
        except Exception:  # a template may raise any error
            return False
        return "probe" in text.rpartition(self._mark)[2]

    def _raw(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._arguments
        )
        return text


def _user() -> dict[str, Any]:
    return {"role": USER, "content": "-"}


def _result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "functions.f:0", "name": "f", "content": "-"}


def _calling(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "functions.f:0", "type": "function", "function": function}
    return {"role": ASSISTANT, "content": "", "tool_calls": [call]}
