"""Compares the bits of single operations in batches of different sizes on a GPU, for exact mode.

    python benchmarks/bench_exact_operations.py OUT.json

For each operation, OUT.json lists the batches in which some row differs from the same row in the
largest batch; an empty list means that all batches are equal. Needs vLLM on a Hopper GPU. cuBLAS
has no workspace, as in exact mode (platform.py, `multiply_in_one_order`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from case_record import command_of, commit
from hybridrl.kernels import rows
from reshard_clock import machine
from torch import Tensor

from hybridrl import ops
from hybridrl.platform import multiply_in_one_order

SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64, 65, 96, 127, 128, 200, 255, 256, 257, 512, 2048)
MOST = 8192
# Columns and contracted size of linear layers, by model, and of output layers.
LAYERS = {
    "smollm2-135m": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "qwen2.5-0.5b": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
HEADS = {"smollm2-135m": (49152, 576), "qwen2.5-0.5b": (151936, 896), "qwen2.5-7b": (152064, 3584)}
# Heads, key heads, size of a head, and earlier positions of a window (-1: all).
ATTENTION = ((9, 3, 64, -1), (14, 2, 64, -1), (28, 4, 128, -1), (32, 8, 128, 511))
LENGTHS = (1, 17, 64, 127, 128, 129, 200, 300, 513, 777, 1024, 1500)
PAGE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    torch.cuda.set_device(0)
    multiply_in_one_order()
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "benchmark": "bits of single operations in batches of different sizes",
        "command": command_of(sys.argv),
        "commit": os.environ.get("BENCH_COMMIT") or commit(),
        "machine": machine(1),
        "sizes": SIZES,
        "unequal": {},
    }
    for name, found in (*products(), *norms(), *others(), *attention()):
        result["unequal"][name] = found
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, found, flush=True)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def unequal(compute: Callable[[Tensor], Tensor], x: Tensor, most: int = MOST) -> list[int]:
    """Returns the sizes of the batches with a row that differs from the row in the whole batch."""
    whole = compute(x[:most])
    found = []
    for size in SIZES:
        for start in (0, 7):
            if size + start <= most:
                part = compute(x[start : start + size])
                if not torch.equal(part, whole[start : start + size]):
                    found.append(size)
                    break
    return found


def products() -> Iterator[tuple[str, Any]]:
    for model, layers in LAYERS.items():
        for columns, contracted in layers:
            weight, x = (
                normal(columns, contracted, scale=contracted**-0.5),
                normal(MOST, contracted),
            )
            name = f"linear, {model}, {columns} x {contracted}"
            yield name, unequal(lambda rows_MK, w=weight: ops.invariant_linear(rows_MK, w, None), x)
            order = torch.randperm(columns, device="cuda")
            permuted = ops.invariant_linear(x, weight[order].contiguous(), None)
            is_equal = torch.equal(permuted, ops.invariant_linear(x, weight, None)[:, order])
            yield f"{name}, permuted columns are equal", is_equal
    for model, (columns, contracted) in HEADS.items():
        weight, x = normal(columns, contracted, scale=contracted**-0.5), normal(512, contracted)
        compute = lambda rows_MK, w=weight: ops.invariant_logits(rows_MK, w)  # noqa: E731
        yield f"logits, {model}", unequal(compute, x, most=512)
        yield f"log-probabilities, {model}", unequal(lambda h, c=compute: logps(c(h)), x, most=512)


def logps(logits_NV: Tensor) -> Tensor:
    from hybridrl.rollout.vllm.exact_gpu import KERNELS

    target_N = torch.arange(len(logits_NV), device="cuda") * 0 + 5
    return KERNELS.logps(logits_NV, target_N, 0.7)


def norms() -> Iterator[tuple[str, Any]]:
    import vllm._custom_ops  # noqa: F401  # registers vLLM's operations

    for size in (576, 896, 3584):
        weight, x = normal(size), normal(MOST, size)

        def fused(part: Tensor, weight: Tensor = weight) -> Tensor:
            added, residual = part.clone(), part.flip(-1).contiguous()
            torch.ops._C.fused_add_rms_norm(added, residual, weight, 1e-6)
            return added

        def ours(part: Tensor, weight: Tensor = weight) -> Tensor:
            return rows.rms_norm(part, weight, 1e-6, False, part.flip(-1))[0]

        yield f"norm of a sum, {size}", unequal(ours, x)
        yield f"norm of a sum, {size}, vLLM's kernel", unequal(fused, x)


def others() -> Iterator[tuple[str, Any]]:
    """Compares SwiGLU for all gates with torch, and rotations."""
    gate = (
        torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )
    gate = gate[gate.isfinite()]
    both = torch.stack((gate, torch.full_like(gate, 0.3)), 1)
    same = torch.equal(rows.swiglu(both)[:, 0], F.silu(gate) * both[:, 1])
    yield "SwiGLU of all gates equals torch's", same
    x = normal(MOST, 9728)
    yield "SwiGLU, 4864", unequal(rows.swiglu, x)
    table, place = normal(2048, 64), torch.randint(2048, (MOST,), device="cuda")
    heads = normal(MOST, 14, 64)

    def turned(token_T: Tensor) -> Tensor:
        return rows.rotate(heads[token_T], table, place[token_T])

    yield "rotation, 14 heads of 64", unequal(turned, torch.arange(MOST, device="cuda"))


def attention() -> Iterator[tuple[str, Any]]:
    """Compares decode steps, chunks and pages with whole packed prompts, by rows that differ."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func as attend

    from hybridrl.rollout.vllm.exact_gpu import announced

    for heads, key_heads, size, window in ATTENTION:
        total, longest = sum(LENGTHS), max(LENGTHS)
        query, key, value = (normal(total, n, size) for n in (heads, key_heads, key_heads))
        starts = torch.tensor((0, *LENGTHS), device="cuda").cumsum(0).int()
        keywords: dict[str, Any] = {
            "softmax_scale": size**-0.5,
            "causal": True,
            "window_size": [window, 0] if window >= 0 else [-1, -1],
            "fa_version": 3,
            "num_splits": 1,
        }
        whole = attend(query, key, value, longest, starts, longest, cu_seqlens_k=starts, **keywords)
        pages, table = paged(key, value, starts.tolist())
        name = f"attention, {heads} heads of {size}" + (f", window {window}" if window >= 0 else "")
        used = torch.tensor(LENGTHS, device="cuda").int()
        found = attend(
            query, *pages, longest, starts, longest, seqused_k=used, block_table=table, **keywords
        )
        yield f"{name}, pages", differing(found, whole)
        places = [(i, p) for i, n in enumerate(LENGTHS) for p in range(0, n, 17)][:256]
        row = torch.tensor([int(starts[i]) + p for i, p in places], device="cuda")
        each = torch.arange(len(places) + 1, device="cuda", dtype=torch.int32)
        used = torch.tensor([p + 1 for _, p in places], device="cuda").int()
        of_each = table[torch.tensor([i for i, _ in places], device="cuda")].contiguous()
        for least in sorted({1, 2, announced(1, size)}):
            found = attend(
                query[row],
                *pages,
                least,
                each,
                longest,
                seqused_k=used,
                block_table=of_each,
                **keywords,
            )
            yield (
                f"{name}, decode steps, queries of up to {least} announced",
                differing(found, whole[row]),
            )
        first, end = int(starts[-2]) + 700, int(starts[-1])
        bounds = torch.tensor([0, end - first], device="cuda").int()
        found = attend(
            query[first:end],
            *pages,
            end - first,
            bounds,
            longest,
            seqused_k=torch.tensor([LENGTHS[-1]], device="cuda").int(),
            block_table=table[-1:].contiguous(),
            **keywords,
        )
        yield f"{name}, last chunk of a prompt", differing(found, whole[first:end])


def paged(key: Tensor, value: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns keys and values in pages in random order, and the table of each sequence's pages."""
    counts = [-(-length // PAGE) for length in LENGTHS]
    order = (torch.randperm(sum(counts)) + 1).int()
    cache = torch.zeros(2, sum(counts) + 1, PAGE, *key.shape[1:], device="cuda", dtype=key.dtype)
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    taken = 0
    for number, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        own = order[taken : taken + count]
        table[number, :count] = own
        for page, first in zip(own.tolist(), range(0, length, PAGE), strict=True):
            part = slice(starts[number] + first, starts[number] + min(first + PAGE, length))
            cache[0, page, : part.stop - part.start] = key[part]
            cache[1, page, : part.stop - part.start] = value[part]
        taken += count
    return cache, table.cuda()


def differing(found: Tensor, wanted: Tensor) -> list[int]:
    return [int((found != wanted).flatten(1).any(1).sum()), len(found)]


if __name__ == "__main__":
    main()
