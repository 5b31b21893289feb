"""Responses of a checkpoint go on only with the prompts and the sampling that they began with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from hybridrl.contracts.batch import Prompt
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.in_flight import restored_pool
from hybridrl.generation.saved_rollouts import (
    SavedRollouts,
    SavedSample,
    made_otherwise,
    merge_states,
    prompt_digest,
    rollout_state,
    without_sample_data,
)
from hybridrl.rollout.engine import Completion, Request, SamplingParams

PROMPT = Prompt(0, "p", (3, 4, 5), {})
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8)
WHOLE = Completion(0, (6, 7, 8), (-1.0, -1.0, -1.0), "stop", 2)
BEGUN = Request(1, PROMPT.tokens, 9, SAMPLING, (6,), (-1.0,), 2)
TURN = Request(2, (*PROMPT.tokens, 6, 7), 9, replace(SAMPLING, max_new_tokens=6))
TURNS = {"sample_id": 2, "actions": [[[6], "six"]]}


@pytest.fixture
def saved() -> SavedRollouts:
    digests = dict.fromkeys(range(3), prompt_digest(PROMPT.tokens))
    parts = [
        rollout_state([WHOLE], [], [], {0: digests[0]}),
        rollout_state([], [BEGUN, TURN], [TURNS], {1: digests[1], 2: digests[2]}),
    ]
    state = {"step": 5, "sampling": asdict(SAMPLING), **merge_states(parts)}
    return SavedRollouts(json.loads(json.dumps(state)))


def test_saved_rollouts_find_what_was_saved(saved: SavedRollouts) -> None:
    assert saved.find(5, 0, PROMPT, SAMPLING) == SavedSample(whole=WHOLE)
    assert saved.find(5, 1, PROMPT, SAMPLING) == SavedSample(request=BEGUN)
    assert saved.find(5, 2, PROMPT, SAMPLING) == SavedSample(request=TURN, turns=TURNS)
    assert saved.find(5, 3, PROMPT, SAMPLING) == SavedSample()


def test_saved_rollouts_keep_recorded_experts() -> None:
    experts = np.arange(10, dtype=np.int16).reshape(5, 2)
    parts = (
        [replace(WHOLE, blobs={"routed_experts": experts})],
        [replace(BEGUN, blobs={"routed_experts": experts[:3]})],
    )
    digests = dict.fromkeys(range(2), prompt_digest(PROMPT.tokens))
    state = {"step": 5, "sampling": asdict(SAMPLING), **rollout_state(*parts, [], digests)}
    saved = SavedRollouts(json.loads(json.dumps(state)))
    whole, begun = (saved.find(5, sample_id, PROMPT, SAMPLING) for sample_id in range(2))
    assert whole.whole is not None and begun.request is not None
    for found, expected in ((whole.whole, experts), (begun.request, experts[:3])):
        assert found.blobs["routed_experts"].dtype == np.int16
        assert np.array_equal(found.blobs["routed_experts"], expected)


def test_saved_rollouts_keep_the_versions_of_tokens() -> None:
    whole = replace(WHOLE, versions=((2, 1), (4, 2)))
    begun = replace(BEGUN, tokens=(6, 7), logps=(-1.0, -2.0), versions=((2, 1), (3, 1)))
    digests = dict.fromkeys(range(2), prompt_digest(PROMPT.tokens))
    state = {"step": 5, "sampling": asdict(SAMPLING)}
    state |= rollout_state([whole], [begun], [], digests)
    saved = SavedRollouts(json.loads(json.dumps(state)))
    assert saved.find(5, 0, PROMPT, SAMPLING).whole == whole
    assert saved.find(5, 1, PROMPT, SAMPLING).request == begun


@pytest.mark.parametrize(
    ("saved", "now", "differs"),
    [
        ("hf (float32)", "hf (float32)", False),
        ("vllm (float32)", "hf (float32)", True),
        (None, "hf (float32)", True),  # sampled with numerics.match=close, or by an older version
        ("hf (float32)", None, False),  # a pass recomputes old log-probabilities
        (None, None, False),
    ],
)
def test_exact_mode_continues_only_with_samples_of_the_same_bits(
    saved: str | None, now: str | None, differs: bool
) -> None:
    state = {"step": 5, "exact_with": saved, **rollout_state([WHOLE], [BEGUN], [], {})}
    assert made_otherwise(state, now) == differs
    assert not made_otherwise(without_sample_data(state), now)


@pytest.mark.parametrize("versions", [((2, 2),), ((3, 3),), ((2, 1), (2, 2)), ((2, 3), (3, 0))])
def test_versions_that_do_not_fit_the_tokens_are_refused(
    versions: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(ValueError, match="3 tokens from version 2"):
        replace(WHOLE, versions=versions)


def test_saved_rollouts_are_of_their_step_and_prompt_alone(saved: SavedRollouts) -> None:
    other = replace(PROMPT, tokens=(3, 4, 6))
    for sample_id in range(3):
        assert saved.find(6, sample_id, PROMPT, SAMPLING) == SavedSample()
        assert saved.find(5, sample_id, other, SAMPLING) == SavedSample()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"temperature": 0.5}, []),
        ({"top_p": 0.9}, []),
        ({"stop_token_ids": (8,)}, []),
        # A response that ended by itself, in a bound that is as wide; a turn has less room than
        # its response.
        ({"max_new_tokens": 3}, [0]),
        ({"max_new_tokens": 2}, []),
        ({"max_new_tokens": 9}, [0, 2, 3]),
    ],
)
def test_saved_rollouts_that_began_otherwise_are_made_anew(
    change: dict[str, Any], left: list[int]
) -> None:
    cut = Completion(4, (6,) * 8, (-1.0,) * 8, "length", 2)
    waits = {"sample_id": 3, "actions": [[[6], "six"]]}
    parts = [WHOLE, replace(WHOLE, request_id=-6), cut], [BEGUN, TURN], [TURNS, waits]
    state = {"step": 5, "sampling": asdict(SAMPLING), **rollout_state(*parts, {})}
    saved = SavedRollouts(json.loads(json.dumps(state)))
    sampling = replace(SAMPLING, **change)
    found = {one: saved.find(5, one, PROMPT, sampling) for one in range(5)}
    greedy = saved.find(5, -6, PROMPT, replace(sampling, temperature=0.0))
    kept = [one for one, what in found.items() if what != SavedSample()]
    assert kept == left
    assert (greedy != SavedSample()) == ("temperature" in change or 0 in left), (
        "of temperature 0 anyway"
    )


def test_saved_rollouts_of_an_older_checkpoint_say_nothing_of_their_sampling() -> None:
    state = {"step": 5, **merge_states([rollout_state([WHOLE], [BEGUN], [], {})])}
    del state["prompts"]
    saved = SavedRollouts(state)
    assert saved.find(5, 0, PROMPT, SAMPLING) == SavedSample(), "perhaps drawn otherwise"
    assert saved.find(5, 1, PROMPT, SAMPLING) == SavedSample(request=BEGUN)
    assert SavedRollouts().find(-1, 0, PROMPT, SAMPLING) == SavedSample()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({}, {0, 1, -1, 2, 3}),
        ({"temperature": 0.5}, {-1}),
        ({"top_p": 0.9}, set()),
        ({"max_new_tokens": 9}, {0, -1, 2, 3}),
    ],
)
def test_samples_under_way_that_began_otherwise_are_made_anew(
    change: dict[str, Any], left: set[int]
) -> None:
    source = PromptSource([PROMPT], seed=0, shuffle=False)
    greedy = replace(WHOLE, request_id=-1)
    waits = {"sample_id": 3, "runs": []}
    turns = {**TURNS, "runs": []}
    state = {
        "sampling": asdict(SAMPLING),
        **rollout_state([WHOLE, greedy], [BEGUN, TURN], [turns, waits], {}),
        "in_flight": {"groups": [[0, 4, 0, 5]], "next_number": 1, "cursors": {"4": source.state()}},
    }
    sampling, numbers = replace(SAMPLING, **change), [0, 1, 2, 3, -1]
    saved = json.loads(json.dumps(state))
    pool = restored_pool(saved, source, lambda _: numbers, sampling)
    assert pool.samples.keys() == left
    (group,) = pool.groups
    assert group.is_done == tuple(one in left and one < 1 for one in numbers)
    del saved["sampling"]  # as in an older checkpoint
    kept = restored_pool(saved, source, lambda _: numbers, sampling).samples
    assert kept.keys() == left & {1, 2}
