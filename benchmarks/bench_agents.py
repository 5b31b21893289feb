"""Measures how many tokens per second agents receive over the endpoint, compared with the plain
sampler on the same engine: the same weights, number of responses and number of sampled tokens.

    python benchmarks/bench_agents.py OUT.json --model benchmarks/models/qwen2.5-0.5b.json

An agent is a session of `--turns` turns. Each turn is a chat completion of `--turn-tokens` tokens,
which continues the conversation. The plain sampler draws one response of turns x turn tokens for
each session. Both ways alternate; the first time of each warms up. The weights are random, so
almost no turn ends early; the tokens that were really sampled are counted.

The result is refused if an episode failed, or if a session did not sample all its turns in one
conversation.
"""

from __future__ import annotations

import argparse
import json
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
    sys.setswitchinterval(arguments.switch_interval_s)
    trainer = make_trainer(arguments)
    trainer.check_engine()
    prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
    episodes, rates = trainer.sampler.episodes, dict[str, list[float]]()
    cpu_s: dict[str, list[float]] = {}
    step = 10**6
    for repeat in range(arguments.repeats + 1):
        for way in ("agents", "plain"):
            trainer.sampler.episodes = episodes if way == "agents" else None
            step += 1
            began, worked = time.perf_counter(), time.process_time()
            batch = trainer.sampler.generate(prompts, step=step)
            taken = time.perf_counter() - began
            used = time.process_time() - worked
            num_tokens = check(batch, way, arguments)
            if way == "agents":
                trainer.sampler.score(batch)  # ends the run if an episode failed
            print(
                f"{way}, {f'repeat {repeat}' if repeat else 'warm-up'}: {taken:.2f} s, "
                f"CPU {used:.2f} s, {num_tokens} tokens, {num_tokens / taken:,.0f} tokens/s",
                flush=True,
            )
            if repeat:
                rates.setdefault(way, []).append(num_tokens / taken)
                cpu_s.setdefault(way, []).append(used)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    result = {
        "benchmark": "agents",
        "model": arguments.model.stem,
        "sessions": arguments.sessions,
        "turns": arguments.turns,
        "turn_tokens": arguments.turn_tokens,
        "switch_interval_s": arguments.switch_interval_s,
        "tokens_per_s": {way: [round(one) for one in found] for way, found in rates.items()},
        "process_cpu_s": {way: [round(one, 2) for one in found] for way, found in cpu_s.items()},
        "agents_to_plain": round(medians["agents"] / medians["plain"], 3),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    trainer.close()
    return 0


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
        "--switch-interval-s", type=float, default=0.005, help="see sys.setswitchinterval"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
