"""A run folder such as a long run leaves, for the report: everything that its page can show."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from hybridrl.metrics.values import STEP_KEYS

SECONDS = dict(generate=22, reward=1.5, logprobs=5, advantages=0.1, update=17, reshard=0.8)
HOSTILE = (
    "</script><script>window.owned = 1; document.title = 'owned'</script><img src=x onerror=1>"
)
WORDS = ("Let", "us", "add", "both", "numbers", ",", "then", "x^2", "= 25", "so", "is", "42")
CONFIG = """run: {{name: long}}
model: {{path: Qwen/Qwen3-8B}}
data: {{prompts: [train.jsonl]}}
algorithm: {{name: grpo}}
train: {{tp: {tp}, pp: 1, cp: 1}}
rollout: {{engine: vllm, tp: 2}}
steps: {{num_steps: {steps}}}
"""


def write_run(folder: Path, num_steps: int, samples_per_dump: int, seed: int = 0) -> None:
    """Writes a run of 8 ranks with 20 dumps and one traced step."""
    rng = random.Random(seed)
    for name in ("rollouts", "traces"):
        (folder / name).mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as out:
        for step in range(1, num_steps + 1):
            out.write(json.dumps(_record(step, num_steps, rng)) + "\n")
    for step in range(num_steps // 20, num_steps + 1, num_steps // 20):
        with (folder / "rollouts" / f"step_{step:06d}.jsonl").open("w") as out:
            for number in range(samples_per_dump):
                out.write(json.dumps(_sample(number, step, rng)) + "\n")
    lanes = {"step": 10, "ranks": {rank: _spans(rank, rng) for rank in range(8)}}
    (folder / "traces" / "step_10.phases.json").write_text(json.dumps(lanes))
    (folder / "config.yaml").write_text(CONFIG.format(tp=2 + seed, steps=num_steps))
    start = {"began": "2026-11-20 08:12:04 UTC", "world_size": 8, "hosts": 1, "device": "H100"}
    start |= {"version": "0.1.0", "commit": "0" * 40, "ended": "2026-11-22 19:01:55 UTC"}
    (folder / "run.json").write_text(json.dumps({"starts": [{**start, "exit": "finished"}]}))


def _record(step: int, num_steps: int, rng: random.Random) -> dict[str, Any]:
    t = step / num_steps
    times = {phase: mean * rng.lognormvariate(0, 0.12) for phase, mean in SECONDS.items()}
    found: dict[str, Any] = {"step": step, **{key: abs(rng.gauss(1, 0.1)) for key in STEP_KEYS}}
    found |= {f"time_s/{p}": v for p, v in times.items()} | {"time_s/step": sum(times.values()) + 1}
    found |= {f"time_min_s/{p}": v * rng.uniform(0.6, 1) for p, v in times.items()}
    found |= {f"slowest_rank/{p}": float(rng.randrange(8)) for p in times}
    found |= {"reward/mean": 1 / (1 + math.exp(4 - 8 * t)) + rng.gauss(0, 0.04)}
    found |= {"reward/math/mean": 0.8 * t + rng.gauss(0, 0.03), "reward/format/mean": min(1, 3 * t)}
    found |= {"policy/loss": rng.gauss(0, 0.01), "policy/kl": 0.02 * t * rng.lognormvariate(0, 0.3)}
    found |= {"policy/learning_rate": 1e-6 * min(1, step / 50), "train/skipped_steps": 0.0}
    found |= {"mismatch/logprob_diff_mean": 8e-3 * rng.lognormvariate(0, 0.1)}
    found |= {"mismatch/correlation": 1 - 1e-3 * rng.random(), "lag/mean": 0.6, "lag/max": 2.0}
    found |= {"response_tokens/mean": 600 + 900 * t, "response_tokens/truncated": 0.1 * t}
    found |= {"lag/token_share/0": 0.7, "lag/token_share/1": 0.3 - 0.1 * (step % 2)}
    found |= {"lag/token_share/2": 0.1} if step % 2 else {}
    found |= {f"moe/max_load/layer_{i}": 1.5 + i / 20 + rng.gauss(0, 0.05) for i in range(28)}
    found |= {"moe/max_load": 1.8 + rng.gauss(0, 0.1), "moe/unused_experts": 3 * (1 - t)}
    found |= {"environment/turns_mean": 2 + t, "environment/truncated_turns": 0.1}
    found |= {f"memory/peak_gib/{phase}": 40 + 3 * i for i, phase in enumerate(SECONDS)}
    if step % 50 == 0:
        found |= {"eval/accuracy": 0.3 + 0.5 * t, "eval/accuracy_stderr": 0.015}
        found |= {"eval/aime/accuracy": 0.3 * t, "eval/aime/accuracy_stderr": 0.05}
    if step == num_steps // 2:
        found["policy/loss"] = None
    return found


def _sample(number: int, step: int, rng: random.Random) -> dict[str, Any]:
    size = rng.randrange(60, 300)
    pieces = [(" " if i else "") + rng.choice(WORDS) for i in range(size)]
    if number == 3:
        pieces[0] = HOSTILE
    wide = [30 if rng.random() < 0.02 else 1 for _ in pieces]
    turns = [[0, size // 2], [1, size // 6], [0, size - size // 2 - size // 6]]
    return {
        "sample": number,
        "group": number // 8,
        "prompt": f"What is {number} + {step}? " * 3,
        "response": "".join(pieces),
        "reward": round(rng.random(), 3),
        "parts": {"math": float(rng.random() > 0.5), "format": 1.0},
        "finished": rng.random() > 0.1,
        "answer": str(number + step),
        "versions": [[step - 2, size // 3], [step - 1, size - size // 3]],
        "chars": [len(piece) for piece in pieces],
        "logp_mnat": [-int(1000 * rng.expovariate(1.5)) for _ in pieces],
        "diff_mnat": [int(1000 * rng.gauss(0, 0.02) * times) for times in wide],
        **({"turns": turns} if rng.random() < 0.3 else {}),
    }


def _spans(rank: int, rng: random.Random) -> list[list[Any]]:
    at, found = 0.0, []
    for phase, mean in SECONDS.items():
        end = at + mean * (1.25 if (rank, phase) == (5, "update") else rng.uniform(0.8, 1))
        found.append([phase, round(at, 4), round(end, 4)])
        at = max(at + mean, end)
    return found
