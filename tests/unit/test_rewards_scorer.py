"""Scoring a batch: what a reward function is given, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import rollout_batch, rollouts

from hybridrl.config.schema import RewardConfig
from hybridrl.contracts.batch import BatchError
from hybridrl.errors import DataError
from hybridrl.parallel.failure import LOG_DIR
from hybridrl.rewards.base import Scorer

SPECIAL = 49


class Numbers:
    """A tokenizer whose text is the tokens' numbers."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(str(t) for t in token_ids if t != SPECIAL)


def scorer(function=None, **config) -> Scorer:
    return Scorer(RewardConfig(**config), Numbers(), function)


def batched(function):
    function.batched = True
    return function


def expected_texts() -> list[str]:
    return [Numbers().decode(r.tokens, skip_special_tokens=True) for r in rollouts()]


def test_a_reward_function_gets_prompt_response_and_columns_of_each_sample():
    seen = []

    def length(prompt, response, columns):
        seen.append((prompt, response, columns["answer"]))
        return len(seen) * 0.5

    found = scorer(length).score(rollout_batch())
    assert [s[0] for s in seen] == [f"prompt {i // 2}" for i in range(6)]
    assert [s[1] for s in seen] == expected_texts()
    assert [s[2] for s in seen] == [str(i // 2) for i in range(6)]
    assert found.reward_B.tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert found.reward_B.dtype == torch.float32
    assert {n: p.tolist() for n, p in found.reward_parts.items()} == {
        "length": found.reward_B.tolist()
    }


def test_a_batched_reward_function_gets_all_samples_at_once():
    calls = []

    @batched
    def lengths(prompts, responses, columns):
        calls.append((prompts, responses, columns))
        return np.arange(len(prompts))

    found = scorer(lengths).score(rollout_batch())
    assert found.reward_B.tolist() == [0, 1, 2, 3, 4, 5]
    ((prompts, responses, columns),) = calls
    assert (len(prompts), responses, len(columns)) == (6, expected_texts(), 6)


def check_message(error: BatchError, function, *parts: str) -> None:
    line = function.__code__.co_firstlineno
    start = f"reward {function.__name__!r} ({Path(__file__).name}:{line}) "
    assert str(error).startswith(start), str(error)
    for part in (*parts, "[reward_B]"):
        assert part in str(error)


SINGLE = {
    "nan": (float("nan"), "returned nan for sample 0"),
    "infinite": (np.inf, "returned inf"),
    "none": (None, "returned a NoneType"),
    "text": ("1.0", "returned a str"),
    "array": (np.zeros(12), "returned shape (12,) for sample 0"),
    "tensor": (torch.zeros(1), "returned shape (1,)"),
    "complex": (1j, "returned a complex"),
    "tuple": ((1.0, {}), "returned a tuple"),
}


@pytest.mark.parametrize("bad", SINGLE)
def test_a_wrong_single_reward_names_function_line_and_sample(bad):
    value, expected = SINGLE[bad]

    def my_reward(prompt, response, columns):
        return value

    with pytest.raises(BatchError) as caught:
        scorer(my_reward).score(rollout_batch())
    check_message(caught.value, my_reward, expected, "expected a finite float")


def parsed(text):
    return json.loads(text)


def test_an_error_in_a_library_names_the_users_lines_and_logs_the_whole_traceback(
    tmp_path, monkeypatch
):
    def my_reward(prompt, response, columns):
        return parsed("no JSON")["score"]

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(LOG_DIR, str(tmp_path))
    with pytest.raises(BatchError) as caught:
        scorer(my_reward).score(rollout_batch())
    lines = [parsed.__code__.co_firstlineno + 1, my_reward.__code__.co_firstlineno + 1]
    at = ", called at ".join(f"{__file__}:{line}" for line in lines)
    log = tmp_path / "rank_3.log"
    told = f"raised JSONDecodeError at {at}, on sample 0: Expecting value"
    check_message(caught.value, my_reward, told, f"The traceback is in {log}.")
    trace = log.read_text()
    assert trace.startswith("Traceback") and "json/decoder.py" in trace and "in parsed" in trace
    with pytest.raises(BatchError, match="traceback is in"):
        scorer(my_reward).score(rollout_batch())
    assert log.read_text() == trace, "once"


def test_calls_of_an_async_function_wait_beside_each_other():
    under_way = []

    async def slow(prompt, response, columns):
        under_way.append(prompt)
        while len(under_way) < 6:  # all are called before one returns
            await asyncio.sleep(0)
        return float(columns["answer"])

    class Judge:
        async def __call__(self, prompt, response, columns):
            return await slow(prompt, response, columns)

    for function in (slow, Judge(), lambda *given: asyncio.sleep(0, float(given[2]["answer"]))):
        under_way.clear()
        found = scorer(function).score(rollout_batch())
        assert found.reward_B.tolist() == [0, 0, 1, 1, 2, 2]


def test_what_is_wrong_with_a_row_follows_on_error():
    def my_reward(prompt, response, columns):
        if columns["answer"] == "1":
            raise DataError("data.answer_key", "x", "y", "z")
        return 1.0

    with pytest.raises(DataError, match="data.answer_key"):
        scorer(my_reward).score(rollout_batch())
    valued = scorer(my_reward, on_error="value", error_value=-1.0)
    assert valued.score(rollout_batch()).reward_B.tolist() == [1, 1, -1, -1, 1, 1]
    assert valued.take_counts() == {"reward/my_reward/errors": 2}
    dropped = scorer(my_reward, on_error="drop").score(rollout_batch())
    assert dropped.sample_ids_B.tolist() == [0, 1, 4, 5]


def test_a_reward_function_gets_the_prompt_as_the_row_has_it_and_the_rendered_text():
    """Of a chat the messages; in place, begun early, and batched."""
    seen = []

    def judge(prompt, response, columns):
        seen.append((prompt, columns["rendered_prompt"]))
        return 1.0

    @batched
    def judge_all(prompts, responses, columns):
        seen.extend((p, c["rendered_prompt"]) for p, c in zip(prompts, columns, strict=True))
        return [1.0] * len(prompts)

    batch, asked = rollout_batch(), [{"role": "user", "content": "?"}]
    chats = tuple(replace(prompt, given=asked) for prompt in batch.prompts)
    for given, expected in ((batch.prompts, None), (chats, asked)):
        for function in (judge, judge_all):
            seen.clear()
            scorer(function).score(replace(batch, prompts=given))
            assert seen == [(expected or p.text, p.text) for p in given]
    # What goes to a pool as soon as it is generated is the same.
    jobs = []
    early = scorer(judge)
    early.parts = [SimpleNamespace(can_begin=True, begin=lambda *job: jobs.append(job[-1]))]
    early.begin(0, chats[0], [1, 2])
    ((prompts, _, columns),) = jobs
    assert prompts == [asked] and columns[0]["rendered_prompt"] == chats[0].text
