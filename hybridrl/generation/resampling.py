"""Replaces uninformative groups with groups for further prompts (dynamic sampling).

DAPO, Yu et al. 2025, arXiv 2503.14476, sec. 3.2. A group is uninformative if all its rewards are
equal: its advantages are then 0. All ranks see the same rewards, so they replace the same groups
and choose the same new prompts. Groups that are still uninformative after the last round are kept,
so the number of groups in a step does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hybridrl.algorithms.base import GroupAlgorithm
from hybridrl.contracts.batch import Prompt, ScoredBatch
from hybridrl.generation.sample_tables import with_token_versions

UNIFORM = "reward/uniform_groups"
TRUNCATED = "response_tokens/truncated"
# Metrics of responses of several turns, and the limits that they count. TRUNCATED includes
# responses whose environment or program failed.
_OF_TURNS = {
    "environment/truncated_tokens": "a limit of tokens, such as rollout.max_new_tokens",
    "environment/truncated_turns": "environment.max_turns",
    "agent/truncated_tokens": "a limit of tokens, such as rollout.max_new_tokens",
    "agent/truncated_turns": "agent.max_turns",
}
UNIFORM_STEPS = 10  # consecutive uninformative steps before the second warning
WARN_EVERY_STEPS = 50

Take = Callable[[int], Sequence[Prompt]]
"""Returns the new prompts needed to complete the given number of further groups."""
Respond = Callable[[Sequence[Prompt], int], ScoredBatch | None]
"""Generates and scores the samples for prompts, given the first prompt's group number. Returns None
if no response has a score.
"""


def replace_uniform_groups(
    algorithm: GroupAlgorithm,
    batch: ScoredBatch,
    take: Take,
    respond: Respond,
    next_group: int,
) -> tuple[ScoredBatch, dict[str, float]]:
    """Replaces uninformative groups in at most `algorithm.max_resampling` rounds.

    If this is 0, they are only counted. A round without a scored response adds no groups. Returns
    the batch in ascending order of sample numbers, and the metrics `reward/uniform_groups` (share
    of uninformative groups), `generate/resampled_groups` (number of additional groups that were
    generated) and `generate/resampling_rounds`.
    """
    first_group, rounds = next_group, 0
    is_lost_B = algorithm.uninformative(batch)
    while rounds < algorithm.max_resampling and bool(is_lost_B.any()):
        lost = batch.group_B[is_lost_B].unique()
        new = respond(take(len(lost)), next_group)
        next_group, rounds = next_group + len(lost), rounds + 1
        good = [] if new is None else (~algorithm.uninformative(new)).nonzero()[:, 0].tolist()
        if new is not None and good:
            found = new.select(good)
            stays_B = ~torch.isin(batch.group_B, lost[: len(found.group_B.unique())])
            stays = stays_B.nonzero()[:, 0]
            batch = _merge([batch.select(stays), found] if len(stays) else [found])
        is_lost_B = algorithm.uninformative(batch)
    num_lost = len(batch.group_B[is_lost_B].unique())
    return batch, {
        UNIFORM: num_lost / len(batch.group_B.unique()),
        "generate/resampled_groups": float(next_group - first_group),
        "generate/resampling_rounds": float(rounds),
    }


def _merge(parts: Sequence[ScoredBatch]) -> ScoredBatch:
    if any(part.versions_T is not None for part in parts):
        parts = [with_token_versions(part) for part in parts]
    batch = ScoredBatch.concat(parts)
    if bool((batch.sample_ids_B.diff() < 0).any()):  # with a lag, an older group may finish later
        batch = batch.select(batch.sample_ids_B.argsort(stable=True))
    return batch


class UniformGroupsWarning:
    """Warns if no group of a step is informative: the first time, after ten such steps in a row,
    and then after every 50 more. If most responses were truncated, which is the most likely reason,
    the warning begins with their share.
    """

    def __init__(self) -> None:
        self._has_warned, self._in_a_row = False, 0

    def text(self, step: int, metrics: Mapping[str, float]) -> str | None:
        if metrics.get(UNIFORM) != 1:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        is_first, self._has_warned = not self._has_warned, True
        cut_off = _truncation_text(metrics)
        if self._in_a_row >= UNIFORM_STEPS:
            if (self._in_a_row - UNIFORM_STEPS) % WARN_EVERY_STEPS:
                return None
            return (
                f"warning: step {step}: {cut_off}all advantages have been 0 for "
                f"{self._in_a_row} steps in a row ({UNIFORM} is 1), and the policy learns nothing "
                f"from rewards. reward/mean is {metrics['reward/mean']:.3g}. Read responses and "
                "rewards in the run's rollouts/ folder. If all responses fail, use easier "
                "data.prompts, or fix the reward or the answer's format; if all succeed, use "
                "harder prompts. Raise rollout.temperature or steps.samples_per_prompt to get more "
                "varied responses, or set algorithm.max_resampling to replace groups whose "
                "rewards are all equal."
            )
        if not is_first:
            return None
        return (
            f"step {step}: {cut_off}all advantages are 0 ({UNIFORM} is 1), because no prompt has "
            "responses with different rewards. The policy learns nothing from rewards in this "
            "step. This message is not repeated"
        )


def _truncation_text(metrics: Mapping[str, float]) -> str:
    """Returns the beginning of the warning if most responses were truncated, else ""."""
    limits = {name: limit for name, limit in _OF_TURNS.items() if name in metrics}
    limits = limits or {TRUNCATED: "rollout.max_new_tokens"}
    name = max(limits, key=lambda name: metrics[name])
    if metrics[name] <= 0.5:
        return ""
    return (
        f"{metrics[name]:.0%} of the responses were cut off at {limits[name]}, most likely before "
        "their answer (raise it, or make responses end earlier); "
    )
