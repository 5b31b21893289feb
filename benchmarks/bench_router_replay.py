"""Measures how far engine and trainer are apart on a mixture of experts, with router replay and
without.

Trains the quickstart's mixture (examples/quickstart/moe_sft.yaml), then takes a few GRPO steps in
bfloat16 from there, of the same seeds, once with each value of `algorithm.router_replay`. Reported
are medians over steps, with the 10th and 90th percentile: the KL of the trainer from the engine
(`mismatch/kl`, k3), the mean and the largest difference of log-probabilities, and how many of the
engine's experts the trainer's router would have chosen too. Refuses a run whose response tokens
were not all replayed.

    python benchmarks/bench_router_replay.py --engine vllm --out router_replay.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from case_record import commit

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "quickstart"
METRICS = (
    "mismatch/kl",
    "mismatch/logprob_diff_mean",
    "mismatch/logprob_diff_max",
    "router/agreed_share",
    "router/replayed_share",
    "time_s/generate",
    "time_s/logprobs",
    "time_s/update",
)


def hybridrl(*arguments: object) -> None:
    """Runs the command line; its errors are shown where it fails."""
    program = "from hybridrl.cli.main import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[3:])}: exit code {done.returncode}\n{done.stderr[-4000:]}")


def spread(values: list[float]) -> dict[str, float]:
    """Returns the median and the 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def measure(args: argparse.Namespace, folder: Path, replay: str, seed: int) -> list[dict[str, Any]]:
    """Returns the metrics of each step of one run."""
    name = f"{replay}-{seed}"
    hybridrl(
        "train",
        EXAMPLES / "moe.yaml",
        f"run.dir={folder}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"model.path={folder / 'hf'}",
        f"model.dtype={args.dtype}",
        f"rollout.engine={args.engine}",
        f"algorithm.router_replay={replay}",
        f"steps.num_steps={args.steps}",
        "steps.eval_every=0",
        f"checkpoint.every={args.steps}",
        "train.ep=2",
        "log.tensorboard=false",
        "--world",
        2,
    )
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    shares = {step["router/replayed_share"] for step in steps if "router/replayed_share" in step}
    if shares != ({1.0} if replay == "rollout" else set()):
        sys.exit(f"{name}: shares of replayed choices {shares}; nothing is measured")
    return steps


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("hf", "vllm"), default="vllm")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        hybridrl("train", EXAMPLES / "moe_sft.yaml", f"run.dir={folder}", "log.tensorboard=false")
        hybridrl("convert", folder / "quickstart-moe-sft", folder / "hf", "--to", "hf")
        found: dict[str, Any] = {}
        for replay in ("off", "rollout"):
            steps = [
                step for seed in range(args.seeds) for step in measure(args, folder, replay, seed)
            ]
            found[replay] = {
                name: spread([step[name] for step in steps]) for name in METRICS if name in steps[0]
            }
    result = {
        "benchmark": "mismatch of engine and trainer with and without router replay",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}",
        "model": "examples/quickstart/moe_model after moe_sft.yaml",
        "engine": args.engine,
        "dtype": args.dtype,
        "steps": args.steps,
        "seeds": args.seeds,
        "seconds": round(time.time() - began, 1),
        "router_replay": found,
        "kl_ratio_of_medians": found["off"]["mismatch/kl"]["median"]
        / found["rollout"]["mismatch/kl"]["median"],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
