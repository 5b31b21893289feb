"""Runs whose samples may be of older weights: which version made each token, that runs repeat, and
that a run which was stopped or killed equals one that was not.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import QUICKSTART, run
from small_runs import SMALL as SMALL_RUN
from small_runs import small_run

from hybridrl import Trainer
from hybridrl.config.needs import Needs
from hybridrl.contracts.batch import GREEDY, RolloutBatch, ScoredBatch, TrainBatch
from hybridrl.errors import UserError
from hybridrl.generation import joint_stop

STEPS = 6
LAGGED = ("rollout.max_new_tokens=40", "data.max_prompt_tokens=40", "train.learning_rate=1e-3")
DROPS = ("rollout.at_lag_bound=drop", "rollout.in_flight=8")  # some samples come too late
# Half of the groups are replaced, in up to two rounds.
TURNS = (
    "environment={name: 'own_environments:Counts', workers: 2, max_turns: 3}",
    "reward.function=environment",
    "reward.isolated=null",
)
REPLACES = ("algorithm.max_resampling=2", "reward.function=scripted_reward:begins_even")


@dataclass
class Recorded:
    """The versions of each sample's tokens as the engine made them, and each step's batch.

    `gaps` are behaviour less the trainer's own log-probabilities of a step's tokens.
    """

    versions: dict[int, list[int]] = field(default_factory=dict)
    batches: list[ScoredBatch] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)


def record(trainer: Trainer) -> Recorded:
    """Notes the tokens of each engine step with the version that was last given to the engine."""
    found, engine = Recorded(), trainer.engine
    step, finish, columns = engine.step, engine.finish_update, trainer.add_columns
    present = [engine.version]

    def finish_update(version: int) -> None:
        present[0] = version
        finish(version)

    def noted_step() -> None:
        before = {row.request_id: len(row.tokens) for row in engine.pending()}
        step()
        held = {row.request_id: len(row.tokens) for row in engine.pending()}
        held |= {done.request_id: len(done.tokens) for done in engine._finished}
        for sample, length in held.items():
            versions = found.versions.setdefault(sample, [])
            versions += [present[0]] * (length - before[sample])

    def noted_columns(scored: ScoredBatch) -> TrainBatch:
        batch = columns(scored)
        found.batches.append(scored)
        found.gaps.append(scored.behaviour_logp_T - trainer.policy.logprobs(batch))
        return batch

    engine.step, engine.finish_update = noted_step, finish_update  # type: ignore[method-assign]
    trainer.add_columns = noted_columns  # type: ignore[method-assign]
    return found


def token_versions(batch: ScoredBatch) -> dict[int, list[int]]:
    """Returns the versions of the response tokens by sample."""
    versions_T = batch.versions_T
    if versions_T is None:
        versions_T = batch.versions_B[batch.sample_index_T]
    lengths = batch.response_lengths_B.tolist()
    parts = versions_T[batch.response_mask_T].split(lengths)
    pairs = zip(batch.sample_ids_B.tolist(), parts, strict=True)
    return {sample: part.tolist() for sample, part in pairs}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in trainer.engine.tensors().items()}


def knobs(engine: str, lag: int, *more: str) -> tuple[str, ...]:
    return (*LAGGED, f"rollout.engine={engine}", f"steps.max_policy_lag={lag}", *more)


@pytest.mark.parametrize(
    ("engine", "lag", "more"),
    [
        pytest.param(engine, lag, more, marks=marks)
        for lag, more, *marks in (
            (1, ()),
            (1, DROPS, pytest.mark.full),
            (1, REPLACES, pytest.mark.full),
            (1, TURNS, pytest.mark.full),
            (2, ("rollout.in_flight=11", "rollout.max_batch=12")),
        )
        for engine, marks in (("hf", marks), ("scripted", ()))
    ],
)
def test_every_token_has_the_version_that_made_it(
    engine: str, lag: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    metrics, drops = [], more == DROPS
    with small_run(tmp_path, *knobs(engine, lag, *more)) as trainer:
        trainer.check_engine()
        found = record(trainer)
        metrics = [trainer.train_step() for _ in range(STEPS)]
        sampler = trainer.sampler
        pool = sampler.in_flight.pool
        # The algorithm corrects for it, without being told.
        assert trainer.algorithm.correction.weight == "token"  # type: ignore[attr-defined]
    taken: list[int] = []
    for step, (batch, gap_T, told) in enumerate(
        zip(found.batches, found.gaps, metrics, strict=True)
    ):
        assert batch.num_samples == 8
        assert sorted(batch.group_B.unique().tolist()) == sorted(
            {sample // 2 for sample in batch.sample_ids_B.tolist()}
        )
        versions = token_versions(batch)
        assert versions == {sample: found.versions[sample] for sample in versions}
        ages = [step - version for part in versions.values() for version in part]
        assert min(ages) >= 0 and max(ages) <= lag
        if more not in (REPLACES, TURNS):  # else what was replaced, or observed, counts too
            assert told["lag/mean"] == pytest.approx(sum(ages) / len(ages))
            assert told["lag/max"] == max(ages)
            mixed = sum(len(set(part)) > 1 for part in versions.values())
            assert told["lag/mixed_share"] == mixed / 8
        if engine == "hf":
            # What this step's weights made is as likely to the trainer; what older ones made, not.
            versions_T = torch.tensor([v for part in versions.values() for v in part])
            gap_R = gap_T[batch.response_mask_T].abs()
            new, old = gap_R[versions_T == step], gap_R[versions_T < step]
            assert not len(new) or float(new.max()) < 1e-4
            assert not len(old) or float(old.mean()) > 1e-3
        taken += versions
    assert max(told["lag/max"] for told in metrics) == lag
    assert any(told["lag/mixed_share"] > 0 for told in metrics)
    if more == TURNS:
        assert max(told["environment/turns_mean"] for told in metrics) > 1.5
        assert any(told["environment/read"] for told in metrics)
    # No sample is lost, and none is learned from twice.
    dropped = sum(told["lag/dropped"] for told in metrics)
    replaced = 2 * sum(told["generate/resampled_groups"] for told in metrics)
    assert bool(replaced) == (more == REPLACES)
    assert len(set(taken)) == len(taken)
    under_way = {2 * group.number + i for group in pool.groups for i in range(2)}
    assert metrics[-1]["lag/unfinished"] + metrics[-1]["lag/waiting"] == len(under_way)
    assert not under_way & set(taken)
    assert len(taken) + len(under_way) + dropped + replaced == 2 * pool.next_number
    assert drops or len(under_way | set(taken)) == 2 * pool.next_number - replaced
    assert drops or not dropped
    assert dropped or not drops or engine == "hf"


def numbers(batch: RolloutBatch | None) -> list[int]:
    """Returns the numbers of a batch's groups."""
    assert batch is not None
    return batch.group_B.unique().tolist()


@pytest.mark.parametrize("uses_late", [True, False])
def test_a_further_round_takes_what_the_step_would_throw_away(
    uses_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        joint_stop, "STEPS_BETWEEN_SUMS", 2
    )  # steps end before all of their groups do
    with small_run(tmp_path, *knobs("scripted", 1, "rollout.at_lag_bound=drop")) as trainer:
        trainer.check_engine()
        trainer.train_step()
        sampler, source = trainer.sampler, trainer.prompts
        taken = numbers(sampler.generate(sampler.take(source, 4), step=1))
        late = {group.number for group in sampler.in_flight.pool.groups if group.born == 0}
        assert late and not late & set(taken)
        if uses_late:
            more = numbers(sampler.generate(sampler.take(source, 4), step=1))
            assert late <= set(more) and len(more) == 4
        sampler.end_step()
        assert not late & {group.number for group in sampler.in_flight.pool.groups}
        assert sampler.metrics()["lag/dropped"] == (0 if uses_late else 2 * len(late))


def test_a_step_after_further_rounds_has_as_many_groups_as_any(tmp_path: Path) -> None:
    drops = "rollout.at_lag_bound=drop"  # nothing is waited for beyond what a step needs
    with small_run(tmp_path, *knobs("scripted", 1, drops, *REPLACES)) as trainer:
        trainer.check_engine()
        metrics = trainer.train_step()
        assert metrics["generate/resampled_groups"] < 4 * metrics["generate/resampling_rounds"]
        # A dataflow of one's own may not say how many it needs.
        assert len(numbers(trainer.sampler.generate(trainer.prompts.take(4), step=1))) == 4


def test_prompts_with_which_a_step_would_never_end_are_refused(tmp_path: Path) -> None:
    with small_run(tmp_path, *knobs("scripted", 1)) as trainer:
        trainer.check_engine()
        sampler, source = trainer.sampler, trainer.prompts
        for num in (3, 9):  # a step takes 4, and the next one as many: a tenth would be too old
            with pytest.raises(ValueError, match=f"step 0 got {num} prompts in addition to 0 "):
                sampler.generate(source.take(num), step=0)
            sampler.drop()
        assert len(numbers(sampler.generate(source.take(8), step=0))) == 4


def finished(folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Runs to the last step, from a checkpoint if there is one; returns weights and metrics."""
    with small_run(folder, *overrides) as trainer:
        trainer.fit(until=STEPS)
        found = weights(trainer)
    return found, records(folder)


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "reward/mean", "policy/loss", "policy/grad_norm", "response_tokens/mean")
    return [
        {name: one[name] for name in one if name in kept or name.startswith("lag/")}
        for one in map(json.loads, lines)
    ]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Own:
    """An algorithm that says nothing of a lag."""

    needs, name = Needs(), "own"
    advantages = denominator = loss = staticmethod(lambda *_: None)


class Killed(Exception):
    """Ends a run as a signal that cannot be caught would: nothing is saved."""


@contextmanager
def at_engine_step(trainer: Trainer, number: int, happens: Callable[[], None]) -> Iterator[None]:
    """Lets something happen after so many steps of the engine."""
    step, count = trainer.engine.step, 0

    def counted() -> None:
        nonlocal count
        step()
        count += 1
        if count == number:
            happens()

    trainer.engine.step = counted  # type: ignore[method-assign]
    yield


FULL = pytest.mark.full


@pytest.fixture(
    scope="module",
    params=[
        ("hf", 1),
        pytest.param(("hf", 2), marks=FULL),
        pytest.param(("scripted", 1), marks=FULL),
        pytest.param(("scripted", 1, *REPLACES), marks=FULL),
        pytest.param(("hf", 2, *REPLACES), marks=FULL),
        ("scripted", 1, *TURNS),
        pytest.param(("hf", 2, *TURNS), marks=FULL),
    ],
    ids=str,
)
def unbroken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], dict[str, torch.Tensor], list[dict[str, Any]]]:
    of_run = knobs(*request.param, "checkpoint.every=2")
    return of_run, *finished(tmp_path_factory.mktemp("unbroken"), *of_run)


Unbroken = tuple[tuple[str, ...], dict[str, torch.Tensor], list[dict[str, Any]]]


@pytest.mark.full
def test_runs_repeat(unbroken: Unbroken, tmp_path: Path) -> None:
    of_run, expected, told = unbroken
    again, told_again = finished(tmp_path, *of_run)
    assert told_again == told
    assert same(again, expected)


# Of the steps of a run's engine, ten that were drawn; one of them runs always.
MOMENTS = sorted(random.Random(20).sample(range(2, 110), 10))


@pytest.mark.parametrize(
    "moment", [pytest.param(one, marks=[FULL] if one != MOMENTS[3] else []) for one in MOMENTS]
)
def test_a_run_that_was_killed_equals_one_that_was_not(
    unbroken: Unbroken, moment: int, tmp_path: Path
) -> None:
    of_run, expected, told = unbroken

    def kill() -> None:
        raise Killed

    with (
        small_run(tmp_path, *of_run) as trainer,
        at_engine_step(trainer, moment, kill),
        pytest.raises(Killed),
    ):
        trainer.fit(until=STEPS)
    found, told_again = finished(tmp_path, *of_run)
    assert told_again == told
    assert same(found, expected)


@pytest.mark.parametrize("moment", [pytest.param(5, marks=FULL), 30])
def test_a_run_that_was_stopped_equals_one_that_was_not(
    unbroken: Unbroken, moment: int, tmp_path: Path
) -> None:
    of_run, expected, told = unbroken

    with small_run(tmp_path, *of_run) as trainer:

        def stop() -> None:
            trainer.world.heartbeat.stop_signal = 15

        with at_engine_step(trainer, moment, stop), pytest.raises(SystemExit):
            trainer.fit(until=STEPS)
    found, told_again = finished(tmp_path, *of_run)
    assert told_again == told
    assert same(found, expected)


def test_a_step_that_failed_is_taken_again_with_the_same_samples(tmp_path: Path) -> None:
    of_run = knobs("hf", 1)
    expected, _ = finished(tmp_path / "whole", *of_run)
    with small_run(tmp_path / "failed", *of_run) as trainer:
        trainer.fit(until=2)
        update = trainer.update

        def fail(batch: TrainBatch) -> dict[str, float]:
            raise Killed

        trainer.update = fail  # type: ignore[method-assign]
        with pytest.raises(Killed):
            trainer.fit(until=STEPS)
        trainer.update = update  # type: ignore[method-assign]
        trainer.fit(until=STEPS)
        assert same(weights(trainer), expected)


def test_evaluations_run_to_their_end_beside_what_is_under_way(tmp_path: Path) -> None:
    heldout = f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}"
    evaluates = (heldout, "data.eval_limit=8", "steps.eval_every=2")
    expected, told = finished(tmp_path / "without", *knobs("scripted", 1))
    found, told_again = finished(tmp_path / "with", *knobs("scripted", 1, *evaluates))
    assert told_again == told
    assert same(found, expected)
    lines = (tmp_path / "with" / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    assert sum("eval/reward" in json.loads(line) for line in lines) == STEPS // 2


def test_lag_of_0_samples_as_without_a_lag(tmp_path: Path) -> None:
    """With as many prompts under way as a step takes, every step begins and ends with none."""
    found = []
    for name, more in (("zero", ()), ("one", ("steps.max_policy_lag=1", "rollout.in_flight=4"))):
        with small_run(tmp_path / name, *LAGGED, "rollout.engine=hf", *more) as trainer:
            trainer.check_engine()
            recorded = record(trainer)
            told = [trainer.train_step() for _ in range(2)]
            found.append((recorded, told))
    (zero, of_zero), (one, of_one) = found
    assert not any(name.startswith("lag/") for name in of_zero[0])
    assert of_one[0]["lag/max"] == 0 == of_one[1]["lag/max"]
    # The first step has the same numbers, seeds and weights.
    assert torch.equal(zero.batches[0].tokens_T, one.batches[0].tokens_T)
    assert torch.equal(zero.batches[0].behaviour_logp_T, one.batches[0].behaviour_logp_T)


def test_greedy_responses_are_part_of_what_is_under_way(tmp_path: Path) -> None:
    of_run = knobs("hf", 1, "algorithm.name=remax")
    with small_run(tmp_path, *of_run) as trainer:
        trainer.check_engine()
        found = record(trainer)
        metrics = [trainer.train_step() for _ in range(3)]
    assert metrics[-1]["lag/max"] == 1
    for batch in found.batches:
        assert batch.num_samples == 8 and GREEDY in batch.reward_parts
        assert int(batch.sample_ids_B.min()) >= 0
    # Greedy tokens were made beside the others, and have versions of their own.
    groups = {group for batch in found.batches for group in batch.group_B.tolist()}
    assert {-1 - group for group in groups} <= found.versions.keys()


def test_a_critic_learns_with_a_lag(tmp_path: Path) -> None:
    of_run = knobs("scripted", 1, "steps.samples_per_prompt=1", "model.path=null")
    with small_run(tmp_path, *of_run, config="ppo.yaml") as trainer:
        trainer.check_engine()
        metrics = [trainer.train_step() for _ in range(3)]
    assert metrics[-1]["lag/max"] == 1
    assert metrics[-1]["critic/loss"] > 0


def test_an_algorithm_of_ones_own_says_that_it_takes_a_lag(tmp_path: Path) -> None:
    of_run = knobs("scripted", 1, "algorithm={name: 'test_policy_lag:Own'}")
    with pytest.raises(UserError, match="does not set allows_lag"), small_run(tmp_path, *of_run):
        pass


@pytest.mark.dist
@pytest.mark.parametrize(
    "more", [(), pytest.param(REPLACES, marks=FULL), pytest.param(TURNS, marks=FULL)]
)
def test_replicas_share_what_is_under_way_and_a_run_goes_on_with_fewer(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """The scripted engine gives every request a token a step, so that the samples are the same on
    any number of replicas; sums of gradients come in another order.
    """
    config = [
        "train", QUICKSTART / "grpo.yaml", *SMALL_RUN, *knobs("scripted", 2, *more),
        f"steps.num_steps={STEPS}", "checkpoint.every=3", "checkpoint.keep=9",
    ]  # fmt: skip
    run(*config, f"run.dir={tmp_path / 'two'}", "--world", "2")
    expected = records(tmp_path / "two")
    assert any(one["lag/mixed_share"] > 0 for one in expected)
    folder = shutil.copytree(tmp_path / "two", tmp_path / "one") / "quickstart-grpo"
    shutil.rmtree(folder / "checkpoints" / "step_6")
    run(*config, f"run.dir={tmp_path / 'one'}", "--world", "1")
    found = records(tmp_path / "one")
    assert [one["step"] for one in found] == list(range(1, STEPS + 1))
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (one["step"], name)
