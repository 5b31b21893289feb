"""`hybridrl train CONFIG --replay FILE`: computes a skipped optimizer step again and says what of
its batch gives a loss or gradient that is not finite.

Takes the weights of the newest checkpoint before that step, or the initial ones: what comes of the
batch shows again, what came of the weights only where they are those of the step, which the report
says. Nothing is trained, generated or written.

Collective: every rank searches the same rows in the same order, by numbers that all know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.mesh import Meshes
from hybridrl.platform import Platform, start_kernels_in_order
from hybridrl.roles.policy import TERM_TEMPERATURE, Policy
from hybridrl.roles.roles import Roles, make_roles
from hybridrl.training.update import Gradients, LossPart

MAX_ROWS = 8  # found before the search ends

Passes = Callable[[TrainBatch, float | None], Gradients]


def replay_rank(config: Config, file: Path) -> dict[str, Any]:
    """Runs one rank of the command.

    Args:
        config: of the run; what differs from the saved one is told.
        file: a batch that the run saved.

    Returns:
        The report, for JSON, the same on all ranks: `is_finite`, `step`, `update` (also by how many
        optimizer steps of the step the weights are older), `saved_reason`, `checkpoint` (None:
        initial weights) and `num_steps_between` it and the step, `changed` knobs,
        `has_random_states` of the run, `terms_left_out`, saved ones that the config has no more,
        `cause` (None if finite), and for each of `models`, and for each further term of the
        policy's loss (`loss_of`), its `loss`, the model's `grad_norm`, `micro_batches`, the first
        `parameter` with a bad gradient, and bad `rows`.
    """
    # Weights go nowhere; they stay where Megatron allocates them.
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
    """Accumulates the gradients of a saved batch, takes no step, and reports; collective."""
    terms = {name: batch for name, batch in saved.terms.items() if name in roles.terms}
    found = roles.gradients(saved.batch, saved.step - 1, terms)
    is_finite = all(one.is_finite for one in found)
    cause = None if is_finite else first_cause(world, found)
    # Told before the search, which makes other gradients.
    models = {
        share.name: _told(world, one, share) | ({"loss_of": one.name} if number else {})
        for one in found
        for number, share in enumerate(one.loss_parts)
    }
    for name, told in models.items():
        of_model = next(one for one in found if one.name == told.get("loss_of", name))
        if not of_model.is_finite:
            batch = terms.get(name, saved.batch)
            told["rows"] = _bad_rows(*_search(roles, name), batch, _suspects(told, batch))
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
    """Returns how to compute a loss alone, a model's or a term's, and its algorithm."""
    if name in roles.terms:
        algorithm = roles.terms[name].algorithm
        policy = Policy(
            roles.policy.model, algorithm, roles.policy.num_updates_in_run, TERM_TEMPERATURE
        )
        return policy.gradients, algorithm
    passes = roles.critic.gradients if name == "critic" and roles.critic else roles.policy.gradients
    return passes, roles.policy.algorithm


def _load_before(config: Config, meshes: Meshes, roles: Roles, step: int) -> Path | None:
    """Loads the newest checkpoint whose weights are of before this step; None if there is none."""
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


def _told(world: World, one: Gradients, share: LossPart) -> dict[str, Any]:
    """Returns the loss of every micro-batch, by rank, their sum, and the model's gradient norm."""
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


def _suspects(told: dict[str, Any], batch: TrainBatch) -> list[int]:
    """Returns the rows of micro-batches whose loss is not finite; all rows if there is none."""
    bad = {row for micro in told["micro_batches"] if micro["is_bad"] for row in micro["rows"]}
    return sorted(bad) or list(range(batch.num_samples))


def _bad_rows(
    passes: Passes, algorithm: Algorithm, batch: TrainBatch, rows: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the first rows that by themselves give what is not finite, divided as in the whole
    batch; by halves, so that a row is found in about log2 of their number passes. A loss of the
    algorithms here is a sum over rows, but for an overflow of their sum, which no row has.
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
    """Returns the knobs, in full, that two configurations as YAML have other values of."""
    before, after = (dict(_leaves(safe_load(text), "")) for text in (saved, now))
    return [
        f"{key}: {after.get(key, 'absent')} ({before.get(key, 'absent')} in the run)"
        for key in {**after, **before}
        if key not in before or key not in after or before[key] != after[key]
    ]


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
