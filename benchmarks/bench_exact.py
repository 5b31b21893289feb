"""Compares exact mode with `numerics.match=close`: seconds of whole GRPO steps, and how much engine
and trainer differ in each step.

    python benchmarks/bench_exact.py OUT.json smollm2-135m qwen2.5-0.5b --steps 20

Each model is trained once with either mode, in a process of its own, with random weights, vLLM, and
one rank: by default 32 prompts of 128 tokens and 8 responses of exactly 384 tokens. The first two
steps warm up; seconds are medians of the others. Differences are those of all steps. A run in exact
mode that differs, and a step that is not finite, are reported as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"
MODES = ("exact", "close")
NUM_WARMUPS = 2
KEPT = ("logprob_diff_mean", "logprob_diff_max", "share_above_0.1", "kl")


def main() -> None:
    given = parse()
    if given.case:
        measure(given, *given.case)
        return
    from case_record import command_of, commit
    from reshard_clock import machine

    result: dict[str, Any] = {
        "benchmark": "exact mode against close: seconds of steps, and differences",
        "command": command_of(sys.argv),
        "commit": os.environ.get("BENCH_COMMIT") or commit(),
        "machine": machine(1),
        "workload": {name: getattr(given, name) for name in ("prompts", "samples", "prompt_tokens")}
        | {"response_tokens": given.response_tokens, "micro_batch_tokens": given.budget},
        "cases": {},
    }
    for model in given.models:
        for mode in given.modes:
            with tempfile.TemporaryDirectory() as folder:
                found = Path(folder) / "case.json"
                case = ["--case", mode, model, str(found)]
                done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *case], check=False)
                report = json.loads(found.read_text()) if found.exists() else {}
            report["exit"] = done.returncode
            result["cases"].setdefault(model, {})[mode] = report
            result["ratio"] = ratios(result["cases"])
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ratio"]), flush=True)


def ratios(cases: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of a step in exact mode, divided by those with close, by model."""
    return {
        model: modes["exact"]["median_s"] / modes["close"]["median_s"]
        for model, modes in cases.items()
        if all("median_s" in modes.get(mode, {}) for mode in MODES)
    }


def measure(given: argparse.Namespace, mode: str, model: str, out: str) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ[name] = value
    os.environ.update(LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 20000)
    from random_workload import checksum_reward, random_prompts, word_tokenizer

    from hybridrl import Trainer
    from hybridrl.config.load import load_config_dict

    with tempfile.TemporaryDirectory() as folder:
        content = json.loads((MODELS / f"{model}.json").read_text())
        num_prompts = given.prompts * given.steps
        config = load_config_dict(settings(given, mode, model, folder), given.set)
        trainer = Trainer.from_config(
            config,
            prompts=random_prompts(num_prompts, given.prompt_tokens, content["vocab_size"]),
            reward=checksum_reward,
            tokenizer=word_tokenizer(content["vocab_size"]),
        )
        force_length(trainer.engine, given.response_tokens)
        report: dict[str, Any] = {
            "layers": trainer.policy.model.layers.said,
            "dtype": str(trainer.source.dtype).removeprefix("torch."),
            "steps": [],
        }
        for number in range(given.steps):
            started = time.perf_counter()
            metrics = trainer.train_step()
            trainer.platform.synchronize()
            seconds = time.perf_counter() - started
            report["steps"].append(
                {
                    "s": seconds,
                    "parts_s": {
                        name.removeprefix("time_s/"): value
                        for name, value in metrics.items()
                        if name.startswith("time_s/")
                    },
                    **{name: metrics[f"mismatch/{name}"] for name in KEPT},
                    "grad_norm": metrics["policy/grad_norm"],
                }
            )
            add_summary(report)
            Path(out).write_text(json.dumps(report))
            last = report["steps"][-1]
            print(f"{model} {mode} step {number + 1}: {seconds:.3f} s, {last}", flush=True)
            if not math.isfinite(last["grad_norm"]):
                break
    sys.stdout.flush()
    os._exit(0)  # the system frees memory faster than vLLM ends


def settings(given: argparse.Namespace, mode: str, model: str, folder: str) -> dict[str, Any]:
    init = Path(folder) / "model"
    init.mkdir()
    (init / "config.json").write_text((MODELS / f"{model}.json").read_text())
    return {
        "run": {"name": mode, "dir": folder, "collective_timeout_s": 120},
        "model": {"init": str(init)},
        "numerics": {"match": mode},
        "train": {"micro_batch_tokens": given.budget, "learning_rate": 1e-5},
        "rollout": {
            "engine": "vllm",
            "max_new_tokens": given.response_tokens,
            "max_batch": given.prompts * given.samples,
        },
        "algorithm": {"name": "grpo"},
        "data": {"max_prompt_tokens": given.prompt_tokens, "shuffle": False},
        "steps": {
            "prompts_per_step": given.prompts,
            "samples_per_prompt": given.samples,
            "num_steps": given.steps,
        },
        "checkpoint": {"every": 0},
        "log": {"console": False, "tensorboard": False, "rollouts_every": 0},
    }


def force_length(engine: Any, num_tokens: int) -> None:
    """Makes every response `num_tokens` long."""
    submit = engine.submit

    def submit_forced(requests: Sequence[Any]) -> None:
        changed = {"max_new_tokens": num_tokens, "stop_token_ids": ()}
        submit([replace(one, sampling=replace(one.sampling, **changed)) for one in requests])

    engine.submit = submit_forced


def add_summary(report: dict[str, Any]) -> None:
    """Adds the median of a step and its parts, and the differences over all steps."""
    steps = report["steps"]
    timed = steps[NUM_WARMUPS:] or steps
    report["median_s"] = statistics.median(step["s"] for step in timed)
    report["median_parts_s"] = {
        name: statistics.median(step["parts_s"][name] for step in timed)
        for name in timed[0]["parts_s"]
    }
    report["largest_difference"] = max(step["logprob_diff_max"] for step in steps)
    report["mean_difference"] = statistics.mean(step["logprob_diff_mean"] for step in steps)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", help="names of files in benchmarks/models")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=384)
    parser.add_argument("--budget", type=int, default=65536, help="train.micro_batch_tokens")
    parser.add_argument("--set", action="append", default=[], help="key=value of the configuration")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
