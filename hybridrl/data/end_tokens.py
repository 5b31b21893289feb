"""Determines the end tokens of responses, in training data as in rollouts. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridrl.config.generation import declared_end_tokens
from hybridrl.config.schema import ModelConfig
from hybridrl.models.hf.config_keys import end_tokens_of

ANSWER = "the answer of the assistant"


def end_tokens(model: ModelConfig, hf_config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """Returns the end tokens of responses in ascending order: those of config.json,
    generation_config.json (if it exists), the tokenizer and the chat template (the token with which
    it ends the assistant's turn). Raises ModelError if generation_config.json names one outside the
    vocabulary.
    """
    return own_end_tokens(
        tokenizer, [*end_tokens_of(hf_config), *declared_end_tokens(model, hf_config)]
    )


def own_end_tokens(tokenizer: Any, declared: Iterable[int] = ()) -> tuple[int, ...]:
    found = {*declared, tokenizer.eos_token_id, turn_end(tokenizer)}
    return tuple(sorted(found - {None}))


def turn_end(tokenizer: Any) -> int | None:
    """Returns the special token with which the chat template ends a turn of the assistant, if any.

    The token follows the last answer of a chat; between two turns, a template may put a different
    one (gpt-oss).
    """
    if getattr(tokenizer, "chat_template", None) is None:  # not every TextEncoder has one
        return None
    chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template may raise any exception to reject these messages
        return None
    rest = text.rpartition(ANSWER)[2].lstrip() if ANSWER in text else ""
    special = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and rest.startswith(token.content)
    }
    return special[max(special, key=len)] if special else None


def shown_tokens(tokenizer: Any, tokens: Iterable[int]) -> str:
    return ", ".join(str(tokenizer.decode([token])) or str(token) for token in tokens)
