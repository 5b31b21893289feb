"""Measures whole GRPO steps of all valid layouts of one model on one and two GPUs against what
`layout: auto` predicts, and says whether the layout that it chooses is within 5% of the best.

    python benchmarks/bench_layouts.py --list 7b --world 2
    python benchmarks/bench_layouts.py --out OUT.json 0.5b --world 2 --gpu H100 --within-s 530

Each layout is a case of bench_step.py, run with the micro-batch, recomputation and offload that the
search found best for it, one after another. Processes of --ahead layouts are started at once and
import all that they need, 20 to 30 s, while others measure; none touches a GPU before its turn.
What is left of a start is 50 s or so; the first with an engine of some size compiles, and the next
ones find that. What does not fit by prediction is run too with --too-large: it must fail, or the
prediction is too careful.

The file is written anew after each layout, and a layout that it has is not run again, so that a
list can be spread over several calls: a layout begins only if it would end within --within-s
seconds of the command's start, taking as long as the longest so far.

What it should show: the chosen layout within 5% of the fastest; each prediction within 15% of what
was measured; no case out of memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_reshard_gpu import ROOT
from case_record import PROGRESS, commit

from hybridrl.config.load import load_config_dict
from hybridrl.services.planner.choose import search
from hybridrl.services.planner.hardware import ClusterFile, Host
from hybridrl.services.planner.search import Result

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
    left = [job for job in jobs if (job["model"], job["case"], tuple(job["options"])) not in known]
    for job, found in all_measured(left, arguments):
        report["cases"].append({**job, "commit": commit(), **found})
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    lines, is_met = verdict(report)
    print("\n".join(lines))
    missing = len(jobs) - sum(one["model"] in arguments.models for one in report["cases"])
    if missing > 0:
        print(f"{missing} layouts are left for another call")
    return 0 if is_met and missing <= 0 else 1


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
    parser.add_argument("--warmups", type=int, default=2, help="steps before those")
    parser.add_argument("--limit-s", type=float, default=200, help="of one layout")
    parser.add_argument("--within-s", type=float, default=1e9, help="of this call")
    parser.add_argument("--ahead", type=int, default=12, help="layouts whose processes are started")
    parser.add_argument("--models-folder", type=Path, default=MODELS, metavar="FOLDER")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
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
    file = next(arguments.models_folder.glob(f"*{model}.json"))
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
            "rollout": {
                "engine": "vllm",
                "max_new_tokens": arguments.response_tokens,
                "max_batch": prompts * arguments.samples,
            },
            "steps": {"prompts_per_step": prompts, "samples_per_prompt": arguments.samples},
            "data": {"max_prompt_tokens": arguments.prompt_tokens},
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


def all_measured(
    jobs: Sequence[dict[str, Any]], arguments: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields each layout with what was measured of it, as long as there is time."""
    began, longest_s = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        turns = Path(folder) / "turns"
        turns.mkdir()
        waiting = deque[Started]()
        later = deque(enumerate(jobs))
        try:
            while waiting or later:
                while later and len(waiting) < max(arguments.ahead, 1):
                    number, job = later.popleft()
                    out = Path(folder) / f"{number}.json"
                    waiting.append(Started(job, out, turns / f"{number}", arguments))
                since = time.monotonic()
                if since + longest_s - began > arguments.within_s:
                    return
                one = waiting.popleft()
                yield one.job, one.measured()
                longest_s = max(longest_s, time.monotonic() - since)
        finally:
            shutil.rmtree(turns)  # those that wait for one end
            for one in waiting:
                one.process.wait()


class Started:
    """A layout whose processes wait for their turn.

    Args:
        job: the layout.
        out: gets what it measures.
        turn: file that they wait for.
        arguments: of the command.
    """

    def __init__(
        self, job: dict[str, Any], out: Path, turn: Path, arguments: argparse.Namespace
    ) -> None:
        self.job, self._turn, self._out = job, turn, out
        command = [sys.executable, str(ROOT / "benchmarks" / "bench_step.py"), job["case"]]
        command += ["--out", str(self._out), "--turn", str(self._turn)]
        command += ["--prompts", str(arguments.prompts * arguments.world), *job["options"]]
        for name in ("warmups", "steps", "samples", "prompt_tokens", "response_tokens", "limit_s"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        command += ["--models", str(arguments.models_folder)]
        if arguments.num_layers:
            command += ["--num-layers", str(arguments.num_layers)]
        self._said = out.with_suffix(".output").open("w+")
        self.process = subprocess.Popen(command, stdout=self._said, stderr=subprocess.STDOUT)

    def measured(self) -> dict[str, Any]:
        """Gives the turn; returns the median step, parts and memory, or why there are none."""
        self._turn.touch()
        self.process.wait()
        self._said.seek(0)
        said = self._said.read()
        self._said.close()
        print("".join(f"{one}\n" for one in said.splitlines() if one.startswith(PROGRESS)), end="")
        if not self._out.exists():
            return {"error": said[-2000:]}
        (case,) = json.loads(self._out.read_text())["cases"]
        if "median" not in case:
            return {"error": case.get("error", "no step was timed"), "output": said[-2000:]}
        names = ("machine", "peak", "median", "measured_memory", "memory", "seconds")
        return {"measured_s": case["median"]["step_s"], **{key: case.get(key) for key in names}}


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
