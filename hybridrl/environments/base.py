"""What an environment is: it begins with a prompt and answers each turn of the policy. No torch.

Owns the protocol and the border with users' code: whatever an environment returns becomes a checked
`Turn`, or a ScorerFailure that says what is wrong with it.
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
"""What the policy reads next: a text, token ids, chat messages (each with `role` and `content`, put
into the form of the tokenizer's chat template), or nothing."""
EXPECTED = "(observation, reward, done), a Turn"
MESSAGE = ("role", "content")
NOTE = re.compile("[a-z][a-z0-9_]*")


class Turn(NamedTuple):
    """What an environment answers to a turn of the policy; a plain tuple of the first three does.

    Args:
        observation: what the policy reads before its next turn; of no use once `done`.
        reward: of this turn; those of all turns are added up.
        done: whether the response ends here.
        notes: words to count, each becomes the metric `environment/WORD`.
    """

    observation: Observation = None
    reward: float = 0.0
    done: bool = False
    notes: Sequence[str] = ()


class Environment(Protocol):
    """Answers the turns of one response; one is made for each.

    It is a function of prompt, columns and turns so far. Another one is made and given the same
    turns again after its process was killed, when a run resumes, and with `steps.max_policy_lag`
    above 0 in every step, for each response that goes on from the step before.
    """

    def reset(self, prompt: Any, columns: Mapping[str, object]) -> Observation:
        """Begins; returns what the policy is to read after the prompt, if anything: a text or token
        ids, since the prompt has opened the policy's turn.

        Args:
            prompt: what the row has, a text or the messages of a chat.
            columns: the rest of its row, with the text that the policy was given as
                `rendered_prompt`.
        """
        ...

    def step(self, tokens: Sequence[int], text: str) -> Turn | tuple[Observation, float, bool]:
        """Answers a turn that the policy has ended by a stop token.

        Args:
            tokens: that it sampled, with the stop token.
            text: the same without the stop token, if that is a special one; other special tokens,
                which may be those of calls, are in it.
        """
        ...


@dataclass(frozen=True)
class Play:
    """One call of an environment: `reset` if there is no action, else `step` with the last one.

    Args:
        key: of the response, unique among those under way; None ends all environments there are.
        prompt, columns: of the response.
        actions: tokens and text of every turn so far.
    """

    key: tuple[int, int] | None
    prompt: Asked = ""
    columns: Mapping[str, object] | None = None
    actions: Sequence[tuple[Sequence[int], str]] = ()


Answer = Turn | ScorerFailure


def checked(answer: object) -> Answer:
    """Returns what `step` returned as a Turn of plain values, or what is wrong with it."""
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
    """Returns an observation of plain values, or what is wrong with it."""
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
    """Returns what `reset` returned, or what is wrong with it: the prompt has opened the policy's
    turn already, so no message can come.
    """
    seen = checked_observation(observation)
    if isinstance(seen, list) and any(isinstance(part, Mapping) for part in seen):
        got = f"returned messages at the start of {WHERE}"
        return ScorerFailure(got, "a text or token ids there: messages belong to the prompt")
    return seen


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in MESSAGE
    )


def encoded(answer: Answer) -> dict[str, Any]:
    """Returns an answer as JSON, which `decoded` reads: a process sends back no objects."""
    if isinstance(answer, ScorerFailure):
        return answer.as_json()
    return answer._asdict()


def decoded(entry: Mapping[str, Any]) -> Answer:
    """Returns what was encoded."""
    return failed(entry) if "got" in entry else checked(Turn(**entry))
