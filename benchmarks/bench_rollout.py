"""Measures the rollout side of a step on GPUs: an engine in the training processes (`--engine`).

One case is a training layout, a rollout layout and a model of random weights. After correctness
(the first sync is verified by checksum, trainer and engine agree on the probe) it takes `--steps`
training steps, every sync verified, and reports the mismatch of log-probabilities, the time of
every phase, and what the engine's own phase changes cost. Options ask for more:

* --throughput: generation in the loop against the plain package (plain_engines.py) on the same
  prompts, sampling parameters and weights, in the same process.
* --interrupt: generation stopped halfway for a change of phases and back; the mismatch of what was
  begun before and ended after it, beside that of samples that nothing interrupted.
* --cycles N: N whole steps, with the free memory after each and the mismatch of each: captured
  CUDA graphs must stay valid while memory comes and goes.

    python benchmarks/bench_rollout.py OUT.json 0.5b/tp2pp2/tp1 7b/tp4/tp1 --throughput
    python benchmarks/bench_rollout.py OUT.json 0.5b/tp1/tp1 --world 1 --cycles 100
    python benchmarks/bench_rollout.py OUT.json 0.5b/tp1/tp1 --world 1 --engine sglang --throughput

A case is SIZE/TRAIN/ROLLOUT: a file benchmarks/models/qwen2.5-SIZE.json, training sizes (the rest
of the world is data parallel) and the engine's tensor parallel size. Cases run one after another,
or `--together N` at once where only results count and times do not.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from case_record import commit
from plain_engines import PLAIN, Plain

ROOT = Path(__file__).resolve().parents[1]
CASE = re.compile(r"^(?P<size>[\w.]+)/(?P<train>(?:(?:tp|pp|cp)\d+)+)/tp(?P<rollout>\d+)$")
PROMPT_LETTERS = "0123456789+,"


def main() -> int:
    """Runs the cases, each in processes of its own, and writes one JSON file."""
    arguments = parse()
    if arguments.case_file:
        run_case(json.loads(arguments.case_file.read_text()))
        return 0
    jobs = [describe(case, arguments) for case in arguments.cases]
    with concurrent.futures.ThreadPoolExecutor(arguments.together) as pool:
        results = list(pool.map(launch, jobs))
    report = {
        "benchmark": "rollout",
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[2:]]),
        "commit": commit(),
        "at_once": arguments.together,
        "cases": results,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [result["case"] for result in results if "error" in result]
    print("failed: " + ", ".join(failed) if failed else f"wrote {arguments.out}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("cases", nargs="*", metavar="SIZE/TRAIN/ROLLOUT")
    parser.add_argument("--world", type=int, default=4, help="number of GPUs, one process each")
    parser.add_argument("--engine", choices=PLAIN, default="vllm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=300, help="of one case")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--case-file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def describe(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns everything that the processes of a case need to know."""
    found = CASE.match(case)
    if found is None:
        sys.exit(f"case {case!r}: expected SIZE/TRAIN/ROLLOUT, e.g. 0.5b/tp2pp2/tp1")
    sizes = {name: int(size) for name, size in re.findall(r"(tp|pp|cp)(\d+)", found["train"])}
    model = ROOT / "benchmarks" / "models" / f"qwen2.5-{found['size']}.json"
    if not model.is_file():
        known = ", ".join(sorted(p.stem for p in model.parent.glob("qwen2.5-*.json")))
        sys.exit(f"case {case!r}: no {model}; there are {known}")
    left_out = ("cases", "out", "case_file")
    chosen = {key: value for key, value in vars(arguments).items() if key not in left_out}
    return {
        **chosen,
        "case": case,
        "model": str(model),
        "train": sizes,
        "rollout_tp": int(found["rollout"]),
    }


def launch(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one case under torchrun; returns its result, or its error with the end of the output."""
    with tempfile.TemporaryDirectory() as folder:
        case_file = Path(folder) / "case.json"
        case_file.write_text(json.dumps({**job, "folder": folder}))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--nproc-per-node={job['world']}", __file__, "--case-file", str(case_file)]
        environment = {"OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ}
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=job["limit_s"],
                check=False,
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as expired:
            output, code = str(expired.stdout or b"")[-4000:], "timeout"
        seconds = time.perf_counter() - began
        print(f"{job['case']}: exit {code} after {seconds:.0f} s", flush=True)
        result_file = Path(folder) / "result.json"
        if code != 0 or not result_file.is_file():
            print(output[-6000:], flush=True)
            return {"case": job["case"], "error": f"exit {code}", "output": output[-2000:]}
        return {**json.loads(result_file.read_text()), "whole_case_s": seconds}


def run_case(job: Mapping[str, Any]) -> None:
    """One rank of one case."""
    import torch

    from hybridrl.loop.loop import Trainer

    trainer = Trainer.from_config(config_of(job), prompts=prompts_of(job), reward=share_of_digits)
    try:
        trainer.check_engine()
        result: dict[str, Any] = {
            "case": job["case"],
            "machine": machine(trainer.world.size),
            "workload": {
                name: job[name]
                for name in (
                    "engine",
                    "world",
                    "steps",
                    "prompts",
                    "samples",
                    "prompt_tokens",
                    "new_tokens",
                )
            },
            "ledger": trainer.memory_table().splitlines(),
        }
        result |= measure_steps(trainer, job["steps"])
        if job["throughput"]:
            result["throughput"] = measure_throughput(trainer, PLAIN[job["engine"]])
        if job["interrupt"]:
            result["interrupted"] = measure_interruption(trainer)
        if job["cycles"]:
            result["cycles"] = measure_cycles(trainer, job["cycles"])
        if trainer.world.rank == 0:
            Path(job["folder"], "result.json").write_text(json.dumps(result))
        torch.distributed.barrier()
    finally:
        trainer.close()


def config_of(job: Mapping[str, Any]) -> Any:
    from hybridrl.config.load import load_config_dict

    config = {
        "run": {"name": "bench", "dir": job["folder"]},
        "model": {
            "init": job["model"],
            "dtype": "bfloat16",
            "tokenizer": str(ROOT / "examples" / "quickstart" / "model"),
        },
        "train": {**job["train"], "micro_batch_tokens": 8192, "learning_rate": 1e-6},
        "rollout": {
            "engine": job["engine"],
            "tp": job["rollout_tp"],
            "max_new_tokens": job["new_tokens"],
            "verify": 1,
        },
        "algorithm": {"name": "grpo"},
        "data": {"max_prompt_tokens": job["prompt_tokens"]},
        "steps": {
            "prompts_per_step": job["prompts"],
            "samples_per_prompt": job["samples"],
            "num_steps": 10_000,
        },
        "log": {"console": False, "tensorboard": False, "rollouts_every": 0},
    }
    return load_config_dict(config, job["set"])


def prompts_of(job: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns random prompts of `prompt_tokens` letters, each of which is one token."""
    import numpy as np

    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(PROMPT_LETTERS), (4 * job["prompts"], job["prompt_tokens"]))
    return [{"prompt": "".join(PROMPT_LETTERS[i] for i in row), "answer": ""} for row in drawn]


def share_of_digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def measure_steps(trainer: Any, num_steps: int) -> dict[str, Any]:
    """Takes training steps; medians leave the first one out, which warms up."""
    engine, records = trainer.engine, []
    names = ("sleep", "begin_update", "finish_update")
    with timed_calls(engine, names, trainer.platform.synchronize) as spent:
        for _ in range(num_steps):
            for name in names:
                spent[name] = 0.0
            metrics = trainer.train_step()
            slowest = largest_over_ranks(trainer, [spent[name] for name in names])
            metrics |= {f"engine_s/{n}": s for n, s in zip(names, slowest, strict=True)}
            records.append(metrics)
    kept = records[1:] or records
    medians = {n: statistics.median(r[n] for r in kept) for n in kept[0]}
    overheads = [sum(r[f"engine_s/{name}"] for name in names) for r in kept]
    return {
        "mismatch_mean_worst": max(r["mismatch/logprob_diff_mean"] for r in records),
        "engine_phases_s_median": statistics.median(overheads),
        "engine_phases_s_worst": max(overheads),
        "medians": {name: round(value, 6) for name, value in sorted(medians.items())},
    }


@contextmanager
def timed_calls(
    owner: Any, names: tuple[str, ...], synchronize: Callable[[], None]
) -> Iterator[dict[str, float]]:
    """Adds up the seconds that the methods take, until their work on the device is done."""
    spent = dict.fromkeys(names, 0.0)

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            synchronize()
            began = time.perf_counter()
            result = method(*arguments, **keywords)
            synchronize()
            spent[name] += time.perf_counter() - began
            return result

        return call

    for name in names:
        setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield spent
    finally:
        for name in names:
            delattr(owner, name)


def measure_throughput(trainer: Any, plain: Plain, repeats: int = 5) -> dict[str, Any]:
    """Generates the same samples in the loop's way and in the plain package's, in turn; tokens a
    second of the slowest replica, all replicas together, in medians.
    """
    prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
    sampler = trainer.sampler
    seconds: dict[str, list[float]] = {"loop": [], "plain": [], "plain_without_logprobs": []}
    num_tokens = 0
    for repeat in range(repeats + 1):
        for way, taken in seconds.items():
            plain.forget(trainer)
            trainer.world.gather_objects(None)  # all begin together
            began = time.perf_counter()
            if way == "loop":
                rollouts = sampler.generate(prompts, step=10**6)
                num_tokens = int(rollouts.response_lengths_B.sum()) if rollouts is not None else 0
            else:
                plain.generate(trainer, prompts, way == "plain")
            (slowest,) = largest_over_ranks(trainer, [time.perf_counter() - began])
            if repeat:
                taken.append(slowest)
    plain.forget(trainer)  # its last batch has no seeds: what comes next would be put beside it
    shares = trainer.world.gather_objects(
        num_tokens if sampler.layout.assignment[trainer.world.rank][1] == 0 else 0
    )
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "tokens": sum(shares),
        "tokens_per_s": {way: round(sum(shares) / taken) for way, taken in medians.items()},
        "loop_to_plain": round(medians["plain"] / medians["loop"], 4),
        "loop_to_plain_without_logprobs": round(
            medians["plain_without_logprobs"] / medians["loop"], 4
        ),
    }


def measure_interruption(trainer: Any) -> dict[str, float]:
    """Samples with and without a change of phases in the middle; their distance from the trainer's
    log-probabilities.
    """
    from hybridrl.training.mismatch import MEAN, mismatch_metrics

    prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
    sampler, found = trainer.sampler, {}
    for name, stops_after in (("mismatch_mean", 0), ("mismatch_mean_interrupted", 5)):
        sampler.submit(prompts, sampler.samples_per_prompt, step=10**6)
        for _ in range(stops_after):
            sampler.advance()
        if stops_after:
            trainer.enter_training()
            trainer.reshard()
        while sampler.engine.has_unfinished:
            sampler.advance()
        scored = sampler.score(sampler.collect())
        trainer.enter_training()
        batch = trainer.add_columns(scored)
        found[name] = mismatch_metrics(batch, trainer.policy.logprobs(batch))[MEAN]
        trainer.reshard()
    return found


def measure_cycles(trainer: Any, num_cycles: int) -> dict[str, Any]:
    """Whole steps; the free memory at the end of each, in rollout and at the end of training."""
    import torch

    free_bytes: dict[str, list[int]] = {"rollout": [], "training": []}
    mismatch = []
    for _ in range(num_cycles):
        mismatch.append(trainer.train_step()["mismatch/logprob_diff_mean"])
        free_bytes["rollout"].append(torch.cuda.mem_get_info()[0])
        trainer.enter_training()
        torch.cuda.empty_cache()
        free_bytes["training"].append(torch.cuda.mem_get_info()[0])
        trainer.reshard()
    changes = {
        phase: largest_over_ranks(trainer, [abs(found[-1] - found[1]) / found[1]])[0]
        for phase, found in free_bytes.items()
    }
    return {
        "number": num_cycles,
        "free_gib_after_cycle_2": {p: round(f[1] / 2**30, 3) for p, f in free_bytes.items()},
        "free_gib_after_last": {p: round(f[-1] / 2**30, 3) for p, f in free_bytes.items()},
        "largest_change": changes,
        "mismatch_mean_first": mismatch[0],
        "mismatch_mean_last": mismatch[-1],
        "mismatch_mean_worst": max(mismatch),
    }


def largest_over_ranks(trainer: Any, values: list[float]) -> list[float]:
    import torch

    found: list[float] = trainer.world.max_over_world(
        torch.tensor(values, dtype=torch.float64)
    ).tolist()
    return found


def machine(num_gpus: int) -> dict[str, Any]:
    from importlib.metadata import distributions

    import torch

    names = ("torch", "transformers", "vllm", "sglang", "megatron-core", "triton")
    found = {str(one.metadata["Name"]): one.version for one in distributions()}
    return {
        "gpus": f"{num_gpus} x {torch.cuda.get_device_name(0)}",
        **{name: found[name] for name in names if name in found},
    }


def command_of(argv: Sequence[str]) -> str:
    """Returns a command line as a report names it: of files elsewhere their names."""
    return " ".join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in argv)])


if __name__ == "__main__":
    sys.exit(main())
