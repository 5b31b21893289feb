"""Times what the host does in a decode step with SGLang, in the loop and without it, on CPU.

A small model on a GPU is done sooner than the host is with its next step, so that this time is what
bounds generation. Here the model costs nothing: its logits are zeros. What is left of a step is the
scheduler, the sampler (of few columns) and what the loop keeps. The scheduler runs without a batch
under way, as it does on CPU; what it does for each request is the same on GPUs.

    python benchmarks/bench_decode_host.py --out OUT.json

The ways of plain_engines.py in turn, and `step`: generation within a training step, of new prompts
after an update, with all that a step leaves behind. CPU time of the thread for a generation, from
prompts to all tokens, by its number of steps: median, p10 and p90 of `--repeats`, after a warm-up.
Of `loop` and `step` also what is not decoding (requests, prompts, ends): a generation's time less
that of as many median steps; and how many tokens of prompts were computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

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
WAYS = ("loop", "step", "plain", "plain_without_logprobs")


class Generation(NamedTuple):
    """What a generation took.

    Args:
        seconds: of CPU time of this thread.
        rest_s: of them, what is not decoding; 0 where steps are not looked at.
        prompt_tokens: that were computed.
    """

    seconds: float
    rest_s: float
    prompt_tokens: int


def main() -> int:
    """Times the ways in turn and writes one JSON file."""
    arguments = parse()
    found: dict[str, list[Generation]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        trainer, model = made(arguments, folder)
        prompts = trainer.prompts.take(arguments.prompts)
        for repeat in range(arguments.repeats + 1):
            for way, taken in found.items():
                one = generate(trainer, model, prompts, way, arguments)
                if repeat:
                    taken.append(one)
        trainer.close()
    steps = {
        way: [1e6 * one.seconds / arguments.new_tokens for one in taken]
        for way, taken in found.items()
    }
    medians = {way: statistics.median(taken) for way, taken in steps.items()}
    looked_at = {way: found[way] for way in ("loop", "step")}
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
            for way, taken in steps.items()
        },
        "loop_to_plain": round(medians["plain"] / medians["loop"], 3),
        "step_to_loop": round(medians["step"] / medians["loop"], 3),
        "ms_beside_decoding": {
            way: round(1e3 * statistics.median(one.rest_s for one in taken), 1)
            for way, taken in looked_at.items()
        },
        "prompt_tokens": num_requests(arguments) * arguments.prompt_tokens,
        "prompt_tokens_computed": {
            way: statistics.median(one.prompt_tokens for one in taken)
            for way, taken in found.items()
        },
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for way, taken in report["us_per_step"].items():
        print(f"{way:24} {taken['median']:6} us a step ({taken['p10']} to {taken['p90']})")
    for way, ms in report["ms_beside_decoding"].items():
        print(f"{way:24} {ms:6} ms beside decoding")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


class NoModel:
    """Takes the place of SGLang's model, computes nothing and counts the tokens of prompts.

    Args:
        logits_BV: for a batch at most.
    """

    def __init__(self, logits_BV: torch.Tensor) -> None:
        self._logits_BV = logits_BV
        self.prompt_tokens = 0

    def forward(self, batch: Any, **_: Any) -> SimpleNamespace:
        """Returns logits for each request of a batch of SGLang."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        if batch.forward_mode.is_extend():
            self.prompt_tokens += batch.extend_num_tokens
        return SimpleNamespace(
            logits_output=LogitsProcessorOutput(self._logits_BV[: len(batch.seq_lens)].clone()),
            can_run_graph=False,
            **dict.fromkeys(
                ("expert_distribution_metrics", "routed_experts_output", "indexer_topk_output")
            ),
        )


def made(arguments: argparse.Namespace, folder: str) -> tuple[Trainer, NoModel]:
    """Returns a Trainer whose engine computes no model, and what it has in its place."""
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
    none = NoModel(logits_BV)
    trainer.engine._scheduler.tp_worker.model_runner.forward = none.forward
    return trainer, none


def num_requests(arguments: argparse.Namespace) -> int:
    """Returns the number of requests."""
    return int(arguments.prompts * arguments.samples)


def generate(
    trainer: Any, model: NoModel, prompts: Any, way: str, arguments: argparse.Namespace
) -> Generation:
    """Generates in one way.

    Raises:
        RuntimeError: there are fewer tokens than asked for.
    """
    plain, sampler = PLAIN["sglang"], trainer.sampler
    plain.forget(trainer)
    model.prompt_tokens = 0
    if way in ("plain", "plain_without_logprobs"):
        began = time.thread_time()
        plain.generate(trainer, prompts, way == "plain")
        return Generation(time.thread_time() - began, 0.0, model.prompt_tokens)
    taken: list[Generation] = []
    make, advance = sampler.generate, sampler.advance

    def timed(*given: Any, **named: Any) -> Any:
        steps: list[float] = []

        def step() -> None:
            began = time.thread_time()
            advance()
            steps.append(time.thread_time() - began)

        began = time.thread_time()
        with patch.object(sampler, "advance", step):
            rollouts = make(*given, **named)
        seconds = time.thread_time() - began
        rest = seconds - len(steps) * statistics.median(steps)
        taken.append(Generation(seconds, rest, model.prompt_tokens))
        tokens = int(rollouts.response_lengths_B.sum())
        if tokens != num_requests(arguments) * arguments.new_tokens:
            raise RuntimeError("a response has fewer tokens than asked for")
        return rollouts

    if way == "loop":
        timed(prompts, step=10**6)
    else:
        with patch.object(sampler, "generate", timed):
            trainer.train_step()
    return taken[0]


if __name__ == "__main__":
    sys.exit(main())
