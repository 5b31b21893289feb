"""Agents in a run: what is trained is what was sampled, updates in the middle, and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_line import ROOT, records, run, start
from packaged import PACKAGED

from hybridrl import Trainer
from hybridrl.contracts.batch import ScoredBatch
from hybridrl.rollout.engine import Completion, Request

MODEL = ROOT / "examples" / "calculator" / "model"
AGENTS = ROOT / "examples" / "agents"


def config_of(folder: Path, agent: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, dict[str, Any]] = {
        "run": {"name": "agents", "dir": str(folder)},
        "model": {"init": str(MODEL)},
        "train": {"micro_batch_tokens": 512},
        "rollout": {"max_new_tokens": 50},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(MODEL.parent / "train.jsonl"), "max_prompt_tokens": 6},
        "agent": agent,
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 4, "num_steps": 3},
        "log": {"tensorboard": False, "console": False},
        "checkpoint": {"every_s": 0},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


class Recording:
    """Records the requests that an engine received and the turns that it sampled."""

    def __init__(self, trainer: Trainer) -> None:
        self.requests: dict[int, Request] = {}
        self.turns: list[tuple[Request, Completion]] = []
        submit, collect = trainer.engine.submit, trainer.engine.collect

        def submitted(requests: Sequence[Request]) -> None:
            submit(requests)
            self.requests |= {one.request_id: one for one in requests}

        def collected() -> list[Completion]:
            found = collect()
            self.turns += [(self.requests[one.request_id], one) for one in found]
            return found

        trainer.engine.submit = submitted  # type: ignore[method-assign]
        trainer.engine.collect = collected  # type: ignore[method-assign]

    def check(self, batch: ScoredBatch) -> int:
        """Checks that each sampled token is trained once, as sampled; returns their number."""
        num_seen_T = torch.zeros(batch.num_tokens, dtype=torch.int64)
        for request, done in self.turns:
            path = torch.tensor([*request.prompt, *done.tokens])
            begin, fits = len(request.prompt), []
            for row in range(batch.num_samples):
                start, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
                here = slice(start + begin, start + len(path))
                is_path = end - start >= len(path)
                is_path = is_path and torch.equal(batch.tokens_T[start : start + len(path)], path)
                if is_path and bool(batch.response_mask_T[here].all()):
                    logps = torch.tensor(done.logps)
                    versions = [v for v, num in done.runs for _ in range(num)]
                    found = [int(batch.versions_B[row])] * len(done.tokens)
                    if batch.versions_T is not None:
                        found = batch.versions_T[here].tolist()
                    if torch.equal(batch.behaviour_logp_T[here], logps) and found == versions:
                        fits.append(here)
            assert fits, "a sampled turn is not trained"
            fresh = [here for here in fits if not num_seen_T[here].any()]
            assert fresh, "two turns are trained as one"
            num_seen_T[fresh[0]] += 1
        assert torch.equal(num_seen_T, batch.response_mask_T.long()), "trained, but not sampled"
        return int(num_seen_T.sum())


def test_each_sampled_token_of_branching_agents_is_trained_once(tmp_path: Path) -> None:
    agent = {"function": "own_agents:branching", "max_turn_tokens": 6}
    trainer = Trainer.from_config(config_of(tmp_path, agent))
    trainer.check_engine()
    recording = Recording(trainer)
    prompts = trainer.prompts.take(2)
    scored = trainer.sampler.score(trainer.sampler.generate(prompts, step=0))
    assert scored.sequence_B is not None and len(recording.turns) == 5 * 8
    num_tokens = recording.check(scored)
    samples = scored.by_sample()
    assert samples.sample_ids_B.tolist() == list(range(8))
    assert samples.reward_B.tolist() == [0, 1] * 4
    assert int(samples.response_lengths_B.sum()) == num_tokens
    # Two subagents and a conversation of its own.
    assert scored.sequences.counts_E is not None
    assert scored.sequences.counts_E.tolist() == [3] * 8
    trainer.sampler.end_step()
    metrics = trainer.train_step()
    assert metrics["agent/sequences_mean"] == 3 and metrics["agent/failed"] == 0
    assert metrics["mismatch/logprob_diff_max"] < 1e-4  # the trainer reads the same tokens
    trainer.close()


@pytest.mark.full
@pytest.mark.parametrize("on_error", ["drop", "value"])
def test_agents_without_a_turn_and_agents_at_a_limit(tmp_path: Path, on_error: str) -> None:
    reward = {"on_error": on_error} | ({"error_value": -1.0} if on_error == "value" else {})
    agent = {"function": "own_agents:quiet_for_some"}
    trainer = Trainer.from_config(config_of(tmp_path, agent, reward=reward))
    trainer.check_engine()
    scored = trainer.sampler.score(trainer.sampler.generate(trainer.prompts.take(2), step=0))
    if on_error == "drop":
        assert scored.sample_ids_B.tolist() == [0, 2, 4, 6]
    else:
        # A token that no agent requested is scored in evaluations, but never trained.
        assert scored.reward_B.tolist() == [1] * 4
        prompts = trainer.prompts.take(2)
        scored = trainer.sampler.score(trainer.sampler.generate(prompts, step=-1))
        assert scored.reward_B.tolist() == [1, -1] * 4
    assert trainer.sampler.metrics()["agent/failed"] == 0.5
    trainer.close()
    agent = {"function": "own_agents:greedy", "max_turns": 3}
    config = config_of(tmp_path, agent, run={"name": "limited"})
    trainer = Trainer.from_config(config)
    metrics = trainer.train_step()
    ended = metrics["agent/truncated_turns"] + metrics["agent/truncated_tokens"]
    assert ended == 1 and metrics["agent/failed"] == 0 and metrics["reward/mean"] == 0
    trainer.close()


@pytest.mark.full
def test_sessions_continue_over_an_update_of_the_weights(tmp_path: Path) -> None:
    agent = {"function": "own_agents:slow_for_some", "options": {"folder": str(tmp_path)}}
    steps = {"max_policy_lag": 1, "prompts_per_step": 1, "num_steps": 4}
    config = config_of(tmp_path, agent, steps=steps, rollout={"in_flight": 2})
    trainer = Trainer.from_config(config)
    trainer.enter_rollout()
    recording = Recording(trainer)
    trained: list[ScoredBatch] = []
    score = trainer.sampler.score_or_none

    def scored(local: Any) -> ScoredBatch | None:
        found = score(local)
        if found is not None:
            trained.append(found)
        return found

    trainer.sampler.score_or_none = scored  # type: ignore[method-assign]
    trainer.train_step()  # group 0, while group 1 waits between two turns
    assert trained[0].group_B.unique().tolist() == [0]
    assert trainer.sampler.in_flight.num_unfinished() == 4
    (tmp_path / "go_on").touch()
    trainer.train_step()  # group 1 must not become older
    assert trained[1].group_B.unique().tolist() == [1]
    versions_T = trained[1].versions_T
    assert versions_T is not None
    assert set(versions_T[trained[1].response_mask_T].tolist()) == {0, 1}
    own = {0: [], 1: []}  # type: dict[int, list[tuple[Request, Completion]]]
    for request, done in recording.turns:
        rows = [
            batch
            for batch in trained
            if any(
                tuple(tokens[: len(request.prompt) + len(done.tokens)])
                == (*request.prompt, *done.tokens)
                for tokens in _rows(batch)
            )
        ]
        for number, batch in enumerate(trained):
            if any(batch is one for one in rows):
                own[number].append((request, done))
    for number, batch in enumerate(trained):
        recording.turns = own[number]
        assert recording.check(batch) > 0
    trainer.close()


def _rows(batch: ScoredBatch) -> list[list[int]]:
    return [part.tolist() for part in batch.tokens_T.split(batch.lengths_B.tolist())]


PROGRAM = """
import json, os, pathlib, time, urllib.request
task = json.load(open(os.environ["HYBRIDRL_TASK"]))
folder = pathlib.Path(os.environ["FOLDER"])
messages = [{"role": "user", "content": task["prompt"]}]
port = os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]
(folder / f"port_{port}").touch()
for turn in range(2):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **key},
    )
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said or ""}, {"role": "user", "content": "1="}]
    if task["step"] == 1:
        (folder / f"in_{os.getpid()}").touch()
        while not (folder / "go_on").exists():
            time.sleep(0.02)
json.dump({"reward": task["sample"] % 2}, open(os.environ["HYBRIDRL_RESULT"], "w"))
"""


def command(folder: Path) -> dict[str, Any]:
    program = folder / "agent.py"
    program.write_text(PROGRAM)
    words = [sys.executable, "-S", str(program)]
    return {"command": words, "env": {"FOLDER": str(folder)}, "max_turn_tokens": 6}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return file


@pytest.mark.full
@pytest.mark.dist
def test_after_a_kill_in_the_middle_of_episodes_they_begin_again(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "every_s": 0}
    config = config_of(tmp_path, command(tmp_path), checkpoint=checkpoint)
    file = write_config(tmp_path, config)
    process = start(["train", file, "--world", "2"])
    until = time.monotonic() + 120
    while not (found := list(tmp_path.glob("in_*"))):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    text = run("top", tmp_path / "agents")
    assert "agents:" in text
    for child in psutil.Process(process.pid).children(recursive=True):
        os.kill(child.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    programs = [int(one.name.removeprefix("in_")) for one in found]
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in programs):
        assert time.monotonic() < until
        time.sleep(0.05)
    (tmp_path / "go_on").touch()
    run("train", file, "--world", "2")
    steps = records(tmp_path / "agents")
    assert [one["step"] for one in steps] == [1, 2, 3]
    for one in steps:
        assert one["reward/mean"] == 0.5 and one["agent/turns_mean"] == 2
        assert one["mismatch/logprob_diff_max"] < 1e-4


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("engine", PACKAGED)
def test_two_replicas_of_two_ranks_serve_programs(tmp_path: Path, engine: str) -> None:
    (tmp_path / "go_on").touch()
    rollout = {"engine": engine, "tp": 2}
    config = config_of(tmp_path, command(tmp_path), rollout=rollout, steps={"num_steps": 2})
    run("train", write_config(tmp_path, config), "--world", "4", timeout_s=400)
    assert len(list(tmp_path.glob("port_*"))) == 2  # each replica has an address
    for one in records(tmp_path / "agents"):
        assert one["reward/mean"] == 0.5 and one["agent/turns_mean"] == 2
        assert one["mismatch/logprob_diff_max"] < 1e-4


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("engine", ["hf", *PACKAGED])
def test_programs_outside_play_the_tasks_of_all_replicas(tmp_path: Path, engine: str) -> None:
    tp = 1 if engine == "hf" else 2
    config = config_of(
        tmp_path,
        {"server": True, "max_turn_tokens": 6},
        rollout={"engine": engine, "tp": tp},
        data={"eval_prompts": str(MODEL.parent / "heldout.jsonl"), "eval_limit": 8},
        steps={"num_steps": 2, "eval_every": 2, "max_policy_lag": 2 - tp},
    )
    folder = tmp_path / "agents"
    process = start(["train", write_config(tmp_path, config), "--world", "2"])
    until = time.monotonic() + 200
    while len(list((folder / "agents").glob("replica_*.json"))) < 2 // tp:
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.1)
    words = ("hybridrl.agents.outside", str(folder), "own_agents:twice")
    options = ("--options", json.dumps({"folder": str(tmp_path)}))
    paths = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    program = subprocess.run(
        [sys.executable, "-m", *words, *options],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert program.returncode == 0, program.stderr
    served = Counter(one.name.partition("_")[0] for one in tmp_path.glob("*_[0-9]*"))
    assert served == {"training": 2 // tp, "evaluation": 2 // tp}  # every replica
    steps = records(folder)
    assert [one["step"] for one in steps] == [1, 2]
    for one in steps:
        assert one["reward/mean"] == 0.5 and one["agent/turns_mean"] == 2
        if tp == 2:  # without a lag, the policy that sampled is the policy that trains
            assert one["mismatch/logprob_diff_max"] < 1e-4
