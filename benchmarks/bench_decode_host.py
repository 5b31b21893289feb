"""Times what the host does in a decode step with SGLang, in the loop and without it, on CPU.

A small model on a GPU is done sooner than the host is with its next step, so that this time is what
bounds generation. Here the model costs nothing: its logits are zeros. What is left of a step is the
scheduler, the sampler (of few columns) and what the loop keeps. The scheduler runs without a batch
under way, as it does on CPU; what it does for each request is the same on GPUs.

    python benchmarks/bench_decode_host.py --out OUT.json

The ways of plain_engines.py in turn; CPU time of the thread for a generation, from prompts to all
tokens, by its number of steps: median, p10 and p90 of `--repeats`, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from case_record import command_of, commit
from plain_engines import PLAIN
from reshard_clock import machine, percentile
from rollout_case import config_of, prompts_of, share_of_digits

from hybridrl.loop.loop import Trainer

MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
COLUMNS = 8  # of the logits: a draw from them costs little more than its calls
WAYS = ("loop", "plain", "plain_without_logprobs")


def main() -> int:
    """Times the ways in turn and writes one JSON file."""
    arguments = parse()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(arguments, folder)
        prompts = trainer.prompts.take(arguments.prompts)
        for repeat in range(arguments.repeats + 1):
            for way, taken in found.items():
                seconds = generate(trainer, prompts, way, arguments)
                if repeat:
                    taken.append(1e6 * seconds / arguments.new_tokens)
        trainer.close()
    medians = {way: statistics.median(taken) for way, taken in found.items()}
    report = {
        "benchmark": "host time of a decode step",
        "command": command_of(sys.argv),
        "commit": commit(),
        "machine": machine(1),
        "requests": num_requests(arguments),
        "new_tokens": arguments.new_tokens,
        "us_per_step": {
            way: {
                "median": round(medians[way]),
                "p10": round(percentile(taken, 0.1)),
                "p90": round(percentile(taken, 0.9)),
            }
            for way, taken in found.items()
        },
        "loop_to_plain": round(medians["plain"] / medians["loop"], 3),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for way, taken in report["us_per_step"].items():
        print(f"{way:24} {taken['median']:6} us a step ({taken['p10']} to {taken['p90']})")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def made(arguments: argparse.Namespace, folder: str) -> Trainer:
    """Returns a Trainer whose engine computes no model."""
    model = Path(folder, "model.json")
    model.write_text(json.dumps(MODEL))
    sizes = ("prompts", "samples", "prompt_tokens", "new_tokens")
    job = {name: getattr(arguments, name) for name in sizes} | {
        "folder": folder,
        "model": str(model),
        "train": {"tp": 1},
        "engine": "sglang",
        "rollout_tp": 1,
        "set": ["model.dtype=float32"],
    }
    trainer = Trainer.from_config(config_of(job), prompts=prompts_of(job), reward=share_of_digits)
    trainer.check_engine()
    sampler, logits_BV = trainer.sampler, torch.zeros(num_requests(arguments), COLUMNS)
    # No response ends before its last token, and each has a token to be looked for.
    sampler.sampling = replace(sampler.sampling, stop_token_ids=(COLUMNS,))
    trainer.engine._scheduler.tp_worker.model_runner.forward = partial(forward, logits_BV)
    return trainer


def forward(logits_BV: torch.Tensor, batch: Any, **_: Any) -> SimpleNamespace:
    """Takes the place of SGLang's model: returns logits for each of its requests."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    return SimpleNamespace(
        logits_output=LogitsProcessorOutput(logits_BV[: len(batch.seq_lens)].clone()),
        can_run_graph=False,
        **dict.fromkeys(
            ("expert_distribution_metrics", "routed_experts_output", "indexer_topk_output")
        ),
    )


def num_requests(arguments: argparse.Namespace) -> int:
    """Returns the number of requests."""
    return int(arguments.prompts * arguments.samples)


def generate(trainer: Any, prompts: Any, way: str, arguments: argparse.Namespace) -> float:
    """Generates in one way; returns seconds of CPU time of this thread.

    Raises:
        RuntimeError: there are fewer tokens than asked for.
    """
    plain = PLAIN["sglang"]
    plain.forget(trainer)
    began = time.thread_time()
    if way != "loop":
        plain.generate(trainer, prompts, way == "plain")
        return time.thread_time() - began
    rollouts = trainer.sampler.generate(prompts, step=10**6)
    seconds = time.thread_time() - began
    if int(rollouts.response_lengths_B.sum()) != num_requests(arguments) * arguments.new_tokens:
        raise RuntimeError("a response has fewer tokens than asked for")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
