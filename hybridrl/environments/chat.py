"""Converts turns to text, and observations to tokens. Does not import torch.

Invariant: every observation is tokenised once and separately. Sampled tokens are never decoded and
encoded again, so training sees exactly the tokens that the engine processed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridrl.contracts.prompts import Content
from hybridrl.data.images import ImageTokens, with_features
from hybridrl.data.text_tokens import TextTokens
from hybridrl.environments.base import Message, Observation
from hybridrl.environments.image_parts import IMAGE, TEXT, parts_of, read_parts
from hybridrl.errors import UserError
from hybridrl.rewards.outcome import WHERE, ScorerFailure

TURN = "the turn of the policy"


def text_of_turn(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns a turn's text with special tokens (they may mark tool calls) except a stop token."""
    is_special = not tokenizer.decode(list(tokens[-1:]), skip_special_tokens=True)
    kept = tokens[:-1] if is_special else tokens
    return str(tokenizer.decode(list(kept), skip_special_tokens=False))


class Observed(NamedTuple):
    """An observation's tokens, and its images at their places among these tokens."""

    tokens: list[int]
    contents: tuple[Content, ...] = ()


class ObservationEncoder:
    """Converts observations to tokens below `vocab_size`; `stop_token_ids` can end a turn.

    Args:
        images: How the model's tokens contain images; None if it reads only text.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        template_arguments: Mapping[str, object] = MappingProxyType({}),
        images: ImageTokens | None = None,
    ) -> None:
        self._template_arguments, self._images = template_arguments, images
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._encoder = TextTokens(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._control = [token.content for token in added if token.special]
        self._stop_texts = [str(tokenizer.decode([token])) for token in stop_token_ids]

    def __call__(self, observation: Observation) -> Observed | ScorerFailure:
        """Encodes an observation, without adding special tokens. Raises UserError for messages that
        the chat template does not accept, and for images if the model reads only text.
        """
        if not observation:
            return Observed([])
        if isinstance(observation, str):
            return self._text(observation)
        messages = [part for part in observation if isinstance(part, Mapping)]
        if messages:
            return self._messages(messages)
        tokens = [part for part in observation if isinstance(part, int)]
        if max(tokens) < self._vocab_size:
            return Observed(tokens)
        got = f"returned the token {max(tokens)} for {WHERE}"
        return ScorerFailure(got, f"tokens below {self._vocab_size}")

    def _messages(self, messages: Sequence[Message]) -> Observed | ScorerFailure:
        found = self._text(self._rendered(messages))
        if isinstance(found, ScorerFailure) or not any(map(parts_of, messages)):
            return found
        if self._images is None:
            raise UserError(
                "environment.name",
                "an environment that returns images",
                "an environment that returns texts, because the model reads no images",
                "Change the environment, or choose a model with a vision tower "
                "(docs/guides/images.md).",
            )
        contents = read_parts(messages, self._images)
        if isinstance(contents, ScorerFailure):
            return contents
        num_places = found.tokens.count(self._images.placeholder)
        if num_places < len(contents):
            raise _no_template(f"It wrote {num_places} placeholders for {len(contents)} images.")
        if num_places > len(contents):
            got = f"returned a text with the placeholder of images for {WHERE}"
            return ScorerFailure(got, "texts without it")
        return Observed(*with_features(found.tokens, contents, self._images.placeholder))

    def _text(self, text: str) -> Observed | ScorerFailure:
        try:
            return Observed(list(self._encoder.continued([text])[0]))
        except Exception as error:  # tokenizers have no exception class for unknown words
            got = f"returned the observation {text[:80]!r} for {WHERE}: {error}"
            return ScorerFailure(got, "a text that the tokenizer can encode")

    def _rendered(self, messages: Sequence[Message]) -> str:
        chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": TURN}]
        safe = [{**one, "content": self._harmless(one["content"])} for one in messages]
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

    def _harmless(self, content: str | Sequence[Mapping[str, str]]) -> str | list[dict[str, str]]:
        """Spaces out control tokens: a tool's output must not begin another message."""
        if not isinstance(content, str):
            return [
                {"type": TEXT, TEXT: self._spaced(part[TEXT])}
                if part["type"] == TEXT
                else {"type": IMAGE}
                for part in content
            ]
        return self._spaced(content)

    def _spaced(self, content: str) -> str:
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
