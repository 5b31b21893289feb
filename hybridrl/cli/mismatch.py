"""`hybridrl check --mismatch`: starts the ranks that compare engine and trainer, and prints what
they found. No torch.

Who waits for whom: the parent waits for its ranks; rank 0 leaves the report beside their logs, for
the parent to print and to judge. Under torchrun there is no parent, and rank 0 prints.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.cli.launch import launch
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.parallel.failure import is_launched, rank_file
from hybridrl.rollout.registry import ENGINES, offered_engines

CHECKS = ("weights", "tokens", "sampling", "numerics", "routing", "engines")
REPORT = "mismatch.json"


def refuse_without_rollouts(config: Config, command: str) -> None:
    """Refuses runs in which no engine computes anything.

    Args:
        config: of the run.
        command: that needs one, for the message.

    Raises:
        UserError: naming the key.
    """
    engine = config.rollout.engine
    if not ENGINES[engine].computes:
        allowed = " or ".join(offered_engines())
        raise UserError(
            "rollout.engine", engine, f"{allowed}, for {command}", "It computes nothing."
        )
    needs = config.algorithm.needs
    if needs is not None and not needs.rollouts:
        raise UserError(
            "algorithm.name",
            config.algorithm.name,
            f"an algorithm with rollouts, for {command}",
            "Give the configuration of an RL run.",
        )


def refuse_unlike(other: str, config: Config) -> None:
    """Refuses to compare with an engine that computes nothing, or that is the run's own.

    Raises:
        UserError: naming the option.
    """
    names = offered_engines()
    names = [name for name in names if name != config.rollout.engine]
    if other not in names:
        allowed = f"{' or '.join(names)} with rollout.engine={config.rollout.engine}"
        raise UserError("--against", other, allowed, "Name another engine that computes.")


def refuse_under_torchrun(other: str | None) -> None:
    """Refuses another engine where nobody starts ranks for it.

    Raises:
        UserError: naming the option.
    """
    if other is not None and not is_launched():
        raise UserError("--against", other, "nothing under torchrun", "Run it without torchrun.")


def judge_engines(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Compares what two engines answered to the same prompts, with the same weights.

    Greedy tokens are compared up to the first that differ, those included: what follows is of other
    sequences. There each engine tells of its own choice, and both are as likely where it is a tie.

    Args:
        one, other: reports of `check --mismatch`.

    Returns:
        A Finding's fields.
    """
    names = one["engine"], other["engine"]
    answers = [report["tokens"]["details"].get("greedy") for report in (one, other)]
    if None in answers:
        said = "not compared: the ranks of a replica drew different tokens"
        return {"agrees": False, "found": said, "remedy": "", "details": {}}
    bound, gaps, num_others = one["numerics"]["details"]["bound"], [], 0
    for mine, theirs in zip(*answers, strict=True):
        columns = (answer[key] for answer in (mine, theirs) for key in ("tokens", "logps"))
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
        "responses go different ways"
    )
    remedy = "" if agrees else "Look at both engines' verdicts: run the check for each alone."
    details = {"diff_mean": mean, "bound": bound, "num_tokens": len(gaps), "num_others": num_others}
    return {"agrees": agrees, "found": found, "remedy": remedy, "details": details}


def diagnose(
    load: Callable[[Sequence[str]], tuple[Config, int]],
    file: Path,
    overrides: Sequence[str],
    options: Sequence[str],
    other: str | None,
) -> dict[str, Any] | int:
    """Lets ranks compare engine and trainer of a run, and those of another engine both engines;
    returns the report, or the exit code of what went wrong.

    Args:
        load: returns the checked configuration with such overrides, and the number of ranks.
        file: the configuration.
        overrides: the user's.
        options: of the ranks.
        other: the other engine, each in ranks of its own; None: there is none.

    Raises:
        UserError: the configuration does not fit, with either engine.
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


def report_of_ranks(arguments: Sequence[str], world_size: int) -> dict[str, Any] | int:
    """Runs `hybridrl ARGUMENTS` as local ranks; returns their report, or the exit code of what
    went wrong.
    """
    log_dir = Path(tempfile.mkdtemp(prefix="hybridrl-mismatch-"))
    code = launch(arguments, world_size, log_dir)
    report: dict[str, Any] = {}
    if code == 0:
        report = json.loads((log_dir / REPORT).read_text(encoding="utf-8"))
    if code != 1:  # a message names the logs
        shutil.rmtree(log_dir)
    return code or report


def leave_for_parent(report: dict[str, Any]) -> bool:
    """Writes the report where the parent looks for it; returns False if there is no parent."""
    file = rank_file(".log")
    if file is None or not is_launched():
        return False
    file.with_name(REPORT).write_text(json.dumps(report), encoding="utf-8")
    return True


def mismatch_text(report: dict[str, Any]) -> str:
    """Returns the report as lines for people."""
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
