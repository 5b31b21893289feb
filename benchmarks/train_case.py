"""One case of bench_train.py, in the processes of its ranks.

Who waits for whom: every function is collective over the world. Rank 0 writes the result anew after
each part, so that what was measured stays if a later part ends the processes.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from bench_reshard_gpu import ROOT
from case_record import CaseRecord
from reshard_clock import Clock, attempted, machine, matmul_rate, timed_calls
from train_profile import driver_counts, profiled

from hybridrl.algorithms import make_algorithm
from hybridrl.config.load import load_config_dict
from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.loop import garbage, setup
from hybridrl.metrics.flops import forward_flops, train_flops
from hybridrl.models.adapters.settings import lora_of
from hybridrl.models.family import ModelShape
from hybridrl.models.megatron.te_attention import set_prefix_kernel
from hybridrl.parallel.joining import start_process_group
from hybridrl.platform import Platform
from hybridrl.roles.policy import Policy
from hybridrl.training.batches.packing import Schedule, even_sizes, round_up
from hybridrl.training.from_config import build_model, model_source

# Of the logarithm of response lengths with a long tail; lengths beyond the budget are cut.
TAIL_SIGMA = 1.0
LEARNING_RATE = 1e-3
# Nats, on average: both round to bf16, and another order of sums rounds otherwise.
MAX_SHARED_DIFFERENCE = 0.02
PARTS = ("accumulate", "grad_norm", "apply")  # of an update


def run_case(job: Mapping[str, Any]) -> None:
    """Measures everything that the job asks for; does not return."""
    case = Case(job)
    case.begin()
    case.start()
    case.measure_peak()
    case.check()
    batch, world = case.uniform_batch(), job["world"]
    sizes = case.flop_sizes(batch)
    flops = {"logprobs": forward_flops(*sizes) / world, "update": train_flops(*sizes) / world}
    if not job["only_shared"]:
        for name, each in flops.items():
            if name in job["passes"]:
                case.attempt(name, batch, getattr(case, name), each)
    if job["samples"] > 1:
        case.measure_shared(batch)
    if "parts" in job["passes"]:
        case.measure_parts(batch)
    if job["tails"]:
        case.measure_tails()
    if job["profile"]:
        case.profile(batch)
    case.result["is_complete"] = True
    case.save("everything")
    case.clock.line_up()
    sys.stdout.flush()
    os._exit(0)  # the system frees memory faster than NCCL ends, and the machine's time is dear


class Case(CaseRecord):
    """A case: the policy, and the passes that are timed."""

    def start(self) -> None:
        """Makes the policy as the Trainer does."""
        config = config_of(self.job)
        self.platform = platform = Platform.detect()
        platform.activate()
        start_process_group(platform, config.run.collective_timeout_s)
        meshes = setup.make_meshes(config, platform, setup.find_machines(platform))
        self.world = meshes.world
        platform.seed(config.run.seed)
        self.clock = Clock(platform.device, self.world.gather_objects)
        source = model_source(config.model, platform, lora=lora_of(config.lora))
        model = build_model(meshes.of("policy"), source, "lm", config)
        model.make_trainable(config.train.learning_rate)
        model.planner.shares_prompts = False  # until `measure_shared`
        self.policy = Policy(model, make_algorithm(config.algorithm), 1 << 20)
        self.result |= {
            "machine": machine(self.world.size),
            "layers": model.layers.said,
            "dtype": str(source.dtype).removeprefix("torch."),
            "train": config.train.model_dump(mode="json"),
            "state_bytes": sum(self.held_bytes()),
        }
        self.save("model made", model.layers.said)

    def held_bytes(self) -> tuple[int, int, int]:
        """Returns this rank's bytes of weights, gradients and optimizer state."""
        memory = self.policy.model.memory
        assert memory is not None
        return memory.weight_bytes(), memory.gradient_bytes(), memory.state_bytes()[0]

    def measure_peak(self) -> None:
        """Measures the rate of a large matrix product, what all figures are shares of."""
        found = matmul_rate(self.clock, self.platform.device, self.policy.model.source.dtype)
        self.peak, self.result["peak"] = found["flops_per_s"], found
        self.save("peak", f"{self.peak / 1e12:.1f} TFLOP/s")

    # Passes

    def logprobs(self, batch: TrainBatch) -> None:
        self.policy.logprobs(batch)

    def update(self, batch: TrainBatch) -> None:
        self.policy.update(batch)

    def check(self) -> None:
        """Refuses to time a step that is not finite or changes nothing."""
        batch = self.batch_of([(8, 24)] * 4 * self.job["replicas"])
        before = self.policy.logprobs(batch)
        metrics = self.policy.update(batch)
        change = float((self.policy.logprobs(batch) - before).abs().max())
        loss, norm = metrics["policy/loss"], metrics["policy/grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0 and change > 0):
            raise RuntimeError(f"a wrong step: loss {loss}, gradient norm {norm}, change {change}")
        # From here on weights stay: the same work, and never a step that is left out.
        self.policy.model.peak_learning_rate = 0.0
        garbage.set_aside(self.platform)  # as after a Trainer's first step
        self.result["attention_backend"] = attention_backend()
        self.save("a step", f"gradient norm {norm:.3g}, change of log-probabilities {change:.2g}")

    def attempt(
        self, name: str, batch: TrainBatch, run: Callable[[TrainBatch], None], flops: float
    ) -> dict[str, Any]:
        """Measures one pass over a batch; `flops` are of the model, on one GPU."""

        def measure() -> dict[str, Any]:
            if not self.platform.is_cpu:
                torch.cuda.reset_peak_memory_stats()
            counts = [driver_counts()]

            def once() -> None:
                run(batch)
                counts.append(driver_counts())

            timing = self.clock.time(once, self.job["iterations"], self.job["warmups"])
            seconds, tokens = timing.ms / 1e3, int(batch.lengths_B.sum())
            return {
                **timing.report(),
                "all_ms": timing.slowest_ms,
                **self.asked_of_driver(counts),
                "tokens": tokens,
                "tokens_per_s_per_gpu": tokens / seconds / self.world.size,
                "tflops_per_gpu": flops / seconds / 1e12,
                "mfu": flops / seconds / self.peak,
                "peak_bytes": max(self.world.gather_objects(self.platform.peak_memory_bytes())),
            }

        found = attempted(self.clock.gather, measure)
        self.result.setdefault("passes", {})[name] = found
        said = found.get("error") or f"{found['ms']:.1f} ms, MFU {found['mfu']:.3f}"
        self.save(name, said)
        return found

    def asked_of_driver(self, counts: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        """Returns, of the rank whose allocator asked most of the driver, how often it did in each
        pass, warm-ups too, and the most memory that it held.
        """
        if not counts[0]:
            return {}
        found: dict[str, Any] = {
            name: [now[name] - before[name] for before, now in pairwise(counts)]
            for name in ("driver_allocations", "driver_frees", "retries")
        }
        found["most_reserved_bytes"] = counts[-1]["most_reserved_bytes"]
        ranks: list[dict[str, Any]] = self.world.gather_objects(found)
        return max(ranks, key=lambda rank: sum(rank["driver_allocations"]))

    def measure_parts(self, batch: TrainBatch) -> None:
        """Times the parts of an update, each until the device has done it, and the whole."""
        model = self.policy.model
        with timed_calls(model, PARTS, self.platform.synchronize) as spent:
            whole_s = self.clock.seconds(lambda: self.update(batch))
        ranks = zip(*self.world.gather_objects(list(spent.values())), strict=True)
        parts = {name: 1e3 * max(each) for name, each in zip(PARTS, ranks, strict=True)}
        self.result["update_parts_ms"] = {**parts, "whole": 1e3 * whole_s}
        self.save("parts", ", ".join(f"{name} {ms:.0f} ms" for name, ms in parts.items()))

    def measure_shared(self, batch: TrainBatch) -> None:
        """Times the same passes where samples of one prompt share its tokens; where they attend to
        long prompts in two calls, also with copied keys, both ways twice, in turns.
        """
        model, job = self.policy.model, self.job
        logps_T = None if job["only_shared"] else self.policy.logprobs(batch)
        model.planner.shares_prompts = True
        if logps_T is not None:
            away = float((self.policy.logprobs(batch) - logps_T).abs().mean())
            if away > MAX_SHARED_DIFFERENCE:
                raise RuntimeError(
                    f"log-probabilities with shared prompts are {away} nats from those without"
                )
            self.result["shared_difference"] = away
        inputs = model.plan(batch).inputs
        self.result["shared_positions"] = [one.whole.num_positions for one in inputs]
        self.result["two_calls"] = model.prompt_calls.uses_two, model.prompt_calls.said
        found = {"shared": self.attempt_both(batch, "shared")}
        if logps_T is not None:
            self.result["shared_to_not"] = {
                name: self.result["passes"][name]["ms"] / one["ms"]
                for name, one in found["shared"].items()
                if "ms" in one
            }
        has_two = any(one.packed.shared and one.packed.shared.two_calls for one in inputs)
        if not (model.prompt_calls.uses_two and has_two and "copies" in job["passes"]):
            return
        for way in ("copied keys", "copied keys again", "shared again"):
            set_prefix_kernel(model.chunks, way == "shared again")
            self.attempt_both(batch, way)

    def attempt_both(self, batch: TrainBatch, way: str) -> dict[str, dict[str, Any]]:
        """Measures both passes with shared prompts; their FLOPs are those that are computed."""
        model, world = self.policy.model, self.world.size
        sizes = self.flop_sizes(batch)
        computed = {
            "logprobs": forward_flops(*sizes, prefixes=model.planner.shared_tokens(batch, True)),
            "update": train_flops(*sizes, prefixes=model.planner.shared_tokens(batch)),
        }
        return {
            name: self.attempt(f"{name}, {way}", batch, getattr(self, name), each / world)
            for name, each in computed.items()
            if name in self.job["passes"]
        }

    def measure_tails(self) -> None:
        """Compares packed, balanced micro-batches of unequal samples with padded ones."""
        sizes = self.tailed_sizes()
        budget, replicas = self.job["micro_batch_tokens"], self.job["replicas"]
        pipeline = self.policy.model.mesh.layout
        multiple = pipeline.pp if pipeline.vpp > 1 else 1
        padded_sizes, in_order = padded_in_order(sizes, budget, replicas, multiple)
        real, padded = self.batch_of(sizes), self.batch_of(padded_sizes)
        tokens, ways = int(real.lengths_B.sum()), {"tails packed": real, "tails padded": padded}
        flops = train_flops(*self.flop_sizes(real)) / self.world.size
        planner, rates = self.policy.model.planner, []
        for name, batch in ways.items():
            # `patch.object` fails if the planner no longer chooses the micro-batches there.
            dealt = patch.object(planner, "_schedule", lambda *_, **__: in_order)
            with dealt if batch is padded else nullcontext():
                found = self.attempt(name, batch, self.update, flops)
            if "ms" in found:
                found["tokens_per_s_per_gpu"] = tokens / found["ms"] * 1e3 / self.world.size
                found["share_of_padding"] = 1 - tokens / int(batch.lengths_B.sum())
                rates.append(found["tokens_per_s_per_gpu"])
        if len(rates) == len(ways):
            self.result["packed_to_padded"] = rates[0] / rates[1]
            self.save("tails", f"packed {rates[0] / rates[1]:.2f} x as fast as padded")

    def profile(self, batch: TrainBatch) -> None:
        """Tells where the time of one update of the first rank goes (train_profile.py)."""
        said = self.result["profile"] = profiled(lambda: self.update(batch))
        self.save("profile", f"{said['busy_ms']:.0f} of {said['span_ms']:.0f} ms with a kernel")

    # Batches

    def flop_sizes(self, batch: TrainBatch) -> tuple[ModelShape, list[int], int]:
        """Returns what FLOPs follow from, as `trainer.roles` has it: shape, lengths, head rows."""
        shape = self.policy.model.source.shape
        return shape, batch.lengths_B.tolist(), int(batch.response_lengths_B.sum())

    def uniform_batch(self) -> TrainBatch:
        """Returns samples of one length that fill every micro-batch, of whole groups."""
        prompt, response = self.job["prompt_tokens"], self.job["response_tokens"]
        each = self.job["micro_batch_tokens"] // (prompt + response)
        number = each * self.job["micro_batches"] * self.job["replicas"]
        number -= number % self.job["samples"]
        return self.batch_of([(prompt, response)] * number, self.job["samples"])

    def tailed_sizes(self) -> list[tuple[int, int]]:
        """Returns about as many tokens with responses of log-normal lengths, the same each time."""
        prompt, response = self.job["prompt_tokens"], self.job["response_tokens"]
        budget = self.job["micro_batch_tokens"]
        wanted = budget * self.job["micro_batches"] * self.job["replicas"]
        draw, sizes, total = random.Random(1), [], 0
        while total < wanted:
            # Of this median the mean is `response`.
            length = draw.lognormvariate(math.log(response) - TAIL_SIGMA**2 / 2, TAIL_SIGMA)
            sizes.append((prompt, min(max(int(length), 1), budget - prompt)))
            total += sum(sizes[-1])
        return sizes

    def batch_of(self, sizes: Sequence[tuple[int, int]], samples: int = 1) -> TrainBatch:
        """Returns a batch of random tokens; so many neighbours share their prompt."""
        draw = torch.Generator().manual_seed(3)
        vocab = self.policy.model.source.shape.vocab_size

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(vocab, (count,), generator=draw).tolist())

        asked = [tokens(prompt) for prompt, _ in sizes[::samples]]
        prompts = [
            Prompt(index, "", asked[index // samples], {}, tokens(response))
            for index, (_, response) in enumerate(sizes)
        ]
        who = Producer.here("the benchmark")
        batch = TrainBatch.supervised(prompts, who)
        batch = replace(batch, group_B=torch.arange(len(sizes)) // samples)
        advantages_T = torch.randn(batch.num_tokens, generator=draw) * batch.response_mask_T
        uniform_T = -math.log(vocab) * batch.response_mask_T  # about what random weights give
        return batch.join_columns(
            who, advantages_T=advantages_T, old_logp_T=uniform_T, behaviour_logp_T=uniform_T
        )


def padded_in_order(
    sizes: Sequence[tuple[int, int]], budget: int, replicas: int, multiple: int = 1
) -> tuple[list[tuple[int, int]], Schedule]:
    """Returns samples as a trainer takes them that neither packs nor balances: the same number on
    each replica, in order, responses padded to the longest of their micro-batch of `budget` tokens.

    Returns:
        The sizes with padding, and the micro-batches of each replica.
    """
    padded: list[tuple[int, int]] = []
    dealt: list[list[tuple[int, ...]]] = []
    for share in even_sizes(len(sizes), replicas):
        groups: list[tuple[int, ...]] = []
        group: list[int] = []
        for index in range(len(padded), len(padded) + share):
            longest = max(sum(sizes[i]) for i in (*group, index))
            if group and longest * (len(group) + 1) > budget:
                groups.append(tuple(group))
                group = []
            group.append(index)
        groups.append(tuple(group))
        for group_ in groups:
            longest = max(sizes[i][1] for i in group_)
            padded.extend((sizes[i][0], longest) for i in group_)
        dealt.append(groups)
    most = round_up(max(len(groups) for groups in dealt), multiple)
    return padded, [groups + [()] * (most - len(groups)) for groups in dealt]


def attention_backend() -> str:
    """Returns which of its ways to attend transformer-engine has taken last."""
    module = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    if module not in sys.modules:
        return "torch"
    chosen = sys.modules[module]._attention_backends
    names = ("use_flash_attention", "use_fused_attention", "use_unfused_attention")
    return ", ".join(name for name in names if chosen.get(name)) or "torch"


def config_of(job: Mapping[str, Any]) -> Any:
    """Returns the configuration of the case."""
    config = {
        "run": {"name": "bench", "dir": job["folder"], "collective_timeout_s": 120},
        "model": {
            "init": job["model"],
            "tokenizer": str(ROOT / "examples" / "quickstart" / "model"),
        },
        "train": {
            **job["train"],
            "micro_batch_tokens": job["micro_batch_tokens"],
            "layers": job["layers"],
            "share_prompts": job["samples"] > 1,
            "learning_rate": LEARNING_RATE,
        },
        "rollout": {"engine": "hf"},
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "log": {"console": False, "tensorboard": False, "rollouts_every": 0},
    }
    return load_config_dict(config, job["set"])
