"""Times the trainer alone: the log-probability pass and the update, as shares of the GPUs' peak.

Each case is one torchrun of its own with the policy of the Trainer, random weights and no engine.
Model FLOPs (metrics/flops.py) are divided by time and by the rate of a large bf16 matrix product
measured in the same run. Samples are 256 prompt and 512 response tokens unless told, packed into
micro-batches of 16,384 tokens.

    python benchmarks/bench_train.py --out OUT.json 7b/tp1dp4 7b/tp2dp2 0.5b/dp4
    python benchmarks/bench_train.py --out OUT.json 7b/tp2dp2 --layers torch --tails

A case is MODEL/TRAIN (case_name.py). --num-layers takes fewer of a model that one GPU cannot hold.

Before anything is timed the loss of a step must be finite and the update must change the
log-probabilities. --tails adds lengths with a long tail, where tokens that are no padding count:
packed and balanced, against samples in order of arrival, padded to the longest of their
micro-batch. --samples G gives each prompt G samples and times the passes a second time with shared
prompts (train.share_prompts), and where long prompts are attended to in two calls also with copied
keys; MFU counts the FLOPs that are computed. Times are of the slowest rank.

OUT.json has every iteration's time, the update's parts, and how often torch's allocator asked the
driver for memory, which stops the device. --profile adds the longest kernels and calls, and the
longest times in which a GPU had none (train_profile.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench_reshard_gpu import ROOT, check_gpus, launch
from case_name import options_of, parse_case
from case_record import command_of, commit


def main() -> int:
    arguments = parse()
    if arguments.case_file:
        from train_case import run_case

        run_case(json.loads(arguments.case_file.read_text()))
    jobs = [describe(case, arguments) for case in arguments.cases]
    check_gpus(max(job["world"] for job in jobs))
    return run_jobs("training", jobs, arguments.out, __file__, table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("cases", nargs="*", metavar="MODEL/TRAIN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", choices=("auto", "torch", "transformer_engine"), default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a replica, in a step")
    parser.add_argument("--num-layers", type=int, help="of the model; all unless told")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--passes", default="logprobs,update,parts,copies", help="what is timed")
    parser.add_argument("--tails", action="store_true", help="also lengths with a long tail")
    parser.add_argument("--profile", action="store_true", help="also tells where the time goes")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt")
    parser.add_argument("--only-shared", action="store_true", help="with --samples: nothing else")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--models", type=Path, default=ROOT / "benchmarks" / "models")
    parser.add_argument("--limit-s", type=float, default=150, help="of one case")
    parser.add_argument("--case-file", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    found = parser.parse_args()
    if not found.case_file and not (found.out and found.cases):
        parser.error("name --out OUT.json and at least one case, e.g. 7b/tp2dp2")
    return found


def describe(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    name = parse_case(case, arguments.models, "7b/tp2dp2")
    sample = arguments.prompt_tokens + arguments.response_tokens
    if sample > arguments.micro_batch_tokens:
        sys.exit(f"samples of {sample} tokens: at most --micro-batch-tokens")
    return {
        **options_of(arguments),
        "case": case,
        "model": str(name.model),
        "world": name.num_ranks,
        "replicas": name.dp,
        "train": name.train,
        "partial": str(arguments.out.with_suffix(".partial.json")),
    }


def run_jobs(
    benchmark: str,
    jobs: Sequence[Mapping[str, Any]],
    out: Path,
    script: str,
    table: Callable[[Mapping[str, Any]], Iterator[str]],
    at_once: int = 1,
) -> int:
    """Runs cases one after another and prints them; returns 1 if one failed.

    `script` is the benchmark that a case's ranks run, `table` gives the lines of a table of the
    report, which is written to `out` anew after each case.
    """
    report: dict[str, Any] = {
        "benchmark": benchmark,
        "command": command_of(sys.argv),
        "commit": commit(),
        "cases": [],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    if at_once > 1:
        report["at_once"] = at_once
    with ThreadPoolExecutor(at_once) as pool:
        in_turn = pool.map if at_once > 1 else map
        for job, found in zip(
            jobs, in_turn(partial(launch_case, script=script), jobs), strict=True
        ):
            report["cases"].append(found)
            out.write_text(json.dumps(report, indent=1) + "\n")
            Path(job["partial"]).unlink(missing_ok=True)
    print("\n".join(table(report)))
    failed = [
        case["case"]
        for case in report["cases"]
        if "error" in case or any("error" in way for way in case.get("ways", {}).values())
    ]
    print("failed: " + ", ".join(failed) if failed else f"wrote {out}")
    return 1 if failed else 0


def launch_case(job: Mapping[str, Any], script: str) -> dict[str, Any]:
    # Before CUDA starts, which importing in advance may do; as platform.start_kernels_in_order.
    is_cut = max(job["train"].get("tp", 1), job["train"].get("cp", 1)) > 1
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_cut else {}
    return launch(job, tempfile.mkdtemp(), script, environment)


def table(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'case':14} {'what':20} {'ms':>9} {'p90':>9} {'tokens/s/GPU':>13} {'MFU':>6} {'GiB':>6}"
    for case in report["cases"]:
        for name, found in case.get("passes", {}).items():
            if "error" in found:
                yield f"{case['case']:14} {name:20} {found['error'][:80]}"
                continue
            mfu = f"{found['mfu']:.3f}" if "mfu" in found else ""
            yield (
                f"{case['case']:14} {name:20} {found['ms']:9.1f} {found['p90_ms']:9.1f} "
                f"{found['tokens_per_s_per_gpu']:13.0f} {mfu:>6} {found['peak_bytes'] / 2**30:6.1f}"
            )
        if "packed_to_padded" in case:
            yield f"{case['case']:14} packed to padded: {case['packed_to_padded']:.2f} x"
        for name, ratio in case.get("shared_to_not", {}).items():
            yield f"{case['case']:14} {name}, prompts shared to not: {ratio:.2f} x"
        if "error" in case:
            yield f"{case['case']:14} {case['error']}"


if __name__ == "__main__":
    sys.exit(main())
