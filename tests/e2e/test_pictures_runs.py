"""The example with pictures: rows, training in several layouts, resuming, and exports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_kernels
from command_line import ROOT, records, run
from packaged import CLASSES, needs
from peft import PeftModel
from rounded_agreement import check_rounded
from safetensors.torch import load_file
from tiny_images import oracle_logits, save_processor
from tiny_models import tiny_model
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridrl import Trainer
from hybridrl.contracts.batch import Producer, TrainBatch
from hybridrl.errors import UserError
from hybridrl.loop.exports import export_peft
from hybridrl.models.family import is_kept_in_fp32
from hybridrl.models.vision.images import FILE, decoded
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.services.report.page_data import read_run

PACKAGED = [pytest.param(name, marks=[*needs(name), pytest.mark.full]) for name in CLASSES]
ENGINES = ["hf", *PACKAGED]
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


def with_template(model: Path, folder: Path, template: str = TEMPLATE) -> Path:
    """Returns a copy of the model whose tokenizer has a chat template."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return copy


def agents_config(data: Path, model: Path, engine: str, folder: Path) -> dict[str, Any]:
    """Returns the configuration of a step in which agents see pictures of rows and tools."""
    return {
        "run": {"name": "agents", "dir": str(folder)},
        "model": {"init": str(model)},
        "train": {"freeze": [], "micro_batch_tokens": 512},
        "rollout": {"engine": engine, "max_new_tokens": 90},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(data / "train.jsonl"), "max_prompt_tokens": 32},
        "agent": {"function": "own_agents:seeing"},
        "reward": {"function": "agent"},
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 4, "num_steps": 1},
        "log": {"tensorboard": False, "console": False},
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_agents_see_pictures_of_rows_and_tools(data: Path, engine: str, tmp_path: Path) -> None:
    """Transformers is the oracle for engine and trainer; branches differ only in pictures."""
    trainer = Trainer.from_config(
        agents_config(data, with_template(data / "model", tmp_path), engine, tmp_path)
    )
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


def test_agents_whose_template_drops_pictures_are_refused(data: Path, tmp_path: Path) -> None:
    """Rows that no template renders could be read, but no request of an agent."""
    texts = "{% for m in messages %}{{ m.content if m.content is string }}{% endfor %}"
    config = agents_config(data, with_template(data / "model", tmp_path, texts), "hf", tmp_path)
    with pytest.raises(UserError, match=r"writes no placeholder for images; .*<\|image_pad\|>"):
        Trainer.from_config(config)


def base_of(name: str, dtype: torch.dtype, data: Path, folder: Path) -> Path:
    """Returns a directory with random weights of a tiny model, and the example's tokenizer."""
    model, base = tiny_model(name, wide=True), folder / "base"
    for key, value in json.loads((data / "model" / "config.json").read_text()).items():
        if key.endswith("_token_id"):
            setattr(model.config, key, value)
    for parameter_name, parameter in model.named_parameters():
        if not is_kept_in_fp32(parameter_name):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        shutil.copyfile(data / "model" / file, base / file)
    return base


def images_of(processor: Any, request: Request, num_tokens: int) -> dict[str, Any]:
    """Returns transformers' inputs for a request's images."""
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64)
    for content in request.contents:
        kinds[:, content.start : content.end] = 1
    files = [decoded(content.arrays[FILE].tobytes()) for content in request.contents]
    return {**processor(files, return_tensors="pt"), "mm_token_type_ids": kinds}


@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[*needs("vllm"), pytest.mark.full])]
)
def test_adapters_of_qwen3_5_with_pictures_are_those_of_peft(
    data: Path, engine: str, tmp_path: Path
) -> None:
    """vLLM receives merged weights, and computes delta nets on CPU in bfloat16 only."""
    dtype = torch.float32
    if engine == "vllm":
        vllm_kernels.register()
        dtype = torch.bfloat16
    base = base_of("qwen3_5", dtype, data, tmp_path)
    config: dict[str, Any] = {
        "run": {"name": "adapters", "dir": str(tmp_path)},
        "model": {"path": str(base), "family": "qwen3_5", "dtype": str(dtype)[len("torch.") :]},
        "lora": {"rank": 4, "alpha": 8},
        "train": {"micro_batch_tokens": 512, "learning_rate": 0.01, "warmup_steps": 0},
        "rollout": {"engine": engine, "max_new_tokens": 12},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(data / "train.jsonl"), "max_prompt_tokens": 32},
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 4, "num_steps": 2},
        "log": {"tensorboard": False, "console": False},
    }
    trainer = Trainer.from_config(config, reward=lengths)
    trainer.fit()
    trainer.reshard()
    found = records(tmp_path / "adapters")
    assert len(found) == 2 and all(step["policy/grad_norm"] > 0 for step in found)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
    prompts = trainer.prompts.take(8)
    asked = [
        Request(number, prompt.tokens, number, sampling, contents=prompt.contents)
        for number, prompt in enumerate(prompts)
    ]
    done = generate(trainer.engine, asked)
    demonstrated = [
        replace(prompt, response_tokens=one.tokens)
        for prompt, one in zip(prompts, done, strict=True)
    ]
    batch = TrainBatch.supervised(demonstrated, Producer.here("the test"))
    ours_T = trainer.policy.logprobs(batch)
    export_peft(trainer.policy.model, tmp_path / "peft", base)
    merged = trainer.save_hf(tmp_path / "merged")
    trainer.close()
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    changed = {name for name, one in after.items() if not torch.equal(one, before[name])}
    assert changed and all("language_model.layers." in name for name in changed)
    processor = Qwen2VLImageProcessorPil.from_pretrained(base)
    inputs = partial(images_of, processor)
    if engine == "vllm":
        rounded = Qwen3_5ForConditionalGeneration.from_pretrained(merged, dtype=dtype)
        check_rounded(rounded.eval(), asked, done, inputs)
        return
    model = Qwen3_5ForConditionalGeneration.from_pretrained(base, dtype=dtype)
    oracle = PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    plain = 0.0
    for row, (request, one) in enumerate(zip(asked, done, strict=True)):
        tokens = torch.tensor([request.prompt + one.tokens])
        given = {"input_ids": tokens, **inputs(request, tokens.shape[1])}
        here = slice(len(request.prompt), None)
        with torch.no_grad():
            logp_V = oracle(**given).logits[0].log_softmax(-1)[here.start - 1 : -1]
            with oracle.disable_adapter():
                plain_V = oracle(**given).logits[0].log_softmax(-1)[here.start - 1 : -1]
        assert logp_V.argmax(-1).tolist() == list(one.tokens)
        expected = logp_V.gather(1, tokens[0, here, None])[:, 0]
        start, end = int(batch.offsets[row]), int(batch.offsets[row + 1])
        for logps in (ours_T[start:end][here], torch.tensor(one.logps)):
            assert (logps - expected).abs().max() < 2e-5
        plain = max(plain, float((plain_V - logp_V).abs().max()))
    assert plain > 0.1, "adapters change something"
    config |= {"lora": {"path": str(tmp_path / "peft")}, "run": {**config["run"], "name": "again"}}
    again = Trainer.from_config(config, reward=lengths)
    assert torch.equal(again.policy.logprobs(batch), ours_T)
    again.close()


def lengths(prompt: Any, response: str, columns: Any) -> float:
    return len(response) % 7 / 7


@pytest.mark.dist
@pytest.mark.parametrize("engine", ENGINES)
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
        pytest.param(("rollout.engine=hf",), id="hf"),
        *(
            pytest.param((f"rollout.engine={name}", "rollout.tp=2"), marks=needs(name), id=name)
            for name in CLASSES
        ),
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


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in CLASSES])
def test_rewards_train_a_tower_with_windows(data: Path, engine: str, tmp_path: Path) -> None:
    """A tower with gated layers, whose parameters SGLang pads."""
    folder = tmp_path / "model"
    shutil.copytree(data / "model", folder)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    model = tiny_model("qwen2_5_vl", wide=True)
    for name, text in (
        ("image_token_id", "<|image_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        setattr(model.config, name, ids(text))
    model.save_pretrained(folder)
    save_processor(folder, patch_size=14, size={"shortest_edge": 84**2, "longest_edge": 84**2})
    run(
        "train",
        EXAMPLE / "grpo.yaml",
        f"model.path={folder}",
        f"data.prompts={data / 'train.jsonl'}",
        *SHORT,
        f"run.dir={tmp_path}",
        "steps.num_steps=3",
        "rollout.max_new_tokens=12",
        "reward.function=own_rewards:length",
        f"rollout.engine={engine}",
        "rollout.tp=2",
        "--world",
        "2",
    )
    for step in records(tmp_path / "pictures-grpo"):
        assert step["mismatch/logprob_diff_max"] < 1e-4 and step["policy/grad_norm"] > 0
