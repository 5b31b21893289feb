"""One case of bench_rollout.py, in the processes of its ranks.

Who waits for whom: every function is collective over the world.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from bench_reshard_gpu import ROOT
from case_record import CaseRecord
from engine_import import import_engine
from plain_engines import PLAIN
from reshard_clock import largest_over_ranks, machine, timed_calls

from hybridrl.config.load import load_config_dict
from hybridrl.loop.trainer import Trainer
from hybridrl.training.mismatch import MEAN, mismatch_metrics

PROMPT_LETTERS = "0123456789+,"
WORKLOAD = ("engine", "world", "steps", "prompts", "samples", "prompt_tokens", "new_tokens")
# The engine's own changes of phases.
CHANGES = ("sleep", "begin_update", "finish_update")
CYCLES_BETWEEN_LINES = 10
STEPS_BEFORE_INTERRUPTION = 5
PYTHON_ROUNDS = 200_000  # 5 to 15 ms


def run_case(begun: CaseRecord) -> None:
    """Measures everything that the job of a record asks for; does not return."""
    job, case = begun.job, Case(begun.job, begun.result)
    case.save("trainer imported")
    import_engine(job["engine"], job["rollout_tp"])
    case.save("engine imported")
    case.start()
    if job["throughput"]:
        case.measure_throughput()
    if job["steps"]:
        case.take_steps()
    if job["interrupt"]:
        case.interrupt()
    if job["cycles"]:
        case.take_cycles()
    case.result["is_complete"] = True
    case.save("everything")
    case.trainer.world.gather_objects(None)
    sys.stdout.flush()
    os._exit(0)  # the system frees memory faster than engines and NCCL end


class Case(CaseRecord):
    """A case: the Trainer with its engine, and what is measured of them."""

    def start(self) -> None:
        """Makes the Trainer and verifies its engine's weights."""
        job = self.job
        self.result |= {"workload": {name: job[name] for name in WORKLOAD}}
        self.trainer = trainer = Trainer.from_config(
            config_of(job), prompts=prompts_of(job), reward=share_of_digits
        )
        self.result |= {
            "machine": machine(trainer.world.size),
            "ledger": trainer.memory_table().splitlines(),
        }
        self.save("trainer and engine made")
        trainer.check_engine()
        self.watch(trainer.sampler)
        self.save("weights verified")

    def watch(self, sampler: Any) -> None:
        """Notes of each generation through the sampler what this rank's host had to do with it."""
        self.host: dict[str, float] = {}
        make = sampler.generate

        def generate(*given: Any, **named: Any) -> Any:
            usage, began = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
            worked = time.thread_time()
            try:
                return make(*given, **named)
            finally:
                later = resource.getrusage(resource.RUSAGE_THREAD)
                self.host |= {
                    "seconds": time.perf_counter() - began,
                    "cpu_s": time.thread_time() - worked,
                    "interruptions": float(later.ru_nivcsw - usage.ru_nivcsw),
                    "page_faults": float(later.ru_minflt - usage.ru_minflt),
                }

        sampler.generate = generate

    def note_host(self, of: str) -> str:
        """Keeps what each rank's host had to do with the last generation; returns a line of it."""
        ranks = self.trainer.world.gather_objects(self.host)
        found = {name: [round(one[name], 4) for one in ranks] for name in self.host}
        self.result.setdefault("generations", []).append({"of": of, **found})
        return f"host's Python {max(found['python_ms']):.1f} ms, CPU {max(found['cpu_s']):.2f} s"

    # Throughput

    def measure_throughput(self) -> None:
        """Generates the same samples in the loop's way and in the plain package's, in turn; tokens
        a second of the slowest replica, all replicas together, in medians. The first of each way
        warms up.
        """
        trainer, plain = self.trainer, PLAIN[self.job["engine"]]
        prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
        seconds: dict[str, list[float]] = {"loop": [], "plain": [], "plain_without_logprobs": []}
        num_tokens = 0
        for repeat in range(self.job["repeats"] + 1):
            for way, taken in seconds.items():
                found, num = self.generate(prompts, way)
                num_tokens = num or num_tokens
                if repeat:
                    taken.append(found)
                name = f"{way}, " + (f"repeat {repeat}" if repeat else "warm-up")
                said = f"{found:.3f} s, {num_tokens / found:,.0f} tokens/s"
                self.save(name, f"{said}; {self.note_host(name)}" if way == "loop" else said)
            if repeat:
                self.result["throughput"] = throughput(num_tokens, seconds)
        plain.forget(trainer)  # its last batch has no seeds: what comes next would be put beside it
        self.save("throughput", f"loop to plain {self.result['throughput']['loop_to_plain']:.3f}")

    def generate(self, prompts: Any, way: str) -> tuple[float, int]:
        """Generates in one way; returns the slowest rank's seconds and all replicas' tokens."""
        trainer, plain, num_tokens = self.trainer, PLAIN[self.job["engine"]], 0
        plain.forget(trainer)
        self.host = {"python_ms": python_s() * 1e3}
        trainer.world.gather_objects(None)  # all begin together
        began = time.perf_counter()
        if way == "loop":
            rollouts = trainer.sampler.generate(prompts, step=10**6)
            num_tokens = int(rollouts.response_lengths_B.sum()) if rollouts is not None else 0
        else:
            plain.generate(trainer, prompts, way == "plain")
        (slowest,) = largest_over_ranks(trainer, [time.perf_counter() - began])
        is_first = trainer.sampler.layout.assignment[trainer.world.rank][1] == 0
        return slowest, sum(trainer.world.gather_objects(num_tokens if is_first else 0))

    # Steps

    def take_steps(self) -> None:
        """Takes training steps; medians leave the first one out, which warms up."""
        trainer, records = self.trainer, list[dict[str, float]]()
        with timed_calls(trainer.engine, CHANGES, trainer.platform.synchronize) as spent:
            for number in range(self.job["steps"]):
                spent.update(dict.fromkeys(CHANGES, 0.0))
                self.host = {"python_ms": python_s() * 1e3}
                metrics = trainer.train_step()
                slowest = largest_over_ranks(trainer, [spent[name] for name in CHANGES])
                changes = {f"engine_s/{n}": s for n, s in zip(CHANGES, slowest, strict=True)}
                records.append({**metrics, **changes})
                self.result |= medians_of(records)
                host = self.note_host(f"step {number + 1}")
                self.save(f"step {number + 1}", f"{phases_of(metrics)}; {host}")

    def interrupt(self) -> None:
        """Samples with and without a change of phases halfway; returns both mismatches."""
        trainer = self.trainer
        prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
        sampler, found = trainer.sampler, self.result.setdefault("interrupted", {})
        ways = {"mismatch_mean": 0, "mismatch_mean_interrupted": STEPS_BEFORE_INTERRUPTION}
        for name, stops_after in ways.items():
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
            self.save(name, f"{found[name]:.4f}")

    def take_cycles(self) -> None:
        """Takes whole steps; returns the free memory in rollout and at the end of training."""
        trainer, mismatch = self.trainer, list[float]()
        free: dict[str, list[int]] = {"rollout": [], "training": []}
        for number in range(1, self.job["cycles"] + 1):
            mismatch.append(trainer.train_step()["mismatch/logprob_diff_mean"])
            free["rollout"].append(free_now())
            trainer.enter_training()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            free["training"].append(free_now())
            trainer.reshard()
            if number % CYCLES_BETWEEN_LINES == 0 or number == self.job["cycles"]:
                self.result["cycles"] = self.cycles_so_far(mismatch, free)
                self.save(f"cycle {number}", f"mismatch {mismatch[-1]:.4f}")

    def cycles_so_far(self, mismatch: list[float], free: Mapping[str, list[int]]) -> dict[str, Any]:
        """Returns what a result file keeps of cycles."""
        changes = {
            phase: largest_over_ranks(
                self.trainer, [abs(found[-1] - found[:2][-1]) / max(found[:2][-1], 1)]
            )[0]
            for phase, found in free.items()
        }
        gib = {phase: [round(size / 2**30, 3) for size in found] for phase, found in free.items()}
        return {
            "number": len(mismatch),
            "free_gib_after_cycle_2": {phase: found[:2][-1] for phase, found in gib.items()},
            "free_gib_after_last": {phase: found[-1] for phase, found in gib.items()},
            f"free_gib_every_{CYCLES_BETWEEN_LINES}": {
                phase: found[CYCLES_BETWEEN_LINES - 1 :: CYCLES_BETWEEN_LINES]
                for phase, found in gib.items()
            },
            "largest_change": changes,
            "mismatch_mean_first": mismatch[0],
            "mismatch_mean_last": mismatch[-1],
            "mismatch_mean_worst": max(mismatch),
        }


def throughput(num_tokens: int, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns what a result file keeps of the ways' `seconds` in each repeat."""
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    others = ("plain", "plain_without_logprobs")
    return {
        "tokens": num_tokens,
        "seconds": {way: [round(one, 4) for one in taken] for way, taken in seconds.items()},
        "tokens_per_s": {way: round(num_tokens / taken) for way, taken in medians.items()},
        **{f"loop_to_{way}": round(medians[way] / medians["loop"], 4) for way in others},
    }


def medians_of(records: list[dict[str, float]]) -> dict[str, Any]:
    """Returns what a result file keeps of steps, of which the first one warmed up."""
    kept = records[1:] or records
    medians = {name: statistics.median(one[name] for one in kept) for name in kept[0]}
    overheads = [sum(one[f"engine_s/{name}"] for name in CHANGES) for one in kept]
    return {
        "mismatch_mean_worst": max(one["mismatch/logprob_diff_mean"] for one in records),
        "engine_phases_s_median": statistics.median(overheads),
        "engine_phases_s_worst": max(overheads),
        "medians": {name: round(value, 6) for name, value in sorted(medians.items())},
    }


def phases_of(metrics: Mapping[str, float]) -> str:
    """Returns the seconds of a step's phases as a line of progress."""
    times = {name.removeprefix("time_s/"): s for name, s in metrics.items() if "time_s/" in name}
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.items())


def python_s() -> float:
    """Returns the seconds of a fixed piece of Python: where they are more than before, the host is
    slower, and so is what the host bounds.
    """
    began, left = time.perf_counter(), 0
    for number in range(PYTHON_ROUNDS):
        left ^= number
    return time.perf_counter() - began


def free_now() -> int:
    """Returns the free bytes of this rank's device; 0 on CPU, which is not measured."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def config_of(job: Mapping[str, Any]) -> Any:
    """Returns the configuration of the case."""
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
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(PROMPT_LETTERS), (4 * job["prompts"], job["prompt_tokens"]))
    return [{"prompt": "".join(PROMPT_LETTERS[i] for i in row), "answer": ""} for row in drawn]


def share_of_digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)
