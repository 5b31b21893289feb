"""From turns to text, and from observations to tokens: each is tokenised once, by itself. No torch.

What the policy sampled is never decoded and encoded again, so that it is trained on the tokens that
the engine was fed.
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
    """Returns what a turn says, special tokens too: of some models the tags of calls are such. Left
    out is the stop token at its end, if it is one.
    """
    is_special = not tokenizer.decode(list(tokens[-1:]), skip_special_tokens=True)
    said = tokens[:-1] if is_special else tokens
    return str(tokenizer.decode(list(said), skip_special_tokens=False))


class ObservationEncoder:
    """Makes tokens of observations.

    Args:
        tokenizer: of transformers.
        vocab_size: of the model; token ids are below it.
        stop_token_ids: one of them ends every turn of the policy.
        template_arguments: of the chat template.
    """

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
        """Returns the tokens, no special ones added.

        Raises:
            UserError: there are messages, and the tokenizer has no chat template that takes them.
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
        except Exception as error:  # tokenizers raise no class of their own, of unknown words
            got = (
                f"returned the observation {text[:80]!r} for {WHERE}, which has no tokens: {error}"
            )
            return ScorerFailure(got, "a text that the tokenizer knows")

    def _rendered(self, messages: Sequence[Message]) -> str:
        """Returns what the chat template puts between a turn's stop token and the next turn."""
        chat = [{"role": "user", "content": "-"}, {"role": "assistant", "content": TURN}]
        shown = [{**one, "content": self._harmless(one["content"])} for one in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [*chat, *shown],
                tokenize=False,
                add_generation_prompt=True,
                **self._template_arguments,
            )
        except Exception as error:  # whatever a template raises, or there is none
            raise _no_template(str(error).splitlines()[0][:160]) from error
        _, found, rest = text.partition(TURN)
        if not found:
            raise _no_template("It leaves out the turns of the assistant.")
        # Llama 2's template puts a space before the stop token.
        begun = rest.lstrip()
        stop = next((stop for stop in self._stop_texts if stop and begun.startswith(stop)), "")
        return begun[len(stop) :] if stop else rest

    def _harmless(self, content: str) -> str:
        """Returns a message's content without control tokens: what a tool shows, or the policy made
        it show, must not end the message and open one of another role.
        """
        for token in self._control:
            content = content.replace(token, f"{token[:1]} {token[1:]}")
        return content


def _no_template(why: str) -> UserError:
    return UserError(
        "environment.name",
        "an environment that observes messages",
        "one that observes texts, with a tokenizer whose chat template does not take its messages",
        f"Choose a parser of text (environment.options.parser=tag), or another model. {why}",
    )
