"""Prompts as chats: texts and messages, rendered by the tokenizer's template. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config.schema import DataConfig
from hybridrl.data.rows import Row
from hybridrl.errors import DataError, said

MESSAGES = "messages"
"""The column that keeps the messages of a chat, for rewards that look at them."""


def chat_column(config: DataConfig) -> str | None:
    """Returns the column that may hold messages, if any."""
    return config.prompt_key if config.chat_template else None


def as_chats(rows: Iterable[Row], config: DataConfig, tokenizer: Any) -> Iterator[Row]:
    """Passes rows on with the text that the model is to see as their prompt.

    Args:
        rows: whose prompt is a text, the user's message, or a list of messages.
        config: names the column and the system message.
        tokenizer: of transformers, with a chat template.

    Raises:
        DataError: the tokenizer has no template, or it does not take a row's messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:  # not every TextEncoder has one
        raise DataError(
            "data.chat_template",
            "true, with a tokenizer that has no template",
            "true only for a model that was trained on chats",
            "Set data.chat_template=false, or model.tokenizer to one with chat_template.",
        )
    for row in rows:
        messages = _messages(row.columns[config.prompt_key], config.system_prompt)
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a template raises
            shown = f"messages that the template refuses: {said(error, 160)}"
            raise DataError(row.place, shown, "messages that it takes", "Mend that row.") from error
        columns = {MESSAGES: messages, **row.columns, config.prompt_key: text}
        yield replace(row, columns=columns)


def _messages(value: object, system: str | None) -> list[Mapping[str, str]]:
    if isinstance(value, list):
        messages = [dict(message) for message in value]
    else:
        messages = [{"role": "user", "content": str(value)}]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages  # type: ignore[return-value]
