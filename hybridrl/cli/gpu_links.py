"""A short all-reduce over this host's GPUs, and which of them fail. Torch is imported by the ranks.

`python -m hybridrl.cli.gpu_links 0,1 [cuda|cpu]` runs it over some GPUs and prints what it found.
Who waits for whom: this process starts one process a GPU, and waits for all within a time limit;
these wait for each other in the all-reduce, and are killed when the limit is over or one failed.
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
from pathlib import Path

from hybridrl.cli.cluster_links import rounds
from hybridrl.errors import said

NUM_BYTES = 64 << 20
REPEATS = 5
# All GPUs at once, and then each alone and each pair: imports of torch take seconds, and NCCL's
# own start one or two.
TOGETHER_S, FEW_S = 60.0, 30.0
SEARCH_S = 180.0  # for the search for what fails
LONGEST_TEXT = 300
MAX_NAMED = 4


@dataclass(frozen=True)
class Sum:
    """How an all-reduce went.

    Args:
        gb_per_s: each rank's bytes by time; None: it failed.
        fault: what went wrong, else empty.
    """

    gb_per_s: float | None
    fault: str = ""


Reduce = Callable[[Sequence[int], float], Sum]


def all_reduce(gpus: Sequence[int], limit_s: float, device: str = "cuda") -> Sum:
    """Sums over these GPUs, each in a process of its own.

    Args:
        gpus: their numbers for torch.
        limit_s: time for all of it.
        device: "cpu": by gloo.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(rank, gpus, device, Path(folder)) for rank in range(len(gpus))]
        try:
            while any(one.poll() is None for one in started) and time.monotonic() < deadline:
                if any(one.poll() for one in started):
                    break
                time.sleep(0.02)
            codes = [one.poll() for one in started]
        finally:
            for one in started:
                one.kill()
            for one in started:
                one.wait()
        texts = [(Path(folder) / f"{rank}.log").read_text() for rank in range(len(gpus))]
    for gpu, code, text in zip(gpus, codes, texts, strict=True):
        if code:
            return Sum(None, f"GPU {gpu}: {_last_line(text) or f'exit code {code}'}")
    if None in codes:
        silent = [str(gpu) for gpu, code in zip(gpus, codes, strict=True) if code is None]
        return Sum(None, f"no end within {limit_s:g} s on GPU {', '.join(silent)}")
    return Sum(min(json.loads(_last_line(text)) for text in texts))


def _start(rank: int, gpus: Sequence[int], device: str, folder: Path) -> subprocess.Popen[bytes]:
    order = [device, str(gpus[rank]), str(rank), str(len(gpus)), str(folder / "store")]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "hybridrl.cli.gpu_links", "--rank", *order],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_TEXT] if lines else ""


def failing(count: int, reduce: Reduce, search_s: float = SEARCH_S) -> list[str]:
    """Returns what fails of an all-reduce over `count` GPUs: those that fail alone, else pairs of
    the others; empty if each alone and all pairs work.

    Args:
        reduce: sums over some GPUs within a time limit.
        search_s: time for all pairs; those left out are counted in the last text.
    """
    deadline = time.monotonic() + search_s
    with ThreadPoolExecutor(count) as pool:
        alone = list(pool.map(lambda gpu: reduce([gpu], FEW_S), range(count)))
        found = [one.fault for one in alone if one.fault]
        able = [gpu for gpu, one in enumerate(alone) if not one.fault]
        pairs: dict[tuple[int, int], str] = {}
        num_left = 0
        for places in rounds(len(able)):
            some = [(able[first], able[second]) for first, second in places]
            if time.monotonic() > deadline:
                num_left += len(some)
                continue
            sums = pool.map(lambda pair: reduce(pair, FEW_S), some)
            pairs |= {pair: one.fault for pair, one in zip(some, sums, strict=True) if one.fault}
    found += _named(pairs, len(able))
    return found + ([f"{num_left} pairs were not tried"] if num_left and found else [])


def _named(pairs: dict[tuple[int, int], str], num_able: int) -> list[str]:
    """Returns a text for each failing pair; one for a GPU that fails with all others."""
    texts, left = [], dict(pairs)
    for gpu in sorted({gpu for pair in pairs for gpu in pair}):
        own = [pair for pair in left if gpu in pair]
        if len(own) == num_able - 1 > 1:
            texts.append(f"GPU {gpu} with each of the others: {left[own[0]]}")
            left = {pair: fault for pair, fault in left.items() if gpu not in pair}
    named = sorted(left.items())
    texts += [f"GPUs {a} and {b}: {fault}" for (a, b), fault in named[:MAX_NAMED]]
    return texts + ([f"{len(named) - MAX_NAMED} more pairs"] if len(named) > MAX_NAMED else [])


def judge(count: int, reduce: Reduce = all_reduce) -> tuple[bool, str]:
    """Returns whether an all-reduce over all GPUs works, and its rate or what fails."""
    whole = reduce(range(count), TOGETHER_S)
    if not whole.fault:
        over = f"over {count} GPUs, {whole.gb_per_s:.3g} GB/s a GPU" if count > 1 else "on 1 GPU"
        return True, f"works {over}"
    found = failing(count, reduce) if count > 1 else []
    if not found and count > 1:
        found = [f"{whole.fault}; each GPU alone and each pair works"]
    return False, "; ".join(found or [whole.fault])


def _rank(device: str, gpu: int, rank: int, size: int, store: str) -> float:
    """Is one rank: returns GB/s of the best of some all-reduces."""
    import datetime

    import torch
    from torch import distributed as dist

    timeout = datetime.timedelta(seconds=TOGETHER_S)
    if device != "cpu":
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    best = float("inf")
    for _ in range(REPEATS):
        block = torch.ones(NUM_BYTES // 4, device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(block)
        wrong = float((block - size).abs().max())  # waits for the sum
        best = min(best, time.perf_counter() - began)
        if wrong:
            raise RuntimeError(f"the sum is off by {wrong:g}")
    dist.destroy_process_group()
    return NUM_BYTES / best / 1e9


def main(arguments: Sequence[str]) -> int:
    """Is a rank, or sums over the GPUs that are named; returns the exit code."""
    if arguments[:1] == ["--rank"]:
        device, gpu, rank, size, store = arguments[1:]
        try:
            rate = _rank(device, int(gpu), int(rank), int(size), store)
        except Exception as error:  # whatever a sick GPU does is said in one line
            print(f"{type(error).__name__}: {said(error)}", flush=True)
            return 1
        print(json.dumps(rate), flush=True)
        return 0
    gpus = [int(number) for number in arguments[0].split(",")]
    found = all_reduce(gpus, TOGETHER_S, *arguments[1:2])
    print(found.fault or f"{found.gb_per_s:.3g} GB/s a GPU")
    return int(bool(found.fault))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
