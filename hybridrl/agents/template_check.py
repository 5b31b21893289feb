"""Checks at the start whether a chat template only appends to a conversation, and shows images. No
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from hybridrl.agents.chat_template import ChatTemplate, TemplateError
from hybridrl.agents.conversation import TOOL, USER, Conversation, assistant, tool_call
from hybridrl.agents.samples import Message
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.contracts.prompts import Content, Prompt
from hybridrl.data.images import ImageTokens
from hybridrl.environments.image_parts import IMAGE
from hybridrl.errors import UserError

NUM_CHECKED = 1000  # rows; reading all of them could take minutes
_THOUGHT, _ANSWER = "thought-q7", "answer-q7"
_MAX_TOKENS = 1 << 20  # more than the conversations of this module have
_EMPTY = re.compile(r"<think>\s*</think>\s*")
_TOOLS: tuple[Message, ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_q7",
            "description": "Looks up.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    },
)
_CALL = tool_call("functions.look_q7:0", "look_q7", {"x": "y"})
_RESULT: Message = {"role": TOOL, "tool_call_id": _CALL["id"], "content": "found-q7"}
_SHOWN: Message = {
    "role": USER,
    "content": [{"type": IMAGE, IMAGE: Content(IMAGE, 0, 1, "image-q7")}],
}
KEPT = "Tokens that were sampled stay as they are, and only new messages are rendered after them."


def check_images(
    tokenizer: Any,
    name: str,
    arguments: Mapping[str, Any],
    images: ImageTokens,
    prompts: Iterable[Prompt],
) -> None:
    """Raises UserError if agents could never show the model an image of their rows, of which the
    first NUM_CHECKED are read.

    Args:
        name: Name of the tokenizer in messages.
        arguments: Further arguments of the chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise no_template(name)
    if not any(prompt.contents for prompt in islice(prompts, NUM_CHECKED)):
        return
    template = ChatTemplate(tokenizer, (), arguments, images)
    if not _has_places(template, Conversation((_SHOWN,))):
        raise UserError(
            "model.tokenizer",
            f"{name}, whose chat template writes no placeholder for images",
            f"with an agent and rows that have images, a template that writes {images.text} for "
            "each image in a message of the user",
            "Set model.tokenizer to one with such a template, or remove the images from the rows.",
        )


def no_template(name: str) -> UserError:
    """Returns the error for the tokenizer of a model that reads images, which agents use."""
    return UserError(
        "model.tokenizer",
        f"{name}, which has no chat template",
        "with an agent and a model that reads images, a tokenizer with a chat template, because "
        "images belong to messages",
        "Set model.tokenizer to one that has it, or add chat_template.jinja to a local folder.",
    )


def template_notes(template: ChatTemplate, reader: TurnReader) -> list[str]:
    """Returns notes on a template that does more than append, or has calls that cannot be read."""
    found = list(dict.fromkeys([*_left_out(template), *_differences(template)]))
    if template.images is not None:
        found += _without_images(template)
    if not template.allows_late_system:
        found.append(
            "the chat template takes a system message only at the beginning. Later ones are passed "
            "to the model as reminders in messages of the user."
        )
    if reader.tool_format is None:
        found.append(
            "the chat template shows no known format of tool calls. Tool calls stay in the text, "
            "unless agent.tool_format names the format."
        )
    return found


def _left_out(template: ChatTemplate) -> Iterator[str]:
    user: Message = {"role": USER, "content": "question-q7"}
    calling = assistant("", "", [_CALL])
    whole = Conversation((user, calling, _RESULT), _TOOLS)
    try:
        text = template.text(whole, template.prepared(whole.messages), True)
    except TemplateError:  # reported with the differences
        return
    if "look_q7" not in template.text(whole, template.prepared([user]), True):
        yield "the chat template does not tell the model which tools a client offers."
    if "found-q7" not in text:
        yield "the chat template leaves out the results of tools, so the model does not see them."


def _has_places(template: ChatTemplate, conversation: Conversation) -> bool:
    try:
        template.whole(conversation, _MAX_TOKENS)
    except TemplateError:
        return False
    return True


def _without_images(template: ChatTemplate) -> Iterator[str]:
    calling = assistant("", "", [_CALL])
    result = {**_RESULT, "content": _SHOWN["content"]}
    user: Message = {"role": USER, "content": "question-q7"}
    for where, messages in (
        ("messages of the user", (_SHOWN,)),
        ("results of tools", (user, calling, result)),
    ):
        if not _has_places(template, Conversation(messages, _TOOLS)):
            yield (
                f"the chat template writes no placeholder for images in {where}. Requests with "
                "such images are refused."
            )


def _differences(template: ChatTemplate) -> Iterator[str]:
    user: Message = {"role": USER, "content": "question-q7"}
    answer, thoughtful = assistant(_ANSWER), assistant(_ANSWER, _THOUGHT)
    calling, result = assistant("", "", [_CALL]), _RESULT
    cases: Sequence[tuple[str, list[Message], Message]] = (
        ("a new question", [user, answer], user),
        ("a new question", [user, thoughtful], user),
        ("a tool's result", [user, calling], result),
        ("a second tool's result", [user, calling, result, calling], result),
        ("a new question", [user, calling, result, answer], user),
    )
    for what, known, new in cases:
        tools = _TOOLS if any(message.get("tool_calls") for message in known) else ()
        conversation = Conversation((*known, new), tools)
        try:
            yield from _difference(template, conversation, len(known), what)
        except TemplateError as error:
            yield f"after {what}: {error.message} Requests with these messages are refused."


def _difference(
    template: ChatTemplate, conversation: Conversation, num_known: int, what: str
) -> Iterator[str]:
    if template.text_after(conversation, num_known) is None:
        yield (
            "the chat template leaves out turns of the assistant. Every request begins a new "
            "conversation, so each turn becomes a row of its own."
        )
        return
    messages = template.prepared(conversation.messages)
    before = template.text(conversation, messages[:num_known], False).rstrip()
    after = template.text(conversation, messages, True)
    if after.startswith(before):
        return
    if _THOUGHT in before and _THOUGHT not in after:
        yield f"the chat template drops the reasoning of earlier turns after {what}. {KEPT}"
    elif after.startswith(template.without_end(before)):
        yield (
            f"the chat template ends a turn with another token after {what}. The sampled end token "
            "is trained in a separate row, and the context has the template's token."
        )
    elif _EMPTY.sub("", after).startswith(_EMPTY.sub("", before)):
        yield f"the chat template adds or removes empty <think> blocks in earlier turns. {KEPT}"
    else:
        yield f"the chat template renders earlier messages differently after {what}. {KEPT}"
