"""Scorers in processes of their own: whatever they do is contained, named and counted."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import rollout_batch

from hybridrl.config.reward import ScorerConfig
from hybridrl.config.schema import RewardConfig
from hybridrl.contracts.batch import BatchError, RolloutBatch
from hybridrl.errors import DataError
from hybridrl.parallel.stop_signals import noted_signals
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.pool import framed

RIGHT = "fine"


class Words:
    """A tokenizer that finds the next of some texts in each response."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts: dict[tuple[int, ...], str] = {}
        self.left = list(texts)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        key = tuple(token_ids)
        if key not in self.texts:
            self.texts[key] = self.left.pop(0)
        return self.texts[key]


@pytest.fixture
def made() -> Iterator[list[Scorer]]:
    scorers: list[Scorer] = []
    yield scorers
    for scorer in scorers:
        scorer.close()


def scored(made: list[Scorer], texts: Sequence[str], batch: RolloutBatch, **section: Any):
    scorer = Scorer(RewardConfig.model_validate(section), Words(texts))
    made.append(scorer)
    return scorer.score(batch), scorer.take_counts()


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


OBEYS = {"function": "own_rewards:obeys", "timeout_s": 1.0}
BAD = {
    "hang": "took longer than 1 s for sample 1",
    "exit": r"died \(exit code 3\) on sample 1",
    "crash": r"died \(SIGSEGV\) on sample 1",
    "raise": "raised ZeroDivisionError at .*own_rewards.py:.* on sample 1: no score",
    "nan": "returned nan for sample 1",
    "inf": "returned inf for sample 1",
    "huge": r"returned 1e\+39 for sample 1",
    "text": "returned a str for sample 1",
    "none": "returned a NoneType for sample 1",
}


@pytest.mark.parametrize("bad", BAD)
def test_a_scorer_that_fails_stops_the_step_and_says_how(made, bad):
    texts = [RIGHT, bad, *[RIGHT] * 4]
    with pytest.raises(BatchError, match=BAD[bad]) as caught:
        scored(made, texts, rollout_batch(), **OBEYS)
    assert "own_rewards.py:" in str(caught.value)


SLOW = {"function": "own_rewards:obeys", "timeout_s": 60.0}
# With workers for two samples at a time, of whom one hangs; beside another scorer that does; in
# place, where the samples behind the failed one would hang.
FAILING = {
    "one of several": ({**SLOW, "on_error": "stop"}, ["hang", "raise", *["hang"] * 4]),
    "another scorer": (
        {"functions": {"slow": SLOW, "bad": {"function": "exact_match"}}},
        ["hang"] * 6,
    ),
    "in place": ({**SLOW, "isolated": False}, ["raise", *["hang"] * 5]),
}


@pytest.mark.parametrize("case", FAILING)
def test_the_first_failure_stops_without_waiting_for_other_samples(made, case):
    section, texts = FAILING[case]
    batch = rollout_batch()
    if case == "another scorer":  # whose rows have no answer
        batch = replace(batch, prompts=tuple(replace(p, columns={}) for p in batch.prompts))
    began = time.monotonic()
    with pytest.raises((BatchError, DataError)):
        scored(made, texts, batch, **section)
    made.pop().close()
    assert time.monotonic() - began < 20, "a process may take seconds to start"


@pytest.mark.parametrize("bad", BAD)
def test_a_failure_is_a_value_and_is_counted(made, bad):
    texts = [RIGHT, bad, *[RIGHT] * 4]
    batch, counts = scored(
        made, texts, rollout_batch(), **OBEYS, on_error="value", error_value=-0.5
    )
    assert batch.reward_B.tolist() == [1, -0.5, 1, 1, 1, 1]
    assert counts == {"reward/own_rewards:obeys/errors": 1}


def test_a_failed_sample_is_dropped_with_the_last_one_of_its_group(made):
    texts = [RIGHT, "exit", RIGHT, *[RIGHT] * 3, RIGHT, "nan", "raise"]
    batch, counts = scored(made, texts, rollout_batch(3, 3), **OBEYS, on_error="drop")
    assert batch.sample_ids_B.tolist() == [0, 2, 3, 4, 5]
    assert counts == {"reward/own_rewards:obeys/errors": 3}


def test_what_a_hanging_scorer_started_is_killed_too(made, tmp_path):
    file = tmp_path / "pid"
    batch = rollout_batch(1, 2)
    prompt = replace(batch.prompts[0], columns={"file": str(file)})
    batch = replace(batch, prompts=(prompt, prompt))
    found, _ = scored(made, ["hang with a child", RIGHT], batch, **OBEYS, on_error="value")
    assert found.reward_B.tolist() == [0, 1]
    until = time.monotonic() + 5
    while is_alive(int(file.read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(int(file.read_text()))


def test_catastrophic_patterns_and_formulas_end_in_time(made):
    functions = {
        "regex": {
            "function": "regex",
            "options": {"pattern": "(a+)+b", "whole": True},
            "timeout_s": 1.0,
            "workers": 2,
        },
        "math": {"function": "math", "timeout_s": 2.0, "workers": 2},
    }
    texts = ["aab", "a" * 40, "\\boxed{9^{9^{9^{9}}}}", "\\boxed{0}", "\\boxed{1}", "2"]
    began = time.monotonic()
    batch, counts = scored(
        made, texts, rollout_batch(), functions=functions, on_error="value", error_value=-3.0
    )
    assert time.monotonic() - began < 30
    assert batch.reward_parts["regex"].tolist() == [1, -3, 0, 0, 0, 0]
    # The answers are 0, 0, 1, 1, 2, 2.
    assert batch.reward_parts["math"].tolist()[3:] == [0, 0, 1]
    assert counts["reward/regex/errors"] == 1


def test_calls_of_an_async_function_wait_beside_each_other_in_one_process(made):
    config = {"function": "own_rewards:waits", "workers": 1, "timeout_s": 1.5}
    values = {**config, "on_error": "value", "error_value": -1.0}
    scorer = Scorer(RewardConfig.model_validate(values), Words(["1", "2", "hang", "4", "5", "6"]))
    made.append(scorer)
    began = time.monotonic()
    found = scorer.score(rollout_batch()).reward_B.tolist()
    # The first call may go alone, and a process takes a second to start.
    assert time.monotonic() - began < 8
    assert found[2] == -1 and len(set(found)) == 2, "the late call alone failed, and ended nothing"
    assert scorer.take_counts() == {"reward/own_rewards:waits/errors": 1}


def test_a_sum_has_its_terms_as_parts(made):
    functions = {
        "long": {"function": "own_rewards:length", "options": {"scale": 2.0}, "weight": 0.5},
        "order": {"function": "own_rewards:ranks", "weight": -1.0},
        "apart": {"function": "own_rewards:ranks", "isolated": True, "weight": 0.0},
    }
    texts = ["x" * n for n in (3, 1, 2, 6, 5, 4)]
    batch, counts = scored(made, texts, rollout_batch(), functions=functions)
    parts = {name: part.tolist() for name, part in batch.reward_parts.items()}
    assert parts == {
        "long": [6, 2, 4, 12, 10, 8],
        "order": [2, 0, 1, 5, 4, 3],
        "apart": [2, 0, 1, 5, 4, 3],
    }
    assert batch.reward_B.tolist() == [1, 1, 1, 1, 1, 1]
    assert counts == dict.fromkeys([f"reward/{n}/errors" for n in functions], 0)


def test_signals_that_ask_a_run_to_stop_do_not_end_a_scorer():
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridrl.rewards.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    process.stdin.write(framed(pickle.dumps(ScorerConfig(function="exact_match"))))
    process.stdin.flush()
    process.stdout.read(1)  # it waits for jobs
    for number in noted_signals():
        process.send_signal(number)
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_a_process_whose_caller_has_gone_ends_without_a_word():
    config = pickle.dumps(ScorerConfig(function="exact_match"))
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridrl.rewards.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(framed(config))
    process.stdin.close()
    said = process.stderr.read()
    assert process.wait(timeout=60) == 0 and not said, said.decode()


ORPHAN = """
import sys, threading
from hybridrl.config.schema import ScorerConfig
from hybridrl.rewards.pool import Pool, Scoring
pool = Pool(lambda: Scoring(ScorerConfig(function="own_rewards:number")), 1, "x")
print(int(pool.submit(([""], [""], [{}])).result()[0]), flush=True)
worker = Scoring(ScorerConfig(function="own_rewards:obeys"))
Pool(lambda: worker, 1, "y").submit(([""], ["hang"], [{}]))
while worker._process is None: pass
print(worker._process.pid, flush=True)
sys.stdin.read()
"""


def test_no_process_outlives_a_trainer_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdin is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    time.sleep(1.5)  # the second is in its function now
    assert all(map(is_alive, pids))
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
