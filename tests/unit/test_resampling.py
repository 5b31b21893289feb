"""Groups of equal rewards give way to further prompts: which, how often, and what is counted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
import torch

from hybridrl.algorithms import make_algorithm
from hybridrl.config.schema import GrpoConfig
from hybridrl.contracts.batch import Producer, Prompt, Rollout, RolloutBatch, ScoredBatch
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.resampling import (
    TRUNCATED,
    UNIFORM,
    UniformGroupsWarning,
    replace_uniform_groups,
)

HERE = Producer.here("test")
NUM_SAMPLES = 3


class Responses:
    """Answers prompts: `informative` ones get unequal rewards, `lost` ones no scored response."""

    def __init__(self, informative: set[int], lost: Collection[int] = ()) -> None:
        self.informative, self.lost = informative, lost
        self.asked: list[tuple[list[int], int]] = []

    def __call__(self, prompts: Sequence[Prompt], first_group: int) -> ScoredBatch | None:
        self.asked.append(([prompt.prompt_id for prompt in prompts], first_group))
        prompts = [prompt for prompt in prompts if prompt.prompt_id not in self.lost]
        if not prompts:
            return None
        rollouts, groups, rewards = [], [], []
        for group, prompt in enumerate(prompts, first_group):
            for sample in range(NUM_SAMPLES):
                number = group * NUM_SAMPLES + sample
                rollouts.append(Rollout(number, prompt, (1, 2), (-1.0, -1.0), "stop", 0))
                groups.append(group)
                rewards.append(float(prompt.prompt_id in self.informative and sample == 0))
        batch = RolloutBatch.from_rollouts(rollouts, groups, HERE)
        reward_B = torch.tensor(rewards)
        return batch.scored(reward_B, {"a": reward_B, "b": -reward_B}, HERE)


def run(
    informative: set[int],
    max_resampling: int,
    name: str = "grpo",
    num: int = 4,
    lost: Collection[int] = (),
):
    source = PromptSource([Prompt(i, f"{i}", (i + 1,)) for i in range(100)], seed=0, shuffle=False)
    respond = Responses(informative, lost)
    algorithm = make_algorithm(GrpoConfig(name=name, max_resampling=max_resampling))
    first = respond(source.take(num), 0)
    batch, metrics = replace_uniform_groups(algorithm, first, source.take, respond, num)
    return batch, metrics, respond.asked[1:], source


def prompts_of(batch: ScoredBatch) -> list[int]:
    return [prompt.prompt_id for prompt in batch.prompts[::NUM_SAMPLES]]


def test_uninformative_groups_are_replaced_until_there_are_none() -> None:
    batch, metrics, asked, source = run({0, 3, 5, 8}, 10)
    assert asked == [([4, 5], 4), ([6], 6), ([7], 7), ([8], 8)]
    assert prompts_of(batch) == [0, 3, 5, 8]
    assert batch.sample_ids_B.tolist() == sorted(batch.sample_ids_B.tolist())
    assert batch.group_B.unique().tolist() == [0, 3, 5, 8]
    assert metrics == {
        "reward/uniform_groups": 0.0,
        "generate/resampled_groups": 5.0,
        "generate/resampling_rounds": 4.0,
    }
    assert source.take(1)[0].prompt_id == 9, "nothing is skipped and nothing taken twice"


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_rounds_are_bounded_and_what_stays_is_counted(rounds: int) -> None:
    batch, metrics, asked, _ = run({1}, rounds)
    assert len(asked) == rounds
    assert prompts_of(batch) == [0, 1, 2, 3], "a full batch all the same"
    assert metrics["reward/uniform_groups"] == 0.75
    assert metrics["generate/resampled_groups"] == 3 * rounds


def test_a_round_without_scores_brings_nothing_and_ends_nothing() -> None:
    batch, metrics, asked, source = run({0, 3, 8}, 3, lost=range(4, 8))
    # Of the second round none is left, of the third prompt 8 alone.
    assert asked == [([4, 5], 4), ([6, 7], 6), ([8, 9], 8)]
    assert prompts_of(batch) == [0, 2, 3, 8]
    assert metrics["generate/resampled_groups"] == 6.0
    assert metrics["generate/resampling_rounds"] == 3.0
    assert metrics["reward/uniform_groups"] == 0.25


def test_a_sum_of_unequal_parts_is_informative_for_gdpo_alone() -> None:
    source = PromptSource([Prompt(i, "", (1,)) for i in range(9)], seed=0, shuffle=False)
    batch = Responses({0, 1})(source.take(2), 0)
    batch = batch.with_parts({"b": torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])})
    flat = replace(batch, reward_B=torch.ones(6))
    lost = [
        make_algorithm(GrpoConfig(name=n)).uninformative(flat).tolist() for n in ("grpo", "gdpo")
    ]
    assert lost == [[True] * 6, [False] * 6]


def steps_of(share: float, truncated: float = 0.0) -> dict[str, float]:
    return {UNIFORM: share, TRUNCATED: truncated, "reward/mean": 0.25}


def test_ten_uniform_steps_in_a_row_are_a_warning_that_says_what_to_do() -> None:
    warning = UniformGroupsWarning()
    told = {step: warning.text(step, steps_of(1.0)) for step in range(1, 10)}
    assert [step for step, text in told.items() if text] == [1]
    assert warning.text(10, steps_of(0.9)) is None, "the row ends"
    told = {step: warning.text(step, steps_of(1.0)) for step in range(11, 132)}
    assert [step for step, text in told.items() if text] == [20, 70, 120]
    assert told[20] is not None and told[20].startswith("warning: step 20: all advantages")
    for part in ("10 steps in a row", "reward/mean is 0.25", "rollouts/", "data.prompts"):
        assert part in told[20]
    for key in ("rollout.temperature", "steps.samples_per_prompt", "algorithm.max_resampling"):
        assert key in told[20]
    assert told[70] is not None and "60 steps in a row" in told[70]


def test_responses_that_are_cut_off_come_first_where_rewards_are_flat() -> None:
    warning = UniformGroupsWarning()
    for step in range(1, 11):
        said = warning.text(step, steps_of(1.0, truncated=0.94))
        if step in (1, 10):
            kind = "warning: step" if step == 10 else "step"
            start = f"{kind} {step}: 94% of the responses were cut off at rollout.max_new_tokens"
            assert said is not None and said.startswith(start)
    said = UniformGroupsWarning().text(1, steps_of(1.0, truncated=0.5))
    assert said is not None and "cut off" not in said


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"environment/truncated_tokens": 0.0, "environment/truncated_turns": 0.0}, None),
        (
            {"environment/truncated_tokens": 0.1, "environment/truncated_turns": 0.9},
            "90% of the responses were cut off at environment.max_turns",
        ),
        (
            {"agent/truncated_tokens": 0.8, "agent/truncated_turns": 0.2},
            "80% of the responses were cut off at a limit of tokens",
        ),
    ],
)
def test_responses_of_several_turns_are_cut_off_at_the_limit_that_ended_them(
    counts: dict[str, float], expected: str | None
) -> None:
    """Responses whose environment fails are unfinished, too, but no limit cut them off."""
    said = UniformGroupsWarning().text(1, {**steps_of(1.0, truncated=1.0), **counts})
    assert said is not None and "cut off at rollout.max_new_tokens" not in said
    assert ("cut off" not in said) if expected is None else expected in said
