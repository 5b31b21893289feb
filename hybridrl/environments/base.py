"""Interface of environments, which observe a prompt and answer each turn of the policy. No torch.

Owns the protocol and the checks of what users' environments return. Every return value becomes a
valid `Turn`, or a ScorerFailure that says what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

from hybridrl.contracts.prompts import Asked
from hybridrl.errors import short
from hybridrl.rewards.outcome import LARGEST, WHERE, ScorerFailure, failed

Message = Mapping[str, str]
Observation = str | Sequence[int] | Sequence[Message] | None
"""Input of the policy's next turn: a text, token ids, chat messages (each with `role` and
`content`, formatted by the tokenizer's chat template), or nothing."""
EXPECTED = "(observation, reward, done), a Turn"
MESSAGE = ("role", "content")
NOTE = re.compile("[a-z][a-z0-9_]*")


class Turn(NamedTuple):
    """Answer of an environment to a turn of the policy. A plain tuple of the first three is
    accepted too.

    Args:
        observation: Text, tokens or messages that the policy reads before its next turn. Ignored if
            `done`.
        reward: Reward of this turn. A response's reward is the sum over its turns.
        done: Whether the response ends here.
        notes: Words to count; each becomes the metric `environment/WORD`.
    """

    observation: Observation = None
    reward: float = 0.0
    done: bool = False
    notes: Sequence[str] = ()


class Environment(Protocol):
    """Answers the turns of one response; every response has its own instance.

    Its answers must depend only on the prompt, the columns and the turns so far. A new instance
    gets the same turns again in three cases: its process was killed, the run resumed, or
    `steps.max_policy_lag` is above 0 and the response continues from the step before.
    """

    def reset(self, prompt: Any, columns: Mapping[str, object]) -> Observation:
        """Starts an episode and returns what the policy reads after the prompt, if anything.

        The observation must be a text or token ids, because the prompt has already opened the
        policy's turn.

        Args:
            prompt: The row's prompt, a text or the messages of a chat.
            columns: Other columns of the row, and the text that the policy read as
                `rendered_prompt`.
        """

    def step(self, tokens: Sequence[int], text: str) -> Turn | tuple[Observation, float, bool]:
        """Answers a turn that the policy ended with a stop token.

        Args:
            tokens: Sampled tokens, including the stop token.
            text: Text of the tokens, without the stop token if that is a special token. Other
                special tokens are kept, because some models use them to mark tool calls.
        """


@dataclass(frozen=True)
class Play:
    """A call of an environment: `reset` if there are no actions, else `step` with the last action.

    Args:
        key: Identity of the response, unique among unfinished responses. None ends all
            environments.
        actions: Tokens and text of every turn so far.
    """

    key: tuple[int, int] | None
    prompt: Asked = ""
    columns: Mapping[str, object] | None = None
    actions: Sequence[tuple[Sequence[int], str]] = ()


Answer = Turn | ScorerFailure


def checked(answer: object) -> Answer:
    """Returns a value of `step` as a valid Turn of plain values, or its failure."""
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
    """Returns an observation of plain values, or its failure."""
    if observation is None or isinstance(observation, str):
        return observation
    if hasattr(observation, "tolist"):  # an array
        observation = observation.tolist()
    if isinstance(observation, list | tuple):
        if all(isinstance(token, Integral) and 0 <= int(token) < 1 << 63 for token in observation):
            return [int(token) for token in observation]
        if all(_is_message(message) for message in observation):
            return [{key: message[key] for key in MESSAGE} for message in observation]
    got = f"returned the observation {short(observation)} for {WHERE}"
    return ScorerFailure(got, "a text, token ids or messages")


def checked_start(observation: object) -> Observation | ScorerFailure:
    """Returns a value of `reset` as a valid observation without messages, or its failure."""
    seen = checked_observation(observation)
    if isinstance(seen, list) and any(isinstance(part, Mapping) for part in seen):
        got = f"returned messages at the start of {WHERE}"
        return ScorerFailure(got, "a text or token ids, since messages belong in the prompt")
    return seen


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in MESSAGE
    )


def encoded(answer: Answer) -> dict[str, Any]:
    """Returns an answer as JSON for `decoded`, because processes exchange no objects."""
    if isinstance(answer, ScorerFailure):
        return answer.as_json()
    return answer._asdict()


def decoded(entry: Mapping[str, Any]) -> Answer:
    """Returns an answer from its JSON."""
    return failed(entry) if "got" in entry else checked(Turn(**entry))
