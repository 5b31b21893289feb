"""Converts the turns of a session to rows of training data. No torch.

Invariant: a row's tokens are exactly the tokens that the engine received and sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridrl.agents.forest import Turn
from hybridrl.agents.samples import Row, Span


def rows_of(turns: Sequence[Turn]) -> tuple[Row, ...]:
    """Returns a row for each delivered turn that no turn continues with all tokens, in order."""
    dropped = undelivered(turns)
    kept = [turn for turn in turns if turn not in dropped]
    covered = {
        turn.parent
        for turn in kept
        if turn.parent is not None and turn.num_shared == turn.parent.num_tokens
    }
    return tuple(_row(turn) for turn in kept if turn not in covered)


def undelivered(turns: Sequence[Turn]) -> set[Turn]:
    """Returns the turns that no client received and no delivered turn continues."""
    continued: set[Turn | None] = set()
    dropped = set()
    for turn in reversed(turns):  # children come before their parents
        if turn.is_delivered or turn in continued:
            continued.add(turn.parent)
        else:
            dropped.add(turn)
    return dropped


def _row(leaf: Turn) -> Row:
    path = leaf.path()
    kept = [turn.num_shared for turn in path[1:]] + [leaf.num_tokens]
    tokens: list[int] = []
    logps: list[float] = []
    observed: list[bool] = []
    runs: list[list[int]] = []
    spans = []
    prompt: tuple[int, ...] = ()
    for turn, end in zip(path, kept, strict=True):
        if not runs:
            prompt += turn.context
        else:
            tokens += turn.context
            logps += [0.0] * len(turn.context)
            observed += [True] * len(turn.context)
            runs[-1][1] += len(turn.context)
        num = end - (turn.num_tokens - len(turn.completion.tokens))
        spans.append(Span(turn.number, len(tokens), num))
        tokens += turn.completion.tokens[:num]
        logps += turn.completion.logps[:num]
        observed += [False] * num
        _add_runs(runs, turn.completion.runs, num)
    request = leaf.request
    return Row(
        prompt=prompt,
        tokens=tuple(tokens),
        logps=tuple(logps),
        observed=tuple(observed),
        versions=tuple((version, count) for version, count in runs),
        finish_reason=leaf.completion.finish_reason,
        spans=tuple(spans),
        blobs=leaf.completion.blobs,
        messages=(*request.messages, leaf.message) if request and leaf.message else (),
        tools=request.tools if request else (),
        text=leaf.text,
    )


def _add_runs(runs: list[list[int]], added: Iterable[tuple[int, int]], num_tokens: int) -> None:
    for version, whole in added:
        count = min(whole, num_tokens)
        num_tokens -= count
        if not count:
            break
        if runs and runs[-1][0] == version:
            runs[-1][1] += count
        else:
            runs.append([version, count])
