"""The committed quickstart: its files are what make_data.py makes, and the splits are disjoint."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hybridrl.config.load import load_config
from hybridrl.config.rules import check

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SPLITS = ("sft.jsonl", "train.jsonl", "heldout.jsonl")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text().splitlines()]


def make_data(example: Path = QUICKSTART) -> Any:
    spec = importlib.util.spec_from_file_location("make_data", example / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", [QUICKSTART, ROOT / "examples" / "calculator"])
def test_quickstart_files_are_what_make_data_makes(example: Path, tmp_path: Path) -> None:
    module = make_data(example)
    module.write_prompts(tmp_path)
    module.write_model(tmp_path / "model")
    made = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(made) == 6
    for name in made:
        assert (tmp_path / name).read_bytes() == (example / name).read_bytes(), name


def test_quickstart_splits_are_disjoint_and_right() -> None:
    prompts = [row["prompt"] for name in SPLITS for row in rows(name)]
    assert len(prompts) == len(set(prompts)) == 10_000
    assert len(rows("heldout.jsonl")) == 512
    for name in SPLITS:
        for row in rows(name):
            a, b = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups())  # type: ignore[union-attr]
            answer = row["answer"] if "answer" in row else row["response"].split(",")[-1]
            assert int(answer) == a + b
            assert answer == str(a + b)


def test_quickstart_tokenizer_is_one_token_a_character() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    config = json.loads((QUICKSTART / "model" / "config.json").read_text())
    text = "47+38=15,08,85"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize("name", ["sft", "grpo", "ppo"])
@pytest.mark.parametrize(("world", "overrides"), [(4, []), (1, ["train.tp=1", "train.pp=1"])])
def test_quickstart_configs_pass_the_rules(name: str, world: int, overrides: list[str]) -> None:
    config = load_config(QUICKSTART / f"{name}.yaml", overrides)
    model_config = json.loads((QUICKSTART / "model" / "config.json").read_text())
    assert check(config, world, model_config) == []
    assert config.run.name == f"quickstart-{name}"
    longest = max(len(row["response"]) for row in rows("sft.jsonl")) + 1
    assert longest < config.rollout.max_new_tokens
    assert config.reward.extract is not None
    assert re.findall(config.reward.extract, "15,08,85") == ["85"]
    assert re.findall(config.reward.extract, "15,08,") == []
