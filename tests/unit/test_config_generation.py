"""Options of generation: which engine has them, which break training, a model's own defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.generation import (
    declared_end_tokens,
    generation_rules,
    on_policy_rules,
    with_generation_config,
)
from hybridrl.config.hub import hub_names, with_names
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, ModelError
from hybridrl.rollout.common.settings import EngineSettings, usable_bytes
from hybridrl.rollout.registry import ENGINES


def config(algorithm: str = "grpo", model: str = "m", **rollout: Any) -> Config:
    return load_config_dict(
        {
            "run": {"name": "a"},
            "model": {"path": model},
            "algorithm": {"name": algorithm},
            "rollout": rollout,
        }
    )


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"engine": "scripted", "stop_strings": "x"}, "rollout.stop_strings"),
        ({"engine": "scripted", "repetition_penalty": 1.1}, "rollout.repetition_penalty"),
        ({"engine": "scripted", "min_new_tokens": 3}, "rollout.min_new_tokens"),
        ({"engine": "scripted", "presence_penalty": -0.5}, "rollout.presence_penalty"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "rollout.min_new_tokens"),
        ({"gpu_memory_share": 0.5}, "rollout.gpu_memory_share"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(rollout: dict[str, Any], key: str) -> None:
    (found,) = generation_rules(config(**rollout))
    assert found.name == key


def test_what_engines_can_do_is_taken() -> None:
    every: dict[str, Any] = {"min_new_tokens": 2, "presence_penalty": 1, "stop_strings": ["a", "b"]}
    assert not list(generation_rules(config(engine="hf", repetition_penalty=1.2, **every)))
    assert not list(generation_rules(config(engine="vllm", gpu_memory_share=0.5, **every)))
    assert not list(generation_rules(config(engine="sglang", repetition_penalty=0.9, **every)))
    found = config(engine="vllm", **every)
    assert found.rollout.stop_strings == ("a", "b")
    environment = {"name": "calculator"}
    changed = found.model_copy(
        update={"environment": found.environment.model_copy(update=environment)}
    )
    assert [one.name for one in generation_rules(changed)] == ["rollout.stop_strings"]


@pytest.mark.parametrize("engine", [name for name, one in ENGINES.items() if one.penalizes])
@pytest.mark.parametrize("knob", ["min_new_tokens", "repetition_penalty", "presence_penalty"])
def test_what_changes_the_distribution_is_refused_in_training_on_samples(
    knob: str, engine: str
) -> None:
    (found,) = on_policy_rules(config(engine=engine, **{knob: 2}))
    assert found.name == f"rollout.{knob}" and "own distribution" in str(found)
    assert not list(on_policy_rules(config("sft", **{knob: 2}))), "only evaluation generates"
    assert not list(on_policy_rules(config(stop_strings=["x"]))), "ends tokens of the policy's own"


@pytest.mark.parametrize("value", [[""], [3], 5, {"a": 1}])
def test_stop_strings_are_texts(value: object) -> None:
    with pytest.raises(ConfigError, match="stop_strings"):
        config(stop_strings=value)


def test_a_generation_config_fills_what_is_not_set(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    content = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    file.write_text(json.dumps({**content, "eos_token_id": [5, 7], "do_sample": True}))
    asked = config(model=str(tmp_path), generation_config=True, top_p=0.95)
    found = with_generation_config(asked).rollout
    taken = found.temperature, found.top_p, found.top_k, found.repetition_penalty
    assert taken == (0.7, 0.95, 20, 1.05)
    (refused,) = on_policy_rules(with_generation_config(asked))
    assert refused.name == "rollout.repetition_penalty"
    plain = config(model=str(tmp_path))
    assert with_generation_config(plain) is plain
    for one in (asked, plain):
        assert declared_end_tokens(one.model, {}) == (5, 7), "whatever the knob says"
    file.write_text('{"do_sample": false, "temperature": 0.7}')
    assert with_generation_config(asked).rollout.temperature == 0, "greedy"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "generation_config.json: got No such file"),
        ("[]", "generation_config.json: got list"),
        ('{"top_p": 2}', "generation_config.json: top_p: got 2"),
        ('{"temperature": "hot"}', "generation_config.json: temperature: got hot"),
        ('{"eos_token_id": ["a"]}', "generation_config.json: eos_token_id: got"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    asked = config(model=str(tmp_path), generation_config=True)
    with pytest.raises(ModelError) as caught:
        with_generation_config(asked)
        declared_end_tokens(asked.model, {})
    assert said in str(caught.value)


def test_a_share_of_the_gpu_bounds_what_an_engine_takes() -> None:
    settings = EngineSettings({}, (), "bfloat16", 8, 64, reserved_bytes=10)
    assert usable_bytes(settings, free=900, total=1000, least=0) == 860
    bounded = EngineSettings({}, (), "bfloat16", 8, 64, reserved_bytes=10, gpu_memory_share=0.4)
    assert usable_bytes(bounded, free=900, total=1000, least=0) == 400
    assert usable_bytes(bounded, free=300, total=1000, least=0) == 260


def test_held_out_rows_of_the_hub_are_named_by_their_commit_too() -> None:
    asked = config("sft")
    data = asked.data.model_copy(update={"validation": ("datasets:org/rows:test",)})
    names = hub_names(asked.model_copy(update={"data": data}))
    assert str(names["data", "validation", 0]) == "datasets:org/rows:test"


def test_evaluation_sets_of_the_hub_are_named_by_their_commit_too() -> None:
    asked = load_config_dict(
        {
            "run": {"name": "evaluated"},
            "model": {"path": "org/model"},
            "algorithm": {"name": "sft"},
            "eval": {"sets": {"sums": {"form": "gsm8k", "path": "datasets:org/sums:main:test"}}},
        },
        [],
    )
    names = hub_names(asked)
    place = ("eval", "sets", "sums", "path", 0)
    assert str(names[place]) == "datasets:org/sums:main:test"
    commit = "0123456789" * 4
    pinned = with_names(asked, {place: replace(names[place], revision=commit)})
    assert pinned.eval.sets["sums"].path == (f"datasets:org/sums@{commit}:main:test",)
