"""Users' code that ends, floods or confuses its process ends in one short message and a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import rollout_batch
from command_line import QUICKSTART
from small_runs import SMALL, small_run
from test_rewards_pool import Words

from hybridrl.cli import main, train
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.reward import ScorerConfig
from hybridrl.config.schema import RewardConfig
from hybridrl.contracts.batch import BatchError
from hybridrl.environments.base import EnvironmentCall
from hybridrl.environments.parsers import ToolCall
from hybridrl.environments.stage import EnvironmentRunners
from hybridrl.environments.tools import ToolEnvironment
from hybridrl.errors import UserError
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.outcome import ScorerFailure
from hybridrl.rewards.pool import Scoring

HERE = {
    "exit": r"called sys.exit\(0\) at .*hostile_code.py:\d+ on sample 1,",
    "own end": r"raised OwnEnd at .*hostile_code.py:\d+ on sample 1: of all,",
    "mute": "raised Mute at .* on sample 1: a text that raises SystemExit,",
    "wordy": "raised ValueError at .* on sample 1: x x x",
    "digits": "returned an integer of 16610 bits for sample 1,",
    "unshown": "raised TypeError on sample 1: ",
    "no float": r"called sys.exit\(0\) at .*hostile_code.py:\d+ on sample 1,",
}
NO_ANSWER = "wrote to the pipe for answers on "
WORKER = {
    "digits": "returned an integer of 16610 bits for ",
    "exit": "called sys.exit(0) at ",
    "own end": "raised OwnEnd at ",
    "mute": "raised Mute at ",
    "wordy": "raised ValueError at ",
    "no float": "called sys.exit(0) at ",
    "end process": "died (exit code 0) on ",
    "rubbish": NO_ANSWER,
    "huge": NO_ANSWER,
    "no number": NO_ANSWER,
    "wrong": NO_ANSWER,
}


@pytest.fixture
def scorer() -> Iterator[Any]:
    made: list[Scorer] = []

    def make(word: str, place: str, **section: Any) -> Scorer:
        config = {"function": "hostile_code:does", "isolated": place == "worker", **section}
        texts = Words(["fine", word, *["fine"] * 4])
        made.append(Scorer(RewardConfig.model_validate(config), texts))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("word", HERE)
def test_what_a_reward_function_does_in_place_is_one_short_message(scorer: Any, word: str) -> None:
    with pytest.raises(BatchError, match=HERE[word]) as caught:
        scorer(word, "here").score(rollout_batch())
    told = str(caught.value)
    assert "hostile_code.py:" in told and "\n" not in told and len(told) < 700


def test_what_a_reward_function_does_in_a_process_is_its_failure() -> None:
    worker = Scoring(ScorerConfig(function="hostile_code:does"))
    try:
        for word, told in WORKER.items():
            (failure,) = worker(([""], [word], [{}]))
            assert isinstance(failure, ScorerFailure), word
            assert failure.got.startswith(told) and len(failure.got) < 700
        assert worker(([""], ["fine"], [{}])) == [1.0]
    finally:
        worker.kill()


def test_an_interrupt_stops_the_run_even_where_failures_are_dropped(scorer: Any) -> None:
    place = "here"
    with pytest.raises(UserError, match=r"raised KeyboardInterrupt at .*hostile_code.py:\d+"):
        scorer("interrupt", place, on_error="drop").score(rollout_batch())
    one = scorer("exit", place, on_error="drop")
    assert one.score(rollout_batch()).sample_ids_B.tolist() == [2, 3, 4, 5]
    assert one.take_counts() == {"reward/hostile_code:does/errors": 1}
    assert scorer("note", place).score(rollout_batch()).reward_B.tolist() == [1.0] * 6


def test_an_answer_that_was_not_asked_for_is_no_answer_to_the_next_sample(scorer: Any) -> None:
    one = scorer("two answers", "worker", workers=1, on_error="value", error_value=-1.0)
    rewards = one.score(rollout_batch()).reward_B.tolist()
    assert rewards == [1, 3, -1, 1, 1, 1]  # the process itself said 3


def play(word: str, isolated: bool) -> Any:
    config = EnvironmentConfig(name="hostile_code:World", isolated=isolated, workers=1)
    stages = EnvironmentRunners(config)
    try:
        return stages.play(EnvironmentCall((0, 0), word, {}, [([5], "5")]), 0).result()[0]
    finally:
        stages.close()


ENVIRONMENT = {
    "exit": "called sys.exit(0) at",
    "own end": "raised OwnEnd at",
    "wordy": "returned the observation a Unshown whose repr raises SystemExit for",
    "token": "returned the observation [an integer of 16610 bits] for",
    "reward": "raised OverflowError",
    "rubbish": "wrote to the pipe for answers",
}


@pytest.mark.parametrize("word", ENVIRONMENT)
def test_what_an_environment_does_is_a_failure(word: str) -> None:
    failure = play(word, isolated=word in ("rubbish", "token"))
    assert isinstance(failure, ScorerFailure) and len(failure.got) < 700
    assert ENVIRONMENT[word] in failure.got


def test_what_a_tool_does_is_told_to_the_policy() -> None:
    environment = ToolEnvironment(["hostile_code:tool"], max_characters=90)
    for word, said in (("exit", "error: it called sys.exit(0)"), ("mute", "error: a text that")):
        result, is_error = environment._run(ToolCall("tool", {"word": word}))
        assert result.startswith(said) and is_error
    assert len(environment._run(ToolCall("tool", {"word": "wordy"}))[0]) <= 100
    with pytest.raises(KeyboardInterrupt):
        environment._run(ToolCall("tool", {"word": "interrupt"}))


EXITS = {
    "reward.function=hostile_module:f": "reward.function: got hostile_module:f",
    "environment.name=hostile_module:F": "environment.name: got hostile_module:F",
    "model.family=hostile_module:F": "model.family: got hostile_module:F",
}


@pytest.mark.parametrize("override", EXITS)
def test_a_module_that_ends_the_process_is_named(override: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(train, "launch_run", lambda *_: 0)
    environment = ["environment.max_turns=2"] if "environment" in override else []
    with pytest.raises(UserError) as caught:
        command = ["train", str(QUICKSTART / "grpo.yaml"), *SMALL, override, *environment]
        main.app(command, standalone_mode=False)
    told = str(caught.value)
    assert EXITS[override] in told and "it called sys.exit(0) at" in told
    assert "hostile_module.py:5" in told


def test_an_algorithm_that_ends_the_process_is_named(tmp_path: Path) -> None:
    run = small_run(tmp_path, "algorithm.name=hostile_module:A")
    with pytest.raises(UserError, match="hostile_module.py:5"), run:
        pass
    told = pytest.raises(UserError, match=r"hostile_code.py:\d+: got code that called sys.exit")
    with small_run(tmp_path, "algorithm.name=hostile_code:Algorithm") as trainer, told:
        trainer.fit(num_steps=1)
