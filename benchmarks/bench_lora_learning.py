"""Compares what LoRA adapters and full training learn from the same samples: SFT of
SmolLM2-135M-Instruct on worked word sums, on one process.

Both methods see the same stories in the same order, because the seed determines the order. Each has
its own learning rate. Accuracy is greedy, on held-out stories. The difference between the methods
is compared with its standard error over seeds and held-out stories.

    python examples/smollm2/make_model.py runs/smollm2/model
    python examples/smollm2/make_data.py runs/smollm2
    python benchmarks/bench_lora_learning.py --out lora_learning_cpu.json

A run that is already in --runs is not repeated. Exits with 1 if adapters are worse than full
training by more than two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from case_record import commit

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "smollm2"
HYBRIDRL = (sys.executable, "-m", "hybridrl.cli.main")
PROMPTS_PER_STEP, MAX_NEW_TOKENS = 16, 16


def main() -> int:
    """Writes the result; returns 0 if adapters learn as much as full training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "smollm2")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lora_learning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate of full training")
    parser.add_argument("--lora-rate", type=float, default=2e-4)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    methods = {
        "full": [f"train.learning_rate={given.rate}"],
        "lora": [f"train.learning_rate={given.lora_rate}", f"lora.rank={given.rank}"],
    }
    result: dict[str, Any] = {
        "benchmark": "LoRA and full training, SFT of SmolLM2-135M-Instruct on word sums",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "samples": given.steps * PROMPTS_PER_STEP,
        "methods": methods,
        "accuracy_before": _evaluate(
            [str(EXAMPLE / "eval.yaml"), f"model.path={given.data / 'model'}", "eval.sets={}"],
            given,
        )["accuracy"],
        "runs": [],
    }
    for seed in range(given.seeds):
        for method, knobs in methods.items():
            result["runs"].append(_run(method, seed, knobs, given))
            result |= _compared(result["runs"])
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(result["runs"][-1]), flush=True)
    print(json.dumps({key: result[key] for key in ("accuracy", "difference", "stderr")}))
    return int(result["difference"] < -2 * result["stderr"])


def _run(method: str, seed: int, knobs: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Trains and evaluates one model, unless this was already done."""
    name = f"{method}-{seed}-{given.steps}-{knobs[0].partition('=')[2]}"
    kept = given.runs / f"{name}.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    overrides = [
        f"model.path={given.data / 'model'}",
        f"data.prompts={given.data / 'sft.jsonl'}",
        "data.eval_prompts=null",
        "rollout.engine=hf",
        "rollout.eager=false",
        f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
        f"steps.prompts_per_step={PROMPTS_PER_STEP}",
        f"steps.num_steps={given.steps}",
        "steps.eval_every=0",
        "train.micro_batch_tokens=2048",
        "checkpoint.every_s=0",
        "checkpoint.export_hf=false",
        "log.tensorboard=false",
        f"run.dir={given.runs}",
        f"run.name={name}",
        f"run.seed={seed}",
        *knobs,
    ]
    train = [*HYBRIDRL, "train", str(EXAMPLE / "sft.yaml"), "--world", "1", *overrides]
    subprocess.run(train, check=True)
    run = given.runs / name
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["policy/loss"] for line in lines]
    evaluation = _evaluate([str(run)], given)
    found = {
        "method": method,
        "seed": seed,
        "accuracy": evaluation["accuracy"],
        "num_held_out": evaluation["num_prompts"],
        "loss_last_10_steps": round(mean(losses[-10:]), 4),
        "seconds": round(json.loads((run / "summary.json").read_text())["seconds"]),
    }
    kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def _evaluate(what: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of `hybridrl eval` on held-out stories."""
    knobs = [
        "rollout.engine=hf",
        "rollout.eager=false",
        "rollout.max_batch=64",
        f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
        f"data.eval_limit={given.held_out}",
    ]
    held_out = ["--prompts", str(given.data / "heldout.jsonl"), "--world", "1", "--json"]
    command = [*HYBRIDRL, "eval", *what, *held_out, *knobs]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean accuracy of each method, and the difference with its standard error.

    The variance of a mean accuracy is the larger of the variance between seeds and the binomial
    variance, each divided by the number of runs. All runs are evaluated on the same stories, so
    stories that are hard for both methods make the true error smaller.
    """
    accuracies: dict[str, list[float]] = {}
    for run in runs:
        accuracies.setdefault(run["method"], []).append(run["accuracy"])
    variance = 0.0
    for found in accuracies.values():
        center = mean(found)
        binomial = center * (1 - center) / runs[0]["num_held_out"]
        spread = sum((one - center) ** 2 for one in found) / max(len(found) - 1, 1)
        variance += max(spread, binomial) / len(found)
    means = {method: round(mean(found), 4) for method, found in accuracies.items()}
    difference = means.get("lora", math.nan) - means["full"]
    return {
        "accuracy": means,
        "difference": round(difference, 4),
        "stderr": round(math.sqrt(variance), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
