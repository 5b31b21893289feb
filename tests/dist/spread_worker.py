"""One rank of the test of prompts over replicas: spread_worker.py FOLDER"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import FRESH, NO_EVALUATION, QUICKSTART
from small_runs import small_run

from hybridrl import Trainer
from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.contracts.batch import GREEDY, Prompt, ScoredBatch
from hybridrl.errors import UserError
from hybridrl.generation.spread import PROMPT_TOKEN_WORK
from hybridrl.loop.evaluate import EvaluationSet, evaluate
from hybridrl.parallel.exchange import collect
from hybridrl.rewards.base import Scorer
from hybridrl.rollout.engine import Request

OVERRIDES = (
    *FRESH,
    *NO_EVALUATION,
    "steps.samples_per_prompt=3",
    "reward.function=scripted_reward:digits",
    "reward.extract=null",
    "log.tensorboard=false",
)


def shares(trainer: Trainer, prompts: list[Prompt], first_group: int = 0) -> list[list[int]]:
    """Submits and returns the groups of each replica; then finishes them."""
    trainer.sampler.submit(prompts, 3, step=0, first_group=first_group)
    owners: Any = trainer.sampler._owners
    return trainer.world.gather_objects(sorted({group for _, group in owners.values()}))


def finish(trainer: Trainer) -> ScoredBatch:
    while trainer.sampler.engine.has_unfinished:
        trainer.sampler.advance()
    return trainer.sampler.score(trainer.sampler.collect())


def same(trainer: Trainer, one: ScoredBatch, two: ScoredBatch) -> bool:
    """Whether two batches have the same tokens, wherever they are; rank 0 looks."""
    a, b = (collect(batch, trainer.world) for batch in (one, two))
    if a is None or b is None:
        return True
    gap = (a.behaviour_logp_T - b.behaviour_logp_T).abs().max()
    return torch.equal(a.tokens_T, b.tokens_T) and float(gap) < 1e-5  # other batches


def check_division(found: list[list[int]], batch: ScoredBatch, prompts: list[Prompt]) -> None:
    """Compares loads by the lengths that the responses really had, which are the expected ones."""
    lengths = batch.response_lengths_B.float().view(len(prompts), 3).sum(1)
    assert lengths.unique().numel() > 2, "nothing to balance"
    pairs = zip(lengths, prompts, strict=True)
    work = [float(n) + PROMPT_TOKEN_WORK * len(p.tokens) for n, p in pairs]
    assert sorted(found[0] + found[1]) == list(range(len(prompts)))
    loads = [sum(work[group] for group in groups) for groups in found]
    more = found[0 if loads[0] > loads[1] else 1]
    assert abs(loads[0] - loads[1]) <= min(work[group] for group in more) + 1e-4


def check_dropped_groups(trainer: Trainer, prompts: list[Prompt]) -> None:
    """Every rank counts the groups that lost all samples, and goes on where all of them did."""
    sampler, scorer = trainer.sampler, trainer.sampler.scorer
    lost = {prompts[0].text, prompts[4].text}

    def refuses(prompt: str, response: str, columns: Mapping[str, object]) -> float:
        if prompt in lost:
            raise ValueError("no score")
        return 1.0

    sampler.scorer = Scorer(RewardConfig(on_error="drop"), trainer.tokenizer, refuses)
    rest = sampler.score(sampler.generate(prompts, step=0))
    assert rest.group_B.unique().tolist() == [1, 2, 3, 5, 6]
    assert sampler.metrics()["reward/dropped_groups"] == 2
    lost |= {prompt.text for prompt in prompts}
    assert sampler.score_or_none(sampler.generate(prompts[:3], step=0, first_group=7)) is None
    shown = trainer.world.gather_objects(sampler.metrics())
    assert [one["reward/dropped_groups"] for one in shown] == [5, 5]
    assert [one["reward/refuses/errors"] for one in shown] == [15, 15]
    assert len(sampler.generated) == 10, "what was dropped was generated too"

    def greedy(prompt: str, response: str, columns: Mapping[str, object]) -> float:
        return 1.0

    sampler.scorer = Scorer(RewardConfig(), trainer.tokenizer, greedy)
    with pytest.raises(UserError, match="a scorer named 'greedy'"):
        sampler.submit(prompts, 3, step=0, greedy=True)
    sampler.scorer = scorer


def check_balance_with_a_lag(folder: Path) -> None:
    """Prompts of unequal length keep both replicas at work, once it is known how long they are."""
    rows = [{"prompt": f"{number}+{number}=", "answer": "1"} for number in range(10)]
    knobs = ("steps.max_policy_lag=1", "data.shuffle=false", "rollout.max_new_tokens=40")
    with small_run(folder, *knobs, prompts=rows) as trainer:
        engine, stop = trainer.engine, trainer.sampler.sampling.stop_token_ids[0]
        step, other = engine.step, 1 + (stop == 1)

        def answer(request: Request) -> tuple[list[int], list[float]]:
            """Every other prompt has responses that are nine times as long."""
            length = 36 if request.prompt[0] % 2 else 4
            return [other] * (length - 1) + [stop], [-1.0] * length

        def timed_step() -> None:
            time.sleep(0.001 * len(engine.pending()))
            step()

        engine._script, engine.step = answer, timed_step  # type: ignore[attr-defined,method-assign]
        trainer.check_engine()
        idle = [trainer.train_step()["generate/idle_share"] for _ in range(8)]
    # 0.01 on average; 0.25 where all prompts count as equally long, as they do at first.
    assert max(idle[:2]) > 0.2 and sum(idle[3:]) / 5 < 0.1, idle


def main() -> None:
    trainer = Trainer.from_config(
        QUICKSTART / "grpo.yaml", [*OVERRIDES, f"run.dir={Path(sys.argv[1])}"]
    )
    sampler, world = trainer.sampler, trainer.world
    trainer.hybrid_engine.to_rollout(0)
    prompts = trainer.prompts.take(7)
    assert shares(trainer, prompts) == [[0, 2, 4, 6], [1, 3, 5]], "nothing is known yet: in turns"
    first = finish(trainer)
    found = shares(trainer, prompts)
    check_division(found, first, prompts)
    assert same(trainer, finish(trainer), first)

    kept = len(sampler.state()["completions"])
    assert kept == (0 if world.rank else 21), "kept until they are learned from"
    sampler.end_step()
    sampler.load_state(json.loads(json.dumps(sampler.state())))
    assert shares(trainer, prompts) == found, "expectations are in the state"
    finish(trainer)
    parts = []
    for begin, end in ((0, 3), (3, 7)):
        groups = shares(trainer, prompts[begin:end], begin)
        assert sorted(groups[0] + groups[1]) == list(range(begin, end))
        done = sampler.state()["completions"]
        assert len(done) == (0 if world.rank else 3 * begin), (
            "a checkpoint has the step's earlier calls"
        )
        parts.append(finish(trainer))
    assert same(trainer, ScoredBatch.concat(parts), first)

    expected = {}
    for group, (prompt, whole) in enumerate(zip(prompts, first.lengths_B.view(7, 3), strict=True)):
        size = len(prompt.tokens)
        expected[group] = (size, [(length, length - size) for length in whole.tolist()])
    assert sampler.generated == expected, "of both calls of the step"
    evaluate(sampler, EvaluationSet(prompts, RewardConfig()), EvalConfig())
    assert sampler.generated == expected
    best = dataclasses.replace(sampler.sampling, temperature=0.0)
    greedy = sampler.score(sampler.generate(prompts, samples_per_prompt=1, step=1, sampling=best))
    beside = sampler.score(sampler.generate(prompts, step=0, greedy=True))
    assert same(trainer, beside, first) and sorted(beside.sample_ids_B.tolist()) == list(range(21))
    assert torch.equal(beside.reward_parts[GREEDY], greedy.reward_B.repeat_interleave(3))
    assert set(first.reward_parts) == set(beside.reward_parts) - {GREEDY}

    check_dropped_groups(trainer, prompts)
    step = sampler.engine.step

    def slow_step() -> None:
        time.sleep(0.05 * world.rank)
        step()

    sampler.engine.step = slow_step  # type: ignore[method-assign]
    sampler.score(sampler.generate(prompts, step=0))
    shown = world.gather_objects(sampler.metrics())
    assert shown[0] == shown[1] and 0.1 < shown[0]["generate/idle_share"] < 0.5, shown
    trainer.close()
    check_balance_with_a_lag(Path(sys.argv[1]) / "lag")


if __name__ == "__main__":
    main()
