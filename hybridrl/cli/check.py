"""`hybridrl check`: checks the installation, a cluster, or an engine against its trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from hybridrl.cli import options
from hybridrl.cli.options import Json, Overrides, World, json_only, refuse_other_job, torchrun_world
from hybridrl.config.load import load_config
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.loop.preflight import validate_training
from hybridrl.parallel.failure import is_launched
from hybridrl.rollout.registry import ENGINES, offered_engines
from hybridrl.services.launch.local_ranks import is_rank, leave_for_parent, report_of_ranks
from hybridrl.services.launch.pinning import laid_out, with_commits

CHECKS = ("weights", "tokens", "sampling", "numerics", "routing", "engines")


def refuse_without_rollouts(config: Config, command: str) -> None:
    """Raises UserError if a run does not generate responses, which a command needs."""
    engine = config.rollout.engine
    if not ENGINES[engine].computes:
        allowed = " or ".join(offered_engines())
        allowed = f"{allowed}, because {command} generates responses"
        raise config.refused("rollout.engine", allowed, "Set rollout.engine.")
    needs = config.algorithm.needs
    if needs is not None and not needs.rollouts:
        allowed = f"an algorithm with rollouts, because {command} generates responses"
        raise config.refused("algorithm.name", allowed, "Use the configuration of an RL run.")


def refuse_unlike(other: str, config: Config) -> None:
    """Refuses to compare the run's engine with itself or with an engine that cannot generate."""
    names = offered_engines()
    names = [name for name in names if name != config.rollout.engine]
    if other not in names:
        allowed = f"{' or '.join(names)} with rollout.engine={config.rollout.engine}"
        raise UserError("--against", other, allowed, "Choose another engine.")


def judge_engines(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the responses of two engines to the same prompts, with the same weights.

    Greedy tokens are compared up to the first that differs, because later tokens continue different
    texts. Takes reports of `check --mismatch`, and returns the fields of a Finding.
    """
    names = one["engine"], other["engine"]
    answers = [report["tokens"]["details"].get("greedy") for report in (one, other)]
    if None in answers:
        found = "not compared: the ranks of a replica sampled different tokens"
        return {"agrees": False, "found": found, "remedy": "", "details": {}}
    bound, gaps, num_others = one["numerics"]["details"]["bound"], [], 0
    for pair in zip(*answers, strict=True):
        columns = (answer[key] for answer in pair for key in ("tokens", "logps"))
        for token, logp, other_token, other_logp in zip(*columns, strict=False):
            gaps.append(abs(logp - other_logp))
            if token != other_token:
                num_others += 1
                break
    mean = sum(gaps) / len(gaps)
    agrees = mean <= bound
    found = (
        f"log-probabilities of {names[0]} and {names[1]} differ by {mean:.2g} nats on average over "
        f"{len(gaps)} greedy tokens (allowed {bound:g}); {num_others} of {len(answers[0])} "
        "responses diverge"
    )
    remedy = "" if agrees else "Run the check for each engine separately, and compare the verdicts."
    details = {"diff_mean": mean, "bound": bound, "num_tokens": len(gaps), "num_others": num_others}
    return {"agrees": agrees, "found": found, "remedy": remedy, "details": details}


def diagnose(
    load: Callable[[Sequence[str]], tuple[Config, int]],
    file: Path,
    overrides: Sequence[str],
    options: Sequence[str],
    other: str | None,
) -> dict[str, Any] | int:
    """Starts ranks that compare a run's engine with its trainer and, optionally, another engine.

    `load` checks the configuration with some overrides, and returns it with the number of ranks.
    Returns the report, or the exit code if the ranks failed.
    """
    config, world_size = load(overrides)
    runs = [(overrides, world_size)]
    if other is not None:
        refuse_unlike(other, config)
        changed = [*overrides, f"rollout.engine={other}"]
        runs.append((changed, load(changed)[1]))
    reports = []
    for given, size in runs:
        report = report_of_ranks(["check", "--mismatch", str(file), *given, *options], size)
        if isinstance(report, int):
            return report
        reports.append(report)
    first = reports[0]
    if other is not None:
        first["engines"] = judge_engines(*reports)
        first["agree"] = first["agree"] and first["engines"]["agrees"]
    return first


def mismatch_text(report: dict[str, Any]) -> str:
    weights = report["checkpoint"] or "the initial weights"
    lines = [f"{report['engine']} engine and trainer in {report['dtype']}, {weights}"]
    for name in (name for name in CHECKS if name in report):
        finding = report[name]
        lines.append(f"{name:9} {'agree' if finding['agrees'] else 'DIFFER':7} {finding['found']}")
        if finding["remedy"]:
            lines.append(f"{'':17} {finding['remedy']}")
    numerics = report["numerics"]["details"]
    if numerics:
        columns = [column for column in numerics["stages"][0] if column != "stage"]
        allowed = numerics["residual_bound"]
        lines.append(f"relative RMS of the residual stream, allowed {allowed:.2g}:")
        lines.append(f"{'after':22}" + "".join(f"{column:>15}" for column in columns))
        for row in numerics["stages"]:
            mark = "  <- stands out" if row["stage"] == numerics["first"] else ""
            values = "".join(f"{row[column]:15.2e}" for column in columns)
            lines.append(f"{row['stage']:22}{values}{mark}")
    lines.append("all agree" if report["agree"] else "engine and trainer differ")
    return "\n".join(lines)


def check(
    overrides: Overrides = None,
    mismatch: options.OfMismatch = None,
    reference: options.WithReference = False,
    against: options.AgainstEngine = None,
    cluster: options.OfCluster = False,
    hostfile: options.NodesFile = None,
    slurm: options.InAllocation = False,
    ray: options.OfRay = None,
    ssh: options.Ssh = "ssh",
    run_dir: options.RunsFolder = Path("runs"),
    world: World = None,
    as_json: Json = False,
) -> None:
    """Check what is installed and works, and print the command that fixes each problem."""
    if cluster:
        from hybridrl.services.cluster_check.check import check_cluster

        raise typer.Exit(check_cluster(hostfile, slurm, ray, ssh, run_dir, as_json))
    if mismatch is not None:
        _check_mismatch(mismatch, overrides or [], world, reference, against, as_json)
    for name, value, needed in (
        ("--hostfile", hostfile, "--cluster"),
        ("--slurm", "given" if slurm else None, "--cluster"),
        ("--ray", ray, "--cluster"),
        ("KEY=VALUE", " ".join(overrides or ()), "--mismatch CONFIG"),
        ("--against", against, "--mismatch CONFIG"),
    ):
        if value:
            raise UserError(name, value, f"no value without {needed}", f"Add {needed}.")
    from hybridrl.services.cluster_check import environment

    with json_only(as_json) as emit:
        items = environment.inspect()
        report = environment.as_json(items)
        emit(report)
    if not as_json:
        typer.echo(f"{'':8} {'':20} {'installed':34} {'tested range':36} newest tested")
        for item in items:
            versions = f"{item.found:34} {item.tested:36} {item.newest}"
            typer.echo(f"{item.status:8} {item.name:20} {versions}".rstrip())
            if item.fix:
                typer.echo(f"{'':8} fix: {item.fix}")
    raise typer.Exit(0 if report["ok"] else 1)


def _check_mismatch(
    file: Path,
    overrides: list[str],
    world: int | None,
    reference: bool,
    against: str | None,
    as_json: bool,
) -> NoReturn:
    refuse_other_job(world)

    def load(given: Sequence[str]) -> tuple[Config, int]:
        config = with_commits(load_config(file, given))
        refuse_without_rollouts(config, "--mismatch")
        if is_launched():
            return config, 0
        started = torchrun_world(world) if is_rank() else None
        config, _, world_size = laid_out(config, started or world)
        validate_training(config, world_size)
        return config, world_size

    with json_only(as_json) as emit:
        report: dict[str, Any] | int
        if is_rank():
            if against is not None and not is_launched():
                remedy = "Run the command without torchrun."
                raise UserError("--against", against, "no value under torchrun", remedy)
            from hybridrl.debug.diagnose import diagnose_rank

            report = diagnose_rank(load(overrides)[0], reference)
            if os.environ["RANK"] != "0" or leave_for_parent(report):
                raise typer.Exit(0 if is_launched() else 1 - report["agree"])
        else:
            options = ["--reference"] * reference + ["--json"] * as_json
            report = diagnose(load, file, overrides, options, against)
            if isinstance(report, int):
                raise typer.Exit(report)
        emit(report)
    if not as_json:
        typer.echo(mismatch_text(report))
    raise typer.Exit(0 if report["agree"] else 1)
