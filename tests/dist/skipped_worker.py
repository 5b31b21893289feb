"""One rank of the tests of skipped steps: whole Trainers on two ranks, one after the other.

    skipped_worker.py FOLDER

Prompts that begin with 9 are bad: in some runs the loss of their micro-batch is NaN, in others
their reward is so large that the loss overflows.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from command_line import QUICKSTART

from hybridrl import Trainer
from hybridrl.checkpoint.random_states import rng_state
from hybridrl.contracts.batch import TrainBatch
from hybridrl.debug.step_replay import replay
from hybridrl.errors import UserError
from hybridrl.loop.saved_batch import SavedBatch
from hybridrl.loop.trace import CLOCK, StepTraces
from hybridrl.metrics.timing import PhaseTimer, Span
from hybridrl.metrics.values import SKIPPED
from hybridrl.parallel.clock import clock_offset
from hybridrl.parallel.exchange import bring
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.platform import Platform
from hybridrl.training.update import optimizer_step

NINE = 11  # its token
PER_STEP = 4
GOOD, BAD = ["12+34=", "55+01=", "20+31=", "47+47="], ["12+34=", "98+01=", "20+31=", "95+47="]
BAD_PROMPTS = {1, 3}
OWN_FILES = {"mine.safetensors", "step_000001_update_000 (copy).safetensors"}
GRPO = {"name": "grpo", "normalize_std": False}
TRAIN = {"learning_rate": 1e-2, "micro_batch_tokens": 48, "lr_schedule": "linear"}
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A run and what is bad in it."""

    name: str
    algorithm: dict[str, Any]
    train: dict[str, Any]
    samples: int = 1
    updates: int = 1
    dtype: str = "float32"
    is_bad_reward: bool = False
    steps: list[list[str]] = field(default_factory=lambda: [GOOD, BAD, GOOD])


# Of a span that begins before a product: a busy host may start that a tenth of a second later.
OUTER_S = 0.4


def poisoned(**of: Any) -> dict[str, Any]:
    return {"name": "poisoned_algorithm:Poisoned", "options": {"token": NINE, "of": of}}


CASES = [
    Case("grpo-reward-dp2", GRPO, {}, samples=4, is_bad_reward=True),
    Case("grpo-dp2", poisoned(**GRPO), {}, samples=4, dtype="bfloat16"),
    Case("ppo-dp2", poisoned(name="ppo"), {}, samples=2),
    Case("sft-tp2", poisoned(name="sft"), {"tp": 2}, dtype="bfloat16"),
    Case("sft-pp2", poisoned(name="sft"), {"pp": 2}),
    Case("dpo-tp2", poisoned(name="dpo"), {"tp": 2}),
    Case("fused-dp2", poisoned(name="sft"), {"fuse_param_gather": True}, dtype="bfloat16"),
]


def row(prompt: str) -> dict[str, str]:
    return {"prompt": prompt, "response": "1,2", "chosen": "3,4,5", "rejected": "6"}


def reward(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    return 3e38 * (len(response) % 2 or 0.5) if prompt.startswith("9") else len(response) % 3


@contextmanager
def trainer_of(case: Case, folder: Path, **train: Any) -> Iterator[Trainer]:
    config = {
        "run": {"name": case.name, "dir": str(folder)},
        "model": {"init": str(QUICKSTART / "model"), "dtype": case.dtype},
        "train": {**TRAIN, **case.train, **train},
        "rollout": {"max_new_tokens": 6},
        "algorithm": case.algorithm,
        "data": {"shuffle": False, "max_prompt_tokens": 8},
        "steps": {
            "prompts_per_step": PER_STEP,
            "samples_per_prompt": case.samples,
            "updates_per_step": case.updates,
            "num_steps": 10,
        },
        "log": {"tensorboard": False, "console": False},
    }
    prompts = [row(prompt) for step in case.steps for prompt in step]
    scored: Callable[..., float] = reward if case.is_bad_reward else digits
    trainer = Trainer.from_config(config, prompts=prompts, reward=scored)
    yield trainer
    for part in (trainer.journal, trainer.hybrid_engine, trainer.engine):
        part.close()


def digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def state_of(trainer: Trainer) -> State:
    """Returns copies of weights, masters and Adam's states of all trained models."""
    trainer.enter_training()
    found: State = {}
    for name, model in trainer.trained.items():
        found |= {f"{name} {key}": value.clone() for key, value in model.weights().items()}
        for part in model.optimizer.chained_optimizers:
            tensors = [p for group in part.optimizer.param_groups for p in group["params"]]
            for number, tensor in enumerate(tensors):
                found[f"{name} master {number}"] = tensor.detach().clone()
                for key, value in part.optimizer.state.get(tensor, {}).items():
                    found[f"{name} {key} {number}"] = value.detach().clone()
    if trainer.algorithm.needs.rollouts:
        trainer.reshard()
    return found


def differing(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def check_case(case: Case, folder: Path) -> None:
    said: list[str] = []
    with trainer_of(case, folder) as trainer:
        trainer.skipped._notify = said.append
        if trainer.algorithm.needs.rollouts:
            trainer.reshard()
        first = trainer.train_step()
        assert first[SKIPPED] == 0 and not said, (first, said)
        before = state_of(trainer)
        counts = {name: model.num_updates for name, model in trainer.trained.items()}
        seen: list[TrainBatch] = []
        gradients = trainer.roles.gradients
        object.__setattr__(
            trainer.roles,
            "gradients",
            lambda part, *more: seen.append(part) or gradients(part, *more),
        )
        second = trainer.train_step()
        object.__setattr__(trainer.roles, "gradients", gradients)
        assert trainer.step == 2 and second[SKIPPED] == 1, second
        assert not torch.tensor(second["policy/grad_norm"]).isfinite(), second
        assert differing(before, state_of(trainer)) == []
        assert counts == {name: model.num_updates for name, model in trainer.trained.items()}
        check_said(case, trainer, said)
        trainer.enter_training()
        check_file(case, trainer, seen[0])
        assert differing(before, state_of(trainer)) == []
        third = trainer.train_step()
        assert third[SKIPPED] == 0 and trainer.skipped.in_a_row == 0, third
        assert {name for name in differing(before, state_of(trainer)) if "master" in name}
        ends = {name: model.num_updates for name, model in trainer.trained.items()}
        assert ends == {name: count + 1 for name, count in counts.items()}


def check_said(case: Case, trainer: Trainer, said: list[str]) -> None:
    """One line, the same on all ranks: the step, what, and where first."""
    assert len(said) == 1 and trainer.world.gather_objects(said) == [said] * 2, said
    assert said[0].startswith("step 2: optimizer step skipped (1 of at most 3 in a row): "), said
    value = "inf" if case.is_bad_reward else "nan"
    assert f"policy/loss is {value}" in said[0].replace("-inf", "inf"), said
    assert "in micro-batch" in said[0] and "on rank" in said[0], said


def check_file(case: Case, trainer: Trainer, part: TrainBatch) -> None:
    """The file holds the batch, and replaying it finds its bad rows."""
    file = trainer.journal.folder / "replay" / "step_000002_update_000.safetensors"
    saved = SavedBatch.read(file)
    assert part.holders is not None
    own = bring(saved.batch, part.holders.by_rank_BW, trainer.world)
    for name, value in part.columns().items():
        assert torch.equal(own.columns()[name], value), name
    assert saved.batch.prompts == part.prompts
    assert saved.batch.reward_parts.keys() == part.reward_parts.keys()
    assert (saved.step, saved.update, len(saved.rng)) == (2, 0, 2)
    report = replay(trainer.world, trainer.roles, saved)
    assert not report["is_finite"] and report["cause"] in saved.reason, report
    found = {told["row"] for told in report["models"]["policy"]["rows"]}
    bad = [i for i, prompt in enumerate(part.prompts) if prompt.text.startswith("9")]
    if case.is_bad_reward:  # a response of an advantage 0 is none; who is bad has a bad prompt
        assert found and found <= set(bad), (found, bad)
    else:
        assert found == set(bad[:8]), (found, bad)
        assert report["models"]["policy"]["parameter"].endswith("on rank 0")
    marked = [m for m in report["models"]["policy"]["micro_batches"] if m["is_bad"]]
    assert marked and all(set(micro["rows"]) & set(bad) for micro in marked)
    if "critic" in report["models"]:
        critic = report["models"]["critic"]
        assert torch.tensor(critic["grad_norm"]).isfinite() and critic["rows"] == []


def check_parts(folder: Path) -> None:
    """Of two optimizer steps of a step, the one that can be trusted is taken."""
    steps = [GOOD, [*GOOD[:2], *BAD[:2]], GOOD]
    case = Case("parts", poisoned(name="sft"), {}, updates=2, steps=steps)
    with trainer_of(case, folder) as trainer:
        trainer.train_step()
        metrics = trainer.train_step()
        assert metrics[SKIPPED] == 1 and trainer.policy.model.num_updates == 3
        files = list((trainer.journal.folder / "replay").iterdir())
        assert [file.name for file in files] == ["step_000002_update_001.safetensors"]


def check_end(folder: Path) -> None:
    """After so many in a row the run stops, on all ranks, and names the file; few are kept."""
    steps = [BAD, GOOD, BAD, BAD, BAD, BAD]
    case = Case("end", poisoned(name="dpo"), {"tp": 2}, steps=steps)
    with trainer_of(case, folder, max_skipped_steps=2) as trainer:
        before = state_of(trainer)
        replays = trainer.journal.folder / "replay"
        trainer.train_step()
        assert differing(before, state_of(trainer)) == []
        if trainer.world.rank == 0:
            for own in OWN_FILES:
                (replays / own).write_text("of the user")
        trainer.train_step()
        trainer.train_step()
        try:
            trainer.fit()
        except UserError as error:
            text = str(error)
        name = "step_000004_update_000.safetensors"
        assert text.startswith("train.max_skipped_steps: got 2 optimizer steps skipped in a row")
        assert f"--replay {replays / name}" in text, text
        kept = [f"step_{step:06d}_update_000.safetensors" for step in (1, 3, 4)]
        assert {file.name for file in replays.iterdir()} == {*kept, *OWN_FILES}
        trainer.world.gather_objects(None)
        saved = SavedBatch.read(replays / name)  # a fifth would leave no room for the first
        trainer.skipped.in_a_row = 0
        found, states = trainer.roles.gradients(saved.batch, 4), rng_state()
        assert optimizer_step(found)[SKIPPED] == 1
        trainer.skipped.add(5, 0, saved.batch, {}, found, states)
        assert len(list(replays.iterdir())) == 3 + len(OWN_FILES)
        trainer.world.gather_objects(None)


def check_exploded(folder: Path) -> None:
    """Where weights have exploded, be it on one rank alone, all ranks name the learning rate."""
    for name, symptom in (
        ("sft", "3 optimizer steps skipped in a row, at step 4: "),
        ("dpo", "returned nan at index"),
    ):
        case = Case(f"exploded-{name}", {"name": name}, {"pp": 2}, steps=[GOOD] * 4)
        with trainer_of(case, folder, learning_rate=1e-3) as trainer:
            trainer.skipped._notify = lambda text: None
            trainer.train_step()
            world = trainer.world
            if world.rank == 1:
                trainer.policy.model.weights_in_place()["0/output_layer.weight"].fill_(1e38)
            try:
                trainer.fit()
            except UserError as error:
                text = str(error)
            wanted = "0.001, at which weights grew until policy 0/output_layer.weight "
            wanted += "reaches 1.0e+38 after optimizer step 1; "
            assert text.startswith(f"train.learning_rate: got {wanted}"), text
            assert symptom in text and "Lower train.learning_rate" in text, text
            assert world.gather_objects(text) == [text] * 2


def check_unsaved(folder: Path) -> None:
    """A batch that cannot be saved does not end the run: all ranks say so and go on."""
    case = Case("unsaved", poisoned(name="sft"), {}, steps=[BAD, BAD, GOOD])
    said: list[str] = []
    with trainer_of(case, folder, max_skipped_steps=2) as trainer:
        trainer.skipped._notify = said.append
        if trainer.world.rank == 0:
            trainer.journal.folder.mkdir(parents=True, exist_ok=True)
            (trainer.journal.folder / "replay").write_text("no folder")
        trainer.world.gather_objects(None)
        metrics = trainer.train_step()
        assert metrics[SKIPPED] == 1 and trainer.step == 1
        assert trainer.world.gather_objects(said) == [said] * 2 and len(said) == 1
        assert "; batch not saved: FileExistsError: " in said[0], said
        try:
            trainer.train_step()
        except UserError as error:
            text = str(error)
        assert "The batch was not saved: FileExistsError" in text and "--replay" not in text, text
        trainer.skipped.in_a_row = 0
        assert trainer.train_step()[SKIPPED] == 1  # the step that failed, with its own prompts
        assert trainer.train_step()[SKIPPED] == 0
        check_frozen(trainer)


def check_frozen(trainer: Trainer) -> None:
    """A frozen parameter has no gradient that could be bad."""
    model = trainer.policy.model
    (_, frozen), (name, bad) = list(model.chunks[0].named_parameters())[:2]
    frozen.requires_grad_(False)
    frozen.main_grad.view(-1)[0] = torch.inf
    assert model.bad_gradient() is None
    bad.main_grad[0] = torch.inf
    assert model.bad_gradient() == f"0/{name}"
    frozen.requires_grad_()


def check_clocks(folder: Path) -> None:
    """A trace has all ranks on rank 0's clock, though rank 1's is far ahead."""
    ahead = 1000.0 * torch.distributed.get_rank()
    case = Case("clocks", {"name": "sft"}, {})

    def now() -> float:
        return time.perf_counter() + ahead

    class Timer(PhaseTimer):
        def spans(self) -> list[Span]:
            return [
                Span("inner", began + 0.01, began + 0.02),
                Span("outer", began, began + OUTER_S),
            ]

    with trainer_of(case, folder) as trainer:
        world = trainer.world
        offset, error = clock_offset(world, now)
        assert abs(offset + ahead) <= error < 0.1, (offset, error)
        traces, timer = StepTraces((4, 5), folder / "traces", world, now), Timer()
        for step in (3, 4):
            with traces.step(step, timer):
                began = now()
                torch.ones(8, 8) @ torch.ones(8, 8)
                time.sleep(OUTER_S + 0.1)
                for _ in range(2):
                    with timer.phase("generate"):
                        torch.ones(8).cumsum(0)
                with timer.phase("reward"):
                    torch.ones(8).cumprod(0)
        check_failing_trace(traces, timer)
    written = {file.name for file in (folder / "traces").iterdir()}
    assert written == {"step_4.json.gz", "step_4.phases.json"}, written
    with gzip.open(folder / "traces" / "step_4.json.gz") as file:
        trace = json.load(file)
    assert max(trace["otherData"]["clock_error_us"]) < 1e5
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ends = {
        rank: [e["ts"] + e["dur"] for e in events if e["name"] == "barrier" and e["pid"] == pid]
        for rank, pid in enumerate((0, 100))
    }
    # Both leave a barrier when both are there; the rest is this host's scheduling.
    assert all(abs(a - b) < 1e5 for a, b in zip(*ends.values(), strict=True)), ends
    for pid in (0, 100):
        outer, inner, first, after = (
            next(e for e in events if e["pid"] in (pid, pid + 1) and e["name"] == name)
            for name in ("outer", "inner", "barrier", "aten::cumprod")
        )
        assert len([e for e in events if e["pid"] == pid + 1 and e["name"] == CLOCK]) == 3
        assert first["ts"] + first["dur"] <= outer["ts"] < inner["ts"], (first, outer, inner)
        matmul = [e for e in events if e["pid"] == pid + 1 and e["name"] == "aten::mm"]
        assert len(matmul) == 1, "the host's operations are on the same clock"
        assert outer["ts"] <= matmul[0]["ts"] + 1e3 and matmul[0]["ts"] < outer["ts"] + outer["dur"]
        assert after["ts"] > outer["ts"] + outer["dur"], "the last part is on that clock too"
    assert not [e for e in events if e["name"] == "aten::cumsum"], "of an unprofiled phase"


def check_failing_trace(traces: StepTraces, timer: PhaseTimer) -> None:
    """What one rank meets while it reads its profile, the other says too."""
    rank = torch.distributed.get_rank()
    if rank == 1:
        traces._profiled = refuse
    try:
        with traces.step(5, timer):
            pass
    except RuntimeError as error:
        text = str(error)
    assert (
        text == ("", "rank 1 failed in writing a trace: RuntimeError: ")[rank == 0] + "no profile"
    )
    if rank == 1:
        del traces._profiled
    torch.distributed.barrier()
    for left in (traces._folder / "rank_0.part", traces._folder / "rank_1.part"):
        left.unlink(missing_ok=True)


def refuse(*_: object) -> Iterator[Any]:
    raise RuntimeError("no profile")


def main() -> None:
    folder = Path(sys.argv[1])
    start_process_group(Platform.detect(), 120)
    for case in CASES:
        check_case(case, folder)
        print("done", case.name, flush=True)
    check_parts(folder)
    check_end(folder)
    check_exploded(folder)
    check_unsaved(folder)
    check_clocks(folder)
    if torch.distributed.get_rank() == 0:
        (folder / "done.json").write_text(json.dumps([case.name for case in CASES]))
    stop_process_group()


if __name__ == "__main__":
    main()
