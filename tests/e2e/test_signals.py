"""Signals during training: saved, ended, and gone on from as if nothing had happened.

One rank, in this process; several ranks and the launcher are in test_resume.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import QUICKSTART
from small_runs import small_run

from hybridrl import Trainer
from hybridrl.loop.evaluate import Evaluation
from hybridrl.parallel import stopping

NAME = "quickstart-grpo"
KNOBS = (
    "steps.num_steps=12",
    "steps.updates_per_step=2",
    "steps.eval_every=1",
    f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}",
    "data.eval_limit=4",
    "train.learning_rate=1e-3",
    "algorithm.kl_coef=0.1",
    "rollout.engine=hf",
    "rollout.max_new_tokens=6",
)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def signal_in(part: Any, method: str, number: int, call: int = 1) -> Callable[[], bool]:
    """Sends a signal in the n-th call of a method from now on; returns whether it was."""
    real, calls = getattr(part, method), []

    def called(*given: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            delattr(part, method)
            send(number)
        return real(*given, **named)

    setattr(part, method, called)
    return lambda: len(calls) >= call


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.model.weights().items()}


def records(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the metrics by step, of several records of a step together; no times."""
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / NAME / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {k: v for k, v in record.items() if k.split("/")[0] in ("policy", "reward", "eval")}
        found.setdefault(record["step"], {}).update(kept)
    return found


def moments(trainer: Trainer) -> list[tuple[str, Any, str, int]]:
    """(what is said to be saved, object, method, which of its calls)."""
    t, sampler, begun = trainer, trainer.sampler, "all responses so far"
    return [
        ("nothing has changed", sampler, "generate", 1),  # the first evaluation
        (begun, sampler, "score", 1),  # of its responses
        (begun, sampler, "advance", 3),
        (begun, sampler, "advance", 1),  # the same step's generation again
        (begun, sampler, "score_or_none", 1),
        (begun, t, "add_columns", 1),
        (begun, t.algorithm, "advantages", 2),
        ("saved to", t, "update", 1),
        ("saved to", t.policy, "gradients", 2),
        ("saved to", t.hybrid_engine, "to_rollout", 3),
        ("saved to", t._run.evaluation, "measure", 2),
        ("nothing has changed", sampler, "generate", 1),  # the evaluation that was left out
        (begun, t.journal, "log", 1),
        (begun, t.checkpoints, "save", 1),
    ]


def test_at_any_moment_a_run_saves_and_goes_on_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_run(tmp_path / "whole", *KNOBS) as trainer:
        expected = trainer.fit()
        whole = weights(trainer)
    with small_run(tmp_path / "cut", *KNOBS, "log.console=true", "checkpoint.every=5") as trainer:
        for i, (kept, *where) in enumerate(moments(trainer)):
            number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[i % 3]
            was_sent = signal_in(*where[:2], number, where[2])
            began = time.monotonic()
            with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
                trainer.fit()
            assert time.monotonic() - began < 30
            assert was_sent(), where
            if number != signal.SIGINT:
                assert isinstance(ended.value, SystemExit) and ended.value.code == 143
            else:
                assert isinstance(ended.value, KeyboardInterrupt)
            said = capsys.readouterr().out
            name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
            stopped = f"stopped by {name} after step {trainer.step} of 12: "
            assert stopped in said, (where, said)
            assert kept in said, (where, said)
            assert ("all responses so far" in said) == ("responses" in kept), (where, said)
            assert (tmp_path / "cut" / NAME / "checkpoints").exists() == (i > 0)
        assert 3 < trainer.step < 12
        again = trainer.fit()
        assert {**again, "seconds": 0} == {**expected, "seconds": 0}
        found = weights(trainer)
        assert trainer.step == 12 and sorted(map(int, trainer.evaluations.by_step)) == list(
            range(13)
        )
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_another_process_goes_on_with_what_was_generated(tmp_path: Path) -> None:
    knobs = ("rollout.engine=hf", "rollout.max_new_tokens=6", "steps.num_steps=2")
    with small_run(tmp_path, *knobs) as trainer:
        signal_in(trainer.sampler, "advance", signal.SIGTERM, 3)
        with pytest.raises(SystemExit):
            trainer.fit()
    state = json.loads((tmp_path / NAME / "checkpoints/step_0/state.json").read_text())["rollouts"]
    assert len(state["requests"]) + len(state["completions"]) == 8
    assert any(request["tokens"] for request in state["requests"]), state
    with small_run(tmp_path, *knobs) as trainer:
        trainer.fit()
        assert trainer.step == 2
        assert trainer.sampler.state()["requests"] == trainer.sampler.state()["completions"] == []


def test_a_run_that_began_without_evaluations_is_not_evaluated_at_every_start(
    tmp_path: Path,
) -> None:
    evaluated = (f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}", "data.eval_limit=4")
    with small_run(tmp_path, "steps.num_steps=2") as trainer:
        trainer.fit()
    more = ("steps.num_steps=6", "steps.eval_every=0", *evaluated)
    for _ in range(2):
        with small_run(tmp_path, *more) as trainer:
            signal_in(trainer, "update", signal.SIGTERM)
            with pytest.raises(SystemExit):
                trainer.fit()
    with small_run(tmp_path, *more) as trainer:
        trainer.fit()
        assert set(trainer.evaluations.by_step) == {"2", "6"}


def test_a_run_that_fails_is_not_evaluated_at_every_start_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_run(tmp_path, "steps.num_steps=2") as trainer:
        trainer.fit()
    evaluated = (f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}", "data.eval_limit=4")
    found = []
    for _ in range(2):
        with small_run(tmp_path, "steps.num_steps=6", "steps.eval_every=0", *evaluated) as trainer:
            counted: list[Evaluation] = []

            def evaluate(
                counted: list[Evaluation] = counted,
                own: Callable[[], Evaluation] = trainer._run.evaluation.measure,
            ) -> Evaluation:
                counted.append(own())
                return counted[-1]

            monkeypatch.setattr(trainer._run.evaluation, "measure", evaluate)
            monkeypatch.setattr(trainer, "train_step", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.fit()
            found.append(len(counted))
    assert found == [1, 0]


def test_a_second_signal_ends_the_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndedError(Exception):
        pass

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(stopping.os, "_exit", end)
    monkeypatch.setattr(stopping, "SAME_SIGNAL_S", 0.2)
    with small_run(tmp_path, "steps.num_steps=1") as trainer:
        monkeypatch.setenv("RANK", "0")  # else a second SIGINT is a KeyboardInterrupt

        def twice(*given: Any) -> None:
            send(signal.SIGTERM)
            send(signal.SIGINT)  # handed on by somebody: the same
            time.sleep(0.3)
            send(signal.SIGTERM)
            raise AssertionError("it lives")

        trainer.algorithm.advantages = twice  # type: ignore[method-assign]
        with pytest.raises(EndedError, match="143"):
            trainer.fit()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_where_a_run_cannot_save_it_says_so(tmp_path: Path) -> None:
    with small_run(tmp_path, "steps.num_steps=2") as trainer:
        signal_in(trainer, "update", signal.SIGTERM)
        shutil.rmtree(tmp_path / NAME, ignore_errors=True)
        (tmp_path / NAME).mkdir()
        (tmp_path / NAME / "checkpoints").write_text("in the way")
        with pytest.raises(Exception, match="checkpoints"):
            trainer.fit()
