"""Damaged model directories are refused before ranks start, in one line that names the culprit."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.cli import main
from hybridrl.config.load import load_config_dict
from hybridrl.errors import ConfigError, UserError
from hybridrl.loop.preflight import validate_training

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
DEEP = '{"a": ' * 100_000 + "1" + "}" * 100_000
MOST_SECONDS = 5.0  # of one refusal; it takes milliseconds, unless something is waited for

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two files with its tokenizer, and prompts beside it."""
    place = tmp_path_factory.mktemp("whole")
    (place / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    folder = place / "model"
    AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG)).save_pretrained(
        folder, max_shard_size="18KB"
    )
    assert (folder / SHARD).exists()
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {name: number for number, name in enumerate(("<pad>", "<eos>", "a", "b"))}
    Tokenizer(models.WordLevel(vocabulary, "<pad>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    return place


def sections(place: Path) -> dict[str, Any]:
    """Returns the configuration of a run with the model there."""
    return {
        "run": {"name": "mine", "dir": str(place / "runs")},
        "model": {"path": str(place / "model")},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": str(place / "prompts.jsonl"), "max_prompt_tokens": 4},
        "steps": {"samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 4},
    }


def judge(place: Path, **others: Any) -> None:
    """Does what the parent of a run does before ranks start."""
    validate_training(load_config_dict(sections(place) | others), 1)


def config(**changes: Any) -> Damage:
    """Changes keys of config.json; ... removes one."""

    def damage(folder: Path) -> None:
        found = {**CONFIG, **changes}
        kept = {key: value for key, value in found.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def text(name: str, content: str | bytes) -> Damage:
    """Replaces a file's content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    """Replaces a file by something else."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def weight_map(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def norm_in(shard: object) -> Damage:
    return weight_map(lambda found: found.update({"model.norm.weight": shard}))


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the header of a safetensors file."""

    def damage(folder: Path) -> None:
        data = (folder / SHARD).read_bytes()
        size = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + size])
        change(found)
        written = json.dumps(found).encode()
        written += b" " * (-len(written) % 8)
        (folder / SHARD).write_bytes(
            len(written).to_bytes(8, "little") + written + data[8 + size :]
        )

    return damage


def first(found: dict[str, Any]) -> dict[str, Any]:
    return found[next(name for name in found if name != "__metadata__")]


def huge(file: Path) -> None:
    """A sparse file that takes no room."""
    with file.open("wb") as opened:
        opened.truncate(1 << 40)


def outside(folder: Path) -> None:
    shutil.move(folder / SHARD, folder.parent / SHARD)


def twice(folder: Path) -> None:
    other = next(file for file in folder.glob("model-*") if file.name != SHARD)
    tensors = load_file(other)
    name = next(iter(load_file(folder / SHARD)))
    save_file({**tensors, name: torch.zeros(2)}, other, {"format": "pt"})


def retyped(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / SHARD, {"format": "pt"})


def reshaped(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    name = next(iter(tensors))
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / SHARD, {"format": "pt"})


FAULTS: dict[str, tuple[Damage, str]] = {
    # config.json as a file
    "config missing": (lambda f: (f / "config.json").unlink(), "config.json: got No such file"),
    "config empty": (text("config.json", ""), "config.json: got text that is not JSON"),
    "config cut": (text("config.json", json.dumps(CONFIG)[:-20]), "not JSON"),
    "config binary": (text("config.json", b"\xff\xfe\x00" * 9), "config.json: got text that is"),
    "config BOM": (text("config.json", b"\xef\xbb\xbf{}"), "not JSON"),
    "config list": (text("config.json", "[1]"), "config.json: got list"),
    "config null": (text("config.json", "null"), "config.json: got NoneType"),
    "config deep": (text("config.json", DEEP), "nested too deeply"),
    "config huge": (instead("config.json", huge), "a file of 1099511627776 bytes"),
    "config directory": (instead("config.json", Path.mkdir), "config.json: got a directory"),
    "config pipe": (instead("config.json", os.mkfifo), "config.json: got a pipe"),
    "config broken link": (
        instead("config.json", lambda f: f.symlink_to("nowhere")),
        "config.json: got No such file",
    ),
    "config endless link": (
        instead("config.json", lambda f: f.symlink_to("config.json")),
        "config.json: got Too many levels",
    ),
    "config long number": (
        text("config.json", '{"vocab_size": ' + "9" * 5000 + "}"),
        "config.json: got text that is not JSON",
    ),
    "config key twice": (
        text("config.json", json.dumps(CONFIG)[:-1] + ', "vocab_size": 50}'),
        'config.json: "vocab_size": got a repeated key',
    ),
    "config no model": (text("config.json", "{}"), "architectures: got none"),
    # sizes
    "layers absent": (config(num_hidden_layers=...), "num_hidden_layers is missing"),
    "layers negative": (config(num_hidden_layers=-2), "num_hidden_layers: got -2"),
    "layers zero": (config(num_hidden_layers=0), "num_hidden_layers: got 0"),
    "layers true": (config(num_hidden_layers=True), "num_hidden_layers: got true"),
    "layers float": (config(num_hidden_layers=2.0), "num_hidden_layers: got 2.0"),
    "layers text": (config(num_hidden_layers="2"), 'num_hidden_layers: got "2"'),
    "layers many": (config(num_hidden_layers=10**9), "num_hidden_layers: got 1000000000"),
    "layers list": (config(num_hidden_layers=[2]), "num_hidden_layers: got [2]"),
    "hidden huge": (config(hidden_size=2**62), "hidden_size: got 4611686018427387904"),
    "vocabulary text": (config(vocab_size="many"), 'vocab_size: got "many"'),
    "heads do not divide": (
        config(num_attention_heads=3, num_key_value_heads=2),
        "num_key_value_heads: got 2; allowed: a divisor of num_attention_heads = 3",
    ),
    "heads zero": (config(num_attention_heads=0), "num_attention_heads: got 0"),
    "key-value heads zero": (config(num_key_value_heads=0), "num_key_value_heads: got 0"),
    "head odd": (config(head_dim=7), "head_dim: got 7; allowed: an even number"),
    "head object": (config(head_dim={}), "head_dim: got {}"),
    "positions absent": (config(max_position_embeddings=...), "max_position_embeddings is missing"),
    "epsilon text": (config(rms_norm_eps="x"), 'rms_norm_eps: got "x"'),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps: got NaN"),
    "epsilon negative": (config(rms_norm_eps=-1e-6), "rms_norm_eps: got -1e-06"),
    "spread infinite": (config(initializer_range=float("inf")), "initializer_range: got Infinity"),
    "tied text": (config(tie_word_embeddings="false"), 'tie_word_embeddings: got "false"'),
    "sizes of another model": (config(intermediate_size=64), "mlp"),
    "a layer too many": (config(num_hidden_layers=3), "model.layers.2"),
    # what the model is
    "architectures text": (config(architectures="Qwen3ForCausalLM"), "architectures: got"),
    "architectures numbers": (config(architectures=[3]), "architectures: got [3]"),
    "architecture unknown": (config(architectures=["X\ud800"]), r'architectures: got "X\ud800"'),
    "type of another": (config(model_type="llama"), "model_type: got \"llama\"; allowed: 'qwen3'"),
    "type absent": (config(model_type=...), "model_type is missing"),
    "type a list": (config(architectures=..., model_type=["qwen3"]), "architectures: got none"),
    "dtype unknown": (config(torch_dtype="float99"), "torch_dtype: got float99"),
    "dtype list": (config(dtype=["float32"]), 'dtype: got ["float32"]'),
    "end text": (config(eos_token_id="<eos>"), "eos_token_id: got <eos>"),
    "end beyond": (config(eos_token_id=[1, 40]), "eos_token_id: got [1, 40]"),
    "end negative": (config(eos_token_id=-1), "eos_token_id: got -1"),
    "activation list": (config(hidden_act=["silu"]), "hidden_act: got"),
    "bias number": (config(attention_bias=0), "attention_bias: got 0"),
    "layer types text": (config(layer_types="full_attention"), "layer_types: got full_attention"),
    "layer types short": (config(layer_types=["full_attention"]), "layer_types: got 1 kinds"),
    "windows": (
        config(use_sliding_window=True, sliding_window=8),
        "use_sliding_window: got true",
    ),
    # positions
    "rope text": (config(rope_parameters="x"), "rope_parameters: got x"),
    "rope list": (config(rope_scaling=[1]), "rope_scaling: got [1]"),
    "rope theta text": (config(rope_theta="10000"), 'rope_theta: got "10000"'),
    "rope theta inside": (config(rope_parameters={"rope_theta": 0}), "rope_theta: got 0"),
    "rope YaRN without its original length": (
        config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "rope_scaling.original_max_position_embeddings is missing; allowed: a number",
    ),
    "rope of no kind": (
        config(rope_scaling={"rope_type": "ntk", "factor": 4.0}),
        "rope_scaling.rope_type: got ntk; allowed: default, linear, dynamic, llama3",
    ),
    "rope type number": (config(rope_parameters={"rope_type": 3}), "rope_type: got 3"),
    "rope twice": (
        config(
            rope_parameters={"rope_type": "default"},
            rope_scaling={"rope_type": "linear", "factor": 2},
        ),
        "rope_scaling: got",
    ),
    "rope two types": (
        config(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2}),
        "rope_scaling.type: got yarn",
    ),
    "rope no factor": (config(rope_scaling={"type": "linear"}), "rope_scaling.factor is missing"),
    "rope unknown part": (
        config(rope_parameters={"rope_type": "default", "mrope_section": [1]}),
        "rope_parameters.mrope_section: got [1]",
    ),
    "rope partial": (config(partial_rotary_factor=0.5), "partial_rotary_factor: got 0.5"),
    # keys that change numbers, or may
    "softcap": (config(attn_logit_softcapping=50.0), "attn_logit_softcapping: got 50.0; allowed:"),
    "dropout": (config(attention_dropout=0.1), "attention_dropout: got 0.1; allowed: 0 or null"),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config: got"),
    "unknown key": (config(my_scale=2.0), "my_scale: got 2.0"),
    "unknown keys": (config(my_scale=2.0, deep=DEEP[:999]), "my_scale, deep: got 2.0"),
    "unknown long key": (config(**{"k" * 10**5: 1}), "kkk"),
    "unknown odd key": (config(**{"\ud800\n\0": 1}), r"\ud800\n\u0000"),
    # weights
    "no weights": (lambda f: (f / INDEX).unlink(), "got no weights"),
    "weights in PyTorch's form": (
        lambda f: [(f / INDEX).unlink(), (f / "pytorch_model.bin").write_bytes(b"x")],
        'got weights in "pytorch_model.bin"; allowed: model.safetensors or',
    ),
    "header FP8": (header(lambda h: first(h).update(dtype="F8_E4M3")), "damaged file"),
    "header INT8": (header(lambda h: first(h).update(dtype="I8")), "damaged file"),
    "index directory": (instead(INDEX, Path.mkdir), "index.json: got unreadable (a directory)"),
    "index pipe": (instead(INDEX, os.mkfifo), "index.json: got unreadable (a pipe"),
    "index deep": (text(INDEX, DEEP), "JSON nested too deeply"),
    "index huge": (instead(INDEX, huge), "unreadable (a file of"),
    "index list": (text(INDEX, "[]"), "unreadable (list)"),
    "index without map": (text(INDEX, "{}"), "weight_map is nothing"),
    "index empty map": (text(INDEX, '{"weight_map": {}}'), "weight_map is {}"),
    "index map a list": (text(INDEX, '{"weight_map": [1]}'), "weight_map is [1]"),
    "index number": (norm_in(3), 'weight_map: "model.norm.weight": got 3'),
    "index parent": (norm_in(f"../{SHARD}"), f'"model.norm.weight": got "../{SHARD}"'),
    "index absolute": (norm_in(f"/tmp/{SHARD}"), f'got "/tmp/{SHARD}"'),
    "index NUL": (norm_in("a\0.safetensors"), r'got "a\u0000.safetensors"'),
    "index surrogate": (norm_in("\ud800.safetensors"), r'got "\ud800.safetensors"'),
    "index null": (norm_in(None), "got null"),
    "index dots": (norm_in(".."), 'got ".."'),
    "index missing file": (norm_in("other.safetensors"), "other.safetensors is missing"),
    "index key twice": (
        text(INDEX, f'{{"weight_map": {{"a": "{SHARD}", "a": "{SHARD}"}}}}'),
        "a repeated key",
    ),
    "index tensor nowhere": (
        weight_map(lambda found: found.update({"x\ud800": SHARD})),
        r'tensor "x\ud800": got no entry in',
    ),
    "shard outside": (outside, f"{SHARD} is missing"),
    "shard empty": (text(SHARD, ""), f"{SHARD}: got a damaged file"),
    "shard garbage": (text(SHARD, b"\xff" * 999), f"{SHARD}: got a damaged file"),
    "shard directory": (instead(SHARD, Path.mkdir), f"{SHARD}: got a directory"),
    "shard pipe": (instead(SHARD, os.mkfifo), f"{SHARD}: got a pipe"),
    "shard broken link": (instead(SHARD, lambda f: f.symlink_to("x")), f"{SHARD} is missing"),
    "shard zeros": (instead(SHARD, huge), f"{SHARD}: got a damaged file"),
    "single directory": (lambda f: (f / "model.safetensors").mkdir(), "got a directory"),
    "single pipe": (lambda f: os.mkfifo(f / "model.safetensors"), "got a pipe"),
    "header length": (
        lambda f: (f / SHARD).write_bytes(b"\xff" * 7 + b"\x7f" + (f / SHARD).read_bytes()[8:]),
        "damaged file",
    ),
    "header deep": (
        lambda f: (f / SHARD).write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode()),
        "damaged file",
    ),
    "header type": (header(lambda h: first(h).update(dtype="F99")), "damaged file"),
    "tensor of INT8": (retyped, "got I8; allowed: F32, F16, BF16"),
    "tensor of another shape": (reshaped, "shape ("),
    "header integers": (header(lambda h: first(h).update(dtype="I32")), "got I32; allowed: F32"),
    "header shape negative": (header(lambda h: first(h).update(shape=[-40, 16])), "damaged file"),
    "header shape huge": (
        header(lambda h: first(h).update(shape=[2**40, 2**40])),
        "damaged file",
    ),
    "header overlap": (
        header(lambda h: first(h).update(data_offsets=[0, 4])),
        "damaged file",
    ),
    "header past the end": (
        header(lambda h: first(h).update(data_offsets=[0, 2**50])),
        "damaged file",
    ),
    "tensor in two files": (twice, f"got both {SHARD} and"),
    # tokenizer and generation
    "tokenizer empty": (text("tokenizer.json", ""), "tokenizer.json: got a damaged file"),
    "tokenizer binary": (text("tokenizer.json", b"\x00\xff" * 99), "tokenizer.json: got a damaged"),
    "tokenizer without model": (text("tokenizer.json", "{}"), "tokenizer.json: got a damaged file"),
    "tokenizer deep": (text("tokenizer.json", DEEP), "tokenizer.json: got a damaged file"),
    "tokenizer pipe": (instead("tokenizer.json", os.mkfifo), "tokenizer.json: got a pipe"),
    "tokenizer cut": (
        lambda f: os.truncate(f / "tokenizer.json", 300),
        "tokenizer.json: got a damaged file",
    ),
    "tokens beyond": (
        lambda f: Tokenizer(models.WordLevel({"a": 39, "b\n": 40, "c": 41}, "a")).save(
            str(f / "tokenizer.json")
        ),
        'tokenizer.json: got token "b\\n" with number 40, and 1 more; allowed: numbers below',
    ),
    "tokenizer config cut": (text("tokenizer_config.json", '{"a": '), "not JSON"),
    "tokenizer config deep": (text("tokenizer_config.json", DEEP), "nested too deeply"),
    "special tokens list": (text("special_tokens_map.json", "[]"), "tokens_map.json: got list"),
    "added tokens pipe": (lambda f: os.mkfifo(f / "added_tokens.json"), "got a pipe"),
    "sentencepiece empty": (text("tokenizer.model", ""), "tokenizer.model: got an empty file"),
    "no tokenizer": (
        lambda f: [file.unlink() for file in f.glob("tokenizer*")],
        "model.tokenizer: got",
    ),
    "generation config": (
        text("generation_config.json", "{'a': 1}"),
        "generation_config.json: got",
    ),
    "template broken": (
        text("chat_template.jinja", "{% for m in messages %}{{ m }"),
        "chat_template.jinja: got line 1",
    ),
    "template number": (
        text("tokenizer_config.json", '{"chat_template": 3}'),
        "tokenizer_config.json: chat_template: got 3",
    ),
    "template list": (
        text("tokenizer_config.json", '{"chat_template": [{"template": "{{ x"}]}'),
        "chat_template: got line 1",
    ),
}


@pytest.fixture
def spoiled(whole: Path, tmp_path: Path) -> Iterator[Callable[[Damage], Path]]:
    """Gives a copy of the whole directory after some damage."""
    places: list[Path] = []

    def make(damage: Damage) -> Path:
        place = tmp_path / str(len(places))
        places.append(place)
        shutil.copytree(whole, place)
        damage(place / "model")
        return place

    yield make


def test_model_directory_faults_are_refused_in_one_line(
    spoiled: Callable[[Damage], Path],
) -> None:
    wrong = {}
    for name, (damage, expected) in FAULTS.items():
        place = spoiled(damage)
        begun = time.monotonic()
        try:
            judge(place)
        except ConfigError as error:
            said = [str(violation) for violation in error.violations]
        except UserError as error:
            said = [str(error)]
        except Exception as error:  # what is tested: no other error reaches the user
            said = [f"{type(error).__name__}: {error}"]
        else:
            said = ["nothing"]
        is_plain = said[0].isprintable() and len(said[0].replace(str(place), "")) < 500
        took = time.monotonic() - begun
        if len(said) != 1 or expected not in said[0] or not is_plain or took > MOST_SECONDS:
            wrong[name] = [line[:300] for line in said], round(took, 1)
    assert wrong == {}
    assert len(FAULTS) > 100


# Of each kind of fault some, each by a command as a user would give it.
BY_COMMAND = (
    *("config missing", "config cut", "layers zero", "sizes of another model", "a layer too many"),
    *("architecture unknown", "rope of no kind", "no weights", "weights in PyTorch's form"),
    *("index parent", "index absolute", "index missing file", "index tensor nowhere"),
    *("shard broken link", "shard garbage", "tensor of INT8", "tensor of another shape"),
    *("tensor in two files", "tokenizer empty", "tokens beyond", "template broken"),
)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_fifteen_malformed_directories_end_a_command_with_code_2_and_one_message(
    command: str,
    spoiled: Callable[[Damage], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wrong = {}
    for name in BY_COMMAND:
        damage, expected = FAULTS[name]
        place = spoiled(damage)
        config_file = place / "c.yaml"
        config_file.write_text(yaml.safe_dump(sections(place)))
        more = ["--prompts", str(place / "prompts.jsonl")] if command == "eval" else []
        monkeypatch.setattr("sys.argv", ["hybridrl", command, str(config_file), *more])
        with pytest.raises(SystemExit) as end:
            main.main()
        out, told = capfd.readouterr()
        is_one = told.count("\n") == 1 and "Traceback" not in told and "allowed: " in told
        if end.value.code != 2 or out or not is_one or expected not in told:
            wrong[name] = end.value.code, out, told
    assert wrong == {}
    assert len(BY_COMMAND) >= 15


def as_in_the_hubs_cache(folder: Path) -> None:
    """Every file a link to one of another name outside the directory."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{number:064x}")
        file.symlink_to(Path("..", "blobs", f"{number:064x}"))


GENERATION = (
    "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        as_in_the_hubs_cache,
        config(pad_token_id=99, id2label=3, torch_dtype=None, temperature=0.6, anything=None),
        config(sliding_window=8, use_sliding_window=False, max_window_layers=1),
        config(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        config(layer_types=["full_attention"] * 2, dtype="bfloat16", torch_dtype=...),
        text("chat_template.jinja", GENERATION),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
    ],
)
def test_model_directory_that_is_whole_is_taken(
    spoiled: Callable[[Damage], Path], change: Damage
) -> None:
    judge(spoiled(change))


def test_reward_model_without_a_value_head_is_refused(whole: Path) -> None:
    scorer = {"function": "reward_model", "options": {"path": str(whole / "model")}}
    with pytest.raises(ConfigError, match="tensor score.weight in .*is missing"):
        judge(whole, reward=scorer)
