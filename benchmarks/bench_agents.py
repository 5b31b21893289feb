"""Measures how many tokens per second agents receive over the endpoint, compared with the plain
sampler on the same engine: the same weights, number of responses and number of sampled tokens.

    python benchmarks/bench_agents.py OUT.json --model benchmarks/models/qwen2.5-0.5b.json

An agent is a session of `--turns` turns. Each turn is a chat completion of `--turn-tokens` tokens,
which continues the conversation. No token ends a turn, so all ways sample the same number of
tokens. Five ways alternate; the first time of each warms up:

- `plain`: the sampler draws one response of turns x turn tokens for each session, after the prompt
  with the first question;
- `long`: the same with a prompt as long as all questions of a session, so that the numbers of
  prompt tokens are also those of the agents;
- `turns`: the same conversations as the agents', without agents and endpoint: a loop passes each
  next turn to the engine immediately;
- `lean`: agents that send JSON with aiohttp;
- `openai`: agents with the `openai` SDK.

The result is refused if an episode failed, or if a session did not sample all its turns in one
conversation. For each way, it contains where the loop that steps the engine spends its time, and
the processor time of the endpoint and of the agents (agent_times.py). `--profile` prints where the
engine's process spends its time, in one more repeat of the plain sampler and with lean agents.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_times import LoopTimes, shown

from hybridrl.generation.admission import Admission
from hybridrl.rollout.engine import SamplingParams

QUESTION = "Question {turn} of {sample}: in Oslo?"  # a token per byte
CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QUESTION_TOKENS = 100  # more than a question and the template's text around it have
AGENT_WAYS = ("lean", "openai")
WAYS = ("plain", "long", "turns", *AGENT_WAYS)


async def talk(task: Any, turns: int, turn_tokens: int | None = None) -> float:
    """Has a conversation of several turns; the agent that is measured. The data's columns `client`
    and `turn_tokens` say with which client, and how long turns are.
    """
    turn_tokens = turn_tokens or task.columns["turn_tokens"]
    ask = _ask_openai(task) if task.columns.get("client", "openai") == "openai" else _ask_lean(task)
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        question = QUESTION.format(turn=turn, sample=task.sample)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": await ask(messages, turn_tokens)})
    return 1.0


def _ask_openai(task: Any) -> Any:
    client = task.client()

    async def ask(messages: list[dict[str, str]], turn_tokens: int) -> str:
        reply = await client.chat.completions.create(
            model=task.model, messages=messages, max_tokens=turn_tokens
        )
        return reply.choices[0].message.content or ""

    return ask


def _ask_lean(task: Any) -> Any:
    import aiohttp

    if not _SHARED:  # a worker process has one event loop
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        _SHARED.append(aiohttp.ClientSession(connector=connector, timeout=timeout))
    headers = {"Authorization": f"Bearer {task.api_key}"}

    async def ask(messages: list[dict[str, str]], turn_tokens: int) -> str:
        body = {"model": task.model, "messages": messages, "max_tokens": turn_tokens}
        url = f"{task.base_url}/v1/chat/completions"
        async with _SHARED[0].post(url, json=body, headers=headers) as reply:
            reply.raise_for_status()
            return (await reply.json())["choices"][0]["message"]["content"] or ""

    return ask


_SHARED: list[Any] = []


def main(texts: Sequence[str] | None = None) -> int:
    """Measures all ways in turn, and writes one JSON file."""
    arguments = parse(texts)
    trainer = make_trainer(arguments)
    trainer.check_engine()
    measure(trainer, arguments)
    trainer.close()
    return 0


def measure(trainer: Any, arguments: argparse.Namespace) -> None:
    """Measures until all repeats are done or the time is over, and writes the result after each
    repeat.
    """
    bench = Bench(trainer, arguments)
    bench.repeat(0, arguments.turn_tokens[0])
    for way in ("plain", "lean") if arguments.profile else ():
        bench.profile(way)
    for number in range(1, arguments.repeats + 1):
        for turn_tokens in arguments.turn_tokens:
            if not bench.is_late:
                bench.repeat(number, turn_tokens)
        if number == 1:
            bench.compare_costs()


class Bench:
    """Plays sessions, and keeps their times.

    Args:
        trainer: Trainer whose engine is awake.
    """

    def __init__(self, trainer: Any, arguments: argparse.Namespace) -> None:
        self._trainer, self._arguments = trainer, arguments
        self._began, self._step = time.perf_counter(), itertools.count(10**6)
        self._prompts = trainer.prompts.take(trainer.config.steps.prompts_per_step)
        self._times = LoopTimes(trainer.sampler.engine, trainer.sampler.episodes)
        self._found: dict[int, dict[str, list[dict[str, float]]]] = {}
        self._by_cost: dict[float, dict[str, float]] = {}

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() - self._began > self._arguments.max_s

    def repeat(self, number: int, turn_tokens: int) -> None:
        """Plays all ways once with turns of a length; number 0 warms up."""
        for way in self._arguments.ways:
            one = self.play(way, turn_tokens)
            name = f"repeat {number}" if number else "warm-up"
            print(f"{way}, {turn_tokens} tokens, {name}: {one}", flush=True)
            if number:
                self._found.setdefault(turn_tokens, {}).setdefault(way, []).append(one)
            if number and self.is_late:
                break
        self._write()

    def compare_costs(self) -> None:
        """Plays lean agents with other costs of a step in which requests begin."""
        episodes = self._trainer.sampler.episodes
        for cost in self._arguments.costs:
            if self.is_late:
                break
            episodes._admission = Admission(cost)
            one = self._by_cost[cost] = self.play("lean", self._arguments.turn_tokens[0])
            print(f"lean, cost {cost:g}: {one}", flush=True)
            self._write()
        episodes._admission = Admission()

    def profile(self, way: str) -> None:
        """Prints where the engine's process spends its time."""
        profile = cProfile.Profile()
        profile.runcall(self.play, way, self._arguments.turn_tokens[0])
        for order in ("tottime", "cumulative"):
            print(f"{way}, by {order}:")
            pstats.Stats(profile, stream=sys.stdout).sort_stats(order).print_stats(60)
        sys.stdout.flush()

    def play(self, way: str, turn_tokens: int) -> dict[str, float]:
        """Generates all tokens in one way. Returns its times."""
        arguments = argparse.Namespace(**{**vars(self._arguments), "turn_tokens": turn_tokens})
        return play(self._trainer, way, self._prompts, next(self._step), self._times, arguments)

    def _write(self) -> None:
        cases = []
        for turn_tokens, repeats in self._found.items():
            rates = {
                way: statistics.median(one["tokens_per_s"] for one in found)
                for way, found in repeats.items()
            }
            shares = {
                way: round(rate / rates["plain"], 3)
                for way, rate in rates.items()
                if "plain" in rates
            }
            cases.append(
                {"turn_tokens": turn_tokens, "tokens_per_s": rates, "share_of_plain": shares}
            )
        result = {
            "benchmark": "agents",
            "model": self._arguments.model.stem,
            "sessions": self._arguments.sessions,
            "turns": self._arguments.turns,
            "workers": self._arguments.workers,
            "cases": cases,
            "tokens_per_s_by_cost": {c: one["tokens_per_s"] for c, one in self._by_cost.items()},
        }
        print(json.dumps(result), flush=True)
        result |= {"repeats": self._found, "by_cost": self._by_cost}
        self._arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def play(
    trainer: Any,
    way: str,
    prompts: Sequence[Any],
    step: int,
    times: LoopTimes,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Generates all tokens in one way. Returns its times."""
    sampler, episodes = trainer.sampler, trainer.sampler.episodes
    for prompt in prompts:
        prompt.columns["client"], prompt.columns["turn_tokens"] = way, arguments.turn_tokens
    num_sampled = arguments.turns * arguments.turn_tokens
    sampling = replace(sampler.sampling, max_new_tokens=num_sampled, stop_token_ids=())
    times.begin()
    if way == "turns":
        num_tokens = play_turns(trainer, sampling, step, arguments)
        taken = times.end()
    else:
        sampler.episodes = episodes if way in AGENT_WAYS else None
        if way == "long":
            prompts = [_lengthened(trainer.tokenizer, one, arguments.turns) for one in prompts]
        batch = sampler.generate(prompts, step=step, sampling=sampling)
        taken = times.end()
        num_tokens = int(batch.response_mask_T.sum())
        check(batch.num_samples, num_tokens, way, arguments)
        if way in AGENT_WAYS:
            sampler.score(batch)  # ends the run if an episode failed
        sampler.episodes = episodes
    return {"tokens_per_s": round(num_tokens / taken["seconds"]), **shown(taken)}


def play_turns(
    trainer: Any, sampling: SamplingParams, step: int, arguments: argparse.Namespace
) -> int:
    """Has the agents' conversations without agents. Returns the number of sampled tokens."""
    from hybridrl.rollout.engine import Request, request_seed

    sampler, engine = trainer.sampler, trainer.sampler.engine
    sampling = replace(sampling, max_new_tokens=arguments.turn_tokens)
    num_sessions = arguments.sessions
    held: dict[int, tuple[int, ...]] = {}
    num_turns = dict.fromkeys(range(num_sessions), 0)
    num_tokens = num_done = 0

    def request(sample: int) -> Request:
        turn = num_turns[sample]
        held[sample] = held.get(sample, ()) + _question_tokens(trainer.tokenizer, turn, sample)
        num_turns[sample] += 1
        number = step * 10**4 + turn * num_sessions + sample
        seed = request_seed(sampler.seed, step, sample, turn)
        return Request(number, held[sample], seed, sampling)

    engine.submit([request(sample) for sample in range(num_sessions)])
    waiting: list[int] = []
    num_running, admission = num_sessions, Admission()
    while num_done < num_sessions:
        engine.step()
        for done in engine.collect():
            sample = (done.request_id - step * 10**4) % num_sessions
            held[sample] += done.tokens
            num_tokens += len(done.tokens)
            num_running -= 1
            admission.note_lengths([len(done.tokens)])
            if num_turns[sample] < arguments.turns:
                waiting.append(sample)
            else:
                num_done += 1
        if admission.is_due(len(waiting), num_running, 1):
            engine.submit([request(sample) for sample in waiting])
            num_running += len(waiting)
            waiting = []
    check(num_sessions, num_tokens, "turns", arguments)
    return num_tokens


def _question_tokens(tokenizer: Any, turn: int, sample: int) -> tuple[int, ...]:
    """Returns the tokens of a question and of the template's text around it."""
    text = QUESTION.format(turn=turn, sample=sample)
    text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    between = f"\n{text}" if turn else text
    return tuple(tokenizer(between, add_special_tokens=False)["input_ids"])


def _lengthened(tokenizer: Any, prompt: Any, turns: int) -> Any:
    """Returns a prompt with the tokens of `turns` questions."""
    tokens: tuple[int, ...] = ()
    for turn in range(turns):
        tokens += _question_tokens(tokenizer, turn, int(prompt.tokens[-1]))
    return replace(prompt, tokens=prompt.tokens + tokens[len(prompt.tokens) :])


def check(num_sequences: int, num_tokens: int, way: str, arguments: argparse.Namespace) -> None:
    """Ends the benchmark unless every session has sampled its tokens in one conversation."""
    full = arguments.sessions * arguments.turns * arguments.turn_tokens
    if num_sequences != arguments.sessions or num_tokens != full:
        sys.exit(f"{way}: {num_sequences} sequences with {num_tokens} tokens, not {full}")


def make_trainer(arguments: argparse.Namespace) -> Any:
    """Returns a Trainer whose agents run `talk`."""
    from hybridrl.config.load import load_config_dict
    from hybridrl.loop.trainer import Trainer

    folder = Path(tempfile.mkdtemp(prefix="bench-agents-"))
    shapes = json.loads(arguments.model.read_text())
    make_tokenizer(shapes["vocab_size"], folder / "tokenizer")
    num_sampled = arguments.turns * max(arguments.turn_tokens)
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
            "options": {"turns": arguments.turns},
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


def parse(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="JSON file with the shapes")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--workers", type=int, default=8, help="processes of the agents")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--costs",
        type=float,
        nargs="*",
        default=[],
        help="costs of a step in which requests begin, to compare with the usual one",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY")
    parser.add_argument("--max-s", type=float, default=600.0, help="no repeat begins later")
    parser.add_argument("--profile", action="store_true", help="print a profile at the end")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main())
