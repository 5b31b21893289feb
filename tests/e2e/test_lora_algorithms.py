"""Every kind of algorithm trains adapters: two steps each, in one process, with real generation."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART
from small_runs import small_run
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl import Trainer
from hybridrl.models.megatron.build import named_parameters
from hybridrl.training.model import ParallelModel

KNOBS = (
    "lora.rank=4",
    "rollout.engine=hf",
    "train.learning_rate=0.01",
    "steps.num_steps=2",
    "rollout.max_new_tokens=12",
)
PAIRS = ("data.prompts=[]", "steps.samples_per_prompt=1", "reward={}")
# Knobs of each run; pairs and SFT read rows with responses.
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("algorithm.kl_coef=0.05",),
    "lag": ("steps.max_policy_lag=1", "rollout.max_new_tokens=24"),
    "dynamic sampling": (
        "algorithm.max_resampling=2",
        "reward.function=scripted_reward:begins_even",
    ),
    "mixture": (
        f"mix.sft={{algorithm: {{name: sft}}, weight: 0.1, prompts_per_step: 4, "
        f"data: {{prompts: {QUICKSTART / 'sft.jsonl'}, max_prompt_tokens: 6}}}}",
    ),
    "ppo": ("algorithm={name: ppo, critic_warmup_steps: 0, kl_coef: 0.05}",),
    "on_policy_distillation": (
        "algorithm={name: on_policy_distillation, teacher: TEACHER}",
        "steps.samples_per_prompt=1",
    ),
    "gkd": ("algorithm={name: gkd, teacher: TEACHER, top_k: 8}", "steps.samples_per_prompt=1"),
    "sft": (f"data.prompts={QUICKSTART / 'sft.jsonl'}", "algorithm={name: sft}"),
    "distillation": (
        f"data.prompts={QUICKSTART / 'sft.jsonl'}",
        "algorithm={name: distillation, teacher: TEACHER, top_k: 8}",
    ),
    "dpo": ("data.prompts=PAIRS", "algorithm={name: dpo}"),
    "reward_model": ("data.prompts=PAIRS", "algorithm={name: reward_model}"),
}
QUICK = ("grpo", "ppo", "dpo", "reward_model")
SUPERVISED = ("sft", "distillation", "dpo", "reward_model")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A teacher, and pairs of a right and a wrong response."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(QUICKSTART / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    for file in (QUICKSTART / "model").glob("tokenizer*"):
        (folder / "teacher" / file.name).write_bytes(file.read_bytes())
    rows = map(json.loads, (QUICKSTART / "sft.jsonl").read_text().splitlines()[:64])
    pairs = [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": row["response"][::-1]}
        for row in rows
        if row["response"] != row["response"][::-1]
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {"TEACHER": folder / "teacher", "PAIRS": folder / "pairs.jsonl"}


def held_bytes() -> int:
    """Returns the bytes of all parameters of this process; shared memory counts once."""
    gc.unfreeze()  # a run hides its objects from the garbage collector
    gc.collect()
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, torch.nn.Parameter) and not one.is_meta
    }
    return sum(storages.values())


def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in weights.items()}


def check_moved(role: str, model: ParallelModel, before: dict[str, torch.Tensor]) -> None:
    """All adapters and a value head have moved, and nothing else."""
    for name, one in model.weights().items():
        is_trained = ".lora_" in name or (role == "critic" and name.endswith("output_layer.weight"))
        assert torch.equal(one, before[name]) != is_trained, f"{role}: {name}"


@pytest.mark.dist
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([*RUNS.keys() - QUICK], marks=pytest.mark.full)]
)
def test_each_algorithm_moves_only_adapters(
    names: Sequence[str], tmp_path: Path, files: dict[str, Path]
) -> None:
    """All models of a run hold one base: a critic adds its adapters and its head."""
    held: dict[str, int] = {}
    for name in names:
        own = RUNS[name]
        others = held_bytes()  # what earlier tests left
        knobs = [*KNOBS, f"run.name={name.replace(' ', '-')}"]
        text = "\n".join(own)
        for key, file in files.items():
            text = text.replace(key, str(file))
        knobs += text.split("\n")
        if name in SUPERVISED:
            knobs = [one for one in knobs if not one.startswith("rollout.engine")]
            knobs += ["steps.samples_per_prompt=1", "reward={function: exact_match}"]
        with small_run(tmp_path, *knobs) as trainer:
            before = {role: copied(model.weights()) for role, model in trainer.models.items()}
            trainer.fit()
            held[name] = held_bytes() - others
            assert trainer.step == 2
            for role, model in trainer.models.items():
                if role in trainer.trained:
                    check_moved(role, model, before[role])
                else:
                    weights = model.weights()
                    assert all(torch.equal(one, weights[n]) for n, one in before[role].items())
            check_reference(name, trainer)
            adapters = adapter_bytes(trainer.models["policy"])
    if names == QUICK:
        for name in ("ppo", "reward_model"):
            more = held[name] - held["grpo" if name == "ppo" else "dpo"]
            assert adapters < more < 1.1 * adapters + 4096, (name, more, adapters)


def adapter_bytes(model: ParallelModel) -> int:
    found = named_parameters(model.chunks).items()
    return sum(one.nbytes for name, one in found if ".lora_" in name)


def check_reference(name: str, trainer: Trainer) -> None:
    """The reference needs no model."""
    assert "reference" not in trainer.models
    if name in ("grpo", "ppo", "dpo"):
        assert trainer.reference is not None
