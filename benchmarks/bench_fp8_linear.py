"""Times the product of few tokens and FP8 weights against cuBLAS with bf16 weights, on one GPU.

bench_fp8_linear.py [--compile PART OF] [--tokens 16,64] [--table FILE] [--seconds 90]

Weights do not stay in the L2 cache: launches take turns with copies of the weights, in one CUDA
graph. Every result is compared with fp32 before it is timed. Prints a JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from hybridrl.kernels import fp8_linear
from hybridrl.kernels.fp8_linear import Tiling

SHAPES = {  # outputs, inputs
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
}
TILINGS = [
    Tiling(128, 128, 3, 4, 2),
    Tiling(128, 128, 2, 4, 2),
    Tiling(128, 128, 4, 8, 1),
    Tiling(128, 128, 3, 8, 1),
    Tiling(128, 64, 4, 4, 2),
    Tiling(64, 128, 2, 4, 3),
    Tiling(64, 128, 3, 4, 2),
    Tiling(64, 128, 3, 4, 3),
    Tiling(64, 128, 4, 4, 2),
    Tiling(64, 128, 3, 4, 4),
    Tiling(64, 64, 3, 4, 4),
    Tiling(256, 128, 3, 8, 1),
    Tiling(256, 64, 4, 8, 1),
]
HALF = [0, 2, 8, 11]  # indices of tilings that are also tried with fp16 tokens
BYTES = 300 << 20  # of a weight's copies together; L2 has 50 MiB
DEVICE = torch.device("cuda", 0)
BLOCK = fp8_linear.BLOCK  # rows and columns that share a scale


class Try(NamedTuple):
    tokens: int
    tiling: Tiling
    is_half: bool


def cases(tokens: list[int]) -> Iterator[Try]:
    for num in tokens:
        for number, tiling in enumerate(TILINGS):
            yield Try(num, tiling, False)
            if number in HALF:
                yield Try(num, tiling, True)


def quantized(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random FP8 weights and scales that are powers of two."""
    weight = (torch.randn(outputs, inputs, device=DEVICE) * 60).to(torch.float8_e4m3fn)
    exponents = torch.randint(-14, -9, (outputs // BLOCK, inputs // BLOCK), device=DEVICE)
    return weight, torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def widened(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return weight.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Returns the time of a call in a graph of all calls."""
    calls[0]()
    torch.cuda.synchronize()
    repeats = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            call()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times[1:]) / (len(calls) * repeats)


def compile_part(part: int, of: int, pairs: list[Try]) -> None:
    """Compiles some of the kernels, so that several processes fill Triton's cache."""
    weight, scales = quantized(512, 512)
    for num, tiling, is_half in pairs[part::of]:
        x = torch.randn(num, 512, device=DEVICE).to(torch.float16 if is_half else torch.bfloat16)
        y = torch.empty(num, 512, device=DEVICE, dtype=torch.bfloat16)
        space = fp8_linear.workspace(DEVICE)
        try:
            fp8_linear.launch(x, weight, scales, y, space, tiling)
            torch.cuda.synchronize()
        except Exception as error:
            print(json.dumps({"tokens": num, "tiling": tiling, "error": str(error)[:200]}))


def measure(name: str, pairs: list[Try], best: dict[str, tuple[float, Tiling]]) -> None:
    outputs, inputs = SHAPES[name]
    copies = [quantized(outputs, inputs) for _ in range(-(-BYTES // (outputs * inputs)))]
    wide = [widened(*one).bfloat16() for one in copies[: max(2, len(copies) // 2)]]
    base: dict[int, tuple[float, torch.Tensor, torch.Tensor]] = {}
    for num, tiling, is_half in pairs:
        if num not in base:
            x = torch.randn(num, inputs, device=DEVICE, dtype=torch.bfloat16)
            calls = [partial(torch.nn.functional.linear, x, weight) for weight in wide]
            base[num] = microseconds(calls), x, x.float() @ widened(*copies[0]).T
            gbps = 2 * outputs * inputs / base[num][0] / 1e3
            print(
                json.dumps(
                    {"shape": name, "tokens": num, "bf16_us": base[num][0], "GB/s": round(gbps)}
                ),
                flush=True,
            )
        bf16, x, wanted = base[num]
        if is_half:
            x = x.half()
        y = torch.empty(num, outputs, device=DEVICE, dtype=torch.bfloat16)
        space = fp8_linear.workspace(DEVICE)
        record = {"shape": name, "tokens": num, "tiling": tiling, "fp16": is_half}
        try:
            fp8_linear.launch(x, *copies[0], y, space, tiling)
            error = float((y.float() - wanted).abs().max() / wanted.abs().max())
            record["error"] = error
            again = torch.empty_like(y)
            fp8_linear.launch(x, *copies[0], again, space, tiling)
            record["same"] = bool(torch.equal(again, y))
            if error < 6e-3:
                launch = fp8_linear.launch
                us = microseconds([partial(launch, x, *one, y, space, tiling) for one in copies])
                record |= {"us": round(us, 2), "GB/s": round(outputs * inputs / us / 1e3)}
                record["ratio"] = round(bf16 / us, 3)
                key = f"{fp8_linear.tokens_block(num)},{outputs},{inputs}"
                if not is_half and us < best.get(key, (1e9,))[0]:
                    best[key] = us, tiling
        except Exception as error:
            record["failed"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", nargs=2, type=int)
    parser.add_argument("--tokens", default="64,16,32,128")
    parser.add_argument("--table", type=Path, help="file for the fastest tilings")
    parser.add_argument("--seconds", type=float, default=90)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokens = [int(one) for one in options.tokens.split(",")]
    if options.compile:
        compile_part(*options.compile, list(cases(tokens)))
        return
    began = time.perf_counter()
    best: dict[str, tuple[float, Tiling]] = {}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for num in tokens:
        for name in SHAPES:
            if time.perf_counter() - began > options.seconds:
                print(json.dumps({"cut": [num, name]}))
                return
            measure(name, list(cases([num])), best)
            if options.table:
                options.table.write_text(json.dumps(best))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
