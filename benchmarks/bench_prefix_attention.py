"""Times attention of samples that share a long prompt: two calls against one with copied keys.

Both ways are checked against attention in fp32 before they are timed. Times are of one layer, on
the device's clock: the forward pass, and the backward pass with it. Peak bytes are what the
forward pass leaves for the backward pass, and the most that both take.

    python benchmarks/bench_prefix_attention.py --out OUT.json [CASE]...

A case is HEADS/KV HEADS:PROMPTSxSAMPLESxPROMPT+RESPONSE, the last two in tokens.
Without a GPU, tiny cases run with torch's kernel, to check the script.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridrl.models.megatron.attention import GatherKeys, SharedPrompts
from hybridrl.models.megatron.prefix_attention import (
    CudnnKernel,
    Kernel,
    PrefixAttention,
    TwoCalls,
    gradient_fault,
)

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from torch_kernel import TorchKernel  # noqa: E402

HEAD_DIM = 128
WARMUPS, REPEATS = 3, 20
CASES = (
    "12/2:1x4x16384+1024",  # Qwen2.5-1.5B
    "12/2:1x8x16384+1024",
    "28/4:1x4x16384+1024",  # Qwen2.5-7B
    "28/4:1x8x16384+1024",
    "28/4:1x4x32768+2048",
    "12/2:4x8x256+512",
    "28/4:4x8x256+512",
    "12/2:2x8x1024+512",
    "12/2:1x8x2048+512",
    "12/2:1x8x4096+1024",
)
CPU_CASES = ("4/2:1x3x40+9", "4/2:3x2x7+20")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    report: dict[str, Any] = {"benchmark": "attention to shared prompts", "cases": []}
    if has_gpu:
        report["machine"] = torch.cuda.get_device_name()
    for text in arguments.cases or (CASES if has_gpu else CPU_CASES):
        found = measure(text, device)
        report["cases"].append(found)
        print(json.dumps(found), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(text: str, device: torch.device) -> dict[str, Any]:
    heads, kv_heads, units, samples, prompt, response = map(int, re.findall(r"\d+", text))
    kernel: Kernel = (CudnnKernel if device.type == "cuda" else TorchKernel)(HEAD_DIM**-0.5)
    fault = gradient_fault(kernel, heads, kv_heads, HEAD_DIM, device)
    if fault is not None:
        return {"case": text, "error": fault}
    lengths, prompts, continued = [], [], []
    for unit in range(units):
        first = unit * (1 + samples)
        lengths += [prompt - 1] + [response + 1] * samples
        prompts += [-1] + [first] * samples
        continued += [0] + [prompt - 1] * samples
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shared = SharedPrompts(
        tuple(bounds), tuple(prompts), tuple(continued), torch.zeros(1, device=device)
    )
    sequences = bounds, prompts, continued
    calls = TwoCalls.of(*sequences, device, least_shared=0)
    assert calls is not None
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(
            bounds[-1], n, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16
        )
        for n in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [one.requires_grad_() for one in (query, key, value)]
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "two calls": lambda *qkv: PrefixAttention.apply(*qkv, calls, kernel)
    }
    if device.type == "cuda":
        ways["copies"] = with_copies(shared, heads, kv_heads)
    outputs = {name: results(attend, inputs, grad) for name, attend in ways.items()}
    found: dict[str, Any] = {"case": text, "positions": bounds[-1]}
    if device.type == "cuda":
        pairs = zip(outputs["two calls"], outputs["copies"], strict=True)
        found["difference"] = [
            float((one.float() - other.float()).norm() / other.float().norm())
            for one, other in pairs
        ]
    for name, attend in ways.items():
        found[name] = timed(attend, inputs, grad)
    return found


def with_copies(shared: SharedPrompts, heads: int, kv_heads: int) -> Callable[..., torch.Tensor]:
    """Returns attention as te_attention.py computes it with copied keys."""
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        heads, HEAD_DIM, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="thd"
    )
    keys = shared.keys

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = attention(
            query,
            GatherKeys.apply(key, keys.index_K, keys.readers),
            GatherKeys.apply(value, keys.index_K, keys.readers),
            None,
            qkv_format="thd",
            cu_seqlens_q=keys.cu_seqlens_q,
            cu_seqlens_kv=keys.cu_seqlens_k,
            max_seqlen_q=keys.max_seqlen_q,
            max_seqlen_kv=keys.max_seqlen_k,
            attn_mask_type="padding_causal_bottom_right",
        )
        return attended.view(query.shape)

    return attend


def results(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def timed(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
) -> dict[str, Any]:
    """Returns milliseconds and bytes of the forward pass, and of both passes."""
    found: dict[str, Any] = {}
    runs = {
        "forward_ms": lambda: attend(*inputs),
        "both_ms": lambda: results(attend, inputs, grad),
    }
    for name, run in runs.items():
        watch = Stopwatch(grad.device)
        for _ in range(WARMUPS + REPEATS):
            with watch:
                run()
        found[name] = watch.median()
    return found | memory(attend, inputs, grad)


def memory(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
) -> dict[str, int]:
    """Returns the bytes that a forward pass keeps, and the most that both passes take."""
    if grad.device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = attend(*inputs)
    kept = torch.cuda.memory_allocated() - before
    torch.autograd.grad(output, inputs, grad)
    return {"kept_bytes": kept, "peak_bytes": torch.cuda.max_memory_allocated() - before}


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._found: list[Any] = []

    def __enter__(self) -> None:
        if self._is_gpu:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        else:
            self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._is_gpu:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._found.append((self._begin, end))
        else:
            self._found.append(1e3 * (time.perf_counter() - self._began))

    def median(self) -> float:
        if self._is_gpu:
            torch.cuda.synchronize()
            times = [begin.elapsed_time(end) for begin, end in self._found]
        else:
            times = self._found
        return statistics.median(times[WARMUPS:])


if __name__ == "__main__":
    main()
