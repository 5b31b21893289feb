"""Measures the rollout side of a step on GPUs: an engine in the training processes (`--engine`).

The first sync is verified by checksum, and trainer and engine agree on the probe. Then, in this
order, as far as options ask for it:

* --throughput: generation in the loop against the plain package (plain_engines.py) on the same
  prompts, sampling parameters and weights, in the same process.
* --steps N: training steps, every sync verified: the mismatch of log-probabilities, the time of
  every phase, and what the engine's own phase changes cost. Of each generation, the file has the
  time of a fixed piece of Python just before, the thread's CPU time, interruptions and page faults.
* --interrupt: generation stopped halfway for a change of phases and back; the mismatch of what was
  begun before and ended after it, beside that of samples that nothing interrupted.
* --cycles N: N whole steps, with the free memory after each and the mismatch of each: captured
  CUDA graphs must stay valid while memory comes and goes.

    python benchmarks/bench_rollout.py OUT.json 0.5b/tp2pp2/tp1 7b/tp4/tp1 --throughput
    python benchmarks/bench_rollout.py OUT.json 0.5b/tp1/tp1 --world 1 --cycles 100
    python benchmarks/bench_rollout.py OUT.json 0.5b/tp1/tp1 --world 1 --engine sglang \\
        --throughput --steps 0 --repeats 3 --new-tokens 512

A case is SIZE/TRAIN/ROLLOUT: a file benchmarks/models/qwen2.5-SIZE.json, training sizes (the rest
of the world is data parallel) and the engine's tensor parallel size. `--together N` runs N cases at
once, where times do not count. OUT.partial.json has what is known of a case so far.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_reshard_gpu import ROOT, check_gpus
from bench_train import run_jobs
from case_name import options_of
from case_record import CaseRecord
from plain_engines import PLAIN

CASE = re.compile(r"^(?P<size>[\w.]+)/(?P<train>(?:(?:tp|pp|cp)\d+)+)/tp(?P<rollout>\d+)$")


def main() -> int:
    arguments = parse()
    if arguments.case_file:
        job = json.loads(arguments.case_file.read_text())
        record = CaseRecord(job)
        record.begin()  # before imports, which take a while
        from rollout_case import run_case

        run_case(record)
    jobs = [describe(case, arguments) for case in arguments.cases]
    check_gpus(arguments.world)
    return run_jobs("rollout", jobs, arguments.out, __file__, table, arguments.together)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("cases", nargs="*", metavar="SIZE/TRAIN/ROLLOUT")
    parser.add_argument("--world", type=int, default=4, help="number of GPUs, one process each")
    parser.add_argument("--engine", choices=PLAIN, default="vllm")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--repeats", type=int, default=5, help="of throughput, after a warm-up")
    parser.add_argument("--steps", type=int, default=3, help="of training; 0: none")
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--num-layers", type=int, help="of the model; all unless told")
    parser.add_argument("--models", type=Path, default=ROOT / "benchmarks" / "models")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=300, help="of one case")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--case-file", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    found = parser.parse_args()
    if not found.case_file and not (found.out and found.cases):
        parser.error("name OUT.json and at least one case, e.g. OUT.json 0.5b/tp2pp2/tp1")
    if min(found.repeats, found.world, found.together) < 1 or min(found.steps, found.cycles) < 0:
        parser.error("--repeats, --world and --together are at least 1, --steps and --cycles 0")
    return found


def describe(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    found = CASE.match(case)
    if found is None:
        sys.exit(f"case {case!r}: expected SIZE/TRAIN/ROLLOUT, e.g. 0.5b/tp2pp2/tp1")
    sizes = {name: int(size) for name, size in re.findall(r"(tp|pp|cp)(\d+)", found["train"])}
    model = arguments.models / f"qwen2.5-{found['size']}.json"
    if not model.is_file():
        known = ", ".join(sorted(p.stem for p in model.parent.glob("qwen2.5-*.json")))
        sys.exit(f"case {case!r}: no {model}; there are {known}")
    name = f".{case.replace('/', '-')}.partial.json" if arguments.together > 1 else ".partial.json"
    return {
        **options_of(arguments),
        "case": case,
        "model": str(model),
        "train": sizes,
        "rollout_tp": int(found["rollout"]),
        "partial": str(arguments.out.with_suffix(name)),
    }


def table(report: Mapping[str, Any]) -> Iterator[str]:
    for case in report["cases"]:
        name = f"{case['case']:16}"
        if "throughput" in case:
            found = case["throughput"]
            rates = ", ".join(f"{way} {rate:,}" for way, rate in found["tokens_per_s"].items())
            yield f"{name} tokens/s: {rates}; loop to plain {found['loop_to_plain']:.3f}"
        if "medians" in case:
            mismatch, phases = case["mismatch_mean_worst"], case["engine_phases_s_median"]
            yield f"{name} mismatch at most {mismatch:.4f}, engine's phases {1000 * phases:.1f} ms"
        for kind in ("interrupted", "cycles"):
            if kind in case:
                yield f"{name} {kind}: {case[kind]}"
        if "error" in case:
            yield f"{name} {case['error']}"


if __name__ == "__main__":
    sys.exit(main())
