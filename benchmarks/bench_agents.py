"""Measures how many tokens per second agents receive over the endpoint, compared with the plain
sampler on the same engine: the same weights, number of responses and number of sampled tokens.

    python benchmarks/bench_agents.py OUT.json --model benchmarks/models/qwen2.5-0.5b.json

An agent is a session of `--turns` turns. Each turn is a chat completion of `--turn-tokens` tokens,
which continues the conversation. The plain sampler draws one response of turns x turn tokens for
each session. Both ways alternate; the first time of each warms up. The weights are random, so
almost no turn ends early; the tokens that were really sampled are counted.

The result is refused if an episode failed, or if a session did not sample all its turns in one
conversation. For both ways, it contains the number of engine steps, the share of the time that was
spent in them, and the processor time of the endpoint. `--profile` prints where the engine's process
spends its time, in one more repeat of each way.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Question {turn} of {sample}: how is the weather in Oslo today?"
CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QUESTION_TOKENS = 100  # more than a question and the template's text around it have


async def talk(task: Any, turns: int, turn_tokens: int) -> float:
    """Has a conversation of several turns; the agent that is measured."""
    client, messages = task.client(), []
    for turn in range(turns):
        question = QUESTION.format(turn=turn, sample=task.sample)
        messages.append({"role": "user", "content": question})
        reply = await client.chat.completions.create(
            model=task.model, messages=messages, max_tokens=turn_tokens
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    return 1.0


def main() -> int:
    """Measures both ways in turn, and writes one JSON file."""
    arguments = parse()
    trainer = make_trainer(arguments)
    trainer.check_engine()
    prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
    episodes = trainer.sampler.episodes
    if arguments.steps_between_events:
        episodes._steps_between_events = lambda: arguments.steps_between_events
    steps, found = EngineSteps(trainer.sampler.engine), dict[str, list[dict[str, float]]]()
    step = 10**6
    for repeat in range(arguments.repeats + 1 + arguments.profile):
        for way in ("agents", "plain"):
            trainer.sampler.episodes = episodes if way == "agents" else None
            profile = cProfile.Profile() if repeat > arguments.repeats else None
            step += 1
            steps.reset()
            endpoint_s, worked = endpoint_cpu_s(episodes), time.process_time()
            began = time.perf_counter()
            if profile is not None:
                batch = profile.runcall(trainer.sampler.generate, prompts, step=step)
            else:
                batch = trainer.sampler.generate(prompts, step=step)
            taken = time.perf_counter() - began
            used = time.process_time() - worked
            num_tokens = check(batch, way, arguments)
            if way == "agents":
                trainer.sampler.score(batch)  # ends the run if an episode failed
            one = {
                "seconds": taken,
                "tokens_per_s": num_tokens / taken,
                "engine_steps": steps.number,
                "step_ms": 1000 * steps.seconds / steps.number,
                "steps_share": steps.seconds / taken,
                "steps_with_new": steps.number_with_new,
                "process_cpu_s": used,
                "endpoint_cpu_s": endpoint_cpu_s(episodes) - endpoint_s,
            }
            name = "profiled" if profile else f"repeat {repeat}" if repeat else "warm-up"
            shown = ", ".join(f"{key} {value:,.4g}" for key, value in one.items())
            print(f"{way}, {name}: {shown}", flush=True)
            if profile is not None:
                for order in ("tottime", "cumulative"):
                    pstats.Stats(profile, stream=sys.stdout).sort_stats(order).print_stats(40)
            elif repeat:
                found.setdefault(way, []).append(one)
    rates = {
        way: statistics.median(one["tokens_per_s"] for one in repeats)
        for way, repeats in found.items()
    }
    result = {
        "benchmark": "agents",
        "model": arguments.model.stem,
        "sessions": arguments.sessions,
        "turns": arguments.turns,
        "turn_tokens": arguments.turn_tokens,
        "steps_between_events": arguments.steps_between_events or "default",
        "repeats": {
            way: [{name: float(f"{value:.5g}") for name, value in one.items()} for one in repeats]
            for way, repeats in found.items()
        },
        "agents_to_plain": round(rates["agents"] / rates["plain"], 3),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    trainer.close()
    return 0


class EngineSteps:
    """Counts and times the steps of an engine."""

    def __init__(self, engine: Any) -> None:
        self.reset()
        self._step, self._submit = engine.step, engine.submit
        engine.step, engine.submit = self._timed, self._noted

    def reset(self) -> None:
        self.number, self.seconds, self.number_with_new, self._has_new = 0, 0.0, 0, False

    def _timed(self) -> Any:
        began = time.perf_counter()
        found = self._step()
        self.seconds += time.perf_counter() - began
        self.number += 1
        self.number_with_new += self._has_new
        self._has_new = False
        return found

    def _noted(self, requests: Any) -> Any:
        self._has_new |= bool(requests)
        return self._submit(requests)


def endpoint_cpu_s(episodes: Any) -> float:
    """Returns the processor time of the process that serves the endpoint; 0 if it has none."""
    import psutil

    number = getattr(episodes._host, "process_id", None)
    if number is None:
        return 0.0
    times = psutil.Process(number).cpu_times()
    return float(times.user + times.system)


def check(batch: Any, way: str, arguments: argparse.Namespace) -> int:
    """Returns the number of sampled tokens, after checking that every session has sampled them in
    one conversation.
    """
    num_tokens = int(batch.response_mask_T.sum())
    full = arguments.sessions * arguments.turns * arguments.turn_tokens
    if batch.num_samples != arguments.sessions or not 0.97 * full <= num_tokens <= full:
        sys.exit(f"{way}: {batch.num_samples} sequences with {num_tokens} tokens, not {full}")
    return num_tokens


def make_trainer(arguments: argparse.Namespace) -> Any:
    """Returns a Trainer whose agents run `talk`."""
    from hybridrl.config.load import load_config_dict
    from hybridrl.loop.trainer import Trainer

    folder = Path(tempfile.mkdtemp(prefix="bench-agents-"))
    shapes = json.loads(arguments.model.read_text())
    make_tokenizer(shapes["vocab_size"], folder / "tokenizer")
    num_sampled = arguments.turns * arguments.turn_tokens
    config = {
        "run": {"name": "bench", "dir": str(folder)},
        "model": {
            "init": str(arguments.model),
            "dtype": "bfloat16",
            "tokenizer": str(folder / "tokenizer"),
        },
        "train": {"micro_batch_tokens": 8192, "learning_rate": 1e-6},
        "rollout": {"engine": arguments.engine, "max_new_tokens": num_sampled},
        "algorithm": {"name": "grpo"},
        "data": {"max_prompt_tokens": QUESTION_TOKENS * arguments.turns},
        "agent": {
            "function": "bench_agents:talk",
            "options": {"turns": arguments.turns, "turn_tokens": arguments.turn_tokens},
            "concurrency": arguments.sessions,
            "workers": arguments.workers,
            "log_steps": 0,
        },
        "steps": {
            "prompts_per_step": arguments.sessions // 8,
            "samples_per_prompt": 8,
            "num_steps": 10_000,
        },
        "log": {"console": False, "tensorboard": False, "rollouts_every": 0},
    }
    rows = [{"prompt": QUESTION.format(turn=0, sample=n)} for n in range(arguments.sessions)]
    return Trainer.from_config(load_config_dict(config, arguments.set), prompts=rows)


def make_tokenizer(vocab_size: int, folder: Path) -> None:
    """Writes a byte-level tokenizer with a chat template, in which every token has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    texts += [f"word{number}" for number in range(vocab_size - len(texts))]
    made = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, []))
    made.add_special_tokens(list(SPECIAL))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=CHATML,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    ).save_pretrained(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="JSON file with the shapes")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=8, help="processes of the agents")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--steps-between-events",
        type=int,
        default=0,
        help="engine steps between two exchanges of requests; 0 follows the usual rule",
    )
    parser.add_argument("--profile", action="store_true", help="print profiles at the end")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
