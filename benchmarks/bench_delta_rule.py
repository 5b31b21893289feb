"""Times the gated delta rule and the convolution of one layer of Qwen3.5-4B: hybridrl's kernels,
and torch's reference.

    python benchmarks/bench_delta_rule.py --out OUT.json

One GPU. 16 key heads and 32 value heads of 128, bf16, 16,384 tokens. Outputs and gradients are
first compared with torch's in fp32; what differs by more than the bound of the start of a run is
reported, not timed. Times are medians over 20 calls, on the device's clock, after 3. The limit is
the time to copy inputs, outputs and gradients once, and a state for every 64 tokens as often as the
kernels do.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from case_record import command_of, commit

from hybridrl import ops
from hybridrl.models.megatron.attention import GatherKeys, PackedSequences
from hybridrl.models.megatron.delta_kernels import TOLERANCE, kernel_rule
from hybridrl.models.megatron.delta_net import Recurrence
from hybridrl.models.megatron.delta_rule import (
    DeltaInputs,
    DeltaRule,
    Sequences,
    causal_convolution,
    delta_rule,
)

KEYS, VALUES, SIZE = 16, 32, 128
CASES = {
    "32 sequences of 512": (512,) * 32,
    "4 sequences of 4096": (4096,) * 4,
    "lengths from 16 to 2000": tuple(16 + 31 * n for n in range(32)),
}
WARMUPS, CALLS = 3, 20
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", action="store_true", help="also report each kernel's time")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "benchmark": "gated delta rule",
        "command": command_of(sys.argv),
        "commit": commit(),
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": __import__("triton").__version__,
            "python": platform.python_version(),
        },
        "copy_bytes_per_s": copy_rate(),
        "cases": [],
    }
    rules: dict[str, DeltaRule] = {"triton": kernel_rule, "torch": delta_rule}
    for name, lengths in CASES.items():
        for has_states in (False, True):
            found = measure(lengths, has_states, rules)
            case = {"case": name, "has_states": has_states, "tokens": sum(lengths), **found}
            report["cases"].append(case)
            print(json.dumps(case), flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    report["convolution"] = convolution(CASES["32 sequences of 512"])
    print(json.dumps(report["convolution"]), flush=True)
    if arguments.profile:
        report["kernels_ms"] = profile()
        print(json.dumps(report["kernels_ms"]), flush=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def drawn(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns random inputs that remember some 20 tokens, and states."""
    torch.manual_seed(0)
    tokens = sum(lengths)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    return [
        noise(tokens, KEYS, SIZE).bfloat16(),
        noise(tokens, KEYS, SIZE).bfloat16(),
        noise(tokens, VALUES, SIZE).bfloat16(),
        -0.05 * noise(tokens, VALUES).abs(),
        noise(tokens, VALUES).sigmoid(),
        noise(len(lengths), VALUES, SIZE, SIZE),
    ]


def measure(
    lengths: tuple[int, ...], has_states: bool, rules: dict[str, DeltaRule]
) -> dict[str, Any]:
    inputs = [one.requires_grad_() for one in drawn(lengths)]
    sequences = Sequences(lengths, DEVICE)
    taken = inputs if has_states else inputs[:5]
    weight = torch.randn(sum(lengths), VALUES, SIZE, device=DEVICE)

    def forward(rule: DeltaRule) -> torch.Tensor:
        state = inputs[5] if has_states else None
        return rule(DeltaInputs(*inputs[:5]), sequences, state, has_states)[0]

    def both(rule: DeltaRule) -> tuple[torch.Tensor, ...]:
        output = forward(rule)
        return output, *torch.autograd.grad(output, taken, weight)

    exact = [one.detach().float() for one in both(delta_rule)]
    names = ("output", "query", "key", "value", "decay", "beta", "state")
    found: dict[str, Any] = {}
    for name, rule in rules.items():
        try:
            errors = {
                what: float((own.detach().float() - one).norm() / one.norm())
                for what, own, one in zip(names, both(rule), exact, strict=False)
            }
            found[name] = {"errors": errors, "is_right": max(errors.values()) <= TOLERANCE}
            if found[name]["is_right"]:
                with torch.no_grad():
                    found[name]["forward_ms"] = timed(lambda: forward(rule))  # noqa: B023
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                found[name]["both_ms"] = timed(lambda: both(rule))  # noqa: B023
                found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        except Exception as error:  # a refusal is a result
            found[name] = {"error": str(error)[:300]}
        torch.cuda.empty_cache()
    tokens = sum(lengths)
    per_state = VALUES * SIZE * SIZE * 2 / 64
    own = 2 * (2 * KEYS + VALUES) * SIZE + 8 * VALUES
    forward_bytes = tokens * (own + 2 * VALUES * SIZE + 2 * per_state)
    found["ideal_bytes"] = {
        "forward": forward_bytes,
        "both": forward_bytes + tokens * (2 * own + 2 * VALUES * SIZE + 6 * per_state),
    }
    return found


def timed(run: Callable[[], object], calls: int = CALLS) -> dict[str, float]:
    for _ in range(WARMUPS):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]
    for index in range(calls):
        marks[2 * index].record()
        run()
        marks[2 * index + 1].record()
    torch.cuda.synchronize()
    ms = sorted(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True))
    return {"median": statistics.median(ms), "p10": ms[calls // 10], "p90": ms[-1 - calls // 10]}


def copy_rate() -> float:
    """Returns the bytes that the device reads and writes in a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2e3 * source.numel() / timed(lambda: target.copy_(source))["median"]


def convolution(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Returns the time of the convolution before the rule, forward and backward."""
    torch.manual_seed(1)
    num_tokens, num_channels = sum(lengths), (2 * KEYS + VALUES) * SIZE
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    order = Recurrence(PackedSequences.of(bounds, max(lengths)), 4, DEVICE)
    inputs = [
        torch.randn(num_tokens, num_channels, device=DEVICE).bfloat16().requires_grad_(),
        torch.randn(num_channels, 4, device=DEVICE).bfloat16().requires_grad_(),
    ]
    weight = torch.randn(num_tokens, num_channels, device=DEVICE).bfloat16()

    def in_torch(channels_TC: torch.Tensor, weight_CK: torch.Tensor) -> torch.Tensor:
        history, with_zero = order.history, F.pad(channels_TC, (0, 0, 0, 1))
        rows = GatherKeys.apply(with_zero, history.index_E, history.readers)
        return causal_convolution(rows, weight_CK)[history.row_T].bfloat16()

    def in_kernels(channels_TC: torch.Tensor, weight_CK: torch.Tensor) -> torch.Tensor:
        return ops.causal_convolution(channels_TC, weight_CK, order.places[:3], None)

    def both(compute: Any) -> list[torch.Tensor]:
        output = compute(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, weight)]

    exact, found = both(in_torch), both(in_kernels)
    return {
        "errors": [
            float((own.float() - one.float()).norm() / one.float().norm())
            for one, own in zip(exact, found, strict=True)
        ],
        "torch_both_ms": timed(lambda: both(in_torch)),
        "triton_both_ms": timed(lambda: both(in_kernels)),
        "tokens": num_tokens,
    }


def profile() -> dict[str, float]:
    """Returns the milliseconds of each kernel of the forward and backward pass."""
    lengths = CASES["32 sequences of 512"]
    inputs, sequences = [one.requires_grad_() for one in drawn(lengths)], Sequences(lengths, DEVICE)

    def both() -> None:
        output, _ = kernel_rule(DeltaInputs(*inputs[:5]), sequences)
        output.sum().backward()

    both()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(10):
            both()
        torch.cuda.synchronize()
    times = {one.key: one.self_device_time_total / 1e4 for one in profiler.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:24])


if __name__ == "__main__":
    main()
