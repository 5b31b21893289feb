"""Measures the processor time that the endpoint for agents takes per turn, without an engine.

    python benchmarks/bench_endpoint.py OUT.json --sessions 64 --turns 8

The agents are those of bench_agents.py. In place of an engine, this process draws random tokens and
answers each turn immediately. The result is refused if a conversation does not contain exactly the
tokens that were drawn.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from bench_agents import QUESTION, QUESTION_TOKENS, make_tokenizer
from transformers import AutoTokenizer

from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.endpoint import Endpoint
from hybridrl.agents.host import AgentHost, Assignment
from hybridrl.agents.host_process import HostProcess
from hybridrl.agents.host_settings import HostSettings, make_host
from hybridrl.config.agent import AgentConfig
from hybridrl.rollout.engine import Completion

VOCAB_SIZE, END = 151936, 2
Host = AgentHost | HostProcess


def main() -> int:
    """Plays all sessions once to warm up and once measured, and writes one JSON file."""
    arguments = parse()
    profile = profiled_endpoint() if arguments.profile else None
    host: Host
    if arguments.profile or arguments.in_process:
        host, _ = make_host(settings_of(arguments))
    else:
        host = HostProcess(settings_of(arguments))
    try:
        play(host, arguments, first_key=0)
        began, worked = time.perf_counter(), cpu_s(host)
        num_turns, engine_s = play(host, arguments, first_key=arguments.sessions)
        seconds = time.perf_counter() - began
        used = {name: spent - worked[name] for name, spent in cpu_s(host).items()}
    finally:
        host.close()
    used["engine"] -= engine_s
    result = {
        "benchmark": "endpoint",
        "sessions": arguments.sessions,
        "turns": num_turns,
        "turn_tokens": arguments.turn_tokens,
        "us_per_turn": {name: round(1e6 * spent / num_turns) for name, spent in used.items()},
        "seconds": round(seconds, 2),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    if profile is not None:
        print(profile_text(profile))
    return 0


def settings_of(arguments: argparse.Namespace) -> HostSettings:
    """Returns the settings of a host whose agents are `bench_agents.talk`."""
    folder = Path(tempfile.mkdtemp(prefix="bench-endpoint-"))
    make_tokenizer(VOCAB_SIZE, folder / "tokenizer")
    num_tokens = arguments.turns * (arguments.turn_tokens + QUESTION_TOKENS)
    options = {"turns": arguments.turns, "turn_tokens": arguments.turn_tokens}
    return HostSettings(
        agent=AgentConfig(
            function="bench_agents:talk",
            options=options,
            concurrency=arguments.sessions,
            workers=arguments.workers,
            log_steps=0,
        ),
        tokenizer=AutoTokenizer.from_pretrained(str(folder / "tokenizer")),
        ends=(END,),
        vocab_size=VOCAB_SIZE,
        terms=SamplingTerms(temperature=1.0, max_context=num_tokens),
        max_row_tokens=num_tokens,
        template_arguments={},
        run_folder=folder,
    )


def play(host: Host, arguments: argparse.Namespace, first_key: int) -> tuple[int, float]:
    """Plays all sessions. Returns the number of turns, and the processor time in seconds for the
    random tokens and for checks.
    """
    rng = random.Random(0)
    drawn: dict[int, list[int]] = {}
    num_turns, apart_s = 0, 0.0
    host.wake(is_evaluation=False)
    for number in range(arguments.sessions):
        question = QUESTION.format(turn=0, sample=number)
        host.begin(Assignment(first_key + number, 0, number, question, {}))
    num_left = arguments.sessions
    while num_left:
        host.wait(1.0)
        arrivals, ended = host.take(), host.take_finished()
        began, completions = time.thread_time(), []
        for request in arrivals.requests:
            tokens = [rng.randrange(END + 1, VOCAB_SIZE) for _ in range(request.max_new_tokens)]
            logps = [-rng.random() for _ in tokens]
            drawn.setdefault(request.sample_key, []).extend(tokens)
            number = request.request_id
            completions.append(Completion(number, tuple(tokens), tuple(logps), "length", 0))
        for one in ended:
            check(one, drawn.pop(one.key))
        num_turns += len(completions)
        num_left -= len(ended)
        apart_s += time.thread_time() - began
        if completions:
            host.finish(completions)
    return num_turns, apart_s


def check(finished: Any, drawn: list[int]) -> None:
    """Ends the benchmark if an episode does not train exactly the tokens that were drawn."""
    if finished.failure is not None:
        sys.exit(f"an episode failed: it {finished.failure[0]}")
    trained = [
        token
        for row in finished.result.rows
        for token, is_observed in zip(row.tokens, row.observed, strict=True)
        if not is_observed
    ]
    if trained != drawn:
        sys.exit("the rows do not train the tokens that were drawn")


def cpu_s(host: Host) -> dict[str, float]:
    """Returns the processor time of the engine's process, and that of the endpoint's process if it
    has its own.
    """
    found = {"engine": time.process_time()}
    if isinstance(host, HostProcess):
        times = psutil.Process(host.process_id).cpu_times()
        found["endpoint"] = times.user + times.system
    return found


def profiled_endpoint() -> cProfile.Profile:
    """Returns a profile of the thread that serves requests, which is filled while it runs."""
    profile, serve = cProfile.Profile(), Endpoint._serve

    def profiled(endpoint: Endpoint, port: int) -> None:
        profile.runcall(serve, endpoint, port)

    Endpoint._serve = profiled  # type: ignore[method-assign]
    return profile


def profile_text(profile: cProfile.Profile) -> str:
    """Returns the functions that took the most time."""
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(90)
    return text.getvalue()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2, help="processes of the agents")
    parser.add_argument(
        "--in-process", action="store_true", help="serve in a thread of the engine's process"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print a profile of the endpoint's thread"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
