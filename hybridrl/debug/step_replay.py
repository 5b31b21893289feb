"""Replay of a skipped optimizer step: `hybridrl train CONFIG --replay FILE`.

Finds the rows whose loss or gradient is not finite, using the newest checkpoint from before the
step, or the initial weights. A failure that the weights caused recurs only if the checkpoint
contains exactly the weights of that step; the report says whether it does. Nothing is trained,
generated or written. Collective: all ranks search the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from yaml import safe_load

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import AdaptiveAlgorithm, Algorithm
from hybridrl.checkpoint.random_states import set_rng_state
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.config.identity import run_folder
from hybridrl.config.load import to_yaml
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import TrainBatch
from hybridrl.loop import setup
from hybridrl.loop.saved_batch import SavedBatch
from hybridrl.loop.skipped import first_cause
from hybridrl.metrics.tables import flat
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.mesh import Meshes
from hybridrl.platform import Platform, start_kernels_in_order
from hybridrl.roles.policy import TERM_TEMPERATURE, Policy
from hybridrl.roles.roles import Roles, make_roles
from hybridrl.training.update import Gradients, LossPart

MAX_ROWS = 8  # the search ends after this many bad rows

Passes = Callable[[TrainBatch, float | None], Gradients]


def replay_rank(config: Config, file: Path) -> dict[str, Any]:
    """Runs one rank of the command; `file` is a batch that the run saved.

    Returns:
        The report for JSON, equal on all ranks: `is_finite`; `step`; `update`, the index of the
        optimizer step within the step (the weights lack that many earlier ones); `saved_reason`;
        `checkpoint` (None: initial weights) and `num_steps_between` it and the step; `changed`
            knobs;
        `has_random_states` of the run; `terms_left_out` of the configuration; `cause` (None if
            finite);
        and `models`, where each model and loss term (with `loss_of`) has `loss`, the model's
        `grad_norm`, `micro_batches`, the first `parameter` with a bad gradient, and the bad `rows`.
    """
    # No engine receives the weights, so they may stay where Megatron allocates them.
    rollout = config.rollout.model_copy(update={"transport": "packed"})
    start_kernels_in_order(config.train.tp, config.train.cp)
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, config.run.collective_timeout_s)
    machines = setup.find_machines(platform)
    setup.check_rules(config, machines, trains=False)
    meshes = setup.make_meshes(config, platform, machines)
    world = meshes.world
    platform.seed(config.run.seed)
    with world.all_agree("reading the saved batch"):
        saved = SavedBatch.read(file)
    algorithm = make_algorithm(config.algorithm)
    plain = config.model_copy(update={"rollout": rollout})
    roles = make_roles(
        plain,
        meshes,
        algorithm,
        {},
        print,
        has_reference=False,
        has_teacher=False,
        has_reward_models=False,
    )
    folder = _load_before(config, meshes, roles, saved.step)
    is_set = len(saved.rng) == world.size and set_rng_state(saved.rng[world.rank])
    report = replay(world, roles, saved)
    before = int(folder.name.removeprefix("step_")) if folder is not None else 0
    stop_process_group()
    return {
        "checkpoint": str(folder) if folder is not None else None,
        "num_steps_between": saved.step - 1 - before,
        "changed": changed(saved.config, to_yaml(config)),
        "has_random_states": is_set,
        **report,
    }


def replay(world: World, roles: Roles, saved: SavedBatch) -> dict[str, Any]:
    """Computes a saved batch's gradients, without a step; returns the report. Collective."""
    terms = {name: batch for name, batch in saved.terms.items() if name in roles.terms}
    found = roles.gradients(saved.batch, saved.step - 1, terms)
    is_finite = all(one.is_finite for one in found)
    cause = None if is_finite else first_cause(world, found)
    # Built before the search, because the search overwrites the gradients.
    models = {
        share.name: _loss_report(world, one, share) | ({"loss_of": one.name} if number else {})
        for one in found
        for number, share in enumerate(one.loss_parts)
    }
    for name, report in models.items():
        of_model = next(one for one in found if one.name == report.get("loss_of", name))
        if not of_model.is_finite:
            batch = terms.get(name, saved.batch)
            report["rows"] = _bad_rows(*_search(roles, name), batch, _suspects(report, batch))
    return {
        "is_finite": is_finite,
        "step": saved.step,
        "update": saved.update,
        "saved_reason": saved.reason,
        "terms_left_out": sorted(set(saved.terms) - set(terms)),
        "cause": cause,
        "models": models,
    }


def _search(roles: Roles, name: str) -> tuple[Passes, Algorithm]:
    if name in roles.terms:
        algorithm = roles.terms[name].algorithm
        policy = Policy(
            roles.policy.model, algorithm, roles.policy.num_updates_in_run, TERM_TEMPERATURE
        )
        return policy.gradients, algorithm
    passes = roles.critic.gradients if name == "critic" and roles.critic else roles.policy.gradients
    return passes, roles.policy.algorithm


def _load_before(config: Config, meshes: Meshes, roles: Roles, step: int) -> Path | None:
    folder, keep = run_folder(config) / "checkpoints", config.checkpoint.keep
    store = CheckpointStore(folder, meshes.world, keep, layout=meshes.name)
    if (found := store.newest(before_step=step)) is None:
        return None
    state = store.load(found, roles.trained)
    for name, model in roles.trained.items():
        model.num_updates = state.num_updates[name]
    if isinstance(algorithm := roles.policy.algorithm, AdaptiveAlgorithm):
        algorithm.load_state(state.algorithm)
    return found


def _loss_report(world: World, one: Gradients, share: LossPart) -> dict[str, Any]:
    mine = [
        {"rank": world.rank, "micro_batch": index, "loss": result.loss.item()}
        | {"rows": list(share.rows(index)), "is_bad": index in share.bad_micro_batches()}
        for index, result in enumerate(share.results if one.model.mesh.reports else [])
    ]
    micro_batches = [row for rows in world.gather_objects(mine) for row in rows]
    name = one.model.bad_gradient()
    parameters = world.gather_objects(None if name is None else f"{name} on rank {world.rank}")
    return {
        "loss": share.loss,
        "grad_norm": one.grad_norm,
        "micro_batches": micro_batches,
        "parameter": next((name for name in parameters if name is not None), None),
        "rows": [],
    }


def _suspects(report: dict[str, Any], batch: TrainBatch) -> list[int]:
    bad = {row for micro in report["micro_batches"] if micro["is_bad"] for row in micro["rows"]}
    return sorted(bad) or list(range(batch.num_samples))


def _bad_rows(
    passes: Passes, algorithm: Algorithm, batch: TrainBatch, rows: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the first rows whose own loss, divided by the batch's denominator, is not finite.
    Bisection finds a row among N in about log2(N) passes. Returns none if only the sum overflows.
    """
    denominator = algorithm.denominator(batch)
    found: list[dict[str, Any]] = []
    to_do = [list(rows)]
    while to_do and len(found) < MAX_ROWS:
        part = to_do.pop()
        result = passes(batch.select(part), denominator)
        if result.is_finite:
            continue
        if len(part) > 1:
            half = len(part) // 2
            to_do += [part[half:], part[:half]]
            continue
        row = part[0]
        prompt = batch.prompts[row]
        sizes = (int(batch.prompt_lengths_B[row]), int(batch.response_lengths_B[row]))
        found.append(
            {
                "row": row,
                "sample": int(batch.sample_ids_B[row]),
                "prompt": prompt.text,
                "num_prompt_tokens": sizes[0],
                "num_response_tokens": sizes[1],
                "reward": float(batch.reward_B[row]),
                "loss": result.loss,
                "grad_norm": result.grad_norm,
            }
        )
    return found


def changed(saved: str, now: str) -> list[str]:
    before, after = (flat(safe_load(text)) for text in (saved, now))
    return [
        f"{key}: {after.get(key, 'absent')} ({before.get(key, 'absent')} in the run)"
        for key in {**after, **before}
        if key not in before or key not in after or before[key] != after[key]
    ]
