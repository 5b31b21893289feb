"""Measures what many prompts take of a node: seconds of the first start and of later ones, and the
memory of all ranks together.

A file of prompts is generated and tokenized (the first start), by one process. Then as many
processes as a node has ranks start, one after another's check of the file as in a run: the first
reads the whole file to see that it is undamaged, all map it, compute the identity of the data and
take prompts. Their memory is the growth of the proportional set size, in which a page that several
share counts once. Ideal: 4 bytes a token, once a node. Mapped pages are clean: the system may take
them back.

    python benchmarks/bench_prompts.py

Exit code 1 where the memory is above --most-gb or a later start takes longer than --most-s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrl.config.schema import DataConfig
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import PromptSource, Reading

NUM_WORDS, TAKEN, WAITED_S = 30_000, 512, 900


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of one token a word."""
    words = {f"w{number}": number for number in range(NUM_WORDS)} | {"<end>": NUM_WORDS}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>")


def write_rows(path: Path, num: int, num_tokens: int) -> None:
    """Writes a JSONL file of random prompts with answers."""
    rng = random.Random(0)
    words = [f"w{number}" for number in range(NUM_WORDS)]
    with path.open("w") as file:
        for number in range(num):
            text = " ".join(rng.choices(words, k=num_tokens))
            file.write(f'{{"prompt": "{text}", "answer": "{number}"}}\n')


def memory_mb() -> dict[str, float]:
    """Returns this process's proportional set size and what it shares with no other, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines}
    private = values["Private_Clean"] + values["Private_Dirty"]
    return {"pss": values["Pss"], "private": private}


def start(reading: Reading, folder: Path, files: list[str | None] | None) -> tuple[Any, Any, Any]:
    """Loads prompts as a rank does; returns the store, what was loaded and the source."""
    store = PromptStore(make_tokenizer(), folder)
    if files is not None:
        store.follow(files)
    loaded = store.load(reading)
    return store, loaded, PromptSource(loaded.prompts, seed=0, shuffle=True)


def verify(reading: Reading, folder: Path) -> None:
    """Refuses to measure prompts that are not those of the file."""
    store = PromptStore(make_tokenizer(), folder)
    loaded = store.load(reading)
    read = reading.prompts(make_tokenizer(), reading.left_out())
    for place, (prompt, _) in enumerate(islice(read, 2000)):
        if loaded.prompts[place] != prompt:
            sys.exit(f"prompt {place} differs: nothing is measured")


def rank(
    number: int, reading: Reading, folder: Path, told: Any, barrier: Any, results: Any
) -> None:
    """Starts as one rank, and puts its seconds and memory into `results`."""
    make_tokenizer()
    barrier.wait()
    before, began = memory_mb(), time.perf_counter()
    if number == 0:
        store, _, source = start(reading, folder, None)
        for _ in range(told["ranks"] - 1):
            told["files"].put(store.files)
    else:
        _, _, source = start(reading, folder, told["files"].get())
    source.take(TAKEN)
    seconds = time.perf_counter() - began
    barrier.wait()
    after = memory_mb()
    barrier.wait()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    results.put({"seconds": seconds, "before": before, "after": after, "peak_rss": peak})


def first_start(reading: Reading, folder: Path, results: Any) -> None:
    """Tokenizes, and puts seconds and peak memory into `results`."""
    began = time.perf_counter()
    start(reading, folder, None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    results.put({"seconds": time.perf_counter() - began, "peak_rss": peak})


def later_start(context: Any, reading: Reading, folder: Path, ranks: int) -> dict[str, float]:
    """Starts ranks that map what is there; returns their seconds and memory."""
    results, barrier = context.Queue(), context.Barrier(ranks)
    told = {"ranks": ranks, "files": context.Queue()}
    jobs = [
        context.Process(target=rank, args=(i, reading, folder, told, barrier, results), daemon=True)
        for i in range(ranks)
    ]
    for job in jobs:
        job.start()
    found = [results.get(timeout=WAITED_S) for _ in jobs]
    for job in jobs:
        job.join()
    grown = [one["after"]["pss"] - one["before"]["pss"] for one in found]
    private = [one["after"]["private"] - one["before"]["private"] for one in found]
    return {
        "ranks": ranks,
        "seconds": round(max(one["seconds"] for one in found), 2),
        "memory_mb": round(sum(grown), 1),
        "private_mb_a_rank": round(max(private), 1),
        "peak_rss_mb_a_rank": round(max(one["peak_rss"] for one in found), 1),
    }


def commit() -> str | None:
    """Returns the commit that was measured, marked where the tree has changes."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or None


def measure(args: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    """Generates the file, and returns what the starts took."""
    rows = folder / "rows.jsonl"
    write_rows(rows, args.prompts, args.tokens)
    context = multiprocessing.get_context("spawn")
    reading = Reading(DataConfig(prompts=(str(rows),), max_prompt_tokens=args.tokens))
    results = context.Queue()
    job = context.Process(target=first_start, args=(reading, folder, results), daemon=True)
    job.start()
    first = results.get(timeout=WAITED_S)
    job.join()
    print(f"first start: {first}", flush=True)
    verify(reading, folder)
    later = later_start(context, reading, folder, args.ranks)
    (file,) = folder.glob("*.prompts")
    return {
        "text_mb": round(rows.stat().st_size / 1e6, 1),
        "file_mb": round(file.stat().st_size / 1e6, 1),
        "first_start": {name: round(value, 1) for name, value in first.items()},
        "later_start": later,
    }


def options() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200, help="of each prompt")
    parser.add_argument("--ranks", type=int, default=4, help="of the node")
    parser.add_argument("--most-gb", type=float, default=1.2, help="of all ranks together")
    parser.add_argument("--most-s", type=float, default=60, help="of a later start")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prompts.json"))
    return parser.parse_args()


def main() -> None:
    """Measures, writes the result, prints it, and judges it."""
    args = options()
    folder = Path(tempfile.mkdtemp(prefix="bench-prompts-"))
    try:
        found = measure(args, folder)
    finally:
        shutil.rmtree(folder)
    result = {
        "benchmark": "prompts",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": multiprocessing.cpu_count(),
            "python": platform.python_version(),
        },
        "shape": {"prompts": args.prompts, "tokens": args.tokens},
        **found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    later = found["later_start"]
    if later["memory_mb"] > 1e3 * args.most_gb or later["seconds"] > args.most_s:
        sys.exit(f"allowed: {args.most_gb} GB, {args.most_s} s")


if __name__ == "__main__":
    main()
