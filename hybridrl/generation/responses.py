"""Defines finished responses of several turns, and restores them from JSON.

A `Response` is one sequence, in which sampled tokens and observations alternate. An `AgentResponse`
consists of the sequences of an agent's conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridrl.contracts.blobs import Blobs, blobs_from_json
from hybridrl.contracts.prompts import Prompt, Rollout
from hybridrl.rewards.outcome import Outcome, ScorerFailure
from hybridrl.rollout.engine import Completion, FinishReason, Versions, versions_from_json

End = Literal["done", "turns", "tokens", "failure"]


@dataclass(frozen=True)
class Response(Completion):
    """A finished response of several turns, with observations among its tokens."""

    observed: tuple[bool, ...] = ()  # for each token, whether it came from the environment
    num_turns: int = 1  # number of turns of the policy
    ended: End = "done"  # what ended it: environment, max_turns, tokens, or a failure
    reward: float = 0.0  # sum of the rewards from the environment
    failure: tuple[str, str] | None = None  # what went wrong, and what is allowed
    notes: Mapping[str, int] = field(default_factory=dict)  # how often each was reported

    @property
    def outcome(self) -> Outcome:
        """Sum of the rewards from the environment, or its failure."""
        return self.reward if self.failure is None else ScorerFailure(*self.failure)

    def rollouts(self, prompt: Prompt) -> list[Rollout]:
        return [replace(one, observed=self.observed) for one in super().rollouts(prompt)]


@dataclass(frozen=True)
class AgentSequence:
    """One sequence of tokens in an agent's response."""

    context: tuple[int, ...]  # tokens before the first sampled token; at least one
    tokens: tuple[int, ...]  # tokens from the first sampled token on; the last token was sampled
    logps: tuple[float, ...]  # log-probability of each token; 0 on observed tokens
    observed: tuple[bool, ...]  # tokens that were not sampled, or are trained elsewhere
    finish_reason: FinishReason  # why the last turn ended
    versions: Versions  # (version, number of tokens); see `Response`
    blobs: Blobs = field(default_factory=dict, compare=False)  # see contracts/blobs.py

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> AgentSequence:
        names = ("context", "tokens", "logps", "observed")
        lists = {name: tuple(fields[name]) for name in names}
        restored = {"versions": versions_from_json(fields), "blobs": blobs_from_json(fields)}
        return AgentSequence(**{**fields, **lists, **restored})


@dataclass(frozen=True)
class AgentResponse(Response):
    """A finished response of an agent, with the tokens and columns of its last sequence."""

    sequences: tuple[AgentSequence, ...] = ()  # in the order of their ends; at least one
    # Whether the only sequence is a token that the agent did not request, because a response needs
    # a token. It must not be trained.
    is_substitute: bool = False

    @property
    def outcome(self) -> Outcome:
        """Reward that the agent reported, or its failure."""
        if self.failure is None:
            return self.reward
        return ScorerFailure(*self.failure, is_untrainable=self.is_substitute)

    @property
    def runs(self) -> Versions:
        return tuple(run for sequence in self.sequences for run in sequence.versions)

    def rollouts(self, prompt: Prompt) -> list[Rollout]:
        return [
            Rollout(
                sample_id=self.request_id,
                prompt=replace(prompt, tokens=one.context, contents=()),
                tokens=one.tokens,
                logps=one.logps,
                finish_reason=one.finish_reason,
                version=one.versions[0][0],
                observed=one.observed,
                blobs=one.blobs,
                versions=one.versions if len(one.versions) > 1 else (),
                sequence=index,
            )
            for index, one in enumerate(self.sequences)
        ]


@dataclass(frozen=True)
class OpenAgent:
    """An agent that is running, with (version, number of tokens) of its finished turns."""

    request_id: int
    runs: Versions


def completion_from_json(fields: Mapping[str, Any]) -> Completion:
    """Restores a completion or response from `saved_fields`, possibly through JSON."""
    names = {"tokens", "logps", "observed", "failure"} & set(fields)
    values = {name: value for name, value in fields.items() if name != "experts"}
    values |= {name: fields[name] and tuple(fields[name]) for name in names}
    values |= {"blobs": blobs_from_json(fields), "versions": versions_from_json(fields)}
    if "sequences" in fields:
        sequences = tuple(AgentSequence.from_dict(one) for one in fields["sequences"])
        return AgentResponse(**{**values, "sequences": sequences})
    return (Response if "observed" in fields else Completion)(**values)
