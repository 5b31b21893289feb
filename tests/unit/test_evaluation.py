"""An evaluation: the weighted sum is the reward, the score of a named scorer the accuracy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from command_line import QUICKSTART

from hybridrl.cli import eval as eval_command
from hybridrl.cli.eval import (
    evaluated_config,
    evaluation_text,
    template_warning,
    untrained_warning,
)
from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.identity import check_run_folder, run_folder
from hybridrl.config.load import load_config_dict, to_yaml
from hybridrl.config.reward import RewardConfig
from hybridrl.config.rules import check, without_training
from hybridrl.errors import ConfigError, UserError
from hybridrl.loop.evaluate import EvaluationSet, evaluate, summarized
from hybridrl.rollout.engine import SamplingParams


def batch(weights: dict[str, float], samples: int = 1, **scores: list[float]) -> Any:
    parts = {name: torch.tensor(values, dtype=torch.float32) for name, values in scores.items()}
    total = sum(weights[name] * part for name, part in parts.items())
    num = len(next(iter(parts.values())))
    ids_B = torch.arange(num)
    columns = {"sample_ids_B": ids_B, "group_B": ids_B // samples}
    made = SimpleNamespace(reward_parts=parts, reward_B=total, num_samples=num, **columns)
    made.by_sample = lambda: made
    return made


def lines_of(found: Any) -> list[str]:
    others = {"validation": {}, "checkpoint": None, "model": "m"}
    return evaluation_text({**found.as_json(), **others}).splitlines()


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
        {
            "eval/accuracy": 2 / 3,
            "eval/accuracy_stderr": 1 / 3,
            "eval/reward": 2 / 3 + 0.1,
            "eval/correct": 2 / 3,
            "eval/form": 1,
        }
    )
    assert {"correct", "form"} < found.record().keys()  # also before the first step
    lines = lines_of(found)
    assert lines[0] == "accuracy 0.6667 ± 0.3333 on 3 prompts" and "form 1.0000" in lines[1]


def test_a_score_outside_0_to_1_is_no_accuracy() -> None:
    scored = batch({"own:f": 1.0}, **{"own:f": [0.5, 1.5]})
    found = summarized(scored, 2, RewardConfig(function="own:f"))
    assert found.accuracy is None and found.reward == 1 and "1.5" in found.note
    config = section("a", a=("own:f", 1.0), b=("length", 1.0))
    scored = batch({"a": 1, "b": 1}, a=[0.5, -2.0], b=[0, 0.0])
    with pytest.raises(UserError, match="reward.accuracy: got a, which gave a score of -2"):
        summarized(scored, 2, config)


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


class Sampler:
    """Scores what it is told to, and keeps what was asked."""

    sampling = SamplingParams(temperature=0.7, max_new_tokens=5)

    def __init__(self, scored: Any) -> None:
        self.scored, self.asked = scored, list[Any]()

    def generate(self, prompts: Any, **given: Any) -> None:
        self.asked.append((given["sampling"], given["samples_per_prompt"]))

    def score(self, _: None) -> Any:
        return self.scored

    def num_errors(self) -> int:
        return 0


def test_an_evaluation_draws_greedily_unless_asked_otherwise() -> None:
    sampler: Any = Sampler(batch({"right": 1.0}, right=[1.0]))
    what = EvaluationSet([None], section(right=("exact_match", 1.0)))  # type: ignore[list-item]
    for temperature in ({}, {"temperature": 0.3}):
        evaluate(sampler, what, EvalConfig(**temperature))
    assert [(drawn.temperature, count) for drawn, count in sampler.asked] == [(0.0, 1), (0.3, 1)]
    assert all(drawn.max_new_tokens == 5 for drawn, _ in sampler.asked)
    evaluate(sampler, what, EvalConfig(max_new_tokens=9))
    assert sampler.asked[-1][0].max_new_tokens == 9


def test_several_samples_give_pass_at_k_and_a_vote_with_standard_errors() -> None:
    config = RewardConfig(function="exact_match")
    scores = [1, 0, 1, 0, 0, 0.0]  # of two prompts
    scored = batch({"exact_match": 1.0}, 3, exact_match=scores)
    answers = {0: "7", 1: "8", 2: "7", 3: "1", 4: None, 5: None}
    found = summarized(scored, 2, config, 3, (1, 2), answers)
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.accuracy_stderr == pytest.approx(1 / 3)  # of 2/3 and 0
    assert found.pass_at[1].value == pytest.approx(found.accuracy)
    assert found.pass_at[2] == pytest.approx((0.5, 0.5))  # 1 and 0: no pair of the first has none
    assert found.majority == pytest.approx((0.5, 0.5))
    assert found.metrics()["eval/pass_at_2_stderr"] == 0.5
    table = lines_of(found)[-2].split()
    assert (
        table[:5] == ["held-out", "prompts", "2", "3", "0.3333"] and "pass@2" in lines_of(found)[-3]
    )
    few = summarized(batch({"exact_match": 1.0}, 3, exact_match=scores[:4]), 2, config, 3, (2,))
    assert (
        few.pass_at[2] == (1.0, None) and few.majority is None
    )  # 1 response of the second is left


def test_rules_of_the_section_eval() -> None:
    content: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"init": "m"},
        "algorithm": {"name": "sft"},
        "steps": {"eval_every": 5},
    }

    def wrong(*overrides: str) -> list[str]:
        return [one.name for one in check(load_config_dict(content, overrides), 1)]

    one_set = "eval.sets={s: {form: gsm8k, path: a.jsonl}}"
    assert "steps.eval_every" in wrong() and "steps.eval_every" not in wrong(one_set)
    assert "eval.samples_per_prompt" in wrong("eval.samples_per_prompt=2")
    sampled = ("eval.samples_per_prompt=2", "eval.temperature=0.7")
    assert "eval.samples_per_prompt" not in wrong(*sampled)
    assert "eval.pass_k" in wrong(*sampled, "eval.pass_k=[1,3]")
    assert "eval.pass_k" not in wrong(*sampled, "eval.pass_k=2")
    assert "eval.sets" in wrong("eval.sets={exact_match: {form: gsm8k, path: a.jsonl}}")
    served = "eval.sets={s: {form: prompts, path: a, scorer: {function: environment}}}"
    assert "eval.sets.s.scorer.function" in wrong(served)
    for bad in ("eval.sets={s: {form: gsm8k}}", "eval.sets={s/t: {form: gsm8k, path: a}}"):
        with pytest.raises(ConfigError, match="eval"):
            load_config_dict(content, [bad])
    long = ("eval.max_new_tokens=5000", "rollout.engine=vllm")
    shape = {"max_position_embeddings": 1024}
    found = [one.name for one in check(load_config_dict(content, long), 1, shape)]
    assert "rollout.max_new_tokens" in found


def test_a_folder_that_is_no_model_is_refused_with_what_to_give(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "checkpoints" / "step_9", Path("organisation/model")):
        with pytest.raises(UserError, match="the folder of a run"):
            evaluated_config(source, [])
    (tmp_path / "config.json").write_text("{}")
    config, found = evaluated_config(tmp_path, ["eval.temperature=0.5", "data.chat_template=true"])
    assert config.model.path == str(tmp_path) and config.eval.temperature == 0.5
    assert found is None and untrained_warning(config, tmp_path) is None
    told, _ = evaluated_config(tmp_path, ["rollout.temperature=0.3"])
    assert told.eval.temperature == 0.3


def test_a_run_and_its_checkpoints_are_evaluated_by_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run has been moved since it was trained."""
    monkeypatch.chdir(tmp_path)
    content = {"run": {"name": "old"}, "model": {"path": "base"}, "algorithm": {"name": "dpo"}}
    step = tmp_path / "moved" / "new" / "checkpoints" / "step_3"
    step.mkdir(parents=True)
    (tmp_path / "moved/new/config.yaml").write_text(to_yaml(load_config_dict(content)))
    sources = {"moved/new": None, "moved/new/checkpoints": None, str(step): step}
    for source, checkpoint in sources.items():
        config, found = evaluated_config(Path(source), ["eval.temperature=0.5"])
        assert run_folder(config) == Path("moved/new") and found == checkpoint
        assert config.algorithm.name == "dpo" and config.eval.temperature == 0.5
    assert untrained_warning(config, Path("moved/new")) is None
    # An export has the name of its checkpoint, and is a model.
    (export := tmp_path / "moved/new/exports/step_3").mkdir(parents=True)
    (export / "config.json").write_text("{}")
    assert evaluated_config(export, [])[0].model.path == str(export)
    step.rmdir()
    said = untrained_warning(config, Path("moved/new"))
    assert said is not None and "moved/new has no checkpoint, so the base model base" in said
    (lost := tmp_path / "lost" / "step_3").mkdir(parents=True)
    with pytest.raises(UserError, match="checkpoint without its run"):
        evaluated_config(lost, [])


def test_eval_of_a_run_without_a_checkpoint_warns_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def launch(arguments: list[str], world_size: int) -> int:
        started.append(arguments)
        return 0

    monkeypatch.setattr(eval_command, "launch_without_run", launch)
    monkeypatch.setattr(eval_command, "validate_evaluation", lambda *given: None)
    with pytest.raises(typer.Exit):
        eval_command.evaluate(QUICKSTART / "sft.yaml", [f"run.dir={tmp_path}"])
    said = capsys.readouterr().err
    assert said.startswith("WARNING: ") and "has no checkpoint" in said and len(started) == 1


def test_a_chat_models_export_warns_of_texts_until_it_is_said_what_they_are(
    tmp_path: Path,
) -> None:
    def warning(*overrides: str) -> str | None:
        return template_warning(evaluated_config(tmp_path, overrides)[0], tmp_path)

    (tmp_path / "config.json").write_text("{}")
    assert warning() is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert "data.chat_template=true" in (warning("eval.temperature=1") or "")
    assert warning("data.chat_template=true") is warning("data.chat_template=false") is None


def test_an_evaluation_ignores_what_training_alone_reads(tmp_path: Path) -> None:
    content = {
        "run": {"name": "a", "dir": str(tmp_path)},
        "model": {"init": "m"},
        "algorithm": {"name": "sft"},
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(to_yaml(load_config_dict(content)))
    other = ["steps.prompts_per_step=7", "steps.samples_per_prompt=4", "run.seed=3"]
    config = load_config_dict(content, other)
    broken = check(config, 1)
    assert "steps.samples_per_prompt" in [one.name for one in broken]
    assert without_training(broken) == []
    with pytest.raises(ConfigError, match="steps.prompts_per_step"):
        check_run_folder(config)
    check_run_folder(config, trains=False)
    with pytest.raises(ConfigError, match="model.init"):
        check_run_folder(load_config_dict({**content, "model": {"init": "o"}}), trains=False)
