"""examples/smollm2: its data is right, fits its configurations, and run.sh does all parts."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.load import load_config
from hybridrl.rewards.answers import Gsm8k
from hybridrl.rewards.instructions import CHECKS, Instructions

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"
CONFIGS = ("eval", "grpo", "instructions", "sft", "dpo")


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # what NamedTuple asks for
    spec.loader.exec_module(made)
    return made


def test_stories_are_answered_rightly_and_no_file_has_another_s(tmp_path: Path) -> None:
    data = module("make_data")
    draw = random.Random(3)
    for _ in range(500):
        story = data.draw_story(draw, 40)
        a, b = map(int, re.findall(r"\d+", story.prompt))
        is_sum = bool(re.search(r"are that now|in all|did \w+ find", story.prompt))
        assert story.answer == (a + b if is_sum else a - b) >= 0 and max(a, b) <= 40
        left, _, right = story.calculation.partition(" = ")
        assert eval(left) == int(right) == story.answer
    for name in ("NUM_TRAIN", "NUM_SFT", "NUM_PAIRS", "NUM_INSTRUCTIONS"):
        setattr(data, name, 60)
    data.write_prompts(tmp_path)
    files = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")}
    rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    prompts = [row["prompt"] for some in rows.values() for row in some]
    assert len(prompts) == len(set(prompts)) == 256 + 3 * 60 + 60 + 64
    right = Gsm8k(method="flexible")
    for row in rows["pairs"]:
        a, b = map(int, re.findall(r"\d+", row["chosen"])[:2])
        answer = {"answer": str(eval(row["chosen"].partition(" = ")[0]))}
        assert right("", row["chosen"], answer) == 1 and right("", row["rejected"], answer) == 0
    for row in rows["instructions"]:
        assert set(row["instruction_id_list"]) <= CHECKS.keys()
        assert Instructions(partial=True)("", "sure", row) >= 0  # arguments are theirs


def test_configurations_use_what_is_made() -> None:
    written = {"heldout", "train", "sft", "pairs", "instructions", "instructions_heldout"}
    for name in CONFIGS:
        config = load_config(EXAMPLE / f"{name}.yaml")
        paths = [*(config.data.prompts or ()), *(config.data.eval_prompts or ())]
        paths += [path for one in config.eval.sets.values() for path in one.path or ()]
        assert {Path(path).stem for path in paths} <= written, name
        assert config.data.chat_template and config.model.path == "runs/smollm2/model"
        assert config.checkpoint.export_hf is (name != "eval")


def test_measure_and_reward_find_the_same_answers() -> None:
    is_right, reward = module("measure").is_right, Gsm8k(method="flexible")
    for text in ("3 + 4 = 7", "It is 7.", "so 7 or 8", "none", "$7.00", "1,007", ""):
        assert is_right(text, "7") == bool(reward("", text, {"answer": "7"})), text


@pytest.mark.full
@pytest.mark.slow
def test_run_sh_goes_from_directory_to_directory(tmp_path: Path) -> None:
    """With a small model of random weights in place of the pretrained one."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", *map(str, range(100)), "how", "many", "left", "Describe"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **named)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), num_attention_heads=2, bos_token_id=None, eos_token_id=1, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    environment["SMOLLM2_MODEL"] = str(tmp_path / "model")
    command = [str(EXAMPLE / "run.sh"), "out", "--small"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr  # nothing is learned in 2 steps
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["has_learned"] is False and result["transformers_agrees"] is True
    assert result["num_prompts"] == 6
