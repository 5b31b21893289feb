"""One case of bench_step.py, in the processes of its ranks.

Who waits for whom: every function is collective over the world.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bench_reshard_gpu import ROOT
from bench_step import PARTS
from case_record import CaseRecord
from engine_import import after_turn
from image_workload import image_model, image_prompts, image_tokenizer, picture, side_of
from random_workload import checksum_reward, random_prompts, word_tokenizer
from reshard_clock import Clock, largest_over_ranks, machine, matmul_rate, timed_calls
from train_case import attention_backend

from hybridrl.config.lag import num_in_flight
from hybridrl.config.load import load_config_dict
from hybridrl.loop.trainer import Trainer
from hybridrl.parallel.host_gpus import local_host
from hybridrl.services.planner.plan_report import plan_report

# Of the logarithm of tailed response lengths, whose median is a quarter of the longest: 4 of 100
# are cut at the longest. Half of the variance is the prompt's, half the sample's.
TAIL_SIGMA = 0.8
KL_COEF = 0.001
LEARNING_RATE = 1e-6
WORKLOAD = ("workload", "prompts", "samples", "prompt_tokens", "image_tokens")
# Numbers of images whose passes through the vision tower are timed, and how often.
TOWER_IMAGES, TOWER_REPEATS = (1, 2, 4, 8), 5
# Phases that need no memory of the engine, and those that need no gradients.
ASLEEP = ("reward", "logprobs", "advantages", "update")
AWAKE = ("generate",)


def run_case(job: Mapping[str, Any]) -> None:
    """Measures everything that the job asks for; does not return."""
    case = Case(job if job["turn"] is None else after_turn(job))
    case.begin()
    case.start()
    case.take_steps()
    case.finish()
    case.result["is_complete"] = True
    case.save("everything")
    case.clock.line_up()
    sys.stdout.flush()
    os._exit(0)  # the system frees memory faster than vLLM and NCCL end


class Case(CaseRecord):
    """A case: the Trainer, and the steps that it takes."""

    def start(self) -> None:
        """Makes the Trainer, checks its engine and forces lengths."""
        self.memory = DeviceMemory.of_this_rank()
        if self.job["image_tokens"]:
            model = image_model(self.job["model"], self.job["folder"])
            self.job = {**self.job, "model": model}
        job = self.job
        self.config = config_of(job)
        vocab_size = self.vocab_size()
        tokenizer = (
            image_tokenizer(vocab_size, job["model"])
            if job["image_tokens"]
            else word_tokenizer(vocab_size)
        )
        self.trainer = trainer = Trainer.from_config(
            self.config,
            prompts=prompts_of(job, vocab_size),
            reward=checksum_reward,
            tokenizer=tokenizer,
        )
        self.config = trainer.config  # with all that the run has chosen for itself
        self.clock = Clock(trainer.platform.device, trainer.world.gather_objects)
        self.memory.mark("trainer and engine made")
        self.save("trainer and engine made")
        trainer.check_engine()
        self.memory.mark("weights verified")
        self.lengths = response_lengths(job)
        force_lengths(trainer, self.lengths)
        self.tokens = sum(self.lengths) + len(self.lengths) * job["prompt_tokens"]
        self.save("weights verified")
        self.peak = matmul_rate(self.clock, trainer.platform.device, trainer.source.dtype)
        self.result |= {
            "machine": machine(trainer.world.size),
            "layers": trainer.policy.model.layers.said,
            "dtype": str(trainer.source.dtype).removeprefix("torch."),
            "config": self.config_in_short(),
            "workload": {
                **{name: job[name] for name in WORKLOAD},
                "response_tokens_mean": statistics.mean(self.lengths),
                "response_tokens_max": max(self.lengths),
                "tokens": self.tokens,
            },
            "peak": self.peak,
            "ledger": trainer.memory_table().splitlines(),
            "steps": [],
        }
        self.save("peak", f"{self.peak['flops_per_s'] / 1e12:.1f} TFLOP/s")

    def config_in_short(self) -> dict[str, Any]:
        """Returns the configuration without what is of this machine alone."""
        found = self.config.model_dump(mode="json")
        init = Path(found["model"]["init"])
        inside = init.relative_to(ROOT) if init.is_relative_to(ROOT) else init.name
        found["model"]["init"], found["run"]["dir"] = str(inside), ""
        return found

    def vocab_size(self) -> int:
        """Returns the model's, before there is a model."""
        from hybridrl.loop.preflight import model_violations

        hf_config, violations = model_violations(self.config, self.job["world"])
        if violations:
            raise violations[0]
        return int(hf_config["vocab_size"])

    # Steps

    def take_steps(self) -> None:
        """Takes steps, and writes each down; fewer, where the case's time would not do."""
        job, taken = self.job, 0
        num_timed = job["warmups"] + job["steps"]
        for number in range(num_timed + job["text_steps"]):
            is_warm = number >= job["warmups"]
            is_text = number >= num_timed
            (age_s,) = largest_over_ranks(self.trainer, [self.age_s])
            slowest = max((step["step_s"] for step in self.result["steps"]), default=0.0)
            if taken and age_s + 1.5 * slowest > job["limit_s"]:
                self.result["stopped_early"] = f"after {taken} of {job['steps']} steps"
                break
            hybrid = self.trainer.hybrid_engine
            keeps_gradients = not hybrid._is_released  # in this rollout
            keeps_engine = hybrid.keeps_memory or hybrid._engine_stays  # in this training
            found = {"is_warm": is_warm, "is_text": is_text, **self.step()}
            if is_warm and not is_text:  # earlier ones still make NCCL's buffers
                self.memory.note_peaks(self.trainer, keeps_gradients, keeps_engine)
            self.memory.mark(f"step {number + 1}", unseen_gradients(self.trainer))
            taken += is_warm
            self.result["steps"].append(found)
            if taken:
                self.result["median"] = self.median(is_text=False)
            if is_text:
                self.result["median_of_text"] = self.median(is_text=True)
            self.result["memory_course"] = self.memory.course
            self.result["attention_backend"] = attention_backend()
            shown = ", ".join(f"{part} {found['parts_s'][part]:.2f}" for part in PARTS)
            self.save(f"step {number + 1}", f"{found['step_s']:.2f} s: {shown}")

    def step(self) -> dict[str, Any]:
        """Takes one step; returns its times and what it did."""
        trainer = self.trainer
        synchronize, reference = trainer.platform.synchronize, trainer.reference
        kept: dict[str, float] = {}
        # Without algorithm.kl_coef there is none.
        none = nullcontext({"logprobs": 0.0})

        def step() -> None:
            kept.update(trainer.train_step())

        with (
            timed_calls(trainer.policy, ("logprobs",), synchronize) as old,
            timed_calls(reference, ("logprobs",), synchronize) if reference else none as referred,
            timed_calls(trainer, ("enter_training",), synchronize) as entered,
        ):
            step_s = self.clock.seconds(step)
        calls = (old["logprobs"], referred["logprobs"], entered["enter_training"])
        old_s, reference_s, enter_s = largest_over_ranks(trainer, list(calls))
        self.check(kept)
        seconds = {
            "generation": kept["time_s/generate"],
            "old": old_s,
            "reference": reference_s,
            "update": kept["time_s/update"],
            "reshard": kept["time_s/reshard"],
        }
        seconds["rest"] = step_s - sum(seconds.values())
        rest = {name: kept[f"time_s/{name}"] for name in ("reward", "advantages")}
        return {
            "step_s": step_s,
            "parts_s": seconds,
            "rest_s": {**rest, "enter_training": enter_s},
            "share": {name: part / step_s for name, part in seconds.items()},
            "tokens_per_s_per_gpu": self.tokens_of(kept) / step_s / trainer.world.size,
            "mfu": self.mfu(kept, seconds, step_s),
            "metrics": kept,
        }

    def mfu(
        self, metrics: Mapping[str, float], seconds: Mapping[str, float], step_s: float
    ) -> dict[str, float]:
        """Returns model FLOPs as shares of what the GPUs could do in each part's time."""
        times = {
            "generate": seconds["generation"],
            "logprobs": seconds["old"] + seconds["reference"],
            "update": seconds["update"],
            "step": step_s,
        }
        rate = self.peak["flops_per_s"] * self.trainer.world.size
        return {
            name: metrics[f"flops/{name}"] / taken / rate for name, taken in times.items() if taken
        }

    def tokens_of(self, metrics: Mapping[str, float]) -> float:
        """Returns the tokens that a step learned from; with a lag not all steps have as many."""
        num = len(self.lengths)
        return num * (metrics["response_tokens/mean"] + self.job["prompt_tokens"])

    def wanted_mean(self) -> float:
        """Returns the mean of the forced lengths of the samples that the last step took."""
        per_group = self.job["samples"]
        taken = self.trainer.sampler.generated
        numbers = [group * per_group + i for group in taken for i in range(per_group)]
        return statistics.mean(self.lengths[number % len(self.lengths)] for number in numbers)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuses a step that is not what it should be."""
        names = ("policy/loss", "policy/grad_norm", "mismatch/logprob_diff_mean", "policy/kl")
        loss, norm, mismatch, kl = (metrics.get(name, 0.0) for name in names)
        length, wanted = metrics["response_tokens/mean"], self.wanted_mean()
        if (
            not all(math.isfinite(value) for value in (loss, norm, kl))
            or not norm > 0
            or not mismatch < self.job["max_mismatch"]
            or metrics["train/skipped_steps"] > 0
            or not math.isclose(length, wanted, rel_tol=1e-5)
        ):
            found = {name: metrics[name] for name in names if name in metrics}
            raise RuntimeError(f"a wrong step: {found}, responses of {length} tokens, not {wanted}")

    def median(self, *, is_text: bool) -> dict[str, Any]:
        """Returns medians over the warm steps so far, of those without or with images."""
        steps = [step for step in self.result["steps"] if step["is_warm"]]
        warm = [step for step in steps if step["is_text"] == is_text]
        found: dict[str, Any] = {
            name: {
                key: statistics.median(step[name][key] for step in warm) for key in warm[0][name]
            }
            for name in ("parts_s", "rest_s", "share", "mfu")
        }
        for name in ("step_s", "tokens_per_s_per_gpu"):
            found[name] = statistics.median(step[name] for step in warm)
        mismatch = "mismatch/logprob_diff_mean"
        found[mismatch] = statistics.median(step["metrics"][mismatch] for step in warm)
        shares = [step["share"] for step in warm]
        # What is neither generation nor the model's passes.
        found["overhead_share"] = statistics.median(s["reshard"] + s["rest"] for s in shares)
        return {"of_steps": len(warm), **found}

    def finish(self) -> None:
        """Verifies the engine's weights once more, and compares memory with the planner's."""
        self.trainer.enter_training()
        if self.job["image_tokens"]:
            self.result["tower"] = self.tower_times()
        self.trainer.reshard(verifies=True)
        report, violations = plan_report(self.config, self.trainer.world.size, host=local_host())
        if violations:
            raise violations[0]
        self.result["predicted_memory"] = report["memory"]
        self.result["predicted_step"] = report["step"]
        measured = self.memory.largest(self.trainer)
        if not measured:
            return
        self.result["measured_memory"] = measured
        usual = {"training": "usual_train_peak_bytes", "rollout": "rollout_peak_bytes"}
        bounds = {"training": "train_peak_bytes", "rollout": "rollout_peak_bytes"}
        phases = {"training": ("logprobs", "update"), "rollout": ("generate",)}
        self.result["memory"] = {
            name: {
                "measured_bytes": (most := max(measured[phase] for phase in phases[name])),
                "predicted_bytes": report["memory"][usual[name]],
                "predicted_to_measured": report["memory"][usual[name]] / most,
                "bound_bytes": report["memory"][bounds[name]],
            }
            for name in usual
        }

    def tower_times(self) -> list[dict[str, float]]:
        """Returns time and memory of the vision tower by number of images."""
        from hybridrl.models.vision.tower import image_features

        processor = self.trainer.source.extra_inputs.processor
        tower, device = self.trainer.policy.model.chunks[0].vision, self.trainer.platform.device
        side, found = side_of(self.job["model"], self.job["image_tokens"]), []
        images = [processor.content(picture(seed, side)) for seed in range(TOWER_IMAGES[-1])]
        for number in TOWER_IMAGES:
            with torch.no_grad():
                image_features(tower, processor, images[:number])
                held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
                if held:
                    torch.cuda.reset_peak_memory_stats()
                times = [
                    self.clock.seconds(
                        lambda n=number: image_features(tower, processor, images[:n])
                    )
                    for _ in range(TOWER_REPEATS)
                ]
            peak = torch.cuda.max_memory_allocated() if held else 0
            found.append(
                {"images": number, "seconds": statistics.median(times), "bytes": peak - held}
            )
        return found


# Memory


@dataclass
class DeviceMemory:
    """What a rank needs of its GPU beyond the CUDA context, by phase; on CPU nothing is known.

    Peaks are the journal's, which counts gradients in memory that the engine lends and beside it,
    and no engine that has given its memory back. It does not count what NCCL and symmetric memory
    take: that follows from what the driver says is free. Where a phase keeps what only the other
    one needs, since there is room for it, that is not what it needs.

    Args:
        course: at each point of the start, bytes in use and those that torch's allocator holds.
    """

    context_bytes: int = 0
    others_bytes: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    course: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of_this_rank(cls) -> DeviceMemory:
        """Returns a record that begins now."""
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.zeros(1, device="cuda")
        return cls(context_bytes=used_bytes())

    def mark(self, point: str, gradients: int = 0) -> None:
        """Takes in how full the device is at a point of the run.

        Args:
            gradients: Bytes of gradients that torch's allocator does not count.
        """
        if torch.cuda.is_available():
            counted, mapped, _ = pool_bytes()
            held = torch.cuda.memory_reserved() - (counted - mapped) + gradients
            self.others_bytes = used_bytes() - held
            self.course[point] = used_bytes(), held

    def note_peaks(self, trainer: Any, keeps_gradients: bool, keeps_engine: bool) -> None:
        """Takes in the last step's peaks, and what was kept beside each phase."""
        if not torch.cuda.is_available():
            return
        *_, engine = pool_bytes()
        # None on a rank that only generates.
        memories = [one.memory for one in trainer.trained.values() if one.memory is not None]
        lent = sum(memory.lent_bytes for memory in memories)  # the engine's, and needed by both
        gradients = sum(memory.gradient_bytes() for memory in memories) - lent
        for phase, peak in trainer.journal.timer.peak_bytes().items():
            own = peak + self.others_bytes - self.context_bytes
            if phase in ASLEEP and keeps_engine:
                own -= engine - lent
            elif phase in AWAKE and keeps_gradients:
                own -= gradients
            self.peaks[phase] = max(own, self.peaks.get(phase, 0))

    def largest(self, trainer: Any) -> dict[str, int]:
        """Returns the peaks of the fullest rank, with what they are made of."""
        parts = ("context_bytes", "others_bytes")
        mine = {**self.peaks, **{name: getattr(self, name) for name in parts}}
        if not self.peaks:
            return {}
        found = largest_over_ranks(trainer, [float(size) for size in mine.values()])
        return {name: int(size) for name, size in zip(mine, found, strict=True)}


def unseen_gradients(trainer: Any) -> int:
    """Returns the bytes of gradients on the device that torch's allocator does not count now."""
    memories = (one.memory for one in trainer.trained.values())
    return sum(memory.unseen_bytes for memory in memories if memory is not None)


def pool_bytes() -> tuple[int, int, int]:
    """Returns bytes of vLLM's pools that torch counts, that are mapped, and when awake."""
    from vllm.device_allocator.cumem import CuMemAllocator

    if (allocator := CuMemAllocator.instance) is None:
        return 0, 0, 0
    pools = [pool for pool, *_ in allocator.allocator_and_pools.values()]
    counted = sum(segment["total_size"] for pool in pools for segment in pool.snapshot())
    sizes = [(part.handle[1], part.is_asleep) for part in allocator.pointer_to_data.values()]
    mapped = sum(size for size, is_asleep in sizes if not is_asleep)
    return counted, mapped, sum(size for size, _ in sizes)


def used_bytes() -> int:
    """Returns what the driver says is in use of this rank's GPU."""
    if not torch.cuda.is_available():
        return 0
    free, size = torch.cuda.mem_get_info()
    return size - free


# The workload


def force_lengths(trainer: Any, lengths: Sequence[int]) -> None:
    """Makes every response as long as `lengths` says of its sample number."""
    engine, submit = trainer.engine, trainer.engine.submit

    def submit_forced(requests: Sequence[Any]) -> None:
        submit(
            [
                replace(
                    request,
                    sampling=replace(
                        request.sampling,
                        max_new_tokens=lengths[request.request_id % len(lengths)],
                        stop_token_ids=(),
                    ),
                )
                for request in requests
            ]
        )

    engine.submit = submit_forced


def response_lengths(job: Mapping[str, Any]) -> list[int]:
    """Returns the tokens of each response of a step, by sample number."""
    longest, draw, lengths = job["response_tokens"], random.Random(1), []
    for _ in range(job["prompts"]):
        of_prompt = draw.gauss(0, TAIL_SIGMA / math.sqrt(2))
        for _ in range(job["samples"]):
            exponent = of_prompt + draw.gauss(0, TAIL_SIGMA / math.sqrt(2))
            drawn = round(longest / 4 * math.exp(exponent))
            is_fixed = job["workload"] == "reference"
            lengths.append(longest if is_fixed else min(max(drawn, 1), longest))
    return lengths


def num_prompts(job: Mapping[str, Any]) -> int:
    """Returns how many prompts a case takes, with a step to spare."""
    num_steps = job["warmups"] + job["steps"] + job["text_steps"]
    return int(job["prompts"] * (num_steps + 1))


def prompts_of(job: Mapping[str, Any], vocab_size: int) -> list[dict[str, Any]]:
    """Returns the prompts of a case: those of steps with images, then those of text alone."""
    num_tokens, image_tokens = job["prompt_tokens"], job["image_tokens"]
    text = random_prompts(num_prompts(job), num_tokens, vocab_size)
    if not image_tokens:
        return text
    number = job["prompts"] * (job["warmups"] + job["steps"])
    shown = image_prompts(number, num_tokens, vocab_size, job["model"], image_tokens)
    return [*shown, *text]


def config_of(job: Mapping[str, Any]) -> Any:
    """Returns the configuration of the case."""
    config = {
        "run": {"name": "bench", "dir": job["folder"], "collective_timeout_s": 120},
        "model": {"init": job["model"]},
        "train": {
            **job["train"],
            "micro_batch_tokens": job["micro_batch_tokens"],
            "learning_rate": LEARNING_RATE,
        },
        "rollout": {
            "engine": "vllm",
            **job["rollout"],
            "max_new_tokens": job["response_tokens"],
            "max_batch": job["max_batch"],
        },
        **({"placement": job["placement"]} if job["placement"] else {}),
        "algorithm": {"name": "grpo", "kl_coef": KL_COEF},
        "data": {"max_prompt_tokens": job["prompt_tokens"], "shuffle": not job["image_tokens"]},
        # For the memory that a plan expects.
        "layout": {"mean_response_tokens": round(statistics.mean(response_lengths(job)))},
        "steps": {
            "prompts_per_step": job["prompts"],
            "samples_per_prompt": job["samples"],
            "num_steps": 10_000,
        },
        "log": {"console": False, "tensorboard": False, "rollouts_every": 0},
    }
    found = load_config_dict(config, job["set"])
    if found.steps.max_policy_lag and found.rollout.max_batch == job["max_batch"]:
        # All that a replica has under way is decoded together, as it is without a lag.
        most = math.ceil(job["max_batch"] * num_in_flight(found) / job["prompts"])
        found = load_config_dict(config, [f"rollout.max_batch={most}", *job["set"]])
    return found
