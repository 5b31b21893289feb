"""Runs a short all-reduce over this host's GPUs, and finds GPUs and pairs of GPUs that fail.

`python -m hybridrl.services.cluster_check.gpu_links 0,1 [cuda|cpu]` uses only the given GPUs. One
process runs per GPU; all are killed if one fails or the time limit expires.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridrl.errors import error_text
from hybridrl.services.cluster_check.links import rounds

NUM_BYTES = 64 << 20
REPEATS = 5
# Time limits for all GPUs and for each pair; importing torch and NCCL take seconds.
TOGETHER_S, PAIR_S = 60.0, 30.0
MAX_CHARACTERS = 300
MAX_NAMED = 4


@dataclass(frozen=True)
class Sum:
    """The GB/s of an all-reduce (gigabytes per rank divided by seconds), or its error."""

    gb_per_s: float | None
    fault: str = ""


Reduce = Callable[[Sequence[int], float], Sum]


def all_reduce(gpus: Sequence[int], limit_s: float, device: str = "cuda") -> Sum:
    """Runs one all-reduce over GPUs (by torch's numbers), or over gloo if `device` is cpu."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(len(gpus))]
        started = []
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        start = partial(subprocess.Popen, stdin=subprocess.DEVNULL, env=variables)
        for rank, gpu in enumerate(gpus):
            order = [device, str(gpu), str(rank), str(len(gpus)), f"{folder}/store"]
            command = [sys.executable, "-m", __spec__.name, "--rank", *order]
            with logs[rank].open("wb") as log:
                started.append(start(command, stdout=log, stderr=log))
        deadline = time.monotonic() + limit_s
        while None in (codes := [one.poll() for one in started]) and time.monotonic() < deadline:
            if any(codes):
                break
            time.sleep(0.02)
        for one in started:
            one.kill()
            one.wait()
        texts = [log.read_text().strip().rpartition("\n")[2][:MAX_CHARACTERS] for log in logs]
    for gpu, code, text in zip(gpus, codes, texts, strict=True):
        if code:
            return Sum(None, f"GPU {gpu}: {text or f'exit code {code}'}")
    if None in codes:
        silent = [str(gpu) for gpu, code in zip(gpus, codes, strict=True) if code is None]
        return Sum(None, f"not finished within {limit_s:g} s on GPU {', '.join(silent)}")
    return Sum(min(json.loads(text) for text in texts))


def judge(count: int, reduce: Reduce = all_reduce) -> tuple[bool, str]:
    """Returns whether an all-reduce over all GPUs works, and its rate or the failing pairs."""
    together = reduce(range(count), TOGETHER_S)
    if not together.fault:
        if count == 1:
            return True, "works on 1 GPU"
        return True, f"works over {count} GPUs, {together.gb_per_s:.3g} GB/s per GPU"
    failing = _failing_pairs(count, reduce)
    texts = []
    for gpu in range(count):  # if a GPU fails in all of its pairs, report it only once
        own = [pair for pair in failing if gpu in pair]
        if len(own) == count - 1 > 1:
            texts.append(f"GPU {gpu} with each of the others: {failing[own[0]]}")
            failing = {pair: fault for pair, fault in failing.items() if gpu not in pair}
    texts += [f"GPUs {a} and {b}: {fault}" for (a, b), fault in sorted(failing.items())]
    if len(texts) > MAX_NAMED:
        texts[MAX_NAMED:] = [f"{len(texts) - MAX_NAMED} more"]
    works = "; each pair works" if count > 1 else ""
    return False, "; ".join(texts) or together.fault + works


def _failing_pairs(count: int, reduce: Reduce) -> dict[tuple[int, int], str]:
    with ThreadPoolExecutor(count) as pool:
        return {
            pair: one.fault
            for pairs in rounds(count)
            for pair, one in zip(pairs, pool.map(lambda p: reduce(p, PAIR_S), pairs), strict=True)
            if one.fault
        }


def _rank(device: str, gpu: int, rank: int, size: int, store: str) -> float:
    import datetime

    import torch
    from torch import distributed as dist

    if device != "cpu":
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TOGETHER_S),
    )
    best = float("inf")
    for _ in range(REPEATS):
        block = torch.ones(NUM_BYTES // 4, device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(block)
        wrong = float((block - size).abs().max())  # waits until the all-reduce has finished
        best = min(best, time.perf_counter() - began)
        if wrong:
            raise RuntimeError(f"the sum is off by {wrong:g}")
    dist.destroy_process_group()
    return NUM_BYTES / best / 1e9


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--rank"]:
        device, gpu, rank, size, store = arguments[1:]
        try:
            print(json.dumps(_rank(device, int(gpu), int(rank), int(size), store)), flush=True)
        except Exception as error:  # report any error on a faulty GPU in one line
            print(f"{type(error).__name__}: {error_text(error)}", flush=True)
            return 1
        return 0
    found = all_reduce([int(gpu) for gpu in arguments[0].split(",")], TOGETHER_S, *arguments[1:2])
    print(found.fault or f"{found.gb_per_s:.3g} GB/s per GPU")
    return int(bool(found.fault))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
