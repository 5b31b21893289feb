"""The example with pictures: rows, training in several layouts, resuming, and exports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import ROOT, records, run
from packaged import needs
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

EXAMPLE = ROOT / "examples" / "pictures"
SHORT = (
    "steps.num_steps=4",
    "steps.prompts_per_step=16",
    "steps.stop_at_accuracy=null",
    "steps.eval_every=0",
    "data.eval_prompts=null",
    "log.tensorboard=false",
    "checkpoint.every=2",
    "checkpoint.keep=9",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", folder], check=True)
    return folder


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("freeze", ["[]", "null"])
def test_a_run_continues_in_another_layout_and_is_exported(
    data: Path, freeze: str, tmp_path: Path
) -> None:
    config = (
        "train",
        EXAMPLE / "sft.yaml",
        f"model.init={data / 'model'}",
        f"data.prompts={data / 'sft.jsonl'}",
        f"train.freeze={freeze}",
        *SHORT,
    )
    said = run(*config, f"run.dir={tmp_path}")
    assert ("has random weights and is frozen" in said) == (freeze == "null")
    expected = records(tmp_path / "pictures-sft")
    assert expected[3]["policy/loss"] < expected[0]["policy/loss"]
    for layout in ("train.tp=2", "train.pp=2"):
        copy = tmp_path / layout / "pictures-sft"
        shutil.copytree(tmp_path / "pictures-sft", copy)
        shutil.rmtree(copy / "checkpoints" / "step_4")
        run(*config, f"run.dir={tmp_path / layout}", layout, "--world", "2")
        for ours, theirs in zip(records(copy)[2:], expected[2:], strict=True):
            for name in ("policy/loss", "policy/grad_norm"):
                assert abs(ours[name] / theirs[name] - 1) < 1e-4, (layout, ours["step"], name)
    hf, start = tmp_path / "hf", tmp_path / "start"
    run("convert", tmp_path / "pictures-sft", hf, "--to", "hf")
    model = Qwen3VLForConditionalGeneration.from_pretrained(hf, dtype=torch.float32)
    assert AutoImageProcessor.from_pretrained(hf).patch_size == 4
    first = tmp_path / "pictures-sft" / "checkpoints" / "step_2"
    run("convert", first, start, "--to", "hf")
    earlier = Qwen3VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
    before, after = (one.state_dict() for one in (earlier, model))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert any(".layers." in name for name in moved)
    assert any(".visual." in name for name in moved) == (freeze == "[]")


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %} {{ c.text }} {% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
)


@pytest.mark.dist
@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[*needs("vllm"), pytest.mark.full])]
)
def test_an_environment_shows_pictures_in_later_turns(
    data: Path, engine: str, tmp_path: Path
) -> None:
    """Two ranks, which may train what the other one generated."""
    model = tmp_path / "model"
    shutil.copytree(data / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": TEMPLATE})
    )
    run(
        "train",
        EXAMPLE / "grpo.yaml",
        "model.path=null",
        f"model.init={model}",
        f"data.prompts={data / 'train.jsonl'}",
        *SHORT,
        f"run.dir={tmp_path}",
        "steps.num_steps=2",
        f"rollout.engine={engine}",
        "rollout.max_new_tokens=70",
        "environment={name: 'own_environments:Pictures', max_turns: 4}",
        "reward.function=environment",
        "--world",
        "2",
    )
    for step in records(tmp_path / "pictures-grpo"):
        assert step["environment/picture"] > 3 and step["policy/grad_norm"] > 0
        assert step["mismatch/logprob_diff_max"] < 1e-4


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    "engine",
    [
        ("rollout.engine=hf",),
        pytest.param(("rollout.engine=vllm", "rollout.tp=2"), marks=needs("vllm")),
    ],
)
def test_rewards_train_on_pictures(data: Path, engine: tuple[str, ...], tmp_path: Path) -> None:
    run(
        "train",
        EXAMPLE / "grpo.yaml",
        "model.path=null",
        f"model.init={data / 'model'}",
        f"data.prompts={data / 'train.jsonl'}",
        *SHORT,
        f"run.dir={tmp_path}",
        "train.tp=2",
        "steps.num_steps=2",
        *engine,
        "--world",
        "2",
    )
    found = records(tmp_path / "pictures-grpo")
    # Of an engine and a trainer that see the same pictures.
    assert all(step["mismatch/logprob_diff_max"] < 1e-4 for step in found)
    folder = tmp_path / "pictures-grpo" / "rollouts"
    samples = [json.loads(line) for line in (folder / "step_000001.jsonl").open()]
    assert len({name for one in samples for name in one["images"]}) == 16  # one per prompt
    assert all((folder / "images" / f"{name}.jpg").is_file() for name in samples[0]["images"])
