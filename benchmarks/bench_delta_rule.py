"""Times the gated delta rule of one layer of Qwen3.5-4B: hybridrl's kernels, torch's reference, and
flash-linear-attention where it is installed.

    python benchmarks/bench_delta_rule.py --out OUT.json

One GPU, no process group. 16 key heads and 32 value heads of 128, bf16, 16,384 tokens. Outputs and
gradients of each implementation are first compared with torch's in fp32; what differs by more than
the bound of the start of a run is reported, not timed. Of flash-linear-attention, whose backward
pass refuses Hopper GPUs with Triton below 3.7.1, --force also times what it refuses, as a
comparison of speed with gradients that may be wrong.

Times are medians over 20 calls, on the device's clock, after 3. The limit is the time in which the
device copies what has to be read and written: inputs, outputs and gradients once, and a state for
every 64 tokens as often as the kernels do.
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
from case_record import command_of, commit

from hybridrl.models.megatron.delta_kernels import TOLERANCE, kernel_rule
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
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--force", action="store_true", help="also time what fla refuses")
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
    if (fla := fla_rule(arguments.force)) is not None:
        rules["fla"] = fla
    for name, lengths in CASES.items():
        for has_states in (False, True):
            found = measure(lengths, has_states, rules)
            case = {"case": name, "has_states": has_states, "tokens": sum(lengths), **found}
            report["cases"].append(case)
            print(json.dumps(case), flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    report["convolution"] = convolution(16384)
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
    """Compares the rules with torch's, then times those that agree."""
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

    exact = [one.float() for one in both(delta_rule)]
    names = ("output", "query", "key", "value", "decay", "beta", "state")
    found: dict[str, Any] = {}
    for name, rule in rules.items():
        try:
            errors = {
                what: float((own.float() - one).norm() / one.norm())
                for what, own, one in zip(names, both(rule), exact, strict=False)
            }
            found[name] = {"errors": errors, "is_right": max(errors.values()) <= TOLERANCE}
            if name == "fla" or found[name]["is_right"]:
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
    """Returns the milliseconds of a call."""
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


def convolution(tokens: int) -> dict[str, Any]:
    """Returns the time of the convolution before the rule, as it is computed."""
    channels = torch.randn(tokens, (2 * KEYS + VALUES) * SIZE, device=DEVICE).bfloat16()
    weight = torch.randn(channels.size(1), 4, device=DEVICE).bfloat16()
    channels.requires_grad_()
    weight.requires_grad_()

    def both() -> None:
        causal_convolution(channels, weight).to(channels.dtype).sum().backward()

    return {"convolution_both_ms": timed(both), "tokens": tokens}


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


def fla_rule(is_forced: bool) -> DeltaRule | None:
    """Returns flash-linear-attention's rule, or None if it is not installed."""
    try:
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        print(f"without flash-linear-attention: {error}", flush=True)
        return None
    if is_forced:
        chunk_o.TRITON_ABOVE_3_7_1 = True

    def rule(
        inputs: DeltaInputs,
        sequences: Sequences,
        state_NGKV: torch.Tensor | None = None,
        wants_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, states = chunk_gated_delta_rule(
            inputs.query_THK[None],
            inputs.key_THK[None],
            inputs.value_TGV[None],
            g=inputs.decay_TG[None],
            beta=inputs.beta_TG[None].to(inputs.value_TGV.dtype),
            initial_state=state_NGKV,
            output_final_state=wants_states,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequences.cu_seqlens,
        )
        return output[0].float(), states

    return rule


if __name__ == "__main__":
    main()
