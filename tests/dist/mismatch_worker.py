"""One rank of the mismatch tests.

mismatch_worker.py splits MODEL              the metrics of a step, in every layout
mismatch_worker.py hf|ENGINE MODEL FOLDER      the diagnosis, with faults planted in the engine
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaged import CLASSES

from hybridrl.algorithms.grpo import Grpo
from hybridrl.config.schema import GrpoConfig, TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.debug.diagnose import diagnose
from hybridrl.debug.residual import stages
from hybridrl.debug.verdicts import Finding
from hybridrl.loop import rollout_setup
from hybridrl.loop.trainer import Trainer
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.exchange import collect
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.roles.policy import Policy
from hybridrl.rollout.common.process_state import replaced
from hybridrl.training.model import ModelSource, ParallelModel

LAYOUTS = [  # tp, pp, cp, vpp
    (2, 2, 1, 1),
    (1, 1, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 1, 2),
]
LENGTHS = [(3, 9), (5, 2), (2, 17), (7, 7), (1, 30), (4, 1), (6, 12), (3, 3)]
TRAIN = {"hf": {"tp": 2, "cp": 2}, **dict.fromkeys(CLASSES, {"tp": 2, "pp": 2})}
# A step's forward in training mode sums in another order than one without gradients.
TOLERANCE = 1e-4


class FixedDenominator(Grpo):
    """Divides its loss by a constant, as some algorithms do."""

    def denominator(self, batch: TrainBatch) -> float:
        return 7.0


def sampled_batch(vocab: int) -> TrainBatch:
    rng = np.random.default_rng(3)
    rollouts = [
        Rollout(
            i,
            Prompt(i // 2, "", tuple(rng.integers(2, vocab, prompt).tolist())),
            tuple(rng.integers(2, vocab, response).tolist()),
            tuple((-6 + rng.normal(size=response)).clip(max=0).tolist()),
            "length",
            0,
        )
        for i, (prompt, response) in enumerate(LENGTHS)
    ]
    here = Producer.here("test")
    batch = RolloutBatch.from_rollouts(rollouts, range(len(rollouts)), here)
    advantages_T = torch.from_numpy(rng.normal(size=batch.num_tokens)).float()
    scored = batch.scored(torch.zeros(batch.num_samples), {}, here)
    return scored.to_train(here).join_columns(
        here, advantages_T=advantages_T * batch.response_mask_T
    )


def expected(batch: TrainBatch, logp_T: torch.Tensor) -> dict[str, float]:
    mask_T = batch.response_mask_T
    engine, trainer = (x[mask_T].double().numpy() for x in (batch.behaviour_logp_T, logp_T))
    d = trainer - engine
    return {
        "mismatch/logprob_diff_mean": np.abs(d).mean(),
        "mismatch/logprob_diff_max": np.abs(d).max(),
        "mismatch/share_above_0.1": (np.abs(d) > 0.1).mean(),
        "mismatch/kl": (np.exp(d) - 1 - d).mean(),
        "mismatch/correlation": np.corrcoef(engine, trainer)[0, 1],
    }


def check_same(found: dict[str, float], wanted: dict[str, float], what: object) -> None:
    for name, value in wanted.items():
        assert abs(found[name] - value) <= TOLERANCE * abs(value), (what, name, found[name], value)


def check_splits(folder: Path) -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    batch = sampled_batch(hf_config["vocab_size"])
    everywhere: list[dict[str, float]] = []
    for tp, pp, cp, vpp in LAYOUTS:
        mesh = Mesh(World(platform, 120), TrainLayout(4, tp, pp, cp, vpp=vpp))
        platform.seed(1)
        model = ParallelModel(mesh, source, "lm", TrainConfig(micro_batch_tokens=48))
        load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
        model.make_trainable(0.0)  # weights stay, so that updates can be compared
        policy = Policy(model, FixedDenominator(GrpoConfig()), 1)
        logp_T = policy.logprobs(batch)
        found = policy.update(batch)
        check_same(found, expected(batch, logp_T), (tp, pp, cp, vpp))
        # A column of the step's start goes before the forward of the update.
        other_T = (logp_T - 0.5) * batch.response_mask_T
        old = batch.join_columns(Producer.here("test"), old_logp_T=other_T)
        check_same(policy.update(old), expected(batch, other_T), "old_logp_T")
        per_token = Policy(model, Grpo(GrpoConfig()), 1).update(batch)
        for name in ("policy/entropy", "policy/kl", "policy/clip_fraction", "mismatch/kl"):
            assert abs(found[name] - per_token[name]) < 1e-9, (name, found[name], per_token[name])
        assert found["policy/entropy"] < np.log(hf_config["vocab_size"])
        everywhere.append(
            {name: found[name] for name in (*expected(batch, logp_T), "policy/entropy")}
        )
    for layout, found in zip(LAYOUTS, everywhere, strict=True):
        check_same(found, everywhere[0], layout)
    stop_process_group()


def make_trainer(engine: str, model: str, folder: Path) -> Trainer:
    config = {
        "run": {"name": "diagnosed", "dir": str(folder)},
        "model": {"path": model, "tokenizer": "examples/quickstart/model"},
        "train": {**TRAIN[engine], "micro_batch_tokens": 64},
        "rollout": {
            "engine": engine,
            "tp": 2 if engine in CLASSES else 1,
            "max_new_tokens": 6,
            "max_batch": 8,
        },
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "examples/quickstart/train.jsonl", "max_prompt_tokens": 6},
        "steps": {
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "updates_per_step": 2,
            "num_steps": 1,
        },
        "log": {"console": False},
    }
    return Trainer.from_config(config)


def look(
    trainer: Trainer, plant: Callable[[], None] = lambda: None, reference: bool = False
) -> dict[str, Finding]:
    trainer.reshard()
    plant()
    return diagnose(trainer, reference)


def verdicts(found: dict[str, Finding]) -> dict[str, bool]:
    return {name: finding.agrees for name, finding in found.items()}


def check_step(trainer: Trainer) -> None:
    """Two updates: the metrics are those of the whole step, by its first log-probabilities."""
    batches: list[TrainBatch] = []
    update = trainer.update

    def update_and_keep(batch: TrainBatch) -> dict[str, float]:
        batches.append(batch)
        return update(batch)

    trainer.update = update_and_keep  # type: ignore[method-assign]
    trainer.reshard()
    metrics = trainer.train_step()
    if (whole := collect(batches[0], trainer.world)) is not None:
        assert whole.old_logp_T is not None
        wanted = expected(whole, whole.old_logp_T)
        check_same(metrics, {n: v for n, v in wanted.items() if n != "mismatch/kl"}, "step")
    assert 0 <= metrics["mismatch/kl"] < 1e-9
    check_on_policy_step(trainer, batches)
    trainer.update = update  # type: ignore[method-assign]


def check_on_policy_step(trainer: Trainer, batches: list[TrainBatch]) -> None:
    """One update: the policy makes no pass for old log-probabilities, which are its own."""
    steps = trainer.config.steps.model_copy(update={"updates_per_step": 1})
    trainer.config = trainer.config.model_copy(update={"steps": steps})
    passes: list[int] = []
    model = trainer.policy.model
    forward_all = model.forward_all

    def forward_and_count(works: Any) -> Any:
        passes.append(len(works))
        return forward_all(works)

    model.forward_all = forward_and_count  # type: ignore[method-assign]
    metrics = trainer.train_step()
    model.forward_all = forward_all  # type: ignore[method-assign]
    assert passes == [] and batches[-1].old_logp_T is None
    assert metrics["flops/logprobs"] == 0 and metrics["flops/update"] > 0
    assert 0 <= metrics["mismatch/logprob_diff_mean"] < 1e-4


def check_diagnosis(engine: str, model: str, folder: Path) -> None:
    trainer = make_trainer(engine, model, folder)
    num_layers = trainer.source.shape.num_layers
    agree = dict.fromkeys(("weights", "tokens", "sampling", "numerics"), True)

    clean = look(trainer, reference=True)
    assert verdicts(clean) == agree, clean
    table = clean["numerics"].details["stages"]
    assert [row["stage"] for row in table] == [*stages(num_layers), "logits"]
    assert all(row["difference"] < 5e-6 for row in table), table
    assert max(row["difference"] for row in table) > 0
    if trainer.world.rank == 0:
        print(json.dumps(clean["numerics"].details, indent=1))
    assert all(max(row["trainer_error"], row["engine_error"]) < 5e-6 for row in table), table
    assert clean["numerics"].details["first_errors"] == {"trainer": None, "engine": None}
    check_reference(trainer, agree)
    assert clean["tokens"].details["num_greedy"] == 8 * 6 * trainer.sampler.layout.replicas

    def stale_layer() -> None:
        """A layer as it would be after an update that was not sent."""
        if trainer.world.rank == 1:
            for name, tensor in trainer.engine.tensors().items():
                if name.startswith("model.layers.2.") and tensor.ndim == 2:
                    tensor.mul_(1.0 + 1e-2)

    stale = look(trainer, stale_layer)
    assert not stale["weights"].agrees and not stale["numerics"].agrees, stale
    assert stale["weights"].found.startswith("model.layers.2."), stale["weights"]
    assert stale["numerics"].details["first"] == "layers.2.attention", stale["numerics"]

    sampler = trainer.sampler
    sampler.sampling = replace(sampler.sampling, top_p=0.5)
    cut = look(trainer)
    assert verdicts(cut) == {**agree, "sampling": False}, cut
    assert cut["sampling"].details["from_truncation"] > 0.1, cut["sampling"]
    assert cut["sampling"].details["diff_mean_with_same_truncation"] < 1e-4, cut["sampling"]
    sampler.sampling = replace(sampler.sampling, top_p=1.0)
    check_step(trainer)
    trainer.engine.close()

    build_engine = rollout_setup.build_engine

    def with_other_positions(config: Any, model: Any, *arguments: Any) -> Any:
        positions = {"rope_theta": 7.0, "rope_type": "default"}
        other = copy.copy(model)
        other.source = replace(
            model.source, hf_config={**model.source.hf_config, "rope_parameters": positions}
        )
        return build_engine(config, other, *arguments)

    with replaced(rollout_setup, "build_engine", with_other_positions):
        trainer = make_trainer(engine, model, folder)
    turned = look(trainer)
    assert turned["weights"].agrees and turned["sampling"].agrees, turned
    assert not turned["numerics"].agrees, turned
    assert turned["numerics"].details["first"] == "layers.0.attention", turned["numerics"]
    assert turned["numerics"].details["stages"][0]["difference"] < 1e-6
    assert "rope" in turned["numerics"].remedy
    trainer.engine.close()


def check_reference(trainer: Trainer, agree: dict[str, bool]) -> None:
    """A window that engine and trainer both pass over, as a family may that does not know of it."""
    model = trainer.policy.model
    source, shape = model.source, model.source.shape
    kinds = ["full_attention"] + ["sliding_attention"] * (shape.num_layers - 1)
    windows = {"use_sliding_window": True, "sliding_window": 2, "layer_types": kinds}
    blind = replace(source.family, shape=lambda hf_config: shape)
    model.source = replace(source, family=blind, hf_config={**source.hf_config, **windows})
    missed = look(trainer, reference=True)
    model.source = source
    assert verdicts(missed) == {**agree, "numerics": False}, missed
    wrong = missed["numerics"].details["first_errors"]
    assert wrong == {"trainer": "layers.1.attention", "engine": "layers.1.attention"}, missed
    assert "the trainer differs from transformers, beginning after" in missed["numerics"].found


def main() -> None:
    if sys.argv[1] == "splits":
        check_splits(Path(sys.argv[2]))
    else:
        check_diagnosis(sys.argv[1], sys.argv[2], Path(sys.argv[3]))


if __name__ == "__main__":
    main()
