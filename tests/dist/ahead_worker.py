"""One rank of the test of generation beside training: what passes between the sides, which version
made each token, that runs repeat, and that a run which was killed equals one that was not.

ahead_worker.py FOLDER ENGINE LAG PARTS [KNOB ...]
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from command_line import QUICKSTART
from small_runs import small_run
from torch import Tensor

from hybridrl import Trainer
from hybridrl.contracts.batch import ScoredBatch, TrainBatch
from hybridrl.parallel.failure import PeerError

STEPS = 4
KNOBS = ("rollout.max_new_tokens=40", "data.max_prompt_tokens=24", "train.learning_rate=1e-3")
EVALUATES = (
    f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}",
    "data.eval_limit=2",
    "steps.eval_every=2",
)
# What a step of the slow runs takes: engines and training for long enough that work beside each
# other shows, and starts of collectives do not.
ENGINE_STEP_S, UPDATE_S = 0.02, 0.4
KEPT = ("reward/mean", "policy/loss", "policy/grad_norm", "response_tokens/mean")


class Killed(Exception):
    """Ends a run as a signal that cannot be caught would: nothing is saved."""


class Seen:
    """What happened in a run: its engine, its table of columns and its update are watched."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.versions: dict[int, list[int]] = {}  # of each sample of this rank's engine
        self.taken: list[dict[int, list[int]]] = []  # of each step, by sample, of this rank
        self.metrics: list[dict[str, float]] = []
        self.updates: list[tuple[float, float]] = []
        self.ahead: list[tuple[float, float]] = []
        self._watch_step()

    def watch_engine(self, step_s: float = 0.0) -> None:
        """Notes the tokens of each engine step with the engine's version; slows steps down."""
        engine = self.trainer.engine
        step, finish, present = engine.step, engine.finish_update, [engine.version]

        def finish_update(version: int) -> None:
            present[0] = version
            finish(version)

        def noted_step() -> None:
            if self.trainer.sampler._is_evaluation:
                step()
                return
            time.sleep(step_s)
            before = {row.request_id: len(row.tokens) for row in engine.pending()}
            step()
            held = {row.request_id: len(row.tokens) for row in engine.pending()}
            held |= {done.request_id: len(done.tokens) for done in engine._finished}
            for sample, length in held.items():
                versions = self.versions.setdefault(sample, [])
                # What another replica has made before is not seen here.
                versions += [-1] * (before.get(sample, 0) - len(versions))
                versions += [present[0]] * (length - len(versions))

        engine.step, engine.finish_update = noted_step, finish_update  # type: ignore[method-assign]

    def _watch_step(self) -> None:
        trainer = self.trainer
        columns, update, step = trainer.add_columns, trainer.update, trainer.train_step

        def noted_columns(scored: ScoredBatch) -> TrainBatch:
            self.taken.append(token_versions(scored))
            return columns(scored)

        def noted_update(batch: TrainBatch) -> dict[str, float]:
            began = time.perf_counter()
            found = update(batch)
            self.updates.append((began, time.perf_counter()))
            return found

        def noted_step() -> dict[str, float]:
            self.metrics.append(step())
            if (span := trainer.sampler.ahead_span) is not None:
                self.ahead.append((span.began, span.ended))
            return self.metrics[-1]

        trainer.add_columns, trainer.update = noted_columns, noted_update  # type: ignore[method-assign]
        trainer.train_step = noted_step  # type: ignore[method-assign]


def token_versions(batch: ScoredBatch) -> dict[int, list[int]]:
    """Returns the versions of the response tokens of this rank's samples, by sample."""
    rows = range(batch.num_samples) if batch.holders is None else batch.holders.rows_H.tolist()
    versions_T, found = batch.versions_T, {}
    ends = torch.tensor([int(batch.lengths_B[row]) for row in rows], dtype=torch.int64).cumsum(0)
    for row, end in zip(rows, ends.tolist(), strict=True):
        num = int(batch.response_lengths_B[row])
        part = [int(batch.versions_B[row])] * num
        if versions_T is not None:
            part = versions_T[end - num : end].tolist()
        found[int(batch.sample_ids_B[row])] = part
    return found


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in trainer.policy.model.weights_in_place().items()}


def told(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: one[name] for name in one if name in KEPT or name.startswith("lag/")}
        for one in metrics
    ]


@contextmanager
def run(folder: Path, *knobs: str) -> Iterator[tuple[Trainer, Seen]]:
    with small_run(folder, *KNOBS, *knobs) as trainer:
        yield trainer, Seen(trainer)


def unbroken(folder: Path, *knobs: str) -> tuple[Any, dict[str, Tensor]]:
    """Runs to the last step, from a checkpoint if there is one; returns metrics and weights."""
    with run(folder, *knobs) as (trainer, seen):
        trainer.fit(until=STEPS)
        return told(seen.metrics), weights(trainer)


def check_versions(folder: Path, lag: int, *knobs: str) -> None:
    """Every token has the version that made it, none is too old, none is lost or taken twice."""
    with run(folder, *knobs, *EVALUATES) as (trainer, seen):
        trainer.check_engine()
        # Slow enough that something is under way at an update. Of hf's replicas nothing is then,
        # however slow they are: their requests are as many as a step has and a few.
        is_scripted = trainer.config.rollout.engine == "scripted"
        seen.watch_engine(ENGINE_STEP_S if is_scripted and lag > 1 else 0.0)
        trainer.fit(until=STEPS)
        pool, world = trainer.sampler.in_flight.pool, trainer.world
        made: dict[int, list[int]] = {}
        for part in world.gather_objects(seen.versions):
            for sample, versions in part.items():
                old = made.get(sample, [])
                made[sample] = [
                    max(pair) for pair in itertools.zip_longest(old, versions, fillvalue=-1)
                ]
        of_steps = [
            {sample: one for part in parts for sample, one in part.items()}
            for parts in zip(*world.gather_objects(seen.taken), strict=True)
        ]
        metrics = seen.metrics
        per_group = 2 + (trainer.config.algorithm.name == "remax")  # and the greedy response
    numbers: list[int] = []
    for step, (samples, found) in enumerate(zip(of_steps, metrics, strict=True)):
        assert len(samples) == 8
        wrong = {n: (one, made[n]) for n, one in samples.items() if one != made[n]}
        assert not wrong, (step, wrong)
        ages = [step - version for part in samples.values() for version in part]
        assert min(ages) >= 0 and max(ages) <= lag and found["lag/max"] == max(ages)
        # What is generated beside a step is one step older than on shared ranks.
        assert step == 0 or max(ages) > 0
        assert abs(found["lag/mean"] - sum(ages) / len(ages)) < 1e-9
        numbers += samples
    under_way = {2 * group.number + i for group in pool.groups for i in range(2)}
    queued = metrics[-1]["lag/unfinished"] + metrics[-1]["lag/waiting"]
    assert queued == per_group * len(pool.groups)
    dropped = sum(found["lag/dropped"] for found in metrics)
    assert len(set(numbers)) == len(numbers) and not under_way & set(numbers)
    assert len(numbers) + len(under_way) + dropped == 2 * pool.next_number
    if is_scripted and lag > 1:
        assert any(found["lag/mixed_share"] for found in metrics)
    for found in metrics[1:]:
        assert 0 <= found["idle/training"] < 1 and 0 <= found["idle/rollout"] < 1


def check_repeats(folder: Path, moments: Sequence[str], *knobs: str) -> None:
    """A run equals one that was killed beside training or before generation, bit for bit."""
    knobs = (*knobs, "checkpoint.every=2")
    expected = unbroken(folder / "once", *knobs)
    if len(moments) > 1:
        compare(expected, unbroken(folder / "again", *knobs))
    for moment in moments:
        with run(folder / moment, *knobs) as (trainer, _):
            fail_in_step(trainer, moment, 4)
            try:
                trainer.fit(until=STEPS)
                raise AssertionError("it goes on")
            except Killed:
                pass
        found, kept = unbroken(folder / moment, *knobs)
        compare((expected[0][2:], expected[1]), (found, kept))


def check_stop(folder: Path, *knobs: str) -> None:
    """A signal beside training ends the step, and the run goes on as if none had come."""
    expected = unbroken(folder / "once", *knobs)
    with run(folder / "stopped", *knobs) as (trainer, _):
        columns, step, sleep = trainer.add_columns, trainer.engine.step, trainer.engine.sleep

        def slow_step() -> None:
            time.sleep(ENGINE_STEP_S)
            step()

        def watched_sleep(keeps_memory: bool = False) -> None:
            names = [thread.name for thread in threading.enumerate()]
            assert "generate ahead" not in names, "the engine's memory goes while it generates"
            sleep(keeps_memory)

        trainer.engine.step, trainer.engine.sleep = slow_step, watched_sleep  # type: ignore[method-assign]

        def stop(scored: ScoredBatch) -> TrainBatch:
            if trainer.step == 2 and trainer.world.rank == 0:
                trainer.world.heartbeat.stop_signal = 15
            return columns(scored)

        trainer.add_columns = stop  # type: ignore[method-assign]
        try:
            trainer.fit(until=STEPS)
            raise AssertionError("it goes on")
        except SystemExit:
            assert trainer.step == 2
    found, kept = unbroken(folder / "stopped", *knobs)
    compare((expected[0][2:], expected[1]), (found, kept))


def check_stuck(folder: Path, *knobs: str) -> None:
    """A signal ends the wait for a stuck environment; the step is saved, and a run continues."""
    folder.mkdir(exist_ok=True)
    stuck, environment = folder / "stuck", "environment={name: 'own_environments:Stuck', "
    knobs = (
        *knobs,
        f"{environment}options: {{path: {stuck}}}, workers: 2, max_turns: 3, timeout_s: 60}}",
        "reward.function=environment",
    )
    with run(folder, *knobs) as (trainer, _):
        update, world = trainer.update, trainer.world

        def stick(batch: TrainBatch) -> dict[str, float]:
            if trainer.step == 1:
                stuck.touch()
                time.sleep(1.0)  # the engines come to ask it
            found = update(batch)
            if trainer.step == 1 and world.rank == 0:
                world.heartbeat.stop_signal = 15
            return found

        trainer.update = stick  # type: ignore[method-assign]
        began = time.monotonic()
        try:
            trainer.fit(until=STEPS)
            raise AssertionError("it goes on")
        except SystemExit:
            assert trainer.step == 2
        took_s = time.monotonic() - began
        unfinished = [not all(group.is_done) for group in trainer.sampler.in_flight.pool.groups]
        world.arrive("the end")
        stuck.unlink(missing_ok=True)
    assert took_s < 15 and any(unfinished), (took_s, unfinished)
    with run(folder, *knobs) as (trainer, seen):
        trainer.fit(until=STEPS)
        assert trainer.step == STEPS and len(seen.metrics) == STEPS - 2
        assert max(one["lag/max"] for one in seen.metrics) > 0


def check_failure(folder: Path, *knobs: str) -> None:
    """An engine that fails beside training ends the run on all ranks, and is named."""
    with run(folder, *knobs) as (trainer, _):
        step, rank = trainer.engine.step, trainer.world.rank
        failing = trainer.sampler.layout.ranks[-1]

        def fail() -> None:
            step()
            if trainer.step == 1 and threading.current_thread() is not threading.main_thread():
                raise RuntimeError("planted")

        if rank == failing:
            trainer.engine.step = fail  # type: ignore[method-assign]
        try:
            trainer.fit(until=STEPS)
            raise AssertionError("it goes on")
        except PeerError as error:
            assert rank != failing and f"rank {failing} failed in generating ahead" in str(error)
            assert "RuntimeError: planted" in str(error)
        except RuntimeError as error:
            assert rank == failing and str(error) == "planted"


def fail_in_step(trainer: Trainer, moment: str, number: int) -> None:
    """Ends the run in its fourth step, beside generation or before the samples are there."""
    owner: Any = trainer if moment == "update" else trainer.sampler
    name = moment
    inner = getattr(owner, name)

    def fail(*given: Any, **named: Any) -> Any:
        if trainer.step + 1 == number and named.get("step", 0) >= 0:
            raise Killed
        return inner(*given, **named)

    setattr(owner, name, fail)


def compare(one: Any, other: Any) -> None:
    assert one[0] == other[0], (one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


def check_overlap(folder: Path, *knobs: str) -> None:
    """Generation and updates run at the same time: most of the shorter one is beside the other."""
    drained = "rollout.unfinished_at_update=0"
    with small_run(folder, *KNOBS, *knobs, drained) as trainer:
        step, update = trainer.engine.step, trainer.update
        is_engine = trainer.world.rank in trainer.sampler.layout.ranks

        def slow_step() -> None:
            time.sleep(ENGINE_STEP_S)
            step()

        def slow_update(batch: TrainBatch) -> dict[str, float]:
            time.sleep(0 if is_engine else UPDATE_S)
            return update(batch)

        trainer.engine.step, trainer.update = slow_step, slow_update  # type: ignore[method-assign]
        seen = Seen(trainer)
        trainer.fit(until=STEPS)
        sides = trainer.world.gather_objects((is_engine, seen.ahead, seen.updates))
    ahead = next(spans for is_engine, spans, _ in sides if is_engine)
    updates = next(spans for is_engine, _, spans in sides if not is_engine)
    shared = [min(a[1], b[1]) - max(a[0], b[0]) for a, b in zip(ahead, updates, strict=True)]
    generated = [end - began for began, end in ahead]
    assert all(one > 0 for one in shared[1:]), (ahead, updates)
    for both, one, (began, end) in list(zip(shared, generated, updates, strict=True))[1:]:
        assert both > 0.6 * min(one, end - began), (both, one, end - began)


def main() -> None:
    _, given, engine, given_lag, parts, *more = sys.argv
    folder, lag = Path(given), int(given_lag)
    knobs = (f"rollout.engine={engine}", f"steps.max_policy_lag={lag}", *more)
    for part in parts.split(","):
        if part == "versions":
            check_versions(folder / part, lag, *knobs)
        elif part == "stopped":
            check_stop(folder / part, *knobs)
        elif part == "stuck":
            check_stuck(folder / part, *knobs)
        elif part == "fails":
            check_failure(folder / part, *knobs)
        elif part == "killed":
            check_repeats(folder / part, ["update"], *knobs)
        elif part == "repeats":
            check_repeats(folder / part, ["update", "generate"], *knobs)
        else:
            check_overlap(folder / part, *knobs)


if __name__ == "__main__":
    main()
