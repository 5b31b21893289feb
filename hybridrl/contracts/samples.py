"""The two ends of generation, one sample each: what goes in and what comes out. No torch.

`batch.py` offers both as its own; modules that must not import torch take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridrl.contracts.routed_experts import Experts

UNKNOWN_LOGP = 1.0
"""What stands for a log-probability that is not finite, where it is only shown: none is above 0."""


Asked = str | list[dict[str, Any]]
"""A prompt as a row has it: a text, or the messages of a chat."""
RENDERED_PROMPT = "rendered_prompt"


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the source, its text and tokens, and the other columns of its row.

    `response_tokens` is the demonstration, with its end token, in supervised data; None elsewhere.
    In preference pairs it is the better response, and `rejected_tokens` the worse. Where a response
    has several turns, `response_gaps` and `rejected_gaps` say which of its tokens are of others
    than the assistant, and not learned: where each run of them begins and ends, flat, ascending,
    none at its end.

    `given` is what the row has as its prompt, a text or messages, where `text` is what a chat
    template made of it; None where the row has `text`.
    """

    prompt_id: int
    text: str
    tokens: tuple[int, ...]
    columns: Mapping[str, object] = field(default_factory=dict)
    response_tokens: tuple[int, ...] | None = None
    rejected_tokens: tuple[int, ...] | None = None
    response_gaps: tuple[int, ...] = ()
    rejected_gaps: tuple[int, ...] = ()
    given: Asked | None = None

    @property
    def asked(self) -> Asked:
        """What the row has as its prompt: rewards and environments get it."""
        return self.text if self.given is None else self.given

    @property
    def columns_with_text(self) -> dict[str, object]:
        """The other columns, and the text that the model was given as `rendered_prompt`."""
        return {**self.columns, RENDERED_PROMPT: self.text}


@dataclass(frozen=True)
class Rollout:
    """One finished response: tokens (with the end token, if it came) and log-probabilities.

    Where an environment takes part, `observed` says which of the tokens it gave; their
    log-probabilities are 0. None: all were sampled. `experts` are those that the engine chose, as
    contracts/routed_experts.py has them; None: they were not asked for. `versions` are runs of
    (version, number of tokens), where more than one version of the weights made the tokens; empty:
    all are of `version`.
    """

    sample_id: int
    prompt: Prompt
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    version: int
    observed: tuple[bool, ...] | None = None
    experts: Experts | None = field(default=None, compare=False)
    versions: tuple[tuple[int, int], ...] = ()


def in_gaps(num: int, gaps: Sequence[int]) -> tuple[bool, ...]:
    """Returns of each of `num` tokens of a response whether it is in a gap, as of Prompt."""
    found = [False] * num
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        found[begin:end] = [True] * (end - begin)
    return tuple(found)
