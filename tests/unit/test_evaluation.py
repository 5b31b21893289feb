"""An evaluation: the weighted sum is the reward, the score of a named scorer the accuracy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.cli.main import evaluation_lines
from hybridrl.config.load import load_config_dict
from hybridrl.config.reward import RewardConfig
from hybridrl.config.rules import check
from hybridrl.errors import ConfigError, UserError
from hybridrl.loop.evaluate import evaluate, summarized
from hybridrl.rollout.engine import SamplingParams


def batch(weights: dict[str, float], **scores: list[float]) -> Any:
    parts = {name: torch.tensor(values) for name, values in scores.items()}
    total = sum(weights[name] * part for name, part in parts.items())
    return SimpleNamespace(
        reward_parts=parts, reward_B=total, num_samples=len(next(iter(parts.values())))
    )


def section(accuracy: str | None = None, **functions: tuple[str, float]) -> RewardConfig:
    scorers = {name: {"function": f, "weight": w} for name, (f, w) in functions.items()}
    return RewardConfig.model_validate({"functions": scorers, "accuracy": accuracy})


def test_of_two_scorers_the_one_that_judges_answers_is_the_accuracy() -> None:
    config = section(correct=("gsm8k", 1.0), form=("regex", 0.1))
    scored = batch({"correct": 1.0, "form": 0.1}, correct=[1, 1, 0.0], form=[1, 1, 1.0])
    found = summarized(scored, 3, config)
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.reward == pytest.approx(2 / 3 + 0.1)
    assert found.metrics() == pytest.approx(
        {"eval/accuracy": 2 / 3, "eval/reward": 2 / 3 + 0.1, "eval/correct": 2 / 3, "eval/form": 1}
    )
    lines = evaluation_lines(vars(found))
    assert lines[0] == "accuracy 0.6667 on 3 prompts" and "form 1.0000" in lines[1]


def test_two_judges_of_weight_1_are_not_added_up() -> None:
    config = section(a=("exact_match", 1.0), b=("math", 1.0))
    scored = batch({"a": 1.0, "b": 1.0}, a=[1, 1.0], b=[1, 1.0])
    found = summarized(scored, 2, config)
    assert found.accuracy is None and found.reward == 2 and "reward.accuracy" in found.note
    assert "eval/accuracy" not in found.metrics() and found.record() == {"reward": 2.0}
    assert evaluation_lines(vars(found))[0].startswith("no accuracy: ")
    named = section("b", a=("exact_match", 1.0), b=("math", 1.0))
    assert summarized(scored, 2, named).accuracy == 1


def test_a_score_outside_0_to_1_is_no_accuracy() -> None:
    scored = batch({"own:f": 1.0}, **{"own:f": [0.5, 1.5]})
    found = summarized(scored, 2, RewardConfig(function="own:f"))
    assert found.accuracy is None and found.reward == 1 and "1.5" in found.note
    config = section("a", a=("own:f", 1.0), b=("length", 1.0))
    scored = batch({"a": 1, "b": 1}, a=[0.5, -2.0], b=[0, 0.0])
    with pytest.raises(UserError, match="reward.accuracy: got a, which gave a score of -2"):
        summarized(scored, 2, config)


def test_responses_without_a_score_are_told_of() -> None:
    found = summarized(batch({"f": 1.0}, f=[1.0]), 4, RewardConfig(function="own:f"))
    assert found.metrics()["eval/scored_share"] == 0.25
    assert "of 4 responses 1 have a score" in evaluation_lines(vars(found))


def test_no_prompts_is_a_matter_of_the_data_not_of_the_reward() -> None:
    with pytest.raises(UserError, match="data.eval_prompts"):
        evaluate(None, [], RewardConfig())  # type: ignore[arg-type]


def test_rules_of_the_accuracy() -> None:
    content = {
        "run": {"name": "a"},
        "model": {"init": "m"},
        "algorithm": {"name": "grpo"},
        "data": {"eval_prompts": "e.jsonl"},
        "steps": {"samples_per_prompt": 2, "stop_at_accuracy": 0.9},
        "reward": {"functions": {"a": {"function": "exact_match"}, "b": {"function": "math"}}},
    }
    found = [one.name for one in check(load_config_dict(content), 1)]
    assert "steps.stop_at_accuracy" in found
    named = load_config_dict(content, ["reward.accuracy=b"])
    assert "steps.stop_at_accuracy" not in [one.name for one in check(named, 1)]
    for wrong in ("reward.accuracy=c", "reward.functions={}"):
        with pytest.raises(ConfigError, match="accuracy: "):
            load_config_dict(content, [wrong, "reward.accuracy=c"])


def test_an_evaluation_draws_greedily_unless_asked_otherwise() -> None:
    asked = []

    class Sampler:
        sampling = SamplingParams(temperature=0.7, max_new_tokens=5)

        def generate(self, prompts: Any, **given: Any) -> None:
            asked.append((given["sampling"], given["samples_per_prompt"]))

        def score(self, _: None) -> Any:
            return batch({"right": 1.0}, right=[1.0])

    for temperature in ({}, {"temperature": 0.3}):
        evaluate(Sampler(), [None], section(right=("exact_match", 1.0)), **temperature)  # type: ignore[arg-type, list-item]
    assert [(drawn.temperature, count) for drawn, count in asked] == [(0.0, 1), (0.3, 1)]
    assert all(drawn.max_new_tokens == 5 for drawn, _ in asked)
