"""Preference optimization separates pairs that it has not seen, and does so alike in any layout.

The pairs are the quickstart's responses and the same with their fields in reverse order. A run is
shorter than an epoch, so that a step's accuracy, taken before its update, is of new pairs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import yaml
from command_line import QUICKSTART, records, run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NUM_STEPS = 30
ACCURACY = 0.9


def write_run(folder: Path, algorithm: dict[str, Any]) -> Path:
    """Writes the rows that the algorithm takes, and its config."""
    rng, rows = random.Random(0), []
    for line in (QUICKSTART / "sft.jsonl").read_text().splitlines():
        row = json.loads(line)
        sides = [row["response"], ",".join(reversed(row["response"].split(",")))]
        if sides[0] == sides[1]:
            continue
        if algorithm["name"] == "kto":
            label = rng.random() < 0.5
            rows.append({"prompt": row["prompt"], "response": sides[not label], "label": label})
        else:
            rows.append({"prompt": row["prompt"], "chosen": sides[0], "rejected": sides[1]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "run": {"name": "mine", "dir": str(folder)},
        "model": {"init": str(QUICKSTART / "model")},
        "train": {"learning_rate": 1e-3, "warmup_steps": 5, "micro_batch_tokens": 1024},
        "rollout": {"max_new_tokens": 12},
        "algorithm": algorithm,
        "data": {"prompts": str(folder / "rows.jsonl"), "max_prompt_tokens": 6},
        "steps": {"prompts_per_step": 32, "num_steps": NUM_STEPS},
    }
    assert len(rows) > NUM_STEPS * 32
    (folder / "c.yaml").write_text(yaml.safe_dump(content))
    return folder / "c.yaml"


LATER = pytest.mark.full
IN_CI = ("dpo",)
KNOBS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "kto": {"beta": 0.3},
    **dict.fromkeys(("reward_model", "dpo_norm", "cdpo", "ipo", "simpo", "orpo"), {}),
}


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"name": name, **knobs}, id=name, marks=() if name in IN_CI else LATER)
        for name, knobs in KNOBS.items()
    ],
)
def test_new_pairs_are_separated(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    run("train", write_run(tmp_path, algorithm))
    found = records(tmp_path / "mine")
    accuracies = [record["preference/accuracy"] for record in found]
    assert len(found) == NUM_STEPS
    print(f"{algorithm}: {mean(accuracies[-5:]):.3f}")
    assert mean(accuracies[-5:]) > ACCURACY, accuracies
    assert mean(r["preference/margin"] for r in found[-5:]) > 0
    assert found[-1]["policy/loss"] < found[0]["policy/loss"]


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dpo", ("train.tp=2", "train.pp=2")),
        ("kto", ("train.cp=2",)),
        ("reward_model", ("train.tp=2", "train.pp=2")),
    ],
)
def test_four_ranks_take_the_steps_of_one(
    tmp_path: Path, name: str, layout: tuple[str, ...]
) -> None:
    """Pairs, and parts of responses, are cut over micro-batches and all kinds of ranks."""
    config = write_run(tmp_path, {"name": name})
    small = ("steps.num_steps=3", "steps.prompts_per_step=16")
    run("train", config, *small, f"run.dir={tmp_path / 'one'}")
    cut = (*small, *layout, f"run.dir={tmp_path / 'four'}", "train.micro_batch_tokens=48")
    run("train", config, *cut, "--world", "4")
    expected, found = records(tmp_path / "one" / "mine"), records(tmp_path / "four" / "mine")
    assert expected[2]["policy/loss"] != expected[0]["policy/loss"]
    for ours, theirs in zip(found, expected, strict=True):
        for key in theirs:
            if key.startswith("preference/") or key in ("policy/loss", "policy/grad_norm"):
                # float32 sums in another order, through two steps of Adam
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), key


def test_a_trained_reward_model_is_a_sequence_classifier_of_transformers(tmp_path: Path) -> None:
    """Its checkpoint is exported, and transformers' scores separate unseen pairs."""
    config = write_run(tmp_path, {"name": "reward_model"})
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    unseen = rows[-100:]
    kept = "".join(json.dumps({**row, "lead": 0.5}) + "\n" for row in rows[:-100])
    (tmp_path / "rows.jsonl").write_text(kept)
    exporting = (
        "steps.num_steps=12",
        "steps.prompts_per_step=64",
        "data.margin_key=lead",
        "checkpoint.export_hf=true",
    )
    run("train", config, *exporting)
    run("convert", tmp_path / "mine", tmp_path / "hf", "--to", "hf")
    for file in (tmp_path / "hf").iterdir():
        exported = tmp_path / "mine" / "exports" / "step_12" / file.name
        assert exported.read_bytes() == file.read_bytes(), file.name
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    right = 0
    for row in unseen:
        scores = []
        for side in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"] + row[side], add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits))
        right += scores[0] > scores[1]
    assert right / len(unseen) > ACCURACY
    judges_what_a_run_samples(tmp_path, model, tokenizer)


def judges_what_a_run_samples(folder: Path, model: Any, tokenizer: Any) -> None:
    """The same directory, served in a GRPO run on two ranks, gives transformers' scores."""
    functions = {
        "judge": {"function": "reward_model", "options": {"path": str(folder / "hf")}},
        "digits": {"function": "scripted_reward:digits", "weight": 0.5},
    }
    content = {
        "run": {"name": "judged", "dir": str(folder)},
        "model": {"init": str(QUICKSTART / "model")},
        "train": {"tp": 2, "learning_rate": 1e-3},
        "rollout": {"max_new_tokens": 12},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 6},
        "reward": {"functions": functions},
        "steps": {"prompts_per_step": 8, "samples_per_prompt": 8, "num_steps": 1},
        "log": {"rollouts_every": 1},
    }
    (folder / "judged.yaml").write_text(yaml.safe_dump(content))
    run("train", folder / "judged.yaml", "--world", "2")
    record = json.loads((folder / "judged" / "metrics.jsonl").read_text().splitlines()[0])
    mean_reward = record["reward/judge/mean"] + 0.5 * record["reward/digits/mean"]
    assert record["reward/mean"] == pytest.approx(mean_reward, abs=1e-4)
    dump = next((folder / "judged" / "rollouts").glob("*1.jsonl"))
    num_compared = 0
    for sample in map(json.loads, dump.read_text().splitlines()):
        text = sample["prompt"] + sample["response"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 6 + 12:
            continue  # special tokens are not in the text
        with torch.no_grad():
            score = float(model(torch.tensor([ids])).logits)
        digits = sum(c.isdigit() for c in sample["response"]) / max(len(sample["response"]), 1)
        assert sample["reward"] == pytest.approx(score + 0.5 * digits, abs=1e-3)
        num_compared += 1
    assert num_compared > 2
