"""Rows of training data from an agent's session, and which of them are trained. No torch.

A row is one path from the first prompt of a conversation to its last turn; branches are several
rows, which share tokens at the beginning. Invariant: `trained_once` returns rows in which every
sampled token is trained exactly once, in the earliest row that contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.prompts import Content
from hybridrl.errors import UserError
from hybridrl.rollout.engine import FinishReason, Versions

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Budgets:
    """Limits of a session; None means no limit.

    `max_row_tokens` bounds a prompt and its turn, `max_sampled_tokens` all turns together.
    """

    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_sampled_tokens: int | None = None
    max_row_tokens: int | None = None


@dataclass(frozen=True)
class Span:
    """Sampled tokens of one turn in a row, which begin at index `start` of `Row.tokens`.

    `num_tokens` is one less than the turn has if the chat template replaced its end token.
    """

    turn: int
    start: int
    num_tokens: int


@dataclass(frozen=True)
class Row:
    """One path of a conversation, as training receives it.

    Args:
        prompt, tokens: Token ids before the first sampled token, and all later ones.
        logps: Log-probability with which each of `tokens` was sampled; 0 for tokens that were not
            sampled.
        observed: For each of `tokens`, whether it is not trained: it was not sampled, or another
            row trains it.
        versions: Runs (version, number of tokens) of `tokens`. Tokens that were not sampled belong
            to the run of the preceding turn.
        contents: Images, at their places among the tokens of `prompt` and `tokens`.
        messages, tools: Conversation, ending with the last turn, and the tools that the client
            offered; empty if it sent token ids.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    observed: tuple[bool, ...]
    versions: Versions
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    blobs: Blobs = field(default_factory=dict, compare=False)
    contents: tuple[Content, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    text: str = ""

    @property
    def num_turns(self) -> int:
        return len(self.spans)

    @property
    def num_trained(self) -> int:
        return self.observed.count(False)


@dataclass(frozen=True)
class SessionResult:
    """Result of a session.

    Args:
        rows: Rows to train on, in the order in which their last turns finished.
        counts: Number of events by name: `malformed_calls`, `aborted_turns`, `replayed_requests`,
            `undelivered_turns`, `conversations`, `replaced_ends`, `refused_requests`.
    """

    sample_key: int
    row: Any
    rows: tuple[Row, ...]
    num_turns: int
    counts: Mapping[str, int] = field(default_factory=dict)


Picker = Callable[[Sequence[Row]], Sequence[Row]]
"""Returns the rows to train on, a subset of the given rows. Before picking, every row trains all of
its sampled tokens.
"""


def pick_all(rows: Sequence[Row]) -> Sequence[Row]:
    return rows


def pick_last(rows: Sequence[Row]) -> Sequence[Row]:
    return rows[-1:]


def pick_longest(rows: Sequence[Row]) -> Sequence[Row]:
    """Returns the row with the most sampled tokens; the earliest of several."""
    return [max(rows, key=lambda row: row.num_trained)] if rows else []


PICKERS: dict[str, Picker] = {"all": pick_all, "last": pick_last, "longest": pick_longest}


def picked(rows: Sequence[Row], picker: Picker) -> tuple[Row, ...]:
    """Returns the rows that `picker` chooses, each token trained once. Raises UserError."""
    places = {id(row): place for place, row in enumerate(rows)}
    found = list(picker(rows))
    if strange := [row for row in found if id(row) not in places]:
        raise UserError(
            "agent.rows",
            f"a function that returned {type(strange[0]).__name__} objects that it was not given",
            "a function that returns some of the rows that it receives, unchanged",
            "Return the rows themselves.",
        )
    chosen = {places[id(row)] for row in found}
    return trained_once([row for place, row in enumerate(rows) if place in chosen])


def trained_once(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Marks tokens that an earlier row trains as observed; drops rows that train nothing."""
    num_trained: dict[int, int] = {}  # number of leading tokens of each turn that are trained
    kept = []
    for row in rows:
        observed = list(row.observed)
        for span in row.spans:
            done = min(num_trained.get(span.turn, 0), span.num_tokens)
            observed[span.start : span.start + done] = [True] * done
            num_trained[span.turn] = max(num_trained.get(span.turn, 0), span.num_tokens)
        if not all(observed):
            pairs = zip(row.logps, observed, strict=True)
            logps = tuple(0.0 if is_observed else logp for logp, is_observed in pairs)
            kept.append(replace(row, logps=logps, observed=tuple(observed)))
    return tuple(kept)
