"""Responses of a checkpoint go on only with the prompts and the sampling that they began with."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hybridrl.contracts.batch import Prompt
from hybridrl.generation.saved_rollouts import (
    Found,
    SavedRollouts,
    digest_of,
    joined,
    rollout_state,
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
    digests = dict.fromkeys(range(3), digest_of(PROMPT.tokens))
    parts = [
        rollout_state([WHOLE], [], [], {0: digests[0]}),
        rollout_state([], [BEGUN, TURN], [TURNS], {1: digests[1], 2: digests[2]}),
    ]
    return SavedRollouts(json.loads(json.dumps({"step": 5, **joined(parts)})))


def test_saved_rollouts_find_what_was_saved(saved: SavedRollouts) -> None:
    assert saved.find(5, 0, PROMPT, SAMPLING) == Found(whole=WHOLE)
    assert saved.find(5, 1, PROMPT, SAMPLING) == Found(request=BEGUN)
    assert saved.find(5, 2, PROMPT, SAMPLING) == Found(request=TURN, turns=TURNS)
    assert saved.find(5, 3, PROMPT, SAMPLING) == Found()


def test_saved_rollouts_keep_recorded_experts() -> None:
    experts = np.arange(10, dtype=np.int16).reshape(5, 2)
    parts = [replace(WHOLE, experts=experts)], [replace(BEGUN, experts=experts[:3])]
    digests = dict.fromkeys(range(2), digest_of(PROMPT.tokens))
    state = {"step": 5, **rollout_state(*parts, [], digests)}
    saved = SavedRollouts(json.loads(json.dumps(state)))
    whole, begun = (saved.find(5, sample_id, PROMPT, SAMPLING) for sample_id in range(2))
    assert whole.whole is not None and begun.request is not None
    for found, expected in ((whole.whole, experts), (begun.request, experts[:3])):
        assert found.experts is not None and found.experts.dtype == np.int16
        assert np.array_equal(found.experts, expected)


def test_saved_rollouts_keep_the_versions_of_tokens() -> None:
    whole = replace(WHOLE, versions=((2, 1), (4, 2)))
    begun = replace(BEGUN, tokens=(6, 7), logps=(-1.0, -2.0), versions=((2, 1), (3, 1)))
    digests = dict.fromkeys(range(2), digest_of(PROMPT.tokens))
    state = {"step": 5, **rollout_state([whole], [begun], [], digests)}
    saved = SavedRollouts(json.loads(json.dumps(state)))
    assert saved.find(5, 0, PROMPT, SAMPLING).whole == whole
    assert saved.find(5, 1, PROMPT, SAMPLING).request == begun


@pytest.mark.parametrize("versions", [((2, 2),), ((3, 3),), ((2, 1), (2, 2)), ((2, 3), (3, 0))])
def test_versions_that_do_not_fit_the_tokens_are_refused(
    versions: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(ValueError, match="3 tokens from version 2"):
        replace(WHOLE, versions=versions)


def test_saved_rollouts_are_of_their_step_and_prompt_alone(saved: SavedRollouts) -> None:
    other = replace(PROMPT, tokens=(3, 4, 6))
    for sample_id in range(3):
        assert saved.find(6, sample_id, PROMPT, SAMPLING) == Found()
        assert saved.find(5, sample_id, other, SAMPLING) == Found()


@pytest.mark.parametrize(
    ("change", "num_left"),
    # A whole response stays if it fits; what has begun goes on as it began.
    [({"temperature": 0.5}, 1), ({"top_p": 0.9}, 1), ({"max_new_tokens": 3}, 1)]
    + [({"max_new_tokens": 2}, 0), ({"max_new_tokens": 9}, 2)],
)
def test_saved_rollouts_that_began_otherwise_are_made_anew(
    saved: SavedRollouts, change: dict[str, float], num_left: int
) -> None:
    sampling = replace(SAMPLING, **change)  # type: ignore[arg-type]
    found = [saved.find(5, sample_id, PROMPT, sampling) for sample_id in range(3)]
    assert sum(one != Found() for one in found) == num_left
    assert found[1] == Found()


def test_saved_rollouts_of_an_older_checkpoint_have_no_digests() -> None:
    state = {"step": 5, **joined([rollout_state([WHOLE], [], [], {})])}
    del state["prompts"]
    assert SavedRollouts(state).find(5, 0, PROMPT, SAMPLING) == Found(whole=WHOLE)
    assert SavedRollouts().find(-1, 0, PROMPT, SAMPLING) == Found()
