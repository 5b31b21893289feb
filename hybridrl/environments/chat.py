"""Converts turns to text, and observations to tokens. Does not import torch.

Invariant: every observation is tokenised once and separately. Sampled tokens are never decoded and
encoded again, so training sees exactly the tokens that the engine processed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hybridrl.data.text_tokens import TextTokens
from hybridrl.environments.base import Message, Observation
from hybridrl.errors import UserError
from hybridrl.rewards.outcome import WHERE, ScorerFailure

TURN = "the turn of the policy"


def text_of_turn(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns a turn's text with special tokens (they may mark tool calls) except a stop token."""
    is_special = not tokenizer.decode(list(tokens[-1:]), skip_special_tokens=True)
    kept = tokens[:-1] if is_special else tokens
    return str(tokenizer.decode(list(kept), skip_special_tokens=False))


class ObservationEncoder:
    """Converts observations to tokens below `vocab_size`; `stop_token_ids` can end a turn."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        template_arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._template_arguments = template_arguments
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._encoder = TextTokens(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._control = [token.content for token in added if token.special]
        self._stop_texts = [str(tokenizer.decode([token])) for token in stop_token_ids]

    def __call__(self, observation: Observation) -> list[int] | ScorerFailure:
        """Returns the tokens of an observation, without adding special tokens. Raises UserError for
        messages if the tokenizer has no chat template that accepts them.
        """
        if not observation:
            return []
        if isinstance(observation, str):
            return self._tokens(observation)
        messages = [part for part in observation if isinstance(part, Mapping)]
        if messages:
            return self._tokens(self._rendered(messages))
        tokens = [part for part in observation if isinstance(part, int)]
        if max(tokens) < self._vocab_size:
            return tokens
        got = f"returned the token {max(tokens)} for {WHERE}"
        return ScorerFailure(got, f"tokens below {self._vocab_size}")

    def _tokens(self, text: str) -> list[int] | ScorerFailure:
        try:
            return list(self._encoder.continued([text])[0])
        except Exception as error:  # tokenizers have no exception class for unknown words
            got = f"returned the observation {text[:80]!r} for {WHERE}: {error}"
            return ScorerFailure(got, "a text that the tokenizer can encode")

    def _rendered(self, messages: Sequence[Message]) -> str:
        chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": TURN}]
        safe = [{**part, "content": self._harmless(part["content"])} for part in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*chat, *safe],
                tokenize=False,
                add_generation_prompt=True,
                **self._template_arguments,
            )
        except Exception as error:  # a chat template may raise any error, or be missing
            raise _no_template(str(error).splitlines()[0][:160]) from error
        _, found, rest = text.partition(TURN)
        if not found:
            raise _no_template("The template drops the assistant's turns.")
        # The template of Llama 2 inserts a space before the stop token.
        text = rest.lstrip()
        stop = next((stop for stop in self._stop_texts if stop and text.startswith(stop)), "")
        return text[len(stop) :] if stop else rest

    def _harmless(self, content: str) -> str:
        """Spaces out control tokens: a tool's output must not begin another message."""
        for token in self._control:
            content = content.replace(token, f"{token[:1]} {token[1:]}")
        return content


def _no_template(reason: str) -> UserError:
    return UserError(
        "environment.name",
        "an environment whose observations are messages",
        "an environment whose observations are texts: the chat template rejects messages",
        f"Set environment.options.parser=tag, or choose another model. {reason}",
    )
