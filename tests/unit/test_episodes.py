"""Responses of several turns: what the engine was fed, what is trained on, what may go wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from chat_tokenizers import byte_tokenizer
from own_environments import SPECIAL, Sums
from scripted_turns import SAMPLING, SEED, STEP, STOP, answer, expert_of, make_sampler, prompts

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.load import load_config_dict
from hybridrl.contracts.batch import BatchError, Prompt, ScoredBatch
from hybridrl.data.end_tokens import own_end_tokens
from hybridrl.environments.base import Answer, EnvironmentCall, Turn
from hybridrl.environments.chat import Observed
from hybridrl.environments.stage import EnvironmentRunners
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.rollout_setup import make_episodes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.platform import Platform
from hybridrl.rewards.outcome import ScorerFailure
from hybridrl.rollout.engine import Request, SamplingParams, request_seed

HERE = {"name": "own_environments:Sums", "isolated": False}
WORDS = "own_environments:num_words"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    platform = Platform.detect()
    start_process_group(platform, 60.0)
    yield World(platform, 60.0)
    stop_process_group()


@pytest.fixture
def make(world: World) -> Iterator[Any]:
    made: list[Sampler] = []

    def sampler(
        environment: Mapping[str, Any] = HERE,
        reward: Mapping[str, Any] = {"function": "environment"},
    ) -> Sampler:
        made.append(make_sampler(world, RolloutLayout.consecutive(1, 1), environment, reward))
        return made[-1]

    yield sampler
    for one in made:
        one.close()


def by_hand(
    environment: Sums, prompt: Prompt, sample_id: int, max_turns: int, room: int, turn_room: int
) -> dict[str, Any]:
    """One response, by a loop of its own."""
    start = environment.reset(prompt.text, prompt.columns)
    tokens = [int(word) for word in (start or "").split()]
    logps, observed = [0.0] * len(tokens), [True] * len(tokens)
    fed, read, reward, ended, turn = [], [], 0.0, None, 0
    while ended is None:
        limit = min(room - len(tokens), turn_room)
        seed = request_seed(SEED, STEP, sample_id, turn)
        fed.append(([*prompt.tokens, *tokens], seed, limit))
        sampling = SamplingParams(1.0 if sample_id >= 0 else 0.0, max_new_tokens=limit)
        said, said_logps = answer(Request(sample_id, (1,), seed, sampling))
        turn += 1
        tokens += said[:limit]
        logps += said_logps[:limit]
        observed += [False] * len(said[:limit])
        # Up to the token before the last; what earlier turns have read is not theirs.
        last = len(prompt.tokens) + len(tokens) - 1
        read += [expert_of(seed)] * (last - len(read))
        if said[:limit][-1] != STOP:
            ended = "tokens"
            break
        text = " ".join(map(str, said[:-1]))
        seen, gained, is_done, _ = environment.step(said, text)
        reward += gained
        if is_done:
            ended = "done"
        elif turn == max_turns:
            ended = "turns"
        else:
            seen = [int(w) for w in seen.split()] if isinstance(seen, str) else seen
            if len(tokens) + len(seen) >= room:
                ended = "tokens"
            else:
                tokens, logps = tokens + seen, logps + [0.0] * len(seen)
                observed += [True] * len(seen)
    names = ("tokens", "logps", "observed", "fed", "experts", "reward", "ended", "turns")
    values = tokens, logps, observed, fed, read, reward, ended, turn
    return dict(zip(names, values, strict=True))


def rows(batch: ScoredBatch) -> dict[int, dict[str, list[Any]]]:
    """The response region of every sample."""
    found = {}
    blob = batch.blobs["routed_experts"]
    experts = blob.values_N.split(batch.of_held(blob.num_rows_B).tolist())
    for i, sample_id in enumerate(batch.sample_ids_B.tolist()):
        part = slice(int(batch.offsets[i] + batch.prompt_lengths_B[i]), int(batch.offsets[i + 1]))
        assert batch.observed_T is not None
        found[sample_id] = {
            "tokens": batch.tokens_T[part].tolist(),
            "logps": batch.behaviour_logp_T[part].tolist(),
            "observed": batch.observed_T[part].tolist(),
            "experts": experts[i][:, 1].tolist(),
            "mask": batch.response_mask_T[part].tolist(),
            "reward": batch.reward_B[i].item(),
            "finished": batch.finished_B[i].item(),
        }
    return found


LIMITS = {
    "as it comes": {},
    "few turns": {"max_turns": 2},
    "one turn": {"max_turns": 1},
    "short turns": {"max_turn_tokens": 4},
    "begins with an observation": {"options": {"start": "7 8 9"}},
    "in processes": {"isolated": True},
}


@pytest.mark.parametrize("limits", LIMITS)
def test_what_is_trained_on_is_what_the_engine_was_fed(make: Any, limits: str) -> None:
    section = {**HERE, **LIMITS[limits]}
    sampler = make(section)
    batch = sampler.score(sampler.generate(prompts(), step=STEP))
    found, counts = rows(batch), {"turns": 0, "done": 0, "tokens": 0, "even": 0, "rounds": 0}
    for sample_id, row in found.items():
        expected = by_hand(
            Sums(**section.get("options", {})),
            prompts()[sample_id // 3],
            sample_id,
            section.get("max_turns", 8),
            SAMPLING.max_new_tokens,
            section.get("max_turn_tokens", 1000),
        )
        assert row["tokens"] == expected["tokens"]
        assert row["logps"] == pytest.approx(expected["logps"], abs=1e-6)  # float32 columns
        assert row["observed"] == expected["observed"]
        assert row["experts"] == expected["experts"]
        assert row["mask"] == [not seen for seen in expected["observed"]]
        assert row["reward"] == pytest.approx(expected["reward"], abs=1e-6)
        assert row["finished"] == (expected["ended"] == "done")
        fed = sampler.engine.fed[sample_id]
        assert [(list(r.prompt), r.seed, r.sampling.max_new_tokens) for r in fed] == expected["fed"]
        # The engine was fed a prefix of what is trained on, every time.
        whole = [*prompts()[sample_id // 3].tokens, *row["tokens"]]
        assert all(list(request.prompt) == whole[: len(request.prompt)] for request in fed)
        counts[expected["ended"]] += 1
        counts["rounds"] += expected["turns"]
    metrics = sampler.metrics()
    assert metrics["environment/turns_mean"] == pytest.approx(counts["rounds"] / 12)
    assert metrics["environment/truncated_turns"] == pytest.approx(counts["turns"] / 12)
    assert metrics["environment/truncated_tokens"] == pytest.approx(counts["tokens"] / 12)
    assert counts["rounds"] > 12 or limits == "one turn"
    of_groups = [sampler.generated[group] for group in range(4)]
    assert [pair for _, pairs in of_groups for pair in pairs] == [
        (len(prompts()[i // 3].tokens) + len(row["tokens"]), row["observed"].count(False))
        for i, row in found.items()
    ]
    lengths = [len(row["tokens"]) - sum(row["observed"]) for row in found.values()]
    assert batch.response_lengths_B.tolist() == lengths
    assert max(len(row["tokens"]) for row in found.values()) <= SAMPLING.max_new_tokens


@pytest.mark.parametrize("isolated", [False, True])
def test_a_step_resumes_in_the_middle_of_any_turn(make: Any, isolated: bool) -> None:
    section = {**HERE, "isolated": isolated}
    first = make(section)
    expected = rows(first.score(first.generate(prompts(), step=STEP)))
    metrics = first.metrics()
    del metrics["generate/idle_share"]
    for num_advances in (0, 1, 2, 4, 7, 11) if not isolated else (3, 9):
        saved = make(section)
        saved.submit(prompts(), 3, STEP)
        for _ in range(num_advances):
            saved.advance()
        state = json.loads(json.dumps(saved.state()))
        if num_advances == 7:  # as checkpoints were before a response had several versions
            for one in state["episodes"]:
                runs = one.pop("runs")
                one["version"] = runs[0][0] if runs else -1
        resumed = make(section)
        resumed.load_state(state)
        batch = resumed.score(resumed.generate(prompts(), step=STEP))
        assert rows(batch) == expected
        assert {**resumed.metrics(), **metrics} == resumed.metrics()
        begun = [one for one in state["episodes"] if one["tokens"]]
        again = [r for requests in resumed.engine.fed.values() for r in requests]
        # Turns that were over are not sampled again.
        assert sum(len(r.prompt) == len(prompts()[r.request_id // 3].tokens) for r in again) <= (
            12 - len(begun)
        )
        if num_advances > 4:
            assert begun and all(one["actions"] for one in begun)


def test_answers_are_due_one_look_after_they_were_asked_for(make: Any) -> None:
    """However early they are there: these environments answer at once."""
    episodes, engine = (sampler := make()).episodes, sampler.engine
    for number in range(2):
        episodes.begin(STEP, number, prompts()[number], SAMPLING)
    ended, requests = episodes.answer_due(lambda: False)
    assert not ended and [one.request_id for one in requests] == [0, 1]
    engine.submit(requests)
    while engine.has_unfinished:
        engine.step()
    assert episodes.end_turns(engine.collect()) == []
    assert episodes.answer_due(lambda: False) == ([], [])
    ended, requests = episodes.answer_due(lambda: False)
    assert sorted(one.request_id for one in (*ended, *requests)) == [0, 1]
    assert all(len(one.prompt) > len(prompts()[one.request_id].tokens) for one in requests)


def test_a_look_waits_for_an_environment_until_it_is_to_give_up(make: Any) -> None:
    slow = {"name": "own_environments:Slow", "workers": 1, "timeout_s": 30.0}
    episodes, engine = (sampler := make(slow)).episodes, sampler.engine
    episodes.begin(STEP, 0, prompts(fault="hang")[0], SAMPLING)
    engine.submit(episodes.answer_due(lambda: False)[1])
    while engine.has_unfinished:
        engine.step()
    episodes.end_turns(engine.collect())
    episodes.answer_due(lambda: False)
    asked: list[float] = []

    def gives_up() -> bool:
        asked.append(time.monotonic())
        return len(asked) == 2

    assert episodes.answer_due(gives_up) == ([], [])
    assert len(asked) == 2 and asked[1] - asked[0] > 0.9, "it has waited"


@pytest.mark.parametrize("num_advances", [0, 2, 4, 7, 11, 40])
def test_responses_to_other_prompts_are_not_taken_from_a_checkpoint(
    make: Any, num_advances: int
) -> None:
    others = [replace(one, tokens=tuple(t + 1 for t in one.tokens)) for one in prompts()]
    first = make()
    expected = rows(first.score(first.generate(others, step=STEP)))
    saved = make()
    saved.submit(prompts(), 3, STEP)
    for _ in range(num_advances):
        saved.advance()
    resumed = make()
    resumed.load_state(json.loads(json.dumps(saved.state())))
    assert rows(resumed.score(resumed.generate(others, step=STEP))) == expected


FAULTS = {
    "hang": "took longer than 1 s for sample",
    "exit": r"died \(exit code 3\) on sample",
    "raise": "raised ZeroDivisionError at .*own_environments.py:.* on sample .*: no answer",
    "nan": "returned the reward nan for sample",
    "text": "returned a str for sample",
    "object": "returned the observation <object object.*> for sample",
    "token": "returned the token 1000 for sample .* expected tokens below 100",
    "negative": r"returned the observation \[-1\] for sample",
    "note": r"returned the notes .* for sample",
    "reset": "raised RuntimeError at .*own_environments.py:.*: no such world",
}
FAULTY = {"name": "own_environments:Faulty", "timeout_s": 1.0, "workers": 1}
IN_PLACE = {"name": "own_environments:Faulty", "isolated": False}
OF_PROCESSES = ("hang", "exit", "object")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_environment_stops_the_step_and_says_how(make: Any, fault: str) -> None:
    sampler = make(FAULTY if fault in OF_PROCESSES else IN_PLACE)
    given = prompts()
    given[2] = Prompt(2, "pp", (2, 3, 4, 5), {"fault": fault})
    local = sampler.generate(given, step=STEP)
    with pytest.raises(BatchError, match=FAULTS[fault]) as caught:
        sampler.score(local)
    assert "environment 'own_environments:Faulty'" in str(caught.value)


@pytest.mark.parametrize(("fault", "on_error"), [("exit", "drop"), ("reset", "value")])
def test_a_fault_costs_only_its_own_responses(make: Any, fault: str, on_error: str) -> None:
    # One process has the environments of all responses: those of others are made anew in the next.
    error = {"error_value": -2.0} if on_error == "value" else {}
    reward = {"function": "environment", "on_error": on_error, **error}
    given = prompts()
    given[2] = Prompt(2, "pp", (2, 3, 4, 5), {"fault": fault})
    sampler = make(FAULTY, reward)
    batch = sampler.score(sampler.generate(given, step=STEP))
    found = rows(batch)
    whole = make({**FAULTY, "isolated": False})
    expected = rows(whole.score(whole.generate(prompts(), step=STEP)))
    good = [i for i in range(12) if i // 3 != 2]
    assert {i: found[i] for i in good} == {i: expected[i] for i in good}
    failed = [i for i in found if i // 3 == 2 and found[i]["reward"] == -2.0]
    if on_error == "drop":
        assert sampler.metrics()["reward/environment/errors"] >= 1
        assert len(found) < 12
    else:
        assert len(failed) == sampler.metrics()["reward/environment/errors"] >= 1
        assert not any(found[i]["finished"] for i in failed)
        if fault == "reset":
            assert len(failed) == 3


@pytest.mark.parametrize("sees", ["last_turn", "response"])
def test_reward_functions_see_the_last_turn_or_all_of_the_response(make: Any, sees: str) -> None:
    functions = {
        "environment": {"function": "environment", "weight": 2.0},
        "words": {"function": WORDS},
    }
    sampler = make({**HERE, "reward_sees": sees}, {"functions": functions})
    batch = sampler.score(sampler.generate(prompts(), step=STEP))
    for i, row in enumerate(rows(batch).values()):
        start = 0
        if sees == "last_turn" and True in row["observed"]:
            start = len(row["observed"]) - row["observed"][::-1].index(True)
        seen = [token for token in row["tokens"][start:] if token not in SPECIAL]
        assert batch.reward_parts["words"][i] == len(seen)
        total = 2 * batch.reward_parts["environment"][i] + len(seen)
        assert row["reward"] == pytest.approx(float(total), abs=1e-5)
    assert [len(text.split()) for text in sampler.scorer.responses(batch)] == [
        sum(token not in SPECIAL for token in row["tokens"]) for row in rows(batch).values()
    ]


def test_environments_that_are_made_anew_get_time_for_the_turns_they_had() -> None:
    section = {"name": "own_environments:Slow", "timeout_s": 1.0, "workers": 1}
    stages = EnvironmentRunners(EnvironmentConfig.model_validate(section))
    turn = ([5, STOP], "5")

    def play(sample: int, num_turns: int, fault: str = "") -> Answer:
        one = EnvironmentCall((0, sample), "p", {"fault": fault}, [turn] * num_turns)
        return stages.play(one, sample).result(timeout=60)[0]

    try:
        for num_turns in range(4):  # each in its own time
            assert isinstance(play(0, num_turns), Turn)
        play(1, 0, "hang")
        began = time.monotonic()
        hung = play(1, 1, "hang")
        assert isinstance(hung, ScorerFailure) and "took longer than 1 s" in hung.got
        assert time.monotonic() - began < 3  # of one turn
        # Its process is gone: four turns of 0.3 s, three of them a second time.
        found = play(0, 4)
        assert isinstance(found, Turn) and found.observation is not None
    finally:
        stages.close()


def test_a_response_whose_environment_failed_has_the_error_value(make: Any) -> None:
    given = prompts()
    given[2] = Prompt(2, "pp", (2, 3, 4, 5), {"fault": "raise"})
    sampler = make(FAULTY, {"function": WORDS, "on_error": "value", "error_value": -2.0})
    found = rows(sampler.score(sampler.generate(given, step=STEP)))
    failed = [i for i, row in found.items() if row["reward"] == -2.0]
    assert failed and all(i // 3 == 2 for i in failed)
    assert len(failed) == sampler.metrics()["reward/environment/errors"]


def test_observations_follow_the_stop_token_that_was_sampled(world: World) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    config = load_config_dict(
        {
            "run": {"name": "a"},
            "model": {"path": "m"},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "calculator"},
        }
    )
    replica = ReplicaGroup(RolloutLayout.consecutive(1, 1), world.rank, world.heartbeat)
    ends = own_end_tokens(tokenizer)
    episodes = make_episodes(config, world, replica, tokenizer, ends, len(tokenizer), None)
    assert ends == (0, 2)
    found = episodes._encoder([{"role": "tool", "content": "42"}])
    assert isinstance(found, Observed)
    said = tokenizer.decode(found.tokens)
    assert said == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    episodes.close()
