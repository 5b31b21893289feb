"""Rewards by name and by dotted path, and the exact match."""

from __future__ import annotations

import pytest

from hybridrl.config.schema import RewardConfig
from hybridrl.errors import UserError
from hybridrl.rewards.functions import find_reward


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


@pytest.mark.parametrize(
    ("function", "options", "key", "reason"),
    [
        ("scaled", {"scal": 2.0}, "reward.options", "unexpected keyword argument 'scal'"),
        ("scaled", {"c": 1}, "reward.options", "multiple values for argument 'c'"),
        ("least", {}, "reward.function", "missing a required argument: 'words'"),
        ("short", {}, "reward.function", "too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_with_its_options_is_refused(
    tmp_path, monkeypatch, function, options, key, reason
):
    (tmp_path / "called_rewards.py").write_text(
        "def scaled(p, r, c, scale=1): return len(r) * scale\n"
        "def least(p, r, c, words): return len(r) > words\n"
        "def short(r): return len(r)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    good = RewardConfig(function="called_rewards:scaled", options={"scale": 2})
    assert find_reward(good)("", "abc", {}) == 6
    with pytest.raises(UserError, match=reason) as caught:
        find_reward(RewardConfig(function=f"called_rewards:{function}", options=options))
    assert caught.value.name == key
