"""Rewards by name and by dotted path, and the exact match."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridrl.config.schema import RewardConfig
from hybridrl.errors import DataError, UserError
from hybridrl.rewards.functions import ExactMatch, find_reward


@pytest.mark.parametrize(
    ("extract", "response", "answer", "expected"),
    [
        (None, " 85\n", "85", 1.0),
        (None, "85", 85, 1.0),
        (None, "15,08,85", "85", 0.0),
        (None, "", "85", 0.0),
        (r"([^,]*)$", "15,08,85", "85", 1.0),
        (r",(\d+)", "15,08,85", "85", 1.0),  # the last match counts
        (r",(\d+)", "15,85,08", "85", 0.0),
        (r"#### (.*)", "no mark", "85", 0.0),
        (r"#### (.*)", "#### 84\n#### 85 ", " 85", 1.0),
        (r"#### (\d+)?", "#### ", "85", 0.0),  # the group took no part in the match
    ],
)
def test_exact_match_compares_the_last_extracted_answer(extract, response, answer, expected):
    reward = find_reward(RewardConfig(extract=extract))
    assert reward("prompt", response, {"answer": answer}) == expected


def test_exact_match_without_an_answer_names_the_key():
    with pytest.raises(DataError, match=r"\['level'\].*data.answer_key") as caught:
        ExactMatch(None)("1+1=", "2", {"level": 1})
    assert caught.value.name == "data.answer_key"


@pytest.mark.parametrize("extract", ["(", r"\d+"])
def test_a_pattern_without_a_group_is_an_error(extract):
    with pytest.raises(UserError) as caught:
        find_reward(RewardConfig(extract=extract))
    assert caught.value.name == "reward.extract"


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "written_rewards.py").write_text("LIMIT = 3\ndef length(p, r, c): return len(r)\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_dotted_path_gives_the_function(own_module):
    assert find_reward(RewardConfig(function="written_rewards:length"))("", "abc", {}) == 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("exact_mach", "Did you mean 'exact_match'"),
        ("accuracy", "Check the name"),
        ("no_such_module:f", "no_such_module"),
        ("written_rewards:width", "width"),
        ("written_rewards:LIMIT", "a int, which cannot be called"),
    ],
)
def test_a_name_that_gives_no_function_is_an_error(own_module, function, reason):
    with pytest.raises(UserError, match=reason) as caught:
        find_reward(RewardConfig(function=function))
    assert caught.value.name == "reward.function"


def test_a_module_that_fails_is_named_with_the_users_lines(tmp_path, monkeypatch):
    (tmp_path / "fails_at_import.py").write_text("import json\n\nRULES = json.loads('no JSON')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    at = rf"JSONDecodeError at {tmp_path}/fails_at_import\.py:3: Expecting value"
    with pytest.raises(UserError, match=at):
        find_reward(RewardConfig(function="fails_at_import:score"))


def test_finding_a_reward_imports_no_torch():
    code = (
        "import sys; from hybridrl.rewards.functions import find_reward\n"
        "from hybridrl.config.schema import RewardConfig; find_reward(RewardConfig())\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
