"""The section `agent`: its values, its rules, and the default reward."""

from __future__ import annotations

from typing import Any

import pytest

from hybridrl.agents.check import check_agent
from hybridrl.config.agent import AgentConfig
from hybridrl.config.identity import identity
from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import check
from hybridrl.config.rules_images import image_rules
from hybridrl.config.schema import Config
from hybridrl.config.wrapped_models import text_part
from hybridrl.errors import ConfigError


def config_of(agent: dict[str, Any], **sections: dict[str, Any]) -> Config:
    given: dict[str, Any] = {
        "run": {"name": "x"},
        "model": {"init": "x"},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "x"},
        "agent": agent,
    }
    return load_config_dict({**given, **sections})


def test_by_default_the_reward_is_the_reported_one():
    assert config_of({"command": "true"}).reward.function == "agent"
    assert config_of({}).reward.function == "exact_match"
    chosen = config_of({"command": "true"}, reward={"function": "math"})
    assert chosen.reward.function == "math"
    assert not [one for one in check(chosen, 1) if "agent" in one.name or "reward" in one.name]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"command": "a", "function": "a:b"}, "command, function, server: only one of them"),
        ({"server": True, "function": "a:b"}, "command, function, server: only one of them"),
        ({"command": "a", "lease_s": 3}, "no value unless agent.server is set"),
        ({"command": "a", "python": "python3"}, "no value unless agent.function is set"),
        ({"command": []}, "at least one word"),
        ({"max_turns": 3}, "no value unless agent.command, function or server is set"),
        ({"command": "a", "options": {"x": 1}}, "no value unless agent.function is set"),
        ({"function": "a:b", "env": {"x": "y"}}, "no value unless agent.command is set"),
        ({"function": "a:b", "sandbox": "bubblewrap"}, "none unless agent.command is set"),
        ({"command": "a", "rows": "best"}, "all, last, longest or package.module:function"),
    ],
)
def test_values_that_contradict_each_other_are_refused(agent, message):
    with pytest.raises(ConfigError, match=message):
        config_of(agent)


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"environment": {"name": "calculator"}}, "environment.name"),
        ({"algorithm": {"name": "sft"}}, "agent"),
        ({"algorithm": {"name": "online_dpo"}}, "algorithm.name"),
        ({"algorithm": {"name": "grpo", "router_replay": "rollout"}}, "algorithm.router_replay"),
        ({"rollout": {"stop_strings": ["x"]}}, "rollout.stop_strings"),
        ({"reward": {"function": "reward_model", "options": {"path": "x"}}}, "reward.function"),
        (
            {"reward": {"functions": {"a": {"function": "agent"}, "b": {"function": "agent"}}}},
            "reward.function",
        ),
    ],
)
def test_sections_that_agents_do_not_support_are_named(sections, name):
    found = {one.name for one in check(config_of({"command": "true"}, **sections), 1)}
    assert name in found
    assert name not in {one.name for one in check(config_of({"command": "true"}), 1)}


@pytest.mark.parametrize(
    ("sections", "name", "message"),
    [
        (
            {"rollout": {"engine": "scripted"}},
            "rollout.engine",
            "hf or vllm or sglang with a model that reads",
        ),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name", "without a critic or reward model"),
        ({"algorithm": {"name": "reward_model"}}, "algorithm.name", "without a critic"),
        (
            {"algorithm": {"name": "on_policy_distillation", "teacher": "t"}},
            "algorithm.teacher",
            "no teacher",
        ),
        (
            {"reward": {"function": "reward_model", "options": {"path": "m"}}},
            "reward reward_model",
            "rewards that are functions",
        ),
    ],
)
def test_what_does_not_work_with_images_is_refused_by_name(sections, name, message):
    text = {"model_type": "qwen3_vl_text", "hidden_size": 8}
    hf_config = text_part({"model_type": "qwen3_vl", "text_config": text, "vision_config": {}})
    found = {one.name: one for one in image_rules(config_of({}, **sections), hf_config)}
    assert message in found[name].allowed
    assert not list(image_rules(config_of({"command": "true"}), hf_config))


def test_a_reported_reward_needs_an_agent_and_a_turn_fits_into_the_context():
    found = check(config_of({}, reward={"function": "agent"}), 1)
    assert "reward.function" in {one.name for one in found}
    found = check(config_of({"command": "true", "max_turn_tokens": 10**6}), 1)
    assert "agent.max_turn_tokens" in {one.name for one in found}


def test_functions_and_sandboxes_are_looked_up(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    wrong = AgentConfig(function="own_agents:missing", rows="no_module_at_all:f")
    assert [one.name for one in check_agent(wrong)] == ["agent.function", "agent.rows"]
    sandboxed = AgentConfig(command="true", sandbox="bubblewrap")
    assert [one.name for one in check_agent(sandboxed)] == ["agent.sandbox"]
    assert check_agent(AgentConfig(function="own_agents:silent")) == []


@pytest.mark.parametrize("command", [["pyhton", "a.py"], ["./run"], ["bin/run", "a"], ["/no/run"]])
def test_a_program_that_does_not_exist_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an agent starts in another folder
    (tmp_path / "run").touch(0o755)
    (found,) = check_agent(AgentConfig(command=command))
    assert found.name == "agent.command" and found.value == command[0]


def test_programs_are_found_as_when_they_start(tmp_path):
    (tmp_path / "run").touch(0o755)
    for one in (
        {"command": ["true"]},
        {"command": "cd somewhere && run"},
        {"command": [str(tmp_path / "run")]},
        {"command": ["run"], "env": {"PATH": str(tmp_path)}},
    ):
        assert check_agent(AgentConfig.model_validate(one)) == []


def test_options_that_the_function_does_not_have_are_refused():
    assert check_agent(AgentConfig(function="own_agents:rewarded", options={"reward": 1.0})) == []
    for options, message in (
        ({"rewrad": 1.0}, "unexpected keyword argument 'rewrad'"),
        ({"task": 1}, "multiple values for argument 'task'"),
    ):
        (found,) = check_agent(AgentConfig(function="own_agents:rewarded", options=options))
        assert found.name == "agent.options" and message in found.remedy


def test_the_package_of_the_endpoint_is_needed_only_by_agents(monkeypatch):
    monkeypatch.setattr("hybridrl.agents.check.find_spec", lambda name: None)
    (found,) = check_agent(AgentConfig(command="true"))
    assert found.name == "aiohttp" and "hybridrl[agents]" in found.remedy
    assert check_agent(AgentConfig()) == []


def test_speed_and_variables_do_not_identify_a_run():
    one = identity(config_of({"command": "true"}))
    fast = {"command": "true", "concurrency": 2, "timeout_s": 5.0, "env": {"A": "b"}}
    assert identity(config_of(fast)) == one
    assert identity(config_of({"command": "true", "max_turns": 2})) != one
