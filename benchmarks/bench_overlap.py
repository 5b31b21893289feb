"""Times a step whose update begins while its last responses are decoded, and compares gradients.

A trainer (Megatron, transformer-engine on GPUs) and a vLLM engine in one process, as the Trainer
makes them, random weights, the tailed lengths of bench_step.py. Of the same samples:

* serial: all is generated, then looked up by the reference, then trained on, as a step does it.
* a way AT_MOST: once at most this share of the responses is being decoded, groups that are whole
  are looked up and trained on in pieces of --piece-tokens, on another stream, while a thread
  decodes on a stream of high priority, for which CUDA graphs were captured. Gradients are divided
  by the number of tokens at the end. 0: in pieces, after all is generated.
* a way AT_MOST/FREE_SMS: the same, and training may not use that many of the multiprocessors, so
  that decoding always finds them free (a green context of the CUDA driver; MPS's percentages are of
  whole processes and do not apply here). Decoding may use all.

    python benchmarks/bench_overlap.py --out OUT.json 7b/tp2/tp1 --prompts 32 --ways 1 1/32
    python benchmarks/bench_overlap.py --out OUT.json 1.5b/dp1/tp1 --prompts 16

A case is named as in bench_step.py; it has one training replica, which may be tensor parallel.
Timed are generation, lookups and gradients with their norm; not rewards, the optimizer's step and
the reshard, which are the same in all ways. All memory stays mapped: the engine's, the gradients',
the optimizer's masters (no step is taken, so moments never are). A way whose gradients are not the
serial ones up to rounding is refused. OUT.json is written anew after each case.

Where training is tensor parallel the Trainer gives CUDA one hardware queue, in which decoding waits
behind training; CUDA_DEVICE_MAX_CONNECTIONS in the environment, 8 unless told, goes before that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_reshard_gpu import ROOT, check_gpus
from bench_step import describe
from bench_train import run_jobs
from case_name import parse_case

GIB = 1 << 30


@dataclass(frozen=True)
class Way:
    """How training goes on beside decoding.

    Args:
        name: as it was asked for.
        at_most: share of the responses that may still be decoded when training begins.
        free_sms: multiprocessors that training does not use.
    """

    name: str
    at_most: float
    free_sms: int = 0

    @staticmethod
    def of(name: str) -> Way:
        """Reads AT_MOST or AT_MOST/FREE_SMS.

        Raises:
            ValueError: it is neither.
        """
        at_most, _, free_sms = name.partition("/")
        found = Way(name, float(at_most), int(free_sms or 0))
        if not 0 <= found.at_most <= 1 or found.free_sms < 0:
            raise ValueError(name)
        return found


def main() -> int:
    """Runs the cases one after another; returns 1 if one failed."""
    arguments = parse()
    if arguments.case_file:
        from overlap_case import run_case

        run_case(json.loads(arguments.case_file.read_text()))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    jobs = [describe_overlap(case, arguments) for case in arguments.cases]
    check_gpus(max(job["world"] for job in jobs))
    return run_jobs("training beside decoding", jobs, arguments.out, __file__, table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n", 1)[0].split()))
    parser.add_argument("cases", nargs="*", metavar="MODEL/TRAIN/GEN")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--ways", nargs="+", default=["0", "1", "0.25", "1/16", "1/32", "1/48"], metavar="WAY"
    )
    parser.add_argument("--passes", type=int, default=3, help="of each way that are timed")
    parser.add_argument("--prompts", type=int, default=32, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=1024, help="at most")
    parser.add_argument("--micro-batch-tokens", type=int, help="default: by model and layout")
    parser.add_argument("--piece-tokens", type=int, help="default: those of a micro-batch")
    parser.add_argument(
        "--switch-ms", type=float, default=0.2, help="after which a thread gives Python's lock up"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--num-layers", type=int, help="of the model; all unless told")
    parser.add_argument("--models", type=Path, default=ROOT / "benchmarks" / "models")
    parser.add_argument("--limit-s", type=float, default=190, help="of one case")
    parser.add_argument("--case-file", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    found = parser.parse_args()
    if not found.case_file and not (found.out and found.cases):
        parser.error("name --out OUT.json and at least one case, e.g. 7b/tp2/tp1")
    if min(found.passes, found.prompts, found.samples - 1) < 1:
        parser.error("--passes and --prompts are at least 1, --samples 2")
    for way in found.ways:
        try:
            Way.of(way)
        except ValueError:
            parser.error(f"--ways {way}: expected AT_MOST or AT_MOST/FREE_SMS, as 0.25 or 1/32")
    found.workload, found.warmups, found.steps, found.turn = "tailed", 0, 1, None
    return found


def describe_overlap(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns everything that the processes of a case need to know."""
    name = parse_case(case, arguments.models, "7b/tp2/tp1")
    if name.is_apart or name.num_ranks != name.train.get("tp", 1):
        sys.exit(f"case {case!r}: training is one replica without pipeline, as 7b/tp2/tp1")
    job = describe(case, arguments)
    return {
        **job,
        "ways": arguments.ways,
        "passes": arguments.passes,
        "piece_tokens": arguments.piece_tokens or job["micro_batch_tokens"],
        "switch_ms": arguments.switch_ms,
    }


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield (
        f"{'case':16} {'way':>8} {'step s':>8} {'gain':>7} {'decoded s':>9} {'beside s':>8} "
        f"{'shares':>7} {'slowed':>7} {'beside':>7} "
        f"{'decode/s':>9} {'train/s':>8} {'GiB':>6} {'differs':>8}"
    )
    for case in report["cases"]:
        for way, found in case.get("ways", {}).items():
            if "error" in found:
                yield f"{case['case']:16} {way:>8} {found['error'][:120]}"
                continue
            yield (
                f"{case['case']:16} {way:>8} {found['step_s']:8.3f} {100 * found['gain']:6.1f}% "
                f"{found['decoded_s']:9.3f} {found['beside_s']:8.3f} {found['sum_of_shares']:7.2f} "
                f"{found['decoding_slowed']:7.2f} {100 * found['trained_beside']:6.1f}% "
                f"{found['decoded_tokens_per_s']:9.0f} {found['trained_tokens_per_s']:8.0f} "
                f"{found['device_bytes'] / GIB:6.1f} {found['gradients']['difference']:8.1e}"
            )
        if "error" in case:
            yield f"{case['case']:16} {case['error']}"


if __name__ == "__main__":
    sys.exit(main())
