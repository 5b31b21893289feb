"""Times the reshard on GPUs: the Trainer's Megatron parameters into live vLLM parameters.

Each case is one torchrun of its own, with a real Trainer of random weights; nothing is trained. In
each: what the links can do; both transports, each checked by checksum before it is timed; both
changes of phases; and the ways of others into the same vLLM parameters. A transport that leaves a
wrong bit is not timed, and a way that fails is recorded with its error.

* peer, packed: `rollout.transport`, alone: no memory is mapped, no phase changed.
* all_gather, buckets: after what verl and slime do (reshard_rivals.py).
* mbridge_vllm: mbridge's export into vLLM's `load_weights`.
* megatron_resharding: `megatron.core.resharding`, NCCL, into a Megatron model of the engine's size.

Where training is data parallel, the gather of parameters that ends the optimizer's step is timed
too, alone and with the reshard. Cases after --fused run with `train.fuse_param_gather`, and once
without it; both without others' ways.

    python benchmarks/bench_reshard_gpu.py OUT.json 7b/tp4/tp1 7b/tp2pp2/tp4 --fused 7b/dp4/tp4
    python benchmarks/bench_reshard_gpu.py OUT.json qwen3-30b-a3b/dp2ep2/tp1 --frozen \\
        --num-layers 12 --baselines mbridge_vllm
    python benchmarks/bench_reshard_gpu.py OUT.json 0.5b/tp1/apart-tp1 7b/tp2/tp1 --frozen --at-once

A case is MODEL/TRAIN/GEN (case_name.py); others' ways know no replicas on further GPUs. Times are
of the slowest rank. OUT.json is written anew after each case.

--num-layers takes fewer layers, each as wide as it is, and --baselines names the ways of others:
what they take grows with the number of experts. --frozen makes no gradients and no optimizer.
--at-once starts all cases at the same time and measures them one after another; the GPUs need room
for all. With --turn FILE ranks import what they need and touch no GPU until there is that file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from case_name import options_of, parse_case, with_num_layers
from case_record import PROGRESS, READY, TURN, commit, stacks_of

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "4",
    # NVLink multicast stays off.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
TAIL_LINES = 150
# In this order: the last one ends the use of the Trainer's groups. The first two know no experts.
BASELINES = ("all_gather", "buckets", "mbridge_vllm", "megatron_resharding")
POLL_S = 0.2
TO_END_S = 40  # for torchrun, until it is killed


def main() -> int:
    """Runs the cases one after another; returns 1 if one failed."""
    arguments = parse()
    if arguments.case_file:
        from reshard_gpu_case import run_case

        run_case(json.loads(arguments.case_file.read_text()))
    jobs = [describe(case, "plain", arguments) for case in arguments.cases]
    for case in arguments.fused:
        if case not in arguments.cases:
            jobs.append(describe(case, "plain", arguments) | {"baselines": ()})
        jobs.append(describe(case, "fused", arguments))
    check_gpus(max(job["world"] for job in jobs))
    report: dict[str, Any] = {
        "benchmark": "reshard on GPUs",
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[2:]]),
        "commit": commit(),
        "cases": [],
    }
    for case in launched(jobs, arguments.at_once):
        report["cases"].append(case)
        report["fused_to_two_steps"] = dict(fused_ratios(report["cases"]))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))
    failed = [f"{case['case']} ({case['kind']})" for case in report["cases"] if "error" in case]
    print("failed: " + ", ".join(failed) if failed else f"wrote {arguments.out}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("cases", nargs="*", metavar="MODEL/TRAIN/GEN")
    parser.add_argument("--fused", nargs="+", default=[], metavar="MODEL/TRAIN/GEN")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--frozen", action="store_true", help="no gradients, no optimizer")
    parser.add_argument("--at-once", action="store_true", help="starts all cases at once")
    parser.add_argument(
        "--no-baselines", dest="baselines", action="store_const", const=(), default=BASELINES
    )
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=BASELINES,
        default=BASELINES,
        help="the ways of others that are measured; all unless told",
    )
    parser.add_argument("--num-layers", type=int, help="of the model; all unless told")
    parser.add_argument("--limit-s", type=float, default=240, help="of one case, from its turn on")
    parser.add_argument("--turn", help="a file that ranks wait for once they have imported all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--models", type=Path, default=ROOT / "benchmarks" / "models")
    parser.add_argument("--case-file", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    found = parser.parse_args()
    if not found.case_file and not (found.out and found.cases + found.fused):
        parser.error("name OUT.json and at least one case, e.g. OUT.json 7b/tp4/tp1")
    return found


def describe(case: str, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    name = parse_case(case, arguments.models, "7b/tp2pp2/tp4")
    return {
        **options_of(arguments),
        "case": case,
        "kind": kind,
        "model": str(name.model),
        "world": name.num_ranks,
        "train": name.train,
        "has_replicas": name.has_replicas and not arguments.frozen,
        "rollout": name.rollout,
        "placement": name.placement,
        "baselines": arguments.baselines if kind == "plain" and not name.is_apart else (),
    }


def check_gpus(needed: int) -> None:
    """Refuses cases that need more GPUs than there are; without any, ranks run on the CPU."""
    import torch

    found = torch.cuda.device_count()
    if 0 < found < needed:
        sys.exit(f"a case needs {needed} GPUs, and {found} are visible: leave it out")


def launched(jobs: Sequence[Mapping[str, Any]], at_once: bool) -> Iterator[dict[str, Any]]:
    """Yields what each case has measured; started at once, cases measure one after another."""
    if not at_once:
        yield from (launch(job, tempfile.mkdtemp()) for job in jobs)
        return
    with ThreadPoolExecutor(len(jobs)) as pool:
        folders = [Path(tempfile.mkdtemp()) for _ in jobs]
        running = [pool.submit(launch, *pair) for pair in zip(jobs, map(str, folders), strict=True)]
        waiting = dict(zip(folders, running, strict=True))
        while any(not is_ready(folder) and not case.done() for folder, case in waiting.items()):
            time.sleep(1)
        for folder, case in waiting.items():
            (folder / TURN).touch()
            yield case.result()


def is_ready(folder: Path) -> bool:
    found = folder / "result.json"
    return found.is_file() and READY in json.loads(found.read_text()).get("seconds", {})


def launch(
    job: Mapping[str, Any],
    folder: str,
    script: str = __file__,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Runs one case under torchrun; returns what it measured, and removes the `folder`."""
    try:
        case_file, result_file = Path(folder) / "case.json", Path(folder) / "result.json"
        model = with_num_layers(job["model"], job["num_layers"], folder)
        job = {**job, "model": model, "folder": folder, "launched_at": time.time()}
        case_file.write_text(json.dumps(job))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--nproc-per-node={job['world']}", script, "--case-file", str(case_file)]
        began = time.monotonic()
        turn = Path(job["turn"]) if job.get("turn") else None
        code, tail = run_showing_progress(command, job["limit_s"], environment, turn)
        seconds = time.monotonic() - began
        result = json.loads(result_file.read_text()) if result_file.is_file() else {}
        stacks = stacks_of(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ending = f"exit {code} after {seconds:.0f} s"
    named = {key: job[key] for key in ("case", "kind", "world") if key in job}
    print(f"{PROGRESS} {' '.join(map(str, named.values()))} GPUs: {ending}", flush=True)
    found = {**named, **result}
    found["whole_case_s"] = round(seconds, 1)
    if not found.pop("is_complete", False):
        print("\n".join(tail), flush=True)
        found |= {"error": ending, "output": "\n".join(tail)[-4000:]}
        for rank, stack in stacks.items():
            print(f"rank {rank} shortly before the limit:\n{stack}", flush=True)
        if stacks:
            found["stacks"] = stacks
    return found


def run_showing_progress(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str],
    turn: Path | None = None,
) -> tuple[int, list[str]]:
    """Runs a command, showing its lines of progress; returns its status and its last lines.

    Its time counts from when `turn` exists; the command is ended if that file's folder goes.
    """
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    process = subprocess.Popen(
        command,
        env={**ENVIRONMENT, **environment, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    is_over = threading.Event()
    parts = process, limit_s, turn, is_over
    threading.Thread(target=_end_late, args=parts, name="limit", daemon=True).start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            if PROGRESS in line:
                print(line[line.index(PROGRESS) :], end="", flush=True)
        return process.wait(), list(tail)
    finally:
        is_over.set()


def _end_late(
    process: subprocess.Popen[str], limit_s: float, turn: Path | None, is_over: threading.Event
) -> None:
    while turn is not None and not turn.exists():
        if not turn.parent.exists():
            limit_s = 0.0
            break
        if is_over.wait(POLL_S):
            return
    if is_over.wait(limit_s):
        return
    # torchrun ends its ranks, which have sessions of their own, when it is asked to; it is killed
    # only if it does not.
    process.terminate()
    if not is_over.wait(TO_END_S):
        os.killpg(process.pid, signal.SIGKILL)


# Report


def fused_ratios(cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields, by fused case, what the two steps take in units of the fused one, by transport."""
    by_kind = {(case["case"], case["kind"]): case.get("ways", {}) for case in cases}
    for (name, kind), fused in by_kind.items():
        two = by_kind.get((name, "plain"), {})
        if kind == "fused":
            yield (
                name,
                {
                    way: two[f"gather+{way}"]["ms"] / found["ms"]
                    for way, found in fused.items()
                    if "ms" in found and "ms" in two.get(f"gather+{way}", {})
                },
            )


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table; the ratio is to the transport that was chosen (*)."""
    yield f"{'case':22} {'way':20} {'ms':>8} {'p90':>7} {'GB/s':>6} {'link':>6} {'ratio':>7}" + (
        f" {'host ms':>8} {'MiB':>7}"
    )
    for case in report["cases"]:
        name = case["case"] + (" fused" if case["kind"] == "fused" else "")
        for way, found in case.get("ways", {}).items():
            if "error" in found:
                yield f"{name:22} {way:20} {found['error'][:80]}"
                continue
            rate, share = found.get("gb_per_s", 0.0), found.get("share_of_link")
            link = "" if share is None else f"{100 * share:.1f}%"
            ratio = f"{found['ratio']:.1f} x" if "ratio" in found else ""
            mark = "*" if found.get("is_auto") else ""
            extra = (found.get("extra_bytes", 0) + found["peak_extra_bytes"]) / 2**20
            yield (
                f"{name:22} {way + mark:20} {found['ms']:8.2f} {found['p90_ms']:7.2f} {rate:6.1f} "
                f"{link:>6} {ratio:>7} {found['host_ms']:8.2f} {extra:7.1f}"
            )
        predictions = case.get("prediction", {})
        for key in ("prediction_ms", "planned_ms"):
            if key in predictions:
                yield f"{name:22} {key:20} {predictions[key]:8.2f}"
        for way, ms in predictions.get("plan_ms", {}).items():
            yield f"{name:22} {'planned for ' + way:20} {ms:8.2f}"
        if "transition_ms" in case.get("transition", {}):
            yield f"{name:22} {'both transitions':20} {case['transition']['transition_ms']:8.2f}"
        if "error" in case:
            yield f"{name:22} {case['error']}"
    for case, ratios in report["fused_to_two_steps"].items():
        shown = ", ".join(f"{way} {ratio:.2f} x" for way, ratio in ratios.items())
        yield f"{case}: gather and reshard take, in units of the fused one, {shown}"


if __name__ == "__main__":
    sys.exit(main())
