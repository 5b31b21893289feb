"""Measures what many prompts take of a node: seconds of the first start and of later ones, and the
memory of all ranks together.

A generated file is checked twice as by `hybridrl train` before ranks start. One process tokenizes
it (the first start). Then as many processes as a node has ranks map it, compute the identity of the
data, with all prompts and with a share held out, and take prompts. Memory is the sum of their
proportional set sizes, less that of as many ranks with FEW prompts. Ideal: 4 bytes a token, once a
node. Mapped pages are clean: the system may take them back.

    python benchmarks/bench_prompts.py

Exit code 1 where the memory is above --most-gb or a later start takes longer than --most-s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from case_record import commit
from transformers import AutoTokenizer

from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import DataConfig
from hybridrl.data.mixture import hold_out
from hybridrl.data.prompt_store import ENDING, PromptStore, prompts_folder
from hybridrl.data.prompts import PromptSource, Reading
from hybridrl.loop.preflight import validate_training

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
TAKEN, FEW, WAITED_S, SHARE = 512, 10, 1800, 0.01


def quickstart_tokenizer() -> Any:
    """Returns the tokenizer of the quickstart's model: one token a digit."""
    return AutoTokenizer.from_pretrained(str(QUICKSTART / "model"), trust_remote_code=False)


def write_rows(path: Path, num: int, num_tokens: int) -> Reading:
    """Writes the same random prompts with answers every time; returns how they are read."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(num):
            text = "".join(rng.choices("0123456789+=,", k=num_tokens))
            file.write(f'{{"prompt": "{text}", "answer": "{number}"}}\n')
    return Reading(DataConfig(prompts=(str(path),), max_prompt_tokens=num_tokens))


def check_s(reading: Reading, folder: Path) -> float:
    """Returns how long the check of a run before its ranks start takes."""
    config = load_config_dict(
        {
            "run": {"name": "prompts", "dir": str(folder / "runs")},
            "model": {"init": str(QUICKSTART / "model")},
            "algorithm": {"name": "grpo"},
            "steps": {"samples_per_prompt": 2},
            "rollout": {"engine": "hf"},
            "data": reading.config.model_dump(),
        }
    )
    began = time.perf_counter()
    validate_training(config, 1)
    return time.perf_counter() - began


def pss_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))


def verify(reading: Reading, tokenizer: Any) -> None:
    """Refuses to measure prompts that are not those of the file."""
    loaded = PromptStore(tokenizer).load(reading)
    read = reading.prompts(tokenizer, reading.left_out())
    for place, (prompt, _) in enumerate(islice(read, 2000)):
        if loaded.prompts[place] != prompt:
            sys.exit(f"prompt {place} differs: nothing is measured")


def rank(
    number: int,
    share: float,
    reading: Reading,
    told: Any,
    barrier: Any,
    results: Any,
) -> None:
    """Starts as one rank, and puts its seconds and memory into `results`."""
    store = PromptStore(quickstart_tokenizer())
    barrier.wait()
    began = time.perf_counter()
    if number:
        store.follow(told["found"].get())
    loaded = store.load(reading)
    for _ in range(0 if number else told["ranks"] - 1):
        told["found"].put(store.files)
    mapped = time.perf_counter()
    if share:
        loaded, _ = hold_out(loaded, share)
    source = PromptSource(loaded.prompts, seed=0, shuffle=True)
    source.take(TAKEN)
    ended = time.perf_counter()
    barrier.wait()
    memory = pss_mb()
    barrier.wait()
    seconds = {"until_mapped": mapped - began, "until_ready": ended - began}
    fingerprint = source.state()["fingerprint"]
    results.put({**seconds, "memory_mb": memory, "fingerprint": fingerprint})


def first_start(reading: Reading, results: Any) -> None:
    """Tokenizes, and puts the seconds into `results`."""
    began = time.perf_counter()
    PromptStore(quickstart_tokenizer()).load(reading)
    results.put(time.perf_counter() - began)


def in_processes(context: Any, functions: list[tuple[Any, ...]], results: Any) -> list[Any]:
    """Runs each function with its arguments in a process, and returns what they put."""
    jobs = [context.Process(target=f, args=(*args, results), daemon=True) for f, *args in functions]
    for job in jobs:
        job.start()
    found = [results.get(timeout=WAITED_S) for _ in jobs]
    for job in jobs:
        job.join()
    return found


def later_start(context: Any, reading: Reading, ranks: int, share: float = 0.0) -> dict[str, Any]:
    """Starts ranks that map what is there; returns the slowest's seconds, and memory."""
    barrier, told = context.Barrier(ranks), {"ranks": ranks, "found": context.Queue()}
    given = share, reading, told, barrier
    functions = [(rank, number, *given) for number in range(ranks)]
    found = in_processes(context, functions, context.Queue())
    if len({one["fingerprint"] for one in found}) != 1:
        sys.exit("ranks disagree on the prompts: nothing is measured")
    slowest = {
        f"{name}_s": round(max(one[name] for one in found), 2)
        for name in ("until_mapped", "until_ready")
    }
    return {"ranks": ranks, **slowest, "memory_mb": sum(one["memory_mb"] for one in found)}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    reading = write_rows(rows, args.prompts, args.tokens)
    few = write_rows(folder / "few.jsonl", FEW, args.tokens)
    checks = [round(check_s(reading, folder), 2) for _ in range(2)]
    print(f"checked in {checks[0]} s, then in {checks[1]} s", flush=True)
    context = multiprocessing.get_context("spawn")
    first = in_processes(context, [(first_start, reading)], context.Queue())
    in_processes(context, [(first_start, few)], context.Queue())
    print(f"first start in {first[0]:.1f} s", flush=True)
    verify(reading, quickstart_tokenizer())
    later = []
    for ranks in args.ranks:
        held = later_start(context, few, ranks)["memory_mb"]
        found = later_start(context, reading, ranks)
        split = later_start(context, reading, ranks, SHARE)
        found["until_ready_with_share_s"] = split["until_ready_s"]
        later.append({**found, "memory_mb": round(found["memory_mb"] - held, 1)})
        print(f"{later[-1]}", flush=True)
    return {
        "tokenizer": "quickstart",
        "text_mb": round(rows.stat().st_size / 1e6, 1),
        "file_mb": round(
            max(p.stat().st_size for p in prompts_folder().glob(f"*{ENDING}")) / 1e6, 1
        ),
        "first_check_s": checks[0],
        "first_start_s": round(first[0], 1),
        "later_check_s": checks[1],
        "load_average": round(os.getloadavg()[2], 1),
        "later_starts": later,
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200, help="of each prompt")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="of the node")
    parser.add_argument("--most-gb", type=float, default=1.2, help="of all ranks together")
    parser.add_argument("--most-s", type=float, default=60, help="of a later start")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prompts.json"))
    return parser.parse_args()


def main() -> None:
    args = options()
    cases: list[dict[str, Any]] = []
    result = {
        "benchmark": "prompts",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": multiprocessing.cpu_count(),
            "python": platform.python_version(),
        },
        "shape": {"prompts": args.prompts, "tokens": args.tokens},
        "limits": {"memory_gb": args.most_gb, "later_start_s": args.most_s},
        "cases": cases,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-prompts-"))
    os.environ["HYBRIDRL_CACHE"] = str(folder)
    try:
        cases.append(measure(args, folder))
    finally:
        shutil.rmtree(folder)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    for case in cases:
        for later in case["later_starts"]:
            slower = max(later["until_ready_s"], later["until_ready_with_share_s"])
            seconds = case["later_check_s"] + slower
            if later["memory_mb"] > 1e3 * args.most_gb or seconds > args.most_s:
                sys.exit(f"allowed: {args.most_gb} GB, {args.most_s} s")


if __name__ == "__main__":
    main()
