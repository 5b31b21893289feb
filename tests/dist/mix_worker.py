"""One rank of the tests of mixed algorithms: whole Trainers on two ranks or four, one after the
other, always with two replicas.

mix_worker.py FOLDER gradients|steps|more
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from command_line import QUICKSTART
from parity_worker import gradients_in_hf_names
from skipped_worker import NINE, differing, state_of

from hybridrl import Trainer
from hybridrl.debug.step_replay import replay
from hybridrl.errors import DataError, UserError
from hybridrl.loop.saved_batch import SavedBatch
from hybridrl.metrics.values import SKIPPED
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.platform import Platform
from hybridrl.roles.policy import TERM_TEMPERATURE, LossTerm, Policy

# fp32 sums in another order: of the largest gradient.
GRADIENT_TOLERANCE = 1e-6
PROMPTS = [f"{a}{b}+{b}{a}=" for a in range(1, 9) for b in range(1, 9)]
WEIGHTS = {"sft": 0.3, "pairs": 1.5, "labels": 2.0}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {"name": "sft"},
    "pairs": {"name": "dpo", "beta": 0.5},
    "labels": {"name": "kto", "beta": 0.5},
}
POISONED = {
    "name": "poisoned_algorithm:Poisoned",
    "options": {"token": NINE, "of": {"name": "sft"}},
}


def digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def row(prompt: str, number: int) -> str:
    fields = {
        "prompt": prompt,
        "response": f"{prompt[0]},2",
        "chosen": f"3,{prompt[1]},5",
        "rejected": "6",
        "label": number % 3 > 0,
    }
    return json.dumps(fields) + "\n"


def write_rows(folder: Path) -> None:
    """Rows for all kinds of terms; of `spoilt.jsonl` the ninth and tenth begin with 9."""
    good = [row(prompt, number) for number, prompt in enumerate(PROMPTS[:30])]
    (folder / "rows.jsonl").write_text("".join(good))
    spoilt = [*good[:8], row("98+01=", 8), row("95+47=", 9), *good[8:14]]
    (folder / "spoilt.jsonl").write_text("".join(spoilt))


def terms(folder: Path, weights: Mapping[str, float], rows: int = 6) -> dict[str, Any]:
    data = {"prompts": str(folder / "rows.jsonl"), "max_prompt_tokens": 8}
    return {
        name: {
            "algorithm": ALGORITHMS[name],
            "data": data,
            "weight": weight,
            "prompts_per_step": rows,
        }
        for name, weight in weights.items()
    }


@contextmanager
def trainer_of(
    folder: Path,
    name: str,
    mix: dict[str, Any],
    given: Mapping[str, list[dict[str, Any]]] | None = None,
    **changes: Any,
) -> Iterator[Trainer]:
    tp = int(os.environ["WORLD_SIZE"]) // 2
    config: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder)},
        "model": {"init": str(QUICKSTART / "model"), "dtype": "float32"},
        "train": {
            "tp": tp,
            "learning_rate": 1e-2,
            "micro_batch_tokens": 48,
            "clip_grad": 0.0,
        },
        "rollout": {"max_new_tokens": 6, "temperature": 0.7},
        "algorithm": {"name": "grpo", "kl_coef": 0.1},
        "mix": mix,
        "data": {"max_prompt_tokens": 8},
        "steps": {"prompts_per_step": 4, "samples_per_prompt": 4, "num_steps": 10},
        "log": {"tensorboard": False, "console": False},
        "checkpoint": {"keep": 9},
    }
    for key, value in changes.items():
        config[key] = {**config[key], **value} if key != "algorithm" else value
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = Trainer.from_config(config, prompts=rows, reward=digits, mix=given)
    if trainer.algorithm.needs.rollouts:
        trainer.reshard()
    yield trainer
    for part in (trainer.journal, trainer.hybrid_engine, trainer.engine):
        part.close()


def held(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The reduced gradients that this rank's optimizer owns, in float64 and HF coordinates."""
    found = gradients_in_hf_names(trainer.policy.model)
    return {name: (gradient * mask).double() for name, (gradient, mask) in found.items()}


def check_gradients(folder: Path, name: str, **changes: Any) -> None:
    """The gradient of a mixed step is the weighted sum of those of its parts alone."""
    with trainer_of(folder, name, terms(folder, WEIGHTS), **changes) as trainer:
        first = trainer.train_step()  # policy and reference differ from now on
        # Until then they were one model, also at the temperature of terms.
        assert abs(first["pairs/loss"] - math.log(2)) < 1e-5, first
        assert abs(first["labels/preference/kl"]) < 1e-5, first
        assert 0 < first["policy/entropy"] < math.log(15), "a mean over tokens"
        policy, roles = trainer.policy, trainer.roles
        scored = trainer.sampler.score(trainer.sampler.generate(trainer.prompts.take(4)))
        trainer.enter_training()
        batch = trainer.algorithm.advantages(trainer.add_columns(scored))
        before_T = policy.logprobs(batch)
        batches = next(trainer.mix.batches(roles, 1, True))
        mixed = [
            LossTerm(name, roles.terms[name].algorithm, roles.terms[name].weight, of_term)
            for name, of_term in batches.items()
        ]
        metrics = policy.gradients(batch, terms=mixed).metrics
        found = held(trainer)
        alone = policy.gradients(batch)
        expected = held(trainer)
        sizes = {"main": largest(expected)}
        for key, value in alone.metrics.items():
            if key not in ("policy/grad_norm", "policy/learning_rate"):
                assert metrics[key] == value, (key, metrics[key], value)
        for term in mixed:
            own = Policy(policy.model, term.algorithm, 10, TERM_TEMPERATURE).gradients(term.batch)
            part = held(trainer)
            sizes[term.name] = largest(part) * term.weight
            expected = {n: g + term.weight * part[n] for n, g in expected.items()}
            if term.name == "sft":
                assert metrics["sft/loss"] == own.loss > 1, metrics
        assert metrics["pairs/loss"] > 0.02 and metrics["labels/loss"] > 0.1, metrics
        assert {"pairs/preference/accuracy", "labels/preference/kl"} <= metrics.keys()
        worst = largest({n: found[n] - g for n, g in expected.items()})
        size = largest(expected)
        # Every part is of a size that would be missed.
        missed = [n for n, one in sizes.items() if one < 0.1 * size]
        assert size > 0 and not missed, (sizes, size)
        assert worst <= GRADIENT_TOLERANCE * size, (name, worst / size)
        print(f"{name}: {worst / size:.1e} of the largest gradient; {sizes}", flush=True)
        after_T = policy.logprobs(batch)
        assert torch.equal(before_T, after_T), "the temperature is the policy's own again"
        assert not torch.equal(before_T, policy.logprobs(batch, TERM_TEMPERATURE))


def largest(gradients: Mapping[str, torch.Tensor]) -> float:
    mine = torch.tensor([max(float(g.abs().max()) for g in gradients.values())])
    torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
    return float(mine)


def check_weight_zero(folder: Path) -> None:
    """Terms of weight 0 are left out: they change no bit, skip no step and cost nothing."""
    zero = terms(folder, dict.fromkeys(WEIGHTS, 0.0))
    zero["sft"]["data"] = {**zero["sft"]["data"], "prompts": str(folder / "spoilt.jsonl")}
    zero["sft"]["algorithm"] = POISONED
    zero["labels"]["data"] = {"max_prompt_tokens": 8}  # rows that nothing reads need not be there
    states, found = [], []
    for name, mix in (("without", {}), ("zero", zero)):
        with trainer_of(folder, name, mix, steps={"updates_per_step": 2}) as trainer:
            found = [trainer.train_step() for _ in range(3)]
            states.append((state_of(trainer), [step["flops/update"] for step in found]))
    assert differing(states[0][0], states[1][0]) == []
    assert states[0][1] == states[1][1]
    assert not any("sft/loss" in step or step[SKIPPED] for step in found), found


def check_resumed(folder: Path) -> None:
    """Going on from a checkpoint is going on: the terms' rows too, from a file or from Python."""
    mix = terms(folder, WEIGHTS, rows=8)
    steps = {"updates_per_step": 2}
    with trainer_of(folder, "whole", mix, steps=steps) as trainer:
        trainer.train_step()
        saved = trainer.save_checkpoint()
        whole = [trainer.train_step() for _ in range(2)]
        expected = state_of(trainer)
        check_parts(trainer)
    passed = terms(folder, WEIGHTS, rows=8)
    passed["pairs"]["data"] = {"max_prompt_tokens": 8}
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    with trainer_of(folder, "again", passed, {"pairs": rows}, steps=steps) as trainer:
        trainer.load_checkpoint(saved)
        again = [trainer.train_step() for _ in range(2)]
        assert differing(expected, state_of(trainer)) == []
        for one, other in zip(whole, again, strict=True):
            for key in ("policy/loss", "policy/grad_norm", "sft/loss", "pairs/loss", "labels/loss"):
                assert one[key] == other[key], key
    other = terms(folder, WEIGHTS, rows=8)
    other["sft"]["data"] = {**other["sft"]["data"], "prompts": str(folder / "spoilt.jsonl")}
    with trainer_of(folder, "other", other, steps=steps) as trainer:
        try:
            trainer.load_checkpoint(saved)
        except DataError as error:
            assert error.name == "mix.sft.data.prompts", error
        else:
            raise AssertionError("went on with other rows")


def check_parts(trainer: Trainer) -> None:
    """Each optimizer step has other rows of a term, looked up with the weights that it has."""
    trainer.enter_training()
    model, algorithm = trainer.policy.model, trainer.roles.terms["pairs"].algorithm
    parts = trainer.mix.batches(trainer.roles, 2, True)
    first = next(parts)["pairs"]
    Policy(model, algorithm, 10, TERM_TEMPERATURE).update(first)
    second = next(parts)["pairs"]
    assert first.num_samples == second.num_samples == 8, "both sides of four pairs"
    ids = [{prompt.prompt_id for prompt in part.prompts} for part in (first, second)]
    assert not ids[0] & ids[1], ids
    assert torch.equal(second.old_logp_T, trainer.policy.logprobs(second, TERM_TEMPERATURE))
    assert not torch.equal(first.old_logp_T, trainer.policy.logprobs(first, TERM_TEMPERATURE))


def check_warmup(folder: Path) -> None:
    """While PPO trains its critic alone, terms rest: no row is taken, no weight moves."""
    algorithm = {"name": "ppo", "critic_warmup_steps": 1}
    mix = terms(folder, {"sft": 1.0})
    with trainer_of(folder, "warmup", mix, algorithm=algorithm) as trainer:
        before = {n: w.clone() for n, w in trainer.policy.model.weights().items()}
        metrics = trainer.train_step()
        assert "sft/loss" not in metrics and trainer.mix.state()["sft"]["index"] == 0
        trainer.enter_training()
        after = trainer.policy.model.weights()
        assert all(torch.equal(before[n], after[n]) for n in before)
        trainer.reshard()
        metrics = trainer.train_step()
        assert metrics["sft/loss"] > 1 and trainer.mix.state()["sft"]["index"] == 6


def check_skipped(folder: Path) -> None:
    """A term that is not finite skips the whole step; its batch is saved, and replay finds it."""
    mix = terms(folder, {"sft": 1.0, "pairs": 1.0}, rows=8)
    data = {**mix["sft"]["data"], "prompts": str(folder / "spoilt.jsonl"), "shuffle": False}
    mix["bad"] = {"algorithm": POISONED, "data": data, "weight": 0.5, "prompts_per_step": 8}
    said: list[str] = []
    with trainer_of(folder, "skipped", mix) as trainer:
        trainer.skipped._notify = said.append
        assert trainer.train_step()[SKIPPED] == 0
        before = state_of(trainer)
        metrics = trainer.train_step()
        assert metrics[SKIPPED] == 1 and torch.tensor(metrics["policy/loss"]).isfinite(), metrics
        assert not torch.tensor([metrics["bad/loss"], metrics["policy/grad_norm"]]).isfinite().any()
        assert differing(before, state_of(trainer)) == []
        assert len(said) == 1 and "skipped (1 of at most 3 in a row): bad/loss is nan" in said[0]
        file = trainer.journal.folder / "replay" / "step_000002_update_000.safetensors"
        trainer.world.gather_objects(None)
        saved = SavedBatch.read(file)
        assert set(saved.terms) == {"sft", "pairs", "bad"}
        trainer.enter_training()
        report = replay(trainer.world, trainer.roles, saved)
        assert not report["is_finite"] and report["cause"] in saved.reason, report
        models = report["models"]
        assert set(models) == {"policy", "sft", "pairs", "bad"} and not report["terms_left_out"]
        assert [told["row"] for told in models["bad"]["rows"]] == [0, 1], models["bad"]
        assert not any(models[name]["rows"] for name in ("policy", "sft", "pairs"))
        assert models["bad"]["loss_of"] == "policy" and "loss_of" not in models["policy"]
        assert trainer.step == 2
        without = {n: t for n, t in trainer.roles.terms.items() if n != "bad"}
        object.__setattr__(trainer.roles, "terms", without)
        report = replay(trainer.world, trainer.roles, saved)
        assert report["is_finite"] and report["terms_left_out"] == ["bad"], report


def check_refused(folder: Path) -> None:
    """All ranks refuse unfit algorithms, terms without rows, and rows without a term."""
    own = {"name": "poisoned_algorithm:Poisoned", "options": {"token": 0, "of": {"name": "grpo"}}}
    rollouts, empty, good = (terms(folder, {"sft": 1.0}) for _ in range(3))
    rollouts["sft"]["algorithm"] = own
    empty["sft"]["data"] = {"max_prompt_tokens": 8}
    for mix, given, key, said in (
        (rollouts, None, "mix.sft.algorithm.name", "needs no rollouts"),
        (empty, None, "mix.sft.data.prompts", "pass mix={'sft': rows}"),
        (good, {"pairs": []}, "mix", "got pairs"),
        (good, {"sft": [{"prompt": "1+1="}]}, "mix['sft'][0]", "'response'"),
    ):
        try:
            with trainer_of(folder, "refused", mix, given):
                pass
        except UserError as error:
            assert error.name == key and said in str(error), error
        else:
            raise AssertionError(f"took {key}")


def main() -> None:
    folder = Path(sys.argv[1])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    if torch.distributed.get_rank() == 0:
        write_rows(folder)
    torch.distributed.barrier()
    if sys.argv[2] == "gradients":
        stages = {"tp": 1, "pp": 2, "vpp": 2, "micro_batch_tokens": 24}
        check_gradients(folder, "tp2-dp2")
        check_gradients(folder, "pp2-dp2", train=stages)
    elif sys.argv[2] == "steps":
        check_weight_zero(folder)
        check_resumed(folder)
        check_warmup(folder)
        check_skipped(folder)
        check_refused(folder)
    else:
        check_gradients(folder, "cp2-tp2", train={"cp": 2})
        check_gradients(folder, "unshared", train={"share_prompts": False})
    stop_process_group()


if __name__ == "__main__":
    main()
