"""The five verdicts of `hybridrl check --mismatch` and their criteria.

All functions are pure and use CPU tensors; diagnose.py computes their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.engine import Completion, SamplingParams
from hybridrl.training.mismatch import Bounds

JUMP = 10.0  # a stage stands out if its difference is this many times that of the previous stage
MAX_OUTSIDE = (
    0.01  # fraction of sampled tokens that may be outside top_p and top_k, because of rounding
)
LOOK_AT = {
    "embedding": "the vocabulary and a scale of the embedding",
    "attention": "rope (theta, scaling), head sizes, query and key norms and biases",
    "mlp": "the activation and the sizes of the MLP",
    "norm": "the epsilon and the kind of the norm",
    "logits": "the output head: tied weights, scaling, a soft cap",
}


@dataclass(frozen=True)
class Finding:
    """A verdict: a sentence with the compared numbers, advice if they disagree, and the details."""

    agrees: bool
    found: str
    remedy: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A response from an engine to prompt number `prompt`."""

    prompt: int
    is_greedy: bool
    completion: Completion


Placed = Sequence[Sequence[tuple[Answer, slice]]]
"""For each replica, its answers, each with the slice of the trainer's columns for its tokens."""


@dataclass(frozen=True)
class Tokenwise:
    """The trainer's results for every response token, each (T,).

    Args:
        cut: Log-probability of the response's token under the engine's truncated sampling
            distribution.
        plain: Log-probability of the response's token as the loss uses it: with temperature, and
            without truncation unless the run replays it.
    """

    choice: Tensor
    best: Tensor
    own: Tensor
    cut: Tensor
    plain: Tensor


def judge_tokens(
    layout: RolloutLayout,
    by_rank: Sequence[Sequence[Answer]],
    placed: Placed,
    tokenwise: Tokenwise,
    tie: float,
) -> Finding:
    """Compares tokens between the ranks of each replica, and greedy tokens with the trainer's
    choice.

    `tie` is the largest difference in nats that counts as a tie; `greedy` in the details contains
    the first replica's greedy answers, ordered by prompt.
    """
    others: list[str] = []
    drawn = [[answer.completion.tokens for answer in answers] for answers in by_rank]
    for rank in layout.ranks:
        first = layout.assignment.index((layout.place(rank)[0], 0))
        if drawn[rank] != drawn[first]:
            others.append(
                f"rank {rank} sampled different tokens than rank {first} of the same replica"
            )
    num_greedy = num_ties = 0
    for replica, answers in enumerate(placed):
        for answer, span in (pair for pair in answers if pair[0].is_greedy):
            tokens = torch.tensor(answer.completion.tokens)
            is_other = tokens != tokenwise.choice[span]
            gap = tokenwise.best[span] - tokenwise.own[span]
            num_greedy += len(tokens)
            num_ties += int((is_other & (gap <= tie)).sum())
            for place in (is_other & ~(gap <= tie)).nonzero().flatten().tolist():
                others.append(
                    f"at position {place} of the response to prompt {answer.prompt}, replica "
                    f"{replica} chose token {int(tokens[place])} and the trainer "
                    f"{int(tokenwise.choice[span][place])}, which is {float(gap[place]):.2g} nats "
                    f"likelier"
                )
    counts = {"num_greedy": num_greedy, "num_near_ties": num_ties, "num_others": len(others)}
    greedy = (one.completion for one, _ in placed[0] if one.is_greedy)
    answers_of_first = [{"tokens": [*one.tokens], "logps": [*one.logps]} for one in greedy]
    details = {**counts, "greedy": answers_of_first}
    if others:
        found = f"{len(others)} differences in {num_greedy} greedy tokens; first: {others[0]}"
        return Finding(False, found, "See the checks below for the cause.", details)
    size = f"{layout.replicas} x tp {layout.tp}"
    found = f"{num_greedy} greedy tokens of {size} match the trainer's; {num_ties} near ties"
    return Finding(True, found, details=details)


def judge_sampling(
    placed: Placed,
    tokenwise: Tokenwise,
    sampling: SamplingParams,
    bound: float,
    run_replays: bool = False,
) -> Finding:
    """Judges how much of the difference, at most `bound` nats, is due to truncated sampling.

    If the run replays the truncation, at most `bound` nats may remain.
    """
    sampled = [pair for answers in placed for pair in answers if not pair[0].is_greedy]
    cut, plain = (
        torch.cat([column[s] for _, s in sampled]) for column in (tokenwise.cut, tokenwise.plain)
    )
    is_inside = cut.isfinite()
    same = float(_gaps(sampled, tokenwise.cut)[is_inside].abs().mean())
    raw = float(_gaps(sampled, tokenwise.plain).abs().mean())
    share = float((cut - plain)[is_inside].abs().mean())
    outside = int((~is_inside).sum())
    details = {
        "diff_mean": raw,
        "diff_mean_with_same_truncation": same,
        "from_truncation": share,
        "num_outside": outside,
        "num_sampled": len(cut),
        "bound": bound,
    }
    knobs = f"temperature={sampling.temperature:g} top_p={sampling.top_p:g} top_k={sampling.top_k}"
    found = f"at {knobs} {len(cut)} sampled tokens differ by {raw:.2g} nats on average; "
    if sampling.top_p == 1 and not sampling.top_k:
        return Finding(True, found + "there is no truncation", details=details)
    if run_replays:
        found += f"the run trains over the tokens that could be drawn (allowed {bound:g})"
        cause = "Wrong tokens were recorded or replayed, if the numerics below agree."
        return Finding(raw <= bound, found, "" if raw <= bound else cause, details)
    found += (
        f"truncation causes {share:.2g} of this (allowed {bound:g}); with the same truncation in "
        f"the trainer the difference is {same:.2g}; {outside} tokens are outside the trainer's "
        f"support"
    )
    if share <= bound and outside <= MAX_OUTSIDE * len(cut):
        return Finding(True, found, details=details)
    remedy = (
        "Set rollout.top_p=1 rollout.top_k=0, because the trainer does not truncate, or "
        "algorithm.sampling_replay=rollout."
    )
    return Finding(False, found, remedy, details)


def judge_routing(
    placed: Placed, tokenwise: Tokenwise, own_T: Tensor, bound: float, run_replays: bool
) -> Finding:
    """Judges how much of the difference is due to a different choice of experts. `tokenwise` has
    results with the experts that the engine chose, and `own_T` log-probabilities with the trainer's
    own.
    """
    greedy = [pair for answers in placed for pair in answers if pair[0].is_greedy]
    own, replayed = (float(_gaps(greedy, column).abs().mean()) for column in (own_T, tokenwise.own))
    details = {"diff_mean": own, "diff_mean_with_engines_experts": replayed, "bound": bound}
    found = (
        f"greedy tokens differ by {own:.2g} nats on average with the trainer's own experts, by "
        f"{replayed:.2g} with the engine's (allowed {bound:g}); the run trains with "
        f"{'those of the engine' if run_replays else 'its own'}"
    )
    if (replayed if run_replays else own) <= bound:
        return Finding(True, found, details=details)
    remedy = "Set algorithm.router_replay=rollout." if replayed <= bound else ""
    return Finding(False, found, remedy or "See the checks above for the cause.", details)


def mean_difference(placed: Placed, tokenwise: Tokenwise) -> tuple[float, int]:
    """Returns the largest mean absolute difference of any replica, and this replica's number."""
    totals = []
    for replica, answers in enumerate(placed):
        gaps = torch.cat(
            [
                _gaps([pair], tokenwise.own if pair[0].is_greedy else tokenwise.cut)
                for pair in answers
            ]
        )
        totals.append((float(gaps[gaps.isfinite()].abs().mean()), replica))
    return max(totals)


def judge_numerics(
    table: Sequence[Mapping[str, Any]],
    total: float,
    replica: int,
    bounds: Bounds,
    error_floor: float | None = None,
) -> Finding:
    """Names the first stage whose difference stands out, and judges the final difference in nats.

    Args:
        table: `stage` and `difference` (relative RMS) of every stage, in order; with a reference
            also `trainer_error` and `engine_error`.
        error_floor: Error of one side, compared with the reference, up to which a stage does not
            stand out; None for `bounds.residual`.
    """
    floor = bounds.residual if error_floor is None else error_floor
    first = standing_out([(row["stage"], row["difference"]) for row in table], bounds.residual)
    wrong = {who: _first_error(table, who, floor) for who in ("trainer", "engine")}
    details = {
        "first": first,
        "first_errors": wrong,
        "diff_mean": total,
        "bound": bounds.warn,
        "residual_bound": bounds.residual,
        "stages": list(table),
    }
    found = (
        f"log-probabilities differ by {total:.2g} nats on average in replica {replica} (allowed "
        f"{bounds.warn:g}); "
    )
    for who, stage in wrong.items():
        if stage is not None:
            found += f"the {who} differs from transformers, beginning after {stage}; "
    stage = first or wrong["trainer"] or wrong["engine"]
    if stage is not None:
        remedy = f"Compare config.json and the engine: {LOOK_AT[stage.split('.')[-1]]}."
        standing = f"{first} is the first stage that stands out"
        found += standing if first else "engine and trainer agree with each other"
        return Finding(False, found, remedy, details)
    largest = max(table, key=lambda row: row["difference"])
    found += f"no stage stands out; {largest['stage']} differs most: {largest['difference']:.2g}"
    agrees = total <= bounds.warn
    remedy = "" if agrees else "Rounding errors may accumulate: try model.dtype=float32."
    return Finding(agrees, found, remedy, details)


def _first_error(table: Sequence[Mapping[str, Any]], who: str, floor: float) -> str | None:
    errors = [(row["stage"], row[f"{who}_error"]) for row in table if f"{who}_error" in row]
    return standing_out(errors, floor)


def relative_rms(found_ND: Tensor, expected_ND: Tensor) -> float:
    """Returns the root mean square of the relative differences between corresponding rows.

    Each row's difference is divided by that row's norm, because the first token's norm is often 100
    times larger and would dominate.
    """
    difference_N = (found_ND - expected_ND).double().norm(dim=-1)
    ratio_N = difference_N / expected_ND.double().norm(dim=-1).clamp_min(1e-30)
    return float(ratio_N.square().mean().sqrt())


def standing_out(differences: Sequence[tuple[str, float]], floor: float) -> str | None:
    """Returns the first stage whose difference exceeds both `floor` and JUMP times the previous
    one's. A difference that exceeds the floor after gradual growth does not stand out.
    """
    before = 0.0
    for stage, difference in differences:
        if not difference <= max(floor, JUMP * before):
            return stage
        before = difference
    return None


def _gaps(answers: Sequence[tuple[Answer, slice]], column: Tensor) -> Tensor:
    parts = [torch.tensor(one.completion.logps) - column[span] for one, span in answers]
    return torch.cat(parts).double()
