"""Interface of environments, which respond to each turn of the policy. Does not import torch.

What users' environments return is converted to a valid `Turn`, or to a ScorerFailure that explains
the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

from hybridrl.contracts.prompts import Asked
from hybridrl.environments.image_parts import plain_content
from hybridrl.errors import short
from hybridrl.rewards.outcome import LARGEST, WHERE, ScorerFailure, failed

Message = Mapping[str, Any]
Observation = str | Sequence[int] | Sequence[Message] | None
"""Input of the policy's next turn: a text, token ids, chat messages (each with `role` and
`content`, formatted by the tokenizer's chat template), or nothing. The content of a message is a
text or a list of parts, which may be images (image_parts.py)."""
EXPECTED = "(observation, reward, done), a Turn"
NOTE = re.compile("[a-z][a-z0-9_]*")


class Turn(NamedTuple):
    """An environment's response to a turn of the policy. A plain tuple (observation, reward, done)
    is also accepted.

    Args:
        observation: Text, tokens or messages that the policy reads before its next turn. Ignored if
            `done` is true.
        reward: Reward for this turn. The reward for a response is the sum over its turns.
        notes: Words to count. The metric `environment/WORD` reports the count of each word.
    """

    observation: Observation = None
    reward: float = 0.0
    done: bool = False
    notes: Sequence[str] = ()


class Environment(Protocol):
    """Responds to the policy's turns in one response. Every response uses its own instance.

    The returned values must depend only on the prompt, the columns and the turns so far. A new
    instance receives the same turns again in three cases: the old instance's process was killed,
    the run was resumed, or `steps.max_policy_lag` is above 0 and a later step continues the
    response.
    """

    def reset(self, prompt: Any, columns: Mapping[str, object]) -> Observation:
        """Starts an episode. Returns text or token ids that the policy reads after the prompt.

        None for nothing. The prompt has already opened the policy's turn. `columns` are the other
        columns of the data row, plus `rendered_prompt`, the text that the policy read.
        """

    def step(self, tokens: Sequence[int], text: str) -> Turn | tuple[Observation, float, bool]:
        """Responds to a turn that the policy ended with a stop token.

        Args:
            tokens: Sampled tokens, including the stop token.
            text: Text of the tokens, without the stop token if it is a special token. Other special
                tokens are included, because some models mark tool calls with them.
        """


@dataclass(frozen=True)
class EnvironmentCall:
    """A call to an environment: `reset` if there are no actions, else `step` with the last action.

    `key` identifies the response among unfinished ones; None closes all environments. `actions`
    are the tokens and the text of each turn so far.
    """

    key: tuple[int, int] | None
    prompt: Asked = ""
    columns: Mapping[str, object] | None = None
    actions: Sequence[tuple[Sequence[int], str]] = ()


Answer = Turn | ScorerFailure


def checked(answer: object) -> Answer:
    """Converts a return value of `step` to a valid Turn of plain values, or to a failure."""
    if not isinstance(answer, tuple) or not 3 <= len(answer) <= 4:
        return ScorerFailure(f"returned a {type(answer).__name__} for {WHERE}", EXPECTED)
    observation, reward, done, notes = Turn(*answer)
    number: Any = reward.item() if hasattr(reward, "item") else reward
    if not isinstance(number, Real) or not abs(float(number)) <= LARGEST:
        return ScorerFailure(f"returned the reward {short(reward)} for {WHERE}")
    if isinstance(notes, str) or not all(isinstance(n, str) and NOTE.fullmatch(n) for n in notes):
        got = f"returned the notes {short(notes)} for {WHERE}"
        return ScorerFailure(got, "words of a-z, 0-9 and _")
    seen = checked_observation(observation)
    if isinstance(seen, ScorerFailure):
        return seen
    return Turn(seen, float(number), bool(done), list(notes))


def checked_observation(observation: object) -> Observation | ScorerFailure:
    """Converts an observation to plain values, or to a failure."""
    if observation is None or isinstance(observation, str):
        return observation
    if hasattr(observation, "tolist"):  # an array
        observation = observation.tolist()
    if isinstance(observation, list | tuple):
        if all(isinstance(token, Integral) and 0 <= int(token) < 1 << 63 for token in observation):
            return [int(token) for token in observation]
        if all(_is_message(message) for message in observation):
            return _plain_messages(observation)
    got = f"returned the observation {short(observation)} for {WHERE}"
    return ScorerFailure(got, "a text, token ids or messages")


def checked_start(observation: object) -> Observation | ScorerFailure:
    """Converts a value from `reset` to a valid observation without messages, or to a failure."""
    seen = checked_observation(observation)
    if isinstance(seen, list) and any(isinstance(part, Mapping) for part in seen):
        got = f"returned messages at the start of {WHERE}"
        return ScorerFailure(got, "a text or token ids, because messages belong in the prompt")
    return seen


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list | tuple)


def _plain_messages(messages: Sequence[Message]) -> list[Message] | ScorerFailure:
    found: list[Message] = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = plain_content(content)
        if isinstance(content, ScorerFailure):
            return content
        found.append({"role": message["role"], "content": content})
    return found


def encoded(answer: Answer) -> dict[str, Any]:
    """Converts an environment's answer to JSON, the only format that processes exchange."""
    if isinstance(answer, ScorerFailure):
        return answer.as_json()
    return answer._asdict()


def decoded(entry: Mapping[str, Any]) -> Answer:
    return failed(entry) if "got" in entry else checked(Turn(**entry))
