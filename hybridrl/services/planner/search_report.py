"""Creates the report of `hybridrl plan --search`: the best layouts, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from hybridrl.services.planner.choose import Adapters
from hybridrl.services.planner.fit import with_margin
from hybridrl.services.planner.hardware import GIB, NO_BOUND_GIB, Assumptions
from hybridrl.services.planner.search import LAYOUT_KEYS, Candidate, Result
from hybridrl.services.planner.text import memory_size

MOST = 10
PHASES = ("generation", "scoring", "update", "reshard")
MOST_RULES = 4


def search_report(
    result: Result,
    assumed: Assumptions,
    seconds: float,
    kept: Iterable[str],
    note: str | None = None,
    adapters: Adapters | None = None,
) -> dict[str, Any]:
    """Returns a search as JSON values; `kept` are the keys that the configuration sets."""
    best = result.best[:MOST]
    return {
        "seconds": seconds,
        "kept": sorted(kept),
        "note": note,
        "best": [_as_json(one, best[0]) for one in best],
        "fitting": len(result.best),
        "too_large": result.num_large,
        "nearest": result.nearest and _as_json(result.nearest, result.nearest),
        "lora": adapters and _adapters_json(adapters),
        "refused": result.num_refused,
        "rules": [str(error) for error in result.refusals.values()],
        "gpu_memory_bytes": assumed.gpu_memory_bytes,
    }


def search_text(report: dict[str, Any]) -> str:
    return "\n".join(_lines(report))


def _as_json(one: Candidate, best: Candidate) -> dict[str, Any]:
    times = one.found.times
    return {
        "keys": one.changes,
        "step_s": times.step,
        "times_s": asdict(times),
        "memory_bytes": one.found.most_bytes,
        "spare_bytes": one.found.spare_bytes,
        "lost_by": _reason(one, best),
    }


def _adapters_json(found: Adapters) -> dict[str, Any]:
    return {
        "rank": found.rank,
        **_as_json(found.best, found.best),
        "full_memory_bytes": found.full.most_bytes,
        "full_step_s": found.full.times.step,
    }


def _reason(one: Candidate, best: Candidate) -> str | None:
    if one is best:
        return None
    more = one.step_s - best.step_s
    if round(one.step_s, 4) == round(best.step_s, 4):  # rounded as when layouts are sorted
        return "memory: equally fast, but uses more"
    own, other = asdict(one.found.times), asdict(best.found.times)
    phase = max(PHASES, key=lambda name: own[name] - other[name])
    return f"time: +{more / best.step_s:.1%}, {phase} {own[phase] - other[phase]:+.2f} s"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    best, gpu = report["best"], report["gpu_memory_bytes"]
    judged = report["fitting"] + report["too_large"] + report["refused"]
    if best:
        first = best[0]
        step = f"{_said(first)}: a step of about {first['step_s']:.3g} s"
        memory = memory_size(first["memory_bytes"])
        if gpu >= NO_BOUND_GIB * GIB:
            verdict = "no verdict on CPU, because ranks share the host's memory"
            yield f"{verdict}; the fastest is {step}, {memory} per rank"
        else:
            yield f"fits: {step}, {memory} of a GPU's {memory_size(gpu)}"
    else:
        yield f"none of {judged} layouts fits"
    yield (
        f"judged {judged} layouts in {report['seconds']:.1f} s: {report['fitting']} fit, "
        f"{report['too_large']} are too large, {report['refused']} violate a rule"
    )
    if report["kept"]:
        yield f"set in the config: {', '.join(report['kept'])}; the search chooses the others"
    if report["note"]:
        yield report["note"]
    if best:
        yield "   " + _head()
    for number, one in enumerate(best, 1):
        yield f"{number:2} {_row(one)}"
    if (nearest := report["nearest"]) is not None:
        needed = with_margin(nearest["memory_bytes"])
        yield (
            f"rejected by memory: {report['too_large']}; the closest, {_said(nearest)}, needs "
            f"{memory_size(needed)}: {memory_size(-nearest['spare_bytes'])} too much"
        )
    if (lora := report["lora"]) is not None:
        yield (
            f"another training method fits: LoRA with lora.rank={lora['rank']} trains adapters, "
            f"not the weights; {_said(lora)}: a step of about {lora['step_s']:.3g} s, "
            f"{memory_size(lora['memory_bytes'])} of a GPU's {memory_size(gpu)}"
        )
        more = memory_size(lora["full_memory_bytes"] - lora["memory_bytes"])
        yield (
            f"   full training in the same layout would need {more} more per GPU, and take about "
            f"{lora['full_step_s']:.3g} s a step"
        )
    if report["rules"]:
        yield f"rejected by a rule (divisibility): {report['refused']}"
        for rule in report["rules"][:MOST_RULES]:
            yield f"   {rule}"


def _head() -> str:
    names = "".join(f"{name:>11}" for name in ("step s", *PHASES, "GiB"))
    return f"{names}  layout"


def _row(one: dict[str, Any]) -> str:
    times = "".join(f"{one['times_s'][phase]:11.2f}" for phase in PHASES)
    lost = f"; {one['lost_by']}" if one["lost_by"] else ""
    memory = one["memory_bytes"] / 2**30
    return f"{one['step_s']:11.2f}{times}{memory:11.1f}  {_said(one)}{lost}"


def _said(one: dict[str, Any]) -> str:
    """Returns a layout's keys and values as text. Omits the values 1, none and false."""
    keys = one["keys"]
    sizes = [f"{key}={keys[key]}" for key in LAYOUT_KEYS if keys[key] != 1]
    others = [f"train.micro_batch_tokens={keys['train.micro_batch_tokens']}"]
    if keys["train.recompute"] != "none":
        others.append(f"train.recompute={keys['train.recompute']}")
    if keys["train.optimizer_memory"] != "device":
        others.append(f"train.optimizer_memory={keys['train.optimizer_memory']}")
    return " ".join([*(sizes or ["data parallel"]), *others])
