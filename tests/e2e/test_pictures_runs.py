"""The example with pictures: rows, training in several layouts, resuming, and exports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from command_line import ROOT, records, run
from packaged import needs
from tiny_images import oracle_logits
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridrl import Trainer
from hybridrl.contracts.batch import Producer
from hybridrl.models.vision.images import FILE, decoded
from hybridrl.services.report.page_data import read_run

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


def with_template(model: Path, folder: Path) -> Path:
    """Returns a copy of the model whose tokenizer has a chat template."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return copy


@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[*needs("vllm"), pytest.mark.full])]
)
def test_agents_see_pictures_of_rows_and_tools(data: Path, engine: str, tmp_path: Path) -> None:
    """Transformers is the oracle for engine and trainer; branches differ only in pictures."""
    config = {
        "run": {"name": "agents", "dir": str(tmp_path)},
        "model": {"init": str(with_template(data / "model", tmp_path))},
        "train": {"freeze": [], "micro_batch_tokens": 512},
        "rollout": {"engine": engine, "max_new_tokens": 90},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(data / "train.jsonl"), "max_prompt_tokens": 32},
        "agent": {"function": "own_agents:seeing"},
        "reward": {"function": "agent"},
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 4, "num_steps": 1},
        "log": {"tensorboard": False, "console": False},
    }
    trainer = Trainer.from_config(config)
    batch, _ = trainer.sample(trainer.prompts.take(2))
    trained = batch.to_train(Producer.here("the test"))
    ours_T = trainer.policy.logprobs(trained)
    folder = trainer.save_hf(tmp_path / "hf")
    oracle = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    seen = Counter[tuple[int, str]]()
    for row in range(batch.num_samples):
        here = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        contents, tokens = batch.contents_of(row), batch.tokens_T[here]
        images = [(c.start, c.end, decoded(c.arrays[FILE].tobytes())) for c in contents]
        with torch.no_grad():
            logits = oracle_logits(oracle, processor, tokens, images)[:-1]
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mask = batch.response_mask_T[here][1:]
        for found_T in (ours_T, batch.behaviour_logp_T):
            assert (found_T[here][1:] - expected)[mask].abs().max() < 2e-5
        seen.update((int(batch.group_B[row]), one.key) for one in contents)
    assert batch.num_samples == 16 and max(seen.values()) == 8
    assert len(seen) == 2 * (1 + 3 + 2), "the row's, the tool's and the branches' pictures"
    metrics = trainer.train_step()
    assert metrics["agent/failed"] == 0 and metrics["policy/grad_norm"] > 0
    assert metrics["mismatch/logprob_diff_max"] < 1e-4
    trainer.close()


@pytest.mark.dist
@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[*needs("vllm"), pytest.mark.full])]
)
def test_an_environment_shows_pictures_in_later_turns(
    data: Path, engine: str, tmp_path: Path
) -> None:
    """Two ranks, which may train what the other one generated."""
    model = with_template(data / "model", tmp_path)
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
    folder = tmp_path / "pictures-grpo"
    lines = (folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    shown = [one for one in map(json.loads, lines) if "response_images" in one]
    assert len(shown) > 3
    for one in shown:
        flags = [flag for flag, number in one["turns"] for _ in range(number)]
        assert all(flags[place] == 1 for place in one["response_images_at"])
    names = {name for one in shown for name in one["images"] + one["response_images"]}
    assert names <= read_run(folder, "run").images.keys()


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
