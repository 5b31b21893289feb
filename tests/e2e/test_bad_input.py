"""Every kind of bad input, through the command line: one clear message, code 2, nothing changed.

What a message must say is judged in refusals.py: what is wrong, what was found, what is allowed,
and what to do. Most are found before any rank starts; the rest need a rank, and get a tiny model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import QUICKSTART, refuse, succeed
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_models

SUMS = [{"prompt": f"{a}0+0{b}=", "answer": str(10 * a + b)} for a in range(2) for b in range(4)]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, **sections: dict[str, Any]) -> None:
    content = {
        "run": {"name": "mine"},
        "model": {"init": "model"},
        "rollout": {"max_new_tokens": 4},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 6},
        "steps": {"prompts_per_step": 4, "samples_per_prompt": 2, "num_steps": 2},
        **sections,
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(content))


def fill(folder: Path) -> Path:
    """Puts a valid configuration, its prompts and its model into a folder."""
    (folder / "model").mkdir()
    for name in ("config.json", *TOKENIZER_FILES):
        shutil.copyfile(QUICKSTART / "model" / name, folder / "model" / name)
    write_rows(folder / "prompts.jsonl", SUMS)
    write_config(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return fill(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 2 steps and a checkpoint of each; one of its prompts is too long."""
    folder = fill(tmp_path_factory.mktemp("trained"))
    write_rows(folder / "prompts.jsonl", [*SUMS, {"prompt": "10+20+30=", "answer": "60"}])
    write_config(folder, checkpoint={"every": 1}, reward={"function": "bad_rewards:counts"})
    (folder / "stdout").write_text(succeed(folder, "train", "c.yaml"))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained folder, to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


# The configuration


@pytest.mark.parametrize("command", ["train", "plan", "eval"])
def test_layout_that_does_not_divide_the_world(here: Path, command: str) -> None:
    arguments = [command, "c.yaml", "train.tp=2", "train.pp=2", "--world", "6"]
    arguments += ["data.eval_prompts=prompts.jsonl"]
    refuse(here, arguments, "train.tp * train.pp * train.cp", "2 * 2 * 1 = 4", "world size 6")


# The prompts


@pytest.mark.dist
def test_prompt_longer_than_the_limit_is_counted_and_the_run_goes_on(trained: Path) -> None:
    told = (trained / "stdout").read_text()
    assert "8 prompts; 1 left out as longer than data.max_prompt_tokens=6" in told
    assert "prompts.jsonl:9, 9 tokens" in told
    metrics = (trained / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]


# HF directories


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_models(folder, ("qwen2",))
    for name in TOKENIZER_FILES:
        shutil.copyfile(QUICKSTART / "model" / name, folder / "qwen2" / name)
    return folder / "qwen2"


@pytest.mark.dist
def test_weight_that_is_not_finite_is_named_by_the_rank_that_reads_it(
    here: Path, hf_model: Path
) -> None:
    shutil.rmtree(here / "model")
    shutil.copytree(hf_model, here / "model")
    name = "model.layers.3.mlp.up_proj.weight"  # of the second stage alone
    shard = here / "model" / json.loads((hf_model / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name][5, 7] = float("nan")
    save_file(tensors, shard, {"format": "pt"})
    arguments = ["convert", "model", "out", "--to", "megatron", "--pp", "2"]
    refuse(here, arguments, f"tensor {name} in model", "got nan at [5, 7]")


# The run folder and its checkpoints


@pytest.mark.dist
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.seed=1", "run.seed"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low"),
        ("reward.function=exact_match", "reward.function"),
        ("steps.prompts_per_step=8", "steps.prompts_per_step"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens"),
    ],
)
def test_run_folder_of_another_identity(run: Path, override: str, expected: str) -> None:
    said = (expected, "with which runs/mine was started", "choose another run.name")
    refuse(run, ["train", "c.yaml", override], *said)


@pytest.mark.dist
def test_prompt_file_with_other_prompts_than_the_checkpoints(run: Path) -> None:
    write_rows(run / "prompts.jsonl", SUMS[:4])
    arguments = ["train", "c.yaml", "steps.num_steps=3"]
    refuse(run, arguments, "data.prompts", "differ from the checkpoint's", has_begun=True)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.dist
@pytest.mark.parametrize("spoil", [cut, Path.unlink])
@pytest.mark.parametrize(
    "name", ["policy/__0_0.distcp", "policy/.metadata", "state.json", "manifest.json"]
)
def test_newest_checkpoint_that_is_truncated(
    run: Path, spoil: Callable[[Path], None], name: str
) -> None:
    file = Path("runs/mine/checkpoints/step_2") / name
    spoil(run / file)
    remedy = "checkpoints/step_1: train with --resume previous"
    refuse(run, ["train", "c.yaml", "steps.num_steps=3"], str(file), remedy)


@pytest.mark.dist
def test_half_written_checkpoint_is_passed_over(run: Path) -> None:
    partial = run / "runs/mine/checkpoints/step_3.partial"
    shutil.copytree(run / "runs/mine/checkpoints/step_2", partial)
    (partial / "manifest.json").unlink()
    cut(partial / "policy" / "__0_0.distcp")
    told = succeed(run, "train", "c.yaml", "steps.num_steps=3")
    assert "continuing runs/mine after step 2" in told
    assert not partial.exists()
    assert (run / "runs/mine/checkpoints/step_3/manifest.json").is_file()


def test_run_folder_that_cannot_be_made(here: Path) -> None:
    (here / "file").touch()
    refuse(here, ["train", "c.yaml", "run.dir=file"], "run.dir", "file/mine", "Not a directory")
    refuse(here, ["train", "c.yaml", "run.dir=.", "run.name=file"], "run.name", "got file")


# Rewards


@pytest.mark.dist
def test_reward_functions_that_misbehave(tmp_path: Path) -> None:
    cases = {
        "raises": ["KeyError at", "bad_rewards.py:10 on", "no such column", "The traceback"],
        "gives_nan": ["returned nan", "a finite float"],
        "gives_pairs": ["returned shape (8, 2)", "(8,) floats"],
        "gives_text": ["returned a str", "a finite float"],
    }

    def judge(function: str) -> None:
        (tmp_path / function).mkdir()
        world = "2" if function == "gives_nan" else "1"  # ranks that all meet it tell it once
        arguments = ["train", "c.yaml", f"reward.function=bad_rewards:{function}"]
        arguments += ["--world", world]
        expected = ("bad_rewards.py:", *cases[function])
        refuse(fill(tmp_path / function), arguments, *expected, leaves_logs=True)

    with ThreadPoolExecutor(2) as pool:  # each waits for processes of its own
        list(pool.map(judge, cases))
    log = (tmp_path / "raises" / "runs" / "mine" / "logs" / "rank_0.log").read_text()
    assert "Traceback (most recent call last)" in log and "in raises" in log


@pytest.mark.dist
def test_reward_that_fails_later_loses_nothing(run: Path) -> None:
    spoilt = run / "bad_rewards.py"  # found before the module of the same name in tests/e2e
    spoilt.write_text("def counts(prompt, response, columns):\n    return None\n")
    arguments = ["train", "c.yaml", "steps.num_steps=3"]
    refuse(run, arguments, "bad_rewards:counts", "returned a NoneType", has_begun=True)
