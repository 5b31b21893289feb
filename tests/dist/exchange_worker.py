"""One rank of the test of where a step's tokens are: with what trains on them, and nowhere else.

exchange_worker.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripted_turns import STEP, make_sampler, prompts
from small_runs import small_run

from hybridrl.contracts.batch import ScoredBatch, TrainBatch
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.sampler import Sampler
from hybridrl.generation.saved_rollouts import SAMPLES
from hybridrl.generation.schedule import Schedule
from hybridrl.loop.trainer import Trainer
from hybridrl.parallel.exchange import bring, collect
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.messages import pack
from hybridrl.platform import Platform
from hybridrl.training.batches.packing import even_sizes

UPDATES = 2
KNOBS = (f"steps.updates_per_step={UPDATES}", "algorithm.kl_coef=0.1", "log.rollouts_every=0")
# Knobs, and how often tokens travel in a step.
WAYS = {
    "replicas of two ranks": (("train.tp=2",), 1),
    "stages": (("train.pp=2",), 1),
    "contexts": (("train.cp=2",), 1),
    # Once to the policy's ranks, and once to the reference's.
    "reference elsewhere": (("placement.policy=0-1", "placement.reference=2-3"), 2),
    "engines elsewhere": (("placement.policy=0-1", "placement.rollout=2-3"), 1),
}


@contextmanager
def counted(trainer: Trainer) -> Iterator[list[torch.dtype]]:
    """Gives what kinds of columns travel inside; token numbers are the 32-bit integers."""
    found: list[torch.dtype] = []
    exchange = trainer.world.all_to_all

    def noted(received: torch.Tensor, *more: Any) -> None:
        found.append(received.dtype)
        exchange(received, *more)

    trainer.world.all_to_all = noted  # type: ignore[method-assign]
    yield found
    trainer.world.all_to_all = exchange  # type: ignore[method-assign]


def check_places(trainer: Trainer, batch: TrainBatch) -> None:
    """A sample's tokens are on the ranks of the replica that trains on it, in each mini-batch."""
    assert batch.holders is not None
    mesh, table_BW = trainer.policy.model.mesh, batch.holders.by_rank_BW
    assert not table_BW[:, [r for r in range(4) if r not in mesh.ranks]].any()
    assert (table_BW.sum(1) == mesh.layout.world_size // mesh.layout.dp).all()
    assert len(batch.tokens_T) == int(batch.lengths_B[table_BW[:, trainer.world.rank]].sum())
    end = 0
    for size in even_sizes(batch.num_samples, UPDATES):
        part, end = batch.select(range(end, end + size)), end + size
        plan = trainer.policy.model.plan(part)
        assert plan.here is part  # nothing had to be brought
        mine = {i for work in plan.inputs for i in work.whole.sample_indices}
        assert mine == set(part.rows_H.tolist())


def check_way(folder: Path, name: str, knobs: Sequence[str], num_exchanges: int) -> None:
    given = *KNOBS, *knobs, f"run.name={name.replace(' ', '-')}"
    with small_run(folder, *given) as trainer:
        seen: list[TrainBatch] = []
        update = trainer.update

        def noted(batch: TrainBatch) -> dict[str, float]:
            seen.append(batch)
            return update(batch)

        trainer.update = noted  # type: ignore[method-assign]
        trainer.enter_rollout()
        with counted(trainer) as kinds:
            trainer.train_step()
        assert kinds.count(torch.int32) == num_exchanges, kinds
        check_places(trainer, seen[0])
        check_gradients(trainer, seen[0])


def check_gradients(trainer: Trainer, batch: TrainBatch) -> None:
    """They and log-probabilities are those of the whole batch on every rank, bit for bit."""
    trainer.enter_training()
    part = batch.select(range(batch.num_samples // 2))
    everywhere = torch.ones(part.num_samples, 4, dtype=torch.bool)
    whole = replace(bring(part, everywhere, trainer.world), holders=None, num_observed_B=None)
    logps = [trainer.policy.logprobs(one) for one in (part, whole)]
    places = whole.token_places(part.rows_H)
    assert torch.equal(logps[0], logps[1][places]) and logps[1].any()
    dealt, at_once = (trainer.policy.gradients(one) for one in (part, whole))
    assert repr(dealt.metrics) == repr(at_once.metrics), (dealt.metrics, at_once.metrics)
    assert dealt.grad_norm > 0


@contextmanager
def received() -> Iterator[list[int]]:
    """Gives how many bytes come from other ranks inside, over torch.distributed."""
    found: list[int] = []
    real = dist.all_gather, dist.all_to_all_single, dist.broadcast

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, **more: Any) -> Any:
        found.append(sum(part.nbytes for part in parts) - own.nbytes)
        return real[0](parts, own, **more)

    def all_to_all_single(out: torch.Tensor, own: torch.Tensor, *sizes: Any, **more: Any) -> Any:
        kept = sizes[0][dist.get_rank()] * out.element_size()
        found.append(out.nbytes - kept)
        return real[1](out, own, *sizes, **more)

    def broadcast(tensor: torch.Tensor, source: int, *given: Any, **more: Any) -> Any:
        found.append(0 if source == dist.get_rank() else tensor.nbytes)
        return real[2](tensor, source, *given, **more)

    dist.all_gather, dist.all_to_all_single, dist.broadcast = (
        all_gather,
        all_to_all_single,
        broadcast,
    )
    yield found
    dist.all_gather, dist.all_to_all_single, dist.broadcast = real


NOTHING_BYTES = 64  # how many bytes there are, of each rank
SUMS = {"name": "own_environments:Sums", "isolated": False}
REWARD = {"function": "environment"}


def check_saved_rollouts(world: World) -> None:
    """Saved samples come to the rank that writes them, and read ones to those that need them."""
    layouts = [RolloutLayout.consecutive(4, tp) for tp in (1, 2)]
    whole, begun, resumed = (
        make_sampler(world, layout, SUMS, REWARD) for layout in (layouts[0], *layouts)
    )
    expected = whole.score(whole.generate(prompts(), step=STEP))
    begun.submit(prompts(), 3, step=STEP)
    for _ in range(3):
        begun.advance()
    state = saved_state(world, begun)
    if world.rank == 0:
        kept = {one["request_id"] for one in [*state["completions"], *state["requests"]]}
        assert kept | {one["sample_id"] for one in state["episodes"]} == set(range(12))
        assert state["completions"] and state["requests"]
    with received() as came:
        resumed.load_state(state)
        place = 2 * (world.rank // 2)
        saved = resumed._saved_samples(STEP, [range(6), range(6, 12)])
    assert {one["request_id"] for one in saved.select(range(12))["completions"]} <= set(
        range(3 * place, 3 * place + 6)
    )
    all_bytes = max(world.gather_objects(len(pack(state))))
    assert world.rank == 0 or sum(came) < 0.8 * all_bytes, (came, all_bytes)
    same(world, resumed.score(resumed.generate(prompts(), step=STEP)), expected)
    for sampler in (whole, begun, resumed):
        sampler.close()


def check_what_is_under_way(world: World) -> None:
    """The same where samples take several steps."""
    schedule = Schedule(max_lag=1, per_step=4, in_flight=8)
    layouts = [RolloutLayout.consecutive(4, tp) for tp in (1, 1, 2)]
    rows = [replace(one, prompt_id=n) for n, one in enumerate(prompts() * 4)]
    found = []
    samplers = [make_sampler(world, layout, SUMS, REWARD, schedule) for layout in layouts]
    sources = [PromptSource(rows, seed=1, shuffle=False) for _ in samplers]
    for sampler, source in zip(samplers[:2], sources[:2], strict=True):
        sampler.score(sampler.generate(sampler.take(source, 4), step=0))
        with sampler.ahead(source):
            sampler.end_step()
    state = saved_state(world, samplers[1])
    sources[2].load_state(json.loads(json.dumps(sources[1].state())))
    with received() as came:
        samplers[2].load_state(state, sources[2])
    assert world.rank == 0 or sum(came) < 5000, came
    again = json.loads(json.dumps(samplers[2].state()))  # before anything is dealt to replicas
    assert samples_of(again) == samples_of(state) and again["in_flight"] == state["in_flight"]
    for sampler, source in ((samplers[0], sources[0]), (samplers[2], sources[2])):
        sampler.engine.finish_update(1)
        found.append(sampler.score(sampler.generate(sampler.take(source, 4), step=1)))
    same(world, *found)
    for sampler in samplers:
        sampler.close()


def samples_of(state: dict[str, Any]) -> list[str]:
    return sorted(json.dumps(one) for name in SAMPLES[:3] for one in state[name])


def saved_state(world: World, sampler: Sampler) -> dict[str, Any]:
    """Returns a sampler's state; checks that ranks which do not write it get no sample."""
    with received() as came:
        state: dict[str, Any] = json.loads(json.dumps(sampler.state()))
    samples = [state[name] for name in SAMPLES]
    if world.rank:
        assert sum(came) <= NOTHING_BYTES and not any(samples), (came, samples)
    else:
        assert sum(came) > 1000 and any(samples)
    return state


def same(world: World, one: ScoredBatch, other: ScoredBatch) -> None:
    batches = [collect(batch, world) for batch in (one, other)]
    if batches[0] is not None and batches[1] is not None:
        assert batches[0].tokens_T.tolist() == batches[1].tokens_T.tolist()
        assert batches[0].reward_B.tolist() == batches[1].reward_B.tolist()


def main() -> None:
    folder = Path(sys.argv[1])
    platform = Platform.detect()
    start_process_group(platform, 60.0)
    world = World(platform, 60.0)
    check_saved_rollouts(world)
    check_what_is_under_way(world)
    stop_process_group()
    print("saved rollouts: ok", flush=True)
    for name, (knobs, num_exchanges) in WAYS.items():
        check_way(folder, name, knobs, num_exchanges)
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
