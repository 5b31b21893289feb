"""Measures whole GRPO steps of all valid layouts of one model on one and two GPUs against what
`layout: auto` predicts, and says whether the layout that it chooses is within 5% of the best.

    python benchmarks/bench_layouts.py --list 7b --world 2
    python benchmarks/bench_layouts.py --out OUT.json 0.5b 1.5b 7b qwen3-3b-as-a3b --world 2

Each layout is a case of bench_step.py, run with the micro-batch, recomputation and offload that the
search found best for it; one after another, about 100 s each (most of it the start). What does not
fit by prediction is run too with --too-large: it must fail, or the prediction is too careful. The
file is written anew after each layout, and a layout that it has is not run again, so that a list
can be spread over several calls.

What it should show: the chosen layout within 5% of the fastest; each prediction within 15% of what
was measured; no case out of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_reshard_gpu import ROOT
from case_record import commit

from hybridrl.config.load import load_config_dict
from hybridrl.planning.choose import search
from hybridrl.planning.cluster import ClusterFile, Host
from hybridrl.planning.search import Result

MODELS = ROOT / "benchmarks" / "models"
SET = ("train.recompute", "train.offload_optimizer", "rollout.ep")
GOAL_OF_BEST, GOAL_OF_PREDICTION = 0.05, 0.15


def main() -> int:
    """Runs the layouts; returns 1 where a goal is missed or a case failed."""
    arguments = parse()
    jobs = [job for model in arguments.models for job in layouts(model, arguments)]
    if arguments.list:
        for job in jobs:
            print(f"{job['predicted_s']:8.2f} s  {job['case']:24} {' '.join(job['options'])}")
        return 0
    report: dict[str, Any] = {"benchmark": "layouts against their predictions", "cases": []}
    if arguments.out.exists():
        report = json.loads(arguments.out.read_text())
    known = {(one["model"], one["case"], tuple(one["options"])) for one in report["cases"]}
    for job in jobs:
        if (job["model"], job["case"], tuple(job["options"])) in known:
            continue
        report["cases"].append({**job, "commit": commit(), **measured(job, arguments)})
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    lines, is_met = verdict(report)
    print("\n".join(lines))
    return 0 if is_met else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=" ".join((__doc__ or "").split("\n\n", 1)[0].split())
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as of bench_step.py: 7b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--gpu", default="H200", help="that predictions are for")
    parser.add_argument("--prompts", type=int, default=16, help="a step, for each GPU")
    parser.add_argument("--num-layers", type=int, help="of the model; all unless told")
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--limit-s", type=float, default=200, help="of one layout")
    parser.add_argument(
        "--too-large", action="store_true", help="run the nearest that does not fit"
    )
    parser.add_argument("--kl-coef", type=float, default=0.001, help="0: without a reference")
    found = parser.parse_args()
    if not found.list and not found.out:
        parser.error("name --out OUT.json, or --list")
    return found


def layouts(model: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the layouts of a model, the fastest by prediction first."""
    found = searched(model, arguments)
    wanted = list(found.best)
    if arguments.too_large and found.nearest is not None:
        wanted.append(found.nearest)
    for one in wanted:
        keys = one.changes
        options = ["--micro-batch-tokens", str(keys["train.micro_batch_tokens"])]
        for key in SET:
            options += ["--set", f"{key}={str(keys[key]).lower()}"]
        options += ["--set", f"algorithm.kl_coef={arguments.kl_coef}"]
        yield {
            "model": model,
            "world": arguments.world,
            "case": case_of(model, keys, arguments.world),
            "options": options,
            "predicted_s": one.step_s,
            "predicted_times_s": vars(one.found.times),
            "predicted_bytes": one.found.most_bytes,
            "is_to_fit": one.found.spare_bytes >= 0,
        }


def searched(model: str, arguments: argparse.Namespace) -> Result:
    """Returns what the search of `layout: auto` finds for a model and the workload."""
    file = next(MODELS.glob(f"*{model}.json"))
    content = json.loads(file.read_text())
    if arguments.num_layers:
        content["num_hidden_layers"] = arguments.num_layers
    made = Path(f"{arguments.out or '/tmp/layouts'}.{model}.config.json")
    made.write_text(json.dumps(content))
    prompts = arguments.prompts * arguments.world
    config = load_config_dict(
        {
            "run": {"name": "layouts"},
            "model": {"init": str(made)},
            "algorithm": {"name": "grpo", "kl_coef": arguments.kl_coef},
            "rollout": {"engine": "vllm", "max_new_tokens": 512, "max_batch": prompts * 8},
            "steps": {"prompts_per_step": prompts, "samples_per_prompt": 8},
            "data": {"max_prompt_tokens": 256},
            "layout": "auto",
        }
    )
    result, _ = search(config, arguments.world, Host(), ClusterFile(gpu=arguments.gpu))
    return result


def case_of(model: str, keys: dict[str, Any], world: int) -> str:
    """Returns the name of a layout as of case_name.py: 7b/tp2/tp1."""
    dp = world // (keys["train.tp"] * keys["train.pp"] * keys["train.cp"])
    sizes = {axis: keys[f"train.{axis}"] for axis in ("tp", "pp", "cp")} | {"dp": dp}
    sizes["ep"] = keys["train.ep"]
    train = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp1"
    return f"{model}/{train}/tp{keys['rollout.tp']}"


def measured(job: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a layout by bench_step.py and returns its median step, parts and memory, or why not."""
    out = arguments.out.with_suffix(".case.json")
    out.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_step.py"), "--out", str(out)]
    command += [job["case"], "--prompts", str(arguments.prompts * arguments.world)]
    command += ["--warmups", "2", "--steps", str(arguments.steps), *job["options"]]
    command += ["--limit-s", str(arguments.limit_s)]
    if arguments.num_layers:
        command += ["--num-layers", str(arguments.num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not out.exists():
        return {"error": (done.stdout + done.stderr)[-2000:]}
    (case,) = json.loads(out.read_text())["cases"]
    if "median" not in case:
        return {"error": case.get("error", "no step was timed")}
    kept = {
        key: case.get(key) for key in ("machine", "peak", "median", "measured_memory", "memory")
    }
    return {"measured_s": case["median"]["step_s"], **kept}


def verdict(report: dict[str, Any]) -> tuple[list[str], bool]:
    """Returns a line for each layout and model, and whether the goals are met."""
    lines, is_met = list[str](), True
    for model in dict.fromkeys(one["model"] for one in report["cases"]):
        own = [one for one in report["cases"] if one["model"] == model]
        timed = [one for one in own if "measured_s" in one]
        for one in own:
            took = one.get("measured_s")
            far = f"{one['predicted_s'] / took - 1:+.1%}" if took else "failed"
            lines.append(
                f"{one['case']:28} predicted {one['predicted_s']:7.2f} s, measured {took}: {far}"
            )
            if one["is_to_fit"]:
                is_met &= bool(took) and abs(one["predicted_s"] / took - 1) <= GOAL_OF_PREDICTION
        fitting = [one for one in timed if one["is_to_fit"]]
        if fitting:
            chosen = min(own, key=lambda one: (not one["is_to_fit"], one["predicted_s"]))
            best = min(one["measured_s"] for one in fitting)
            over = chosen.get("measured_s", float("inf")) / best - 1
            lines.append(
                f"{model}: chosen {chosen['case']}, {over:.1%} beyond the best of {len(fitting)}"
            )
            is_met &= over <= GOAL_OF_BEST
    return lines, is_met


if __name__ == "__main__":
    sys.exit(main())
