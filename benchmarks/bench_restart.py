"""Kills a rank of a run that `hybridrl train` started, and measures what going on after that costs:
copies of the state in host memory, a checkpoint that is written meanwhile, and the time from the
kill to the next finished step.

    python benchmarks/bench_restart.py --out OUT.json 7b/tp2/tp2           # two GPUs, one call
    python benchmarks/bench_restart.py --out OUT.json 7b/tp2/tp2 --list    # says what would run

One run, random weights, prompts and a reward: GRPO without a reference, vLLM (on CPU the engine
`hf`). A case is MODEL/TRAIN/GEN as of bench_step.py. With --copy-every 3, the default, steps are:

* 1, 2: warm up; threads take page-locked memory for copies. 3, 6, 9, 12: the state is copied after
  each; after the first copy threads take page-locked memory for checkpoints.
* 4, 7, 10, 13: run beside the threads that write the copy to /dev/shm. 5, 8, 11: beside nothing.
* 11: a checkpoint is begun after it, and written beside the next steps. Before, there is none, so
  that what copies cost has nothing of it.
* 14: in its update the last rank is killed (SIGKILL). Step 13 is to be lost, 12 not.
* With --fewer, two steps on: the last rank is killed again in its update, and so is the rank that
  replaces it, before it has taken a step, as if its GPU did not come back. The run goes on with the
  next smaller number of ranks that its layout allows.

What a copy costs is the time that its step waits for it and what the step beside its threads takes
longer than a step beside nothing. It is given as a share of one step without either
(`share_of_a_step`), of the --copy-every steps from a copy to the next (`share`), and of the steps
that `checkpoint.copy_every: auto` would leave between two copies (`auto_share`); the two
`waits_share` count what steps wait alone, which is what `auto` keeps at 1.25%. `complete_after_s`
is when copies counted after the ends of their steps: what a loss before that would cost a step
more. What a checkpoint costs is the time between its step and the next one, but for what is between
other steps. Times of copies are medians without the first, which is given beside them.

Without --num-layers there are as many layers, the model's at most, as host memory has room for: 5
times what a checkpoint has (page-locked for copies and for checkpoints, two copies, and half of
what is free stays), and the file system for two checkpoints. /dev/shm has to hold two copies:
`mount -o remount,size=80% /dev/shm`.

What it should show: copies take 3% of the time or less, of one step and by `auto`; copies, the
first one too, and the checkpoint stall training 2 s or less; a step is finished 90 s after the kill
or sooner, with fewer ranks too, counted from the first of the two kills. Exit code 1 where it does
not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from bench_reshard_gpu import ROOT, check_gpus
from case_name import CaseName, parse_case
from case_record import PROGRESS, command_of, commit
from random_workload import random_prompts, word_tokenizer
from restart_case import Run, checkpoint_step

from hybridrl.checkpoint.memory_folders import MEMORY
from hybridrl.config.load import load_config_dict
from hybridrl.services.planner.plan_report import plan_report

GOALS = {
    "copy_share": 0.03,
    "auto_copy_share": 0.03,
    "copy_waits_s": 2.0,
    "checkpoint_stall_s": 2.0,
    "restart_s": 90.0,
}
COPIES = 5  # of what a checkpoint has, that host memory needs room for
KEPT = 2  # checkpoints in the file system at a time
KEPT_FREE = 24 << 30  # of host memory, for processes


def main() -> int:
    """Runs the case; returns 1 where a goal is missed or the run failed."""
    arguments = parse()
    name = parse_case(arguments.case, arguments.models, "7b/tp2/tp2")
    with tempfile.TemporaryDirectory(dir=arguments.folder, ignore_cleanup_errors=True) as made:
        folder = Path(made)
        config, layers, sizes = inputs(folder, name, arguments)
        print(f"{PROGRESS} {arguments.case}: {layers} layers, {sizes}", flush=True)
        if arguments.list:
            return 0
        check_gpus(name.num_ranks)
        report = {
            "benchmark": "going on after a killed rank",
            "command": command_of(sys.argv),
            "commit": commit(),
            "case": arguments.case,
            "machine": machine(name.num_ranks),
            "layers": layers,
            **sizes,
            "config": shown(config, folder),
            "goals": GOALS,
        }
        report |= Run(folder, name.num_ranks, arguments).measured()
    if "error" not in report:
        report["is_met"] = is_met(report)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines_of(report)))
    return 0 if "error" not in report and all(report["is_met"].values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=" ".join((__doc__ or "").split("\n\n", 1)[0].split())
    )
    parser.add_argument("case", metavar="MODEL/TRAIN/GEN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--copy-every", type=int, default=3, help="steps between copies")
    parser.add_argument("--fewer", action="store_true", help="a rank does not come back, too")
    parser.add_argument("--prompts", type=int, default=32, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--num-layers", type=int, help="of the model; default: by host memory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--models", type=Path, default=ROOT / "benchmarks" / "models")
    parser.add_argument("--folder", type=Path, help="for the run; default: the temporary one")
    parser.add_argument("--limit-s", type=float, default=540, help="of the whole case")
    found = parser.parse_args()
    if not found.list and not found.out:
        parser.error("name --out OUT.json, or --list")
    if found.copy_every < 3:
        parser.error("--copy-every is at least 3: one step beside a copy's thread, one beside none")
    return found


# The run's inputs


def inputs(
    folder: Path, name: CaseName, arguments: argparse.Namespace
) -> tuple[dict[str, Any], int, dict[str, float]]:
    """Writes the model's config, a tokenizer, prompts and the configuration; returns the last, the
    number of layers and what a checkpoint has.
    """
    model = json.loads(name.model.read_text())
    vocab_size = model["vocab_size"]
    word_tokenizer(vocab_size).save_pretrained(folder / "tokenizer")
    every = arguments.copy_every
    number = arguments.prompts * (4 * every + 4)
    prompts = random_prompts(number, arguments.prompt_tokens, vocab_size)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    config = config_of(folder, name, arguments)
    wanted = arguments.num_layers
    room = min(
        (psutil.virtual_memory().available - KEPT_FREE) // COPIES,
        os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize // KEPT,
    )
    layers = wanted or model["num_hidden_layers"]
    while True:
        (folder / "config.json").write_text(json.dumps({**model, "num_hidden_layers": layers}))
        size = checkpoint_bytes(config, arguments.set, name.num_ranks)
        if wanted or size <= room or layers == 1 or not torch.cuda.is_available():
            break
        layers -= 1
    (folder / "restart.yaml").write_text(yaml.safe_dump(config))
    sizes = {
        "checkpoint_gb": size / 1e9,
        "room_gb": room / 1e9,
        "memory_files_gb": shutil.disk_usage(MEMORY).free / 1e9,
    }
    return config, layers, {key: round(value, 3) for key, value in sizes.items()}


def checkpoint_bytes(config: Mapping[str, Any], knobs: Sequence[str], world: int) -> int:
    """Returns what copies of a checkpoint take on all ranks."""
    report, violations = plan_report(load_config_dict(config, knobs), world)
    if violations:
        raise violations[0]
    return int(report["memory"]["checkpoint_copy_bytes"]) * world


def config_of(folder: Path, name: CaseName, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the configuration."""
    every, is_gpu = arguments.copy_every, torch.cuda.is_available()
    return {
        "run": {
            "name": "restart",
            "dir": str(folder / "runs"),
            "max_restarts": 3 if arguments.fewer else 1,
            "collective_timeout_s": 300,
        },
        "model": {"init": str(folder / "config.json"), "tokenizer": str(folder / "tokenizer")},
        "train": {
            **name.train,
            "micro_batch_tokens": arguments.micro_batch_tokens,
            "learning_rate": 1e-6,
        },
        "rollout": {
            "engine": "vllm" if is_gpu else "hf",
            **name.rollout,
            "max_new_tokens": arguments.response_tokens,
            **({"max_batch": arguments.prompts * arguments.samples} if is_gpu else {}),
        },
        "algorithm": {"name": "grpo"},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_prompt_tokens": arguments.prompt_tokens,
        },
        "reward": {"function": "random_workload:checksum_reward", "isolated": False},
        "steps": {
            "prompts_per_step": arguments.prompts,
            "samples_per_prompt": arguments.samples,
            "num_steps": 4 * every + 4,
        },
        "checkpoint": {
            "every": checkpoint_step(every),
            "every_s": 0,
            "keep": 1,
            "copy_every": every,
        },
        "log": {"tensorboard": False, "rollouts_every": 0},
    }


def machine(num_ranks: int) -> dict[str, Any]:
    """Returns the devices, the host and the versions."""
    is_gpu = torch.cuda.is_available()
    return {
        "devices": f"{num_ranks} x {torch.cuda.get_device_name(0) if is_gpu else 'cpu'}",
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "torch": torch.__version__,
    }


def shown(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the configuration without the folder, which is of one run alone."""
    text = json.dumps(config).replace(str(folder), "FOLDER")
    found: dict[str, Any] = json.loads(text)
    return found


# What it comes to


def is_met(found: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which goals are met."""
    copy, saved = found["copy"], found["checkpoint"]
    fewer = found.get("fewer")
    met = {} if fewer is None else {"fewer_restart_s": fewer["restart_s"] <= GOALS["restart_s"]}
    return {
        **met,
        "copy_share": copy["share_of_a_step"] <= GOALS["copy_share"],
        "auto_copy_share": copy["auto_share"] <= GOALS["auto_copy_share"],
        "copy_waits_s": max(copy["first_waits_s"], copy["waits_s"]) <= GOALS["copy_waits_s"],
        "checkpoint_stall_s": saved["stalls_s"] <= GOALS["checkpoint_stall_s"],
        "restart_s": found["restart"]["restart_s"] <= GOALS["restart_s"],
        "lost_steps": found["restart"]["lost_steps"] <= 1,
    }


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Returns the result in words."""
    found = []
    if "copy" in report:
        copy, saved = report["copy"], report["checkpoint"]
        found.append(
            f"a copy: {copy['waits_s']} s in a step of {copy['step_without_s']} s, the first "
            f"{copy['first_waits_s']} s; the step beside its threads "
            f"{copy['step_beside_is_longer_s']} s longer; complete {copy['complete_after_s']} s "
            "after the steps' ends"
        )
        found.append(
            f"copies: {copy['share_of_a_step']:.1%} of one step, {copy['share']:.1%} of the time "
            f"here ({copy['waits_share']:.1%} waiting); auto would copy after every "
            f"{copy['auto_would_copy_every']} steps, {copy['auto_share']:.1%} of the time "
            f"({copy['auto_waits_share']:.1%} waiting)"
        )
        found.append(f"a checkpoint: training waits {saved['stalls_s']} s")
    if "restart" in report:
        again = report["restart"]
        found.append(
            f"a killed rank: a step was finished after {again['restart_s']} s, "
            f"{again['lost_steps']} finished steps were lost"
        )
    if "fewer" in report:
        fewer = report["fewer"]
        found.append(
            f"a rank that does not come back: {fewer['ranks']} ranks finished a step after "
            f"{fewer['restart_s']} s, {fewer['lost_steps']} finished steps were lost"
        )
    if "error" in report:
        return [*found, f"failed: {report['error']}"]
    missed = [goal for goal, is_so in report["is_met"].items() if not is_so]
    return [*found, f"missed: {', '.join(missed)}" if missed else "all goals are met"]


if __name__ == "__main__":
    sys.exit(main())
