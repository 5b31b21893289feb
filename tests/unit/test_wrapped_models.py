"""Text parts of multimodal models: their config.json, and the names of their tensors."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from layout_tensors import allocate
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForImageTextToText

from hybridrl.config.load import load_config_dict
from hybridrl.config.wrapped_models import has_images, text_part, wrapped, wrapped_name
from hybridrl.errors import CheckpointError, ModelError
from hybridrl.metrics.flops import attended_pairs, attention_length, forward_flops, matmul_params
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.exported_config import exported_config
from hybridrl.models.hf.passed_over import passed_over
from hybridrl.models.hf.shards import HfWriter, KeptTensors, load_hf
from hybridrl.models.megatron.rotary_positions import axes_of
from hybridrl.models.mixers import DeltaShape
from hybridrl.models.weights import hf_shapes, megatron_layout
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.model_rules import hybrid_layout_rules

MODELS = Path(__file__).parents[2] / "examples" / "recipes" / "models"
# Billions of weights that each token of the text part is multiplied with, without embeddings.
LAYERS = {"qwen3.5-0.8b": 0.50, "qwen3.5-4b": 3.57, "qwen3.5-9b": 6.92, "qwen3.5-27b": 24.35}


@pytest.mark.parametrize("name", LAYERS)
def test_real_models_have_the_sizes_of_their_names(name: str) -> None:
    content = json.loads((MODELS / name / "config.json").read_text())
    del content["text_config"]["dtype"]
    assert wrapped(text_part(content)) == content
    family, shape = read_model(None, text_part(content))
    assert family.name == "qwen3_5_text"
    assert isinstance(shape.mixer, DeltaShape)
    assert len(shape.mixer.layers) == 3 * shape.num_attention_layers
    assert matmul_params(shape) / 1e9 == pytest.approx(LAYERS[name], abs=0.006)
    tensors = sum(torch.Size(size).numel() for size in hf_shapes(family, shape).values())
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    # Norms, convolutions, decays and biases are not products.
    assert 0 < tensors - embeddings - matmul_params(shape) < 2e-3 * tensors
    # Only a quarter of the layers has pairs of positions, and caches keys and values.
    assert attended_pairs(shape, 100) == shape.num_attention_layers * 5050
    assert attention_length(shape) > 10_000
    per_token = 2 * shape.num_kv_heads * shape.head_dim * shape.num_attention_layers * 2
    assert shape.token_bytes(1, 2) == per_token
    mixer = shape.mixer
    state = mixer.value_heads * 128 * 128 * 4 + 3 * mixer.convolved * 2
    assert shape.state_bytes(1, 2) == len(mixer.layers) * state
    # Products with weights and states are the same for each token of a longer sequence.
    one, two = (forward_flops(shape, [length], 0) for length in (1, 2))
    attention = 2 * shape.num_heads * 2 * shape.head_dim * shape.num_attention_layers
    assert two - 2 * one == attention  # one more pair


# Qwen/Qwen2.5-VL-7B-Instruct, whose text part is at the top level.
QWEN2_5_VL: dict[str, object] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def test_a_text_part_at_the_top_level_is_read_and_restored() -> None:
    content = text_part(QWEN2_5_VL)
    assert text_part(content) == content
    assert wrapped(content) == QWEN2_5_VL
    family, shape = read_model(None, content)
    assert family.name == "qwen2_5_vl"
    assert shape.vision is not None
    assert shape.vision.num_parameters == 676_550_144
    total = sum(torch.Size(size).numel() for size in hf_shapes(family, shape).values())
    assert total == 8_292_166_656
    rotary = family.model_keywords(content)["rotary"]
    axes = axes_of(rotary)
    assert [*axes[:17], *axes[39:41]] == [0] * 16 + [1, 1, 2]
    # Others see the sizes that they know.
    parsed = AutoConfig.for_model(**copy.deepcopy(QWEN2_5_VL))
    assert parsed.vision_config.hidden_size == shape.vision.config["hidden_size"]
    assert parsed.text_config.num_hidden_layers == shape.num_layers


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"window_size": 100}, r"vision_config\.window_size"),
        ({"in_chans": 4}, r"in_chans"),
        ({"spatial_patch_size": 16}, r"spatial_patch_size"),
        ({"fullatt_block_indexes": [32]}, r"vision_config\.fullatt_block_indexes"),
        ({"out_hidden_size": 2048}, r"vision_config\.out_hidden_size"),
        ({"hidden_act": "gelu"}, r"hidden_act"),
        ({"depths": 3}, r"vision_config\.depths"),
    ],
)
def test_towers_that_transformers_would_build_differently_are_refused(
    change: dict[str, object], key: str
) -> None:
    vision = {**QWEN2_5_VL["vision_config"], **change}  # type: ignore[dict-item]
    with pytest.raises(ModelError, match=key):
        read_model(None, text_part({**QWEN2_5_VL, "vision_config": vision}))


@pytest.mark.parametrize("name", [*LAYERS, "qwen3.5-35b-a3b"])
def test_published_models_have_a_tower_if_the_family_names_it(name: str) -> None:
    """Without the name, the same directory is a text model, as before towers were supported."""
    given = json.loads((MODELS / name / "config.json").read_text())
    content = text_part(given, given["model_type"])
    assert has_images(content) and not has_images(text_part(given))
    assert text_part(content) == content  # as stored in a checkpoint
    family, shape = read_model(given["model_type"], content)
    assert read_model(None, content) == (family, shape)
    text, text_shape = read_model("qwen3_5_text" if shape.moe is None else None, text_part(given))
    assert (text.name, text_shape.vision) == (f"{family.name}_text", None)
    rotary = family.model_keywords(content)["rotary"]
    axes = axes_of(rotary).tolist()
    assert (rotary.share, axes) == (0.25, [*[0, 1, 2] * 10, 0, 1])
    with torch.device("meta"):
        parsed = AutoConfig.for_model(**copy.deepcopy(given))
        model = AutoModelForImageTextToText.from_config(parsed)
    shapes = hf_shapes(family, shape)
    own = sum(torch.Size(size).numel() for size in shapes.values())
    assert own == sum(parameter.numel() for parameter in model.parameters())
    # The vision part of a text model, and the layer for multi-token prediction of both.
    visual = [one for one in shapes if one.startswith("model.visual.")]
    stored = [*visual, "mtp.fc.weight"]
    assert passed_over(stored, shapes) == ("mtp.fc.weight",)
    assert list(passed_over(stored, hf_shapes(text, text_shape))) == stored


@pytest.mark.parametrize(
    ("part", "change", "key"),
    [
        ("vision_config", {"deepstack_visual_indexes": [5]}, r"deepstack_visual_indexes"),
        ("vision_config", {"out_hidden_size": 64}, r"vision_config\.out_hidden_size"),
        ("text_config", {"rope_parameters": {"mrope_section": [24, 20, 20]}}, r"the sum 32"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, r"mrope_interleaved"),
    ],
)
def test_other_towers_of_qwen3_5_are_refused(
    part: str, change: dict[str, object], key: str
) -> None:
    given = json.loads((MODELS / "qwen3.5-4b" / "config.json").read_text())
    with pytest.raises(ModelError, match=key):
        read_model("qwen3_5", text_part({**given, part: given[part] | change}, "qwen3_5"))
    with pytest.raises(ModelError, match=r"a family that describes Qwen3_5ForCausalLM"):
        read_model("qwen3_5", given["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]})


def test_layouts_that_split_a_recurrence_are_refused() -> None:
    family, shape = read_model(None, read_config(MODELS / "qwen3.5-4b"))
    given = {
        "run": {"name": "a"},
        "model": {"init": str(MODELS / "qwen3.5-4b")},
        "algorithm": {"name": "grpo", "kl_coef": 0.1},
    }

    def refused(*overrides: str) -> list[str]:
        config = load_config_dict(given, overrides)
        return [error.name for error in hybrid_layout_rules(config, shape)]

    assert not refused("train.tp=4", "rollout.tp=2", "placement.reference.tp=2")
    assert refused("train.cp=2") == ["train.cp"]
    assert refused("train.tp=3", "rollout.tp=32") == ["train.tp", "rollout.tp"]
    own = "placement.reference.tp=3", "placement.reference.cp=2"
    assert refused(*own) == ["placement.reference.cp", "placement.reference.tp"]
    with pytest.raises(ModelError, match=r"train\.tp.*at most the model's 4 key-value heads"):
        megatron_layout(family, shape, TrainLayout(8, tp=8), 0)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"text_config": None}, "text_config"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"text_config": {"model_type": "qwen3"}}, r"text_config\.model_type"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], key: str) -> None:
    content = json.loads((MODELS / "qwen3.5-4b" / "config.json").read_text())
    with pytest.raises(ModelError, match=key):
        text_part({**content, **change})


def test_a_wrappers_files_are_read_by_the_names_of_the_text_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3_5_text")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extra = {"model.visual.patch_embed.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    stored = {wrapped_name(name): tensor for name, tensor in state.items()}
    assert "lm_head.weight" in stored
    assert "model.language_model.norm.weight" in stored
    save_file(stored | extra, tmp_path / "model.safetensors", {"format": "pt"})
    nested = json.loads(model.config.to_json_string(use_diff=False))
    content = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": nested,
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    hf_config = read_config(tmp_path)
    family, shape = read_model(None, hf_config)
    shapes, layout = hf_shapes(family, shape), megatron_layout(family, shape, TrainLayout(1), 0)
    tensors = allocate(layout, torch.float32)
    load_hf(tmp_path, layout, tensors, shapes)
    embedding = tensors["0/embedding.word_embeddings.weight"][: shape.vocab_size]
    assert torch.equal(embedding, state["model.embed_tokens.weight"])
    # Exports have the names, and the other tensors, of the original.
    kept = KeptTensors(tmp_path, shapes)
    assert kept.shapes.keys() == extra.keys()
    config = exported_config(hf_config, "lm", None, is_wrapped=kept.is_wrapped)
    with HfWriter(tmp_path / "out", shapes, torch.float32, config, kept=kept) as writer:
        for name in shapes:
            writer.write(name, state[name])
        for name in kept.shapes:
            writer.write(name, kept.read(name))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == (stored | extra).keys()
    for name, tensor in (stored | extra).items():
        assert torch.equal(exported[name], tensor), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert read_model(None, read_config(tmp_path / "out"))[1] == shape
    save_file(
        stored | {"model.norm.weight": torch.ones(64)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*two tensors"):
        load_hf(tmp_path, layout, tensors, shapes)
