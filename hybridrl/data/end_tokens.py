"""End tokens: with which tokens a response ends, in rollouts, evaluations, environments and the
rows that an algorithm learns from. No torch.

Owns the one list of them, so that a model is trained to end with what its rollouts stop at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridrl.config.generation import declared_end_tokens
from hybridrl.config.schema import ModelConfig
from hybridrl.models.hf.config_keys import end_tokens_of

ANSWER = "the answer of the assistant"


def end_tokens(model: ModelConfig, hf_config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """Returns the end tokens of a run's responses, in ascending order: those that config.json,
    generation_config.json (if there is one) and the tokenizer name, and the one with which the chat
    template ends the assistant's turn.

    Args:
        model: the section, which names the model's directory.
        hf_config: the content of config.json.
        tokenizer: the tokenizer that the run uses.

    Raises:
        ModelError: generation_config.json names an end token that is no token of the model.
    """
    return own_end_tokens(
        tokenizer, [*end_tokens_of(hf_config), *declared_end_tokens(model, hf_config)]
    )


def own_end_tokens(tokenizer: Any, declared: Iterable[int] = ()) -> tuple[int, ...]:
    """Returns the end tokens of the tokenizer and its chat template, with those that are declared
    elsewhere, in ascending order.
    """
    found = {*declared, tokenizer.eos_token_id, turn_end(tokenizer)}
    return tuple(sorted(found - {None}))


def turn_end(tokenizer: Any) -> int | None:
    """Returns the special token with which the chat template ends a turn of the assistant; None
    if there is no template, or none that ends a turn so.

    The template says it by what follows an answer that nothing comes after. What it puts between
    two turns may be another token (gpt-oss).
    """
    if getattr(tokenizer, "chat_template", None) is None:  # not every TextEncoder has one
        return None
    chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # whatever a template raises that does not take these messages
        return None
    rest = text.rpartition(ANSWER)[2].lstrip() if ANSWER in text else ""
    special = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and rest.startswith(token.content)
    }
    return special[max(special, key=len)] if special else None


def shown_tokens(tokenizer: Any, tokens: Iterable[int]) -> str:
    """Returns tokens for people."""
    return ", ".join(str(tokenizer.decode([token])) or str(token) for token in tokens)
