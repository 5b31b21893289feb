"""Times whole GRPO steps: vLLM generates, a reward, the reference's log-probabilities, the update,
the reshard; by the Trainer itself, as `hybridrl train` runs it.

Each case is one torchrun of its own with random weights. Lengths are forced, so that random weights
behave like a real run: no sample ends at a token of its choice.

* reference: 64 prompts x 8 samples, exactly 256 prompt and 512 response tokens.
* tailed: prompts of 256 tokens, responses of at most 1,024 with a long-tailed distribution, half of
  it by prompt, half by sample; the same lengths in every step.

    python benchmarks/bench_step.py --out OUT.json 7b/tp4/tp1 7b/dp4/tp1 0.5b/dp4/tp1
    python benchmarks/bench_step.py --out OUT.json 0.5b/dp4/tp1 --workload tailed
    python benchmarks/bench_step.py --out OUT.json qwen3-vl-4b/tp1/tp1 --image-tokens 1024 \\
        --prompt-tokens 1152 --prompts 32 --text-steps 2

--image-tokens gives each prompt an image of so many of its tokens; --text-steps takes further steps
with as long prompts of text alone. With a lag, --set steps.max_policy_lag=1, rates count the tokens
that each step learned from, and lengths go round: the first step's come again for the next ones'.

A case is MODEL/TRAIN/GEN (case_name.py). --num-layers takes fewer layers of a model that the GPUs
cannot hold. The engine's weights are verified by checksum before and after what is timed, and a
step that is not finite, learns nothing or has other lengths is refused. Times are of the slowest
rank, medians over `--steps` after `--warmups`; every step is in OUT.json.

Nothing is offloaded or recomputed unless --set says so. `hybridrl plan` says that a 7B policy with
its reference takes 60 GB with tensor parallel size 4 and micro-batches of 16,384 tokens, and with 4
replicas 124 GB with 8,192 tokens, which are taken there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_reshard_gpu import ROOT, check_gpus
from bench_train import run_jobs
from case_name import options_of, parse_case, text_of

# Most tokens in a micro-batch: where a GPU holds a whole large model, and elsewhere; of a small
# model, whose kernels are over before the next are launched, all that each of 4 replicas has in the
# reference workload (16 prompts with their samples, 4,359 tokens each if the prompt is shared).
BUDGET_OF_WHOLE_MODEL, BUDGET, BUDGET_OF_SMALL_MODEL = 8192, 16384, 69760
LARGE_HIDDEN_SIZE, SMALL_HIDDEN_SIZE = 2048, 1024
# What a step is made of, in order; the rest is what none of them has.
PARTS = ("generation", "old", "reference", "update", "reshard", "rest")


def main() -> int:
    arguments = parse()
    if arguments.case_file:
        from step_case import run_case

        run_case(json.loads(arguments.case_file.read_text()))
    jobs = [describe(case, arguments) for case in arguments.cases]
    check_gpus(max(job["world"] for job in jobs))
    return run_jobs("GRPO step", jobs, arguments.out, __file__, table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n", 1)[0].split()))
    parser.add_argument("cases", nargs="*", metavar="MODEL/TRAIN/GEN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workload", choices=("reference", "tailed"), default="reference")
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--prompts", type=int, default=64, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument(
        "--response-tokens", type=int, help="all, or at most; default: 512, or 1,024 if tailed"
    )
    parser.add_argument("--image-tokens", type=int, default=0, help="of each prompt's tokens")
    parser.add_argument(
        "--text-steps", type=int, default=0, help="without images, after the others"
    )
    parser.add_argument("--micro-batch-tokens", type=int, help="default: by model and layout")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--max-mismatch",
        type=float,
        default=0.1,
        help="nats; random weights in bf16 give 0.01 (0.5B) to 0.12 (32B), wrong ones more than 1",
    )
    parser.add_argument("--num-layers", type=int, help="of the model; all unless told")
    parser.add_argument("--models", type=Path, default=ROOT / "benchmarks" / "models")
    parser.add_argument("--limit-s", type=float, default=300, help="of one case")
    parser.add_argument(
        "--turn",
        help="a file that ranks wait for once they have imported all",
    )
    parser.add_argument("--case-file", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    found = parser.parse_args()
    if not found.case_file and not (found.out and found.cases):
        parser.error("name --out OUT.json and at least one case, e.g. 7b/tp4/tp1")
    if min(found.steps, found.warmups + 1, found.prompts, found.samples - 1) < 1:
        parser.error("--steps and --prompts are at least 1, --warmups 0, --samples 2")
    return found


def describe(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    name = parse_case(case, arguments.models, "7b/tp4/tp1")
    world, rollout_tp = name.num_ranks, name.rollout["tp"]
    num_replicas = name.num_apart if name.is_apart else world // rollout_tp
    if not name.is_apart and world % rollout_tp:
        sys.exit(f"case {case!r}: tp{rollout_tp} engines over {world} GPUs: choose a divisor")
    hidden_size = text_of(json.loads(name.model.read_text()))["hidden_size"]
    is_whole = name.train.get("tp", 1) * name.train.get("pp", 1) == 1
    budget = BUDGET_OF_WHOLE_MODEL if hidden_size >= LARGE_HIDDEN_SIZE and is_whole else BUDGET
    budget = BUDGET_OF_SMALL_MODEL if hidden_size <= SMALL_HIDDEN_SIZE else budget
    default_response = 512 if arguments.workload == "reference" else 1024
    return {
        **options_of(arguments),
        "case": case,
        "model": str(name.model),
        "world": world,
        "train": name.train,
        "rollout": name.rollout,
        "placement": name.placement,
        "response_tokens": arguments.response_tokens or default_response,
        "micro_batch_tokens": arguments.micro_batch_tokens or budget,
        # All samples of a replica are decoded together.
        "max_batch": math.ceil(arguments.prompts * arguments.samples / num_replicas),
        "partial": str(arguments.out.with_suffix(".partial.json")),
    }


def table(report: Mapping[str, Any]) -> Iterator[str]:
    parts = "".join(f"{part:>12}" for part in PARTS)
    yield f"{'case':16} {'':10} {'step':>8}{parts} {'tokens/s/GPU':>13}"
    for case in report["cases"]:
        name, found = case["case"], case.get("median")
        if found is not None:
            cells = {
                "seconds": "".join(f"{found['parts_s'][part]:12.3f}" for part in PARTS),
                "share": "".join(f"{100 * found['share'][part]:11.2f}%" for part in PARTS),
            }
            rate = f"{found['tokens_per_s_per_gpu']:13.0f}"
            yield f"{name:16} {'seconds':10} {found['step_s']:8.3f}{cells['seconds']} {rate}"
            yield f"{name:16} {'share':10} {'':8}{cells['share']}"
            mfus = ", ".join(f"{part} {mfu:.3f}" for part, mfu in found["mfu"].items())
            yield f"{name:16} MFU of {case['peak']['flops_per_s'] / 1e12:.0f} TFLOP/s: {mfus}"
            predicted = case.get("predicted_step")
            if predicted is not None:
                ratio = predicted["predicted_s"] / found["step_s"]
                yield f"{name:16} predicted step {predicted['predicted_s']:.3f} s ({ratio:.2f})"
        for phase, held in case.get("memory", {}).items():
            yield (
                f"{name:16} memory in {phase}: {held['measured_bytes'] / 2**30:.1f} GiB, "
                f"predicted {held['predicted_bytes'] / 2**30:.1f} GiB "
                f"({held['predicted_to_measured']:.2f}), at most "
                f"{held['bound_bytes'] / 2**30:.1f} GiB"
            )
        if "error" in case:
            yield f"{name:16} {case['error']}"


if __name__ == "__main__":
    sys.exit(main())
