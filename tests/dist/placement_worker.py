"""One rank of the test of placements: the same samples give the same losses and weights, wherever
the models lie.

placement_worker.py FOLDER
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from small_runs import small_run
from torch import Tensor

from hybridrl.hybrid_engine.export import gather_tensors
from hybridrl.loop.trainer import Trainer
from hybridrl.models.weights import hf_shapes
from hybridrl.training.model import ParallelModel

STEPS = 2
# With the same number of data-parallel replicas sums are made in the same order: bit for bit.
EXACT, CLOSE = 0.0, 1e-6
Found = tuple[list[dict[str, float]], dict[str, dict[str, Tensor]]]


# What is gone on from, and one of each kind of placement, are saved; others are not.
SAVED = ("reversed", "reference", "alone", "apart")


def weights(model: ParallelModel) -> dict[str, Tensor]:
    """Returns the HF tensors of a model, from the parts that the ranks hold."""
    world, source = model.world, model.source
    shapes = hf_shapes(source.family, source.shape, model.head)
    found = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    mine = {name: tensor.clone() for name, tensor in model.weights().items()}  # no whole buffers
    for rank, tensors in enumerate(world.gather_objects(mine)):
        for region in model.layout_of(rank).regions:
            part = tensors[region.local][tuple(slice(a, b) for a, b in region.local_box)]
            target = found[region.hf][tuple(slice(a, b) for a, b in region.hf_box)]
            target.copy_(part.view(target.shape))
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def check_export(model: ParallelModel, expected: dict[str, Tensor]) -> None:
    """What is exported are these tensors, on rank 0."""
    world = model.world
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    found = dict(gather_tensors(model.whole_weights(), shapes, torch.float32, world))
    assert set(found) == (set(expected) if world.rank == 0 else set())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def train(folder: Path, name: str, steps: int, config: str, *knobs: str) -> Found:
    """Trains, and returns the metrics of each step and the weights at the end."""
    return train_through(folder, name, steps, config, *knobs)[steps]


def train_through(
    folder: Path, name: str, steps: int, config: str, *knobs: str
) -> dict[int, Found]:
    """Trains, and returns what is found after STEPS steps, and after more, up to the end."""
    # Adam divides by a gradient's size: where it is tiny, another order of sums moves a weight by a
    # part of the learning rate, up to 6% of it on some processors, which is kept below the
    # tolerance that way. What lies wrongly moves weights by all of it.
    options = f"run.name={name}", f"steps.num_steps={STEPS * 2}", "train.learning_rate=1e-5"
    if config == "ppo.yaml":
        options = *options, "train.critic_learning_rate=1e-5"
    given = (*options, *knobs)
    with small_run(folder, *given, config=config) as trainer:
        metrics: list[dict[str, float]] = []
        found: dict[int, Found] = {}
        step = trainer.train_step

        def note() -> dict[str, float]:
            metrics.append(step())
            if trainer.step % STEPS == 0:
                models = {role: weights(model) for role, model in trainer.trained.items()}
                found[trainer.step] = metrics[:], models
            return metrics[-1]

        trainer.train_step = note  # type: ignore[method-assign]
        if name not in SAVED:
            trainer.checkpoints.save = lambda waits=True: None  # type: ignore[assignment, method-assign]
        trainer.fit(until=steps)
        if name in SAVED:
            for role, model in trainer.trained.items():
                check_export(model, found[steps][1][role])
        check_parts(trainer)
        told = trainer.world.gather_objects(seen(metrics))
    assert all(other == told[0] for other in told), ("metrics differ between ranks", told)
    return found


def seen(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Returns what does not depend on how fast a run is, or on where its parts lie."""
    mine = ("time_s", "throughput", "memory", "reshard", "generate/idle_share", "flops", "mfu")
    return [
        {key: repr(value) for key, value in step.items() if not key.startswith(mine)}
        for step in metrics
    ]


def check_parts(trainer: Trainer) -> None:
    """A rank holds of a model exactly what its place gives it."""
    for model in trainer.models.values():
        names = model.layout().shapes if model.mesh.is_member else {}
        assert set(model.weights_in_place()) == set(names), (trainer.world.rank, names)
    has_engine = trainer.world.rank in trainer.sampler.layout.ranks
    assert bool(trainer.engine.tensors()) is has_engine


def compare(name: str, one: Found, other: Found, tolerance: float) -> None:
    """Raises AssertionError where two runs differ by more than the tolerance."""
    for step, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
        for key in ("policy/loss", "policy/grad_norm", "critic/loss", "reward/mean", "policy/kl"):
            mine, its = a.get(key), b.get(key)
            assert (mine is None) == (its is None), (name, step, key)
            if mine is not None and its is not None:
                gap = abs(mine - its) / max(1.0, abs(mine))
                assert gap <= tolerance, (name, step, key, mine, its)
    assert one[1].keys() == other[1].keys()
    for role, tensors in one[1].items():
        for tensor, value in tensors.items():
            gap = float((value - other[1][role][tensor]).abs().max())
            assert gap <= tolerance, (name, role, tensor, gap)


def check_grpo(folder: Path) -> None:
    """The policy on two ranks, engines elsewhere, and a reference on a rank of its own.

    Compared with shared runs that are cut alike, and with runs that never changed placement.
    """
    kl, found = "algorithm.kl_coef=0.1", {}
    whole = train_through(folder, "shared", 2 * STEPS, "grpo.yaml", kl)
    found["shared"] = whole[STEPS]
    ways = {
        "disjoint": ("shared", ("placement.policy=0-1", "placement.rollout=2-3")),
        "reversed": ("shared", ("placement.policy=last:2", "placement.rollout=first:2")),
        "tp": ("", ("train.tp=2",)),
        "overlapping": ("tp", ("train.tp=2", "placement.policy=0-1", "placement.rollout=1-3")),
        "pp": ("", ("train.pp=2",)),
        "reference": (
            "pp",
            (
                "train.pp=2",
                "placement.policy=1,3",
                "placement.reference={ranks: 2, pp: 1}",
                "placement.rollout=0",
            ),
        ),
    }
    for name, (like, knobs) in ways.items():
        found[name] = train(folder, name, STEPS, "grpo.yaml", kl, *knobs)
        if like:
            compare(name, found[like], found[name], CLOSE)
    compare("the same layout elsewhere", found["disjoint"], found["reversed"], EXACT)
    moved = ways["overlapping"][1]
    metrics, tensors = train(folder, "reversed", 2 * STEPS, "grpo.yaml", kl, *moved)
    compare("moved", (whole[2 * STEPS][0][STEPS:], whole[2 * STEPS][1]), (metrics, tensors), CLOSE)


def ppo_knobs(judge: str) -> tuple[str, ...]:
    served = f"{{function: reward_model, options: {{path: {judge}}}}}"
    return (
        f"reward.functions={{judge: {served}, digits: {{function: 'scripted_reward:digits'}}}}",
        "reward.function=exact_match",
        "reward.isolated=null",
        "steps.samples_per_prompt=1",
        "algorithm.critic_warmup_steps=0",
    )


def check_ppo(folder: Path, judge: str) -> None:
    """A critic on other ranks, or cut otherwise; a reward model alone on a rank."""
    knobs = ppo_knobs(judge)
    shared = train(folder, "ppo", STEPS, "ppo.yaml", *knobs)
    ways = {
        "critic": ("placement.policy=0-1", "placement.critic=2-3"),
        "cut": ("train.tp=1", "placement.critic.tp=2"),
        "alone": ("placement.policy=0,1", "placement.critic=1-2", "placement.rewards.judge=3"),
    }
    for name, placed in ways.items():
        compare(name, shared, train(folder, name, STEPS, "ppo.yaml", *knobs, *placed), CLOSE)


def check_eight(folder: Path, judge: str) -> None:
    """Every role on ranks of its own, each cut in its own way."""
    knobs = (*ppo_knobs(judge), "train.tp=2", "algorithm.kl_coef=0.1")
    shared = train(folder, "eight", STEPS, "ppo.yaml", *knobs)
    placed = (
        "placement.policy=0-3",
        "placement.critic={ranks: 4-5, tp: 1, pp: 2}",
        "placement.reference={ranks: '3,5', tp: 1}",
        "placement.rewards.judge={ranks: 6, tp: 1}",
        "placement.rollout=first:1,last:2",
    )
    compare("apart", shared, train(folder, "apart", STEPS, "ppo.yaml", *knobs, *placed), CLOSE)


def main() -> None:
    folder, judge = Path(sys.argv[1]), sys.argv[2]
    if os.environ["WORLD_SIZE"] == "8":
        check_eight(folder, judge)
        return
    check_grpo(folder)
    check_ppo(folder, judge)


if __name__ == "__main__":
    main()
