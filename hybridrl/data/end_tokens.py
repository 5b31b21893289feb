"""End tokens of responses, in rollouts, evaluations, environments and training data. No torch.

Owns the only list of them, so that a model is trained to end responses with the tokens at which its
rollouts stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridrl.config.generation import declared_end_tokens
from hybridrl.config.schema import ModelConfig
from hybridrl.models.hf.config_keys import end_tokens_of

ANSWER = "the answer of the assistant"


def end_tokens(model: ModelConfig, hf_config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """Returns the end tokens of responses in ascending order: those of config.json, of
    generation_config.json (if there is one) and of the tokenizer, and the token with which the chat
    template ends the assistant's turn.

    Args:
        model: Section that names the model's directory.
        hf_config: Content of config.json.
        tokenizer: Tokenizer of the run.

    Raises:
        ModelError: generation_config.json names an end token that is not a token of the model.
    """
    return own_end_tokens(
        tokenizer, [*end_tokens_of(hf_config), *declared_end_tokens(model, hf_config)]
    )


def own_end_tokens(tokenizer: Any, declared: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the end tokens of the tokenizer and its chat template, together with `declared` ones,
    in ascending order.
    """
    found = {*declared, tokenizer.eos_token_id, turn_end(tokenizer)}
    return tuple(sorted(found - {None}))


def turn_end(tokenizer: Any) -> int | None:
    """Returns the special token with which the chat template ends a turn of the assistant; None if
    there is no template, or if it ends turns without one.

    It is the token after an answer that ends the chat. Between two turns a template may put another
    token (gpt-oss).
    """
    if getattr(tokenizer, "chat_template", None) is None:  # not every TextEncoder has one
        return None
    chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template raises anything if it rejects these messages
        return None
    rest = text.rpartition(ANSWER)[2].lstrip() if ANSWER in text else ""
    special = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and rest.startswith(token.content)
    }
    return special[max(special, key=len)] if special else None


def shown_tokens(tokenizer: Any, tokens: Iterable[int]) -> str:
    """Returns the texts of tokens, for messages."""
    return ", ".join(str(tokenizer.decode([token])) or str(token) for token in tokens)
