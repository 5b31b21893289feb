"""HF directories of transformers into the shards of every rank and back, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_tensors import allocate
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import GLM4_MOE, LATENT, slices_of
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolLM3Config,
)

from hybridrl.config.wrapped_models import text_name, wrapped_name
from hybridrl.errors import CheckpointError
from hybridrl.hybrid_engine.planning.plan import Plan, plan_reshard
from hybridrl.models.boxes import box_view, volume
from hybridrl.models.family import is_kept_in_fp32, resolve_family
from hybridrl.models.hf import headers
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.exported_config import exported_config
from hybridrl.models.hf.headers import HfHeaders
from hybridrl.models.hf.shards import HfCheckpoint, HfWriter, load_hf
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.weights import RankLayout, hf_layout, hf_shapes, megatron_layout
from hybridrl.parallel.layout import TrainLayout

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
HYBRID: dict[str, Any] = {
    "num_key_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3_ROPE)),
    "llama_tied_biases": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES),
    "smollm3": SmolLM3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, pad_token_id=0),
    "granite": GraniteConfig(**SIZES),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "gemma2": Gemma2Config(**SIZES),
    "gemma3_text": Gemma3TextConfig(**SIZES),
    "glm4": Glm4Config(**SIZES, pad_token_id=0),
    # Norms of all heads together are cut by heads: no more ranks than key-value heads.
    "olmo2": Olmo2Config(**(SIZES | {"num_key_value_heads": 4})),
    # The same with gates of attention.
    "qwen3_5_text": Qwen3_5TextConfig(**(SIZES | HYBRID)),
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SMALL_MROPE = {"rope_parameters": {**MROPE, "mrope_section": [2, 1, 1]}}
TOWER = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [1],
}
PLAIN_TOWER = {key: value for key, value in TOWER.items() if "deepstack" not in key}
PARTIAL_MROPE = {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}
IMAGE_TOKENS = {"image_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
WITH_IMAGES: dict[str, PreTrainedConfig] = {
    "qwen3_vl": Qwen3VLConfig(
        text_config=SIZES | SMALL_MROPE,
        vision_config=TOWER,
        **IMAGE_TOKENS,
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=SIZES | HYBRID | PARTIAL_MROPE, vision_config=PLAIN_TOWER, **IMAGE_TOKENS
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config={key: value for key, value in SIZES.items() if key != "head_dim"} | SMALL_MROPE,
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "out_hidden_size": SIZES["hidden_size"],
            "fullatt_block_indexes": [1],
        },
        **IMAGE_TOKENS,
    ),
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
CONFIGS_WITH_EXPERTS: dict[str, PreTrainedConfig] = {
    # Gate and up together are as wide as the model: only the numbers show a transposed matrix.
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config=SIZES
        | SMALL_MROPE
        | EXPERTS
        | {"moe_intermediate_size": 16, "mlp_only_layers": [1], "tie_word_embeddings": False},
        vision_config=TOWER,
        tie_word_embeddings=False,
        **IMAGE_TOKENS,
    ),
    "qwen3_5_moe": Qwen3_5MoeConfig(
        text_config=SIZES | HYBRID | SHARED_EXPERT | PARTIAL_MROPE,
        vision_config=PLAIN_TOWER,
        **IMAGE_TOKENS,
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=24, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS),
    "qwen2_moe": Qwen2MoeConfig(**(SIZES | SHARED_EXPERT | {"head_dim": 8})),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**(SIZES | HYBRID | SHARED_EXPERT)),
    "qwen3_next": Qwen3NextConfig(**(SIZES | HYBRID | SHARED_EXPERT), mlp_only_layers=[2]),
    "olmoe": OlmoeConfig(**(SIZES | EXPERTS | {"head_dim": 8, "num_key_value_heads": 4})),
    "glm4_moe": Glm4MoeConfig(**SIZES, **GLM4_MOE),
    "deepseek_v3": DeepseekV3Config(**(SIZES | LATENT | {"head_dim": 8})),
    # As wide as the model: only the numbers show whether a matrix is transposed.
    "gpt_oss": GptOssConfig(**(SIZES | EXPERTS | {"intermediate_size": 32})),
}
LAYOUTS = (
    TrainLayout(1),
    TrainLayout(4, tp=2, pp=2),
    TrainLayout(4, tp=4),  # more ranks than key-value heads
    TrainLayout(4, pp=2, vpp=2, order="pp-tp-cp-ep-dp"),
)


LAYOUTS_WITH_EXPERTS = (
    TrainLayout(8, tp=2, pp=2, ep=2),
    TrainLayout(4, tp=4, ep=2, etp=2),
    TrainLayout(4, pp=2, vpp=2, ep=2, order="ep-dp-tp-cp-pp"),
)


def _save(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    config = (CONFIGS | WITH_IMAGES | CONFIGS_WITH_EXPERTS)[name]
    has_tower = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for buffer in (b for n, b in model.named_buffers() if is_kept_in_fp32(n)):
            buffer.normal_()
    model.save_pretrained(folder, **options)
    return model


def _execute(plan: Plan, sources: list[dict[str, Tensor]], dests: list[dict[str, Tensor]]) -> None:
    for ops in plan.ops:
        for op in ops:
            source = box_view(sources[op.source_rank][op.source], op.source_box)
            box_view(dests[op.dest_rank][op.dest], op.dest_box).copy_(source)


def _read(folder: Path) -> dict[str, Any]:
    """Returns a directory's config.json, of a model with its vision tower if it has one."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return read_config(folder, model_type)


def _load_all_ranks(
    folder: Path, layout: TrainLayout, dtype: torch.dtype = torch.float32
) -> tuple[list[RankLayout], list[dict[str, Tensor]], dict[str, tuple[int, ...]]]:
    hf_config = _read(folder)
    family = resolve_family(None, hf_config)
    shape = family.shape(hf_config)
    shapes = hf_shapes(family, shape)
    layouts = [megatron_layout(family, shape, layout, r) for r in range(layout.world_size)]
    shards = [allocate(one, dtype) for one in layouts]
    for one, tensors in zip(layouts, shards, strict=True):
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
        assert load_hf(folder, one, tensors, shapes) == frozenset()
        assert not any(tensor.isnan().any() for tensor in tensors.values())
    return layouts, shards, shapes


@pytest.mark.parametrize("name", [*CONFIGS, *WITH_IMAGES, *CONFIGS_WITH_EXPERTS])
@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_hf_round_trip_is_bitwise_in_every_layout(
    name: str, max_shard_size: str, tmp_path: Path
) -> None:
    model = _save(name, tmp_path / "in", max_shard_size=max_shard_size)
    is_sharded = (tmp_path / "in" / "model.safetensors.index.json").exists()
    assert is_sharded == (max_shard_size == "40KB")
    if name not in CONFIGS_WITH_EXPERTS:
        wanted = {text_name(n): p.detach() for n, p in model.named_parameters()}
    elif name == "qwen3_vl_moe":  # stacks on disk too
        hf_config = read_config(tmp_path / "in")
        wanted = {n: t.clone() for n, t in checkpoint_tensors(model, hf_config).items()}
    else:  # what transformers stacks in memory is a tensor an expert on disk
        wanted = {
            text_name(n): t
            for f in (tmp_path / "in").glob("*.safetensors")
            for n, t in load_file(f).items()
        }
    for layout in LAYOUTS_WITH_EXPERTS if name in CONFIGS_WITH_EXPERTS else LAYOUTS:
        if layout.etp > 1 and name == "gpt_oss":
            continue  # whose experts have biases
        layouts, shards, shapes = _load_all_ranks(tmp_path / "in", layout)
        wanted = slices_of(wanted, shapes) if wanted.keys() != shapes.keys() else wanted
        targets = [hf_layout(shapes), *[RankLayout((), {})] * (layout.world_size - 1)]
        back = allocate(targets[0], torch.float32)
        plan = plan_reshard(layouts, targets, itemsize=4)
        _execute(plan, shards, [back, *[{} for _ in targets[1:]]])
        assert back.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(back[key], tensor), (layout, key)
    out = tmp_path / "out"
    config = exported_config(_read(tmp_path / "in"), "lm", None)
    with HfWriter(out, shapes, torch.float32, config, max_shard_bytes=40_000) as writer:
        for key in reversed(shapes):  # any order will do
            writer.write(key, back[key])
    given, written = (
        {name for file in folder.glob("*.safetensors") for name in load_file(file)}
        for folder in (tmp_path / "in", out)
    )
    assert written == given
    again = type(model).from_pretrained(out)
    assert _read(out)["architectures"] == [type(model).__name__]
    assert without_origin(again.config.to_dict()) == without_origin(model.config.to_dict())
    for (key, tensor), (_, found) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(tensor, found), key
    if name == "qwen3_vl_moe":  # as published, with transposed matrices
        written = {n: t for f in out.glob("*.safetensors") for n, t in load_file(f).items()}
        shape = written["model.language_model.layers.0.mlp.experts.down_proj"].shape
        assert shape == (8, 16, 32)
        for one, other in zip(shards, _load_all_ranks(out, layout)[1], strict=True):
            assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_stacks_of_experts_are_read_as_matrices(tmp_path: Path) -> None:
    """Directories on the hub contain the experts of a layer in two tensors."""
    _save("qwen3_5_moe_text", tmp_path / "apart")
    apart = load_file(tmp_path / "apart" / "model.safetensors")
    stacked = {name: tensor for name, tensor in apart.items() if ".mlp.experts." not in name}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [apart[f"{experts}{i}.{kind}_proj.weight"] for i in range(8)]
            for kind in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        stacked[f"{experts}gate_up_proj"] = torch.stack(both)
        stacked[f"{experts}down_proj"] = torch.stack(downs)
    (tmp_path / "stacked").mkdir()
    shutil.copy(tmp_path / "apart" / "config.json", tmp_path / "stacked")
    for layout in (TrainLayout(1), TrainLayout(4, tp=2, ep=2, etp=2)):
        # In the files of a multimodal model too.
        names = {name: wrapped_name(name) if layout.tp > 1 else name for name in stacked}
        renamed = {names[name]: tensor for name, tensor in stacked.items()}
        save_file(renamed, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
        loaded = [_load_all_ranks(tmp_path / folder, layout)[1] for folder in ("apart", "stacked")]
        for one, other in zip(*loaded, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    wrong = {name: t[:-1] if name.endswith("gate_up_proj") else t for name, t in stacked.items()}
    save_file(wrong, tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*\(7, 48, 32\).*\(8, 48, 32\)"):
        _load_all_ranks(tmp_path / "stacked", TrainLayout(1))


def without_origin(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without the folder that it came from, and without the type of its parts."""
    found = {key: value for key, value in config.items() if key != "_name_or_path"}
    for key, value in found.items():
        if isinstance(value, dict):
            found[key] = {name: part for name, part in value.items() if name != "dtype"}
    return found


def test_hf_load_casts_and_zeroes_padding(tmp_path: Path) -> None:
    model = _save("qwen3", tmp_path)
    layouts, shards, _ = _load_all_ranks(tmp_path, TrainLayout(2, tp=2), torch.bfloat16)
    embedding = torch.cat([shard["0/embedding.word_embeddings.weight"] for shard in shards])
    assert torch.equal(embedding[:131], model.model.embed_tokens.weight.to(torch.bfloat16))
    assert embedding.shape[0] == 256
    assert not embedding[131:].any()


def test_hf_load_reads_slices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of TP4 reads a quarter of each cut tensor, never the whole."""
    _save("qwen3", tmp_path)
    read: list[int] = []

    class Slice:
        def __init__(self, part: Any) -> None:
            self._part = part
            self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

        def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
            found: Tensor = self._part[index]
            read.append(found.numel())
            return found

    class File:
        """A safe_open that can give slices alone and notes their sizes."""

        def __init__(self, file: Path, framework: str) -> None:
            self._file = safe_open(file, framework)

        def __enter__(self) -> File:
            self._open = self._file.__enter__()
            self.keys = self._open.keys
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, name: str) -> Slice:
            return Slice(self._open.get_slice(name))

    monkeypatch.setattr(headers, "safe_open", File)
    layouts, shards, _ = _load_all_ranks(tmp_path, TrainLayout(4, tp=4))
    assert max(read) <= max(tensor.numel() for tensor in shards[0].values())
    assert sum(read) == sum(volume(region.hf_box) for one in layouts for region in one.regions)


def test_hf_load_passes_over_inv_freq_and_a_tied_models_lm_head(tmp_path: Path) -> None:
    model = _save("qwen3_tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = model.model.embed_tokens.weight.detach().clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file, {"format": "pt"})
    _load_all_ranks(tmp_path, TrainLayout(2, tp=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_differs_from_the_tied_embedding_is_refused(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "COMPARED_BYTES", 1000)
    _save("qwen3_tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head.clone()}, file, {"format": "pt"})
    _load_all_ranks(tmp_path, TrainLayout(1))
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in .*tie_word_embeddings to false"):
        _load_all_ranks(tmp_path, TrainLayout(1))
    # A value model has no use for it.
    hf_config = read_config(tmp_path)
    family = resolve_family(None, hf_config)
    shapes = hf_shapes(family, family.shape(hf_config), "value")
    HfHeaders(tmp_path).check(shapes, missing_ok={"score.weight"})


def test_hf_writer_copies_tokenizer_files_and_sets_the_dtype(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text("{}")
    (source / "model.safetensors").write_text("not copied")
    config = {"model_type": "llama", "torch_dtype": "float32"}
    with HfWriter(
        tmp_path / "out", {"w": (2, 3)}, torch.bfloat16, config, side_files=source
    ) as writer:
        writer.write("w", torch.ones(2, 3))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "llama", "torch_dtype": "bfloat16"}
    checkpoint = HfCheckpoint(tmp_path / "out")
    assert (checkpoint.shapes, checkpoint.dtypes) == ({"w": (2, 3)}, {"w": torch.bfloat16})


def test_hf_writer_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    shapes = {"a": (2,), "b": (3,)}
    with (
        pytest.raises(KeyboardInterrupt),
        HfWriter(tmp_path / "out", shapes, torch.float32, {}) as writer,
    ):
        writer.write("a", torch.ones(2))
        raise KeyboardInterrupt
    with (
        pytest.raises(ValueError, match=r"never written: \['b'\]"),
        HfWriter(tmp_path / "out", shapes, torch.float32, {}) as writer,
    ):
        writer.write("a", torch.ones(2))
    with (
        pytest.raises(ValueError, match="b: shape"),
        HfWriter(tmp_path / "out", shapes, torch.float32, {}) as writer,
    ):
        writer.write("b", torch.ones(2))
    assert list(tmp_path.iterdir()) == []
