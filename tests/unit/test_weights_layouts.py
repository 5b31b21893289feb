"""The weight table: exact names and rectangles on small models, coverage both ways, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from some_cases import some
from weight_cases import megatron_reference, random_case_with_experts

from hybridrl.errors import ModelError
from hybridrl.models.family import ModelShape, MoeShape, Row, resolve_family
from hybridrl.models.weights import (
    RankLayout,
    Region,
    check_coverage,
    check_layout,
    check_tensors,
    fused_layout,
    hf_shapes,
    megatron_layout,
    megatron_layouts,
)
from hybridrl.parallel.layout import TrainLayout

LLAMA = resolve_family("llama", {})
SHAPE = ModelShape(4, 16, 8, 2, 4, 32, 100, qkv_bias=True, qk_norm=True)
QWEN3_MOE = resolve_family("qwen3_moe", {})
# Layer 1 is dense.
MOE = ModelShape(4, 16, 8, 2, 4, 32, 100, qk_norm=True, moe=MoeShape(8, 2, 12, 0, (1,)))


def _held(layout: RankLayout, local: str) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Returns (HF name, HF rows, local rows) of one local tensor."""
    found = [region for region in layout.regions if region.local == local]
    return [(region.hf, region.hf_box[0], region.local_box[0]) for region in found]


def test_weights_interleave_qkv_per_key_value_head() -> None:
    layout = megatron_layout(LLAMA, SHAPE, TrainLayout(1), 0)
    attention = "model.layers.3.self_attn."
    assert _held(layout, "0/decoder.layers.3.self_attention.linear_qkv.weight") == [
        (f"{attention}q_proj.weight", (0, 16), (0, 16)),
        (f"{attention}k_proj.weight", (0, 4), (16, 20)),
        (f"{attention}v_proj.weight", (0, 4), (20, 24)),
        (f"{attention}q_proj.weight", (16, 32), (24, 40)),
        (f"{attention}k_proj.weight", (4, 8), (40, 44)),
        (f"{attention}v_proj.weight", (4, 8), (44, 48)),
    ]


def test_weights_place_layers_by_virtual_pipeline_chunk() -> None:
    train = TrainLayout(2, pp=2, vpp=2)
    first, last = (megatron_layout(LLAMA, SHAPE, train, rank) for rank in range(2))
    norm = "decoder.layers.0.input_layernorm.weight"
    assert _held(first, f"1/{norm}") == [
        ("model.layers.2.input_layernorm.weight", (0, 16), (0, 16))
    ]
    assert _held(last, f"0/{norm}") == [("model.layers.1.input_layernorm.weight", (0, 16), (0, 16))]
    assert "0/embedding.word_embeddings.weight" in first.shapes
    assert {"1/decoder.final_layernorm.weight", "1/output_layer.weight"} <= last.shapes.keys()
    assert not any("output_layer" in name for name in first.shapes)


@pytest.mark.parametrize(("pp", "vpp"), [(3, 1), (4, 2), (16, 1), (8, 4)])
def test_unequal_stages_hold_every_layer_once_and_as_megatron_deals_them(pp: int, vpp: int) -> None:
    train, num_layers = TrainLayout(pp, pp=pp, vpp=vpp), 61
    shape = replace(SHAPE, num_layers=num_layers)
    layouts = [megatron_layout(LLAMA, shape, train, rank) for rank in range(pp)]
    check_coverage(layouts, hf_shapes(LLAMA, shape))
    chunks = [["decoder"] * size for size in train.chunk_sizes(num_layers)]
    chunks[0], chunks[-1] = ["embedding", *chunks[0]], [*chunks[-1], "loss"]
    theirs = PipelineParallelLayerLayout(chunks, pp)
    theirs.validate_layer_layout(num_layers, None)
    first = 0
    for chunk in range(vpp):
        for stage in range(pp):
            own = train.layers(stage, num_layers)[chunk]
            assert own == tuple(range(first, first + len(own)))
            assert len(own) == theirs.layout[stage][chunk].count(LayerType.decoder)
            first += len(own)
    assert first == num_layers


def test_weights_copy_tied_embeddings_to_the_last_stage() -> None:
    tied = replace(SHAPE, tied_embeddings=True)
    assert "lm_head.weight" not in hf_shapes(LLAMA, tied)
    alone = megatron_layout(LLAMA, tied, TrainLayout(1), 0)
    assert "0/output_layer.weight" not in alone.shapes
    last = megatron_layout(LLAMA, tied, TrainLayout(4, tp=2, pp=2), 3)
    held = _held(last, "0/output_layer.weight")
    assert held == [("model.embed_tokens.weight", (64, 100), (0, 36))]
    assert last.padding == (("0/output_layer.weight", ((36, 64), (0, 16))),)


def test_weights_name_fused_norms_of_transformer_engine() -> None:
    plain = megatron_layout(LLAMA, SHAPE, TrainLayout(1), 0)
    te = megatron_layout(LLAMA, SHAPE, TrainLayout(1), 0, te=True)
    layer = "0/decoder.layers.2."
    assert set(plain.shapes) - set(te.shapes) >= {
        f"{layer}input_layernorm.weight",
        f"{layer}pre_mlp_layernorm.weight",
    }
    for name, norm in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm"),
    ):
        assert _held(te, layer + name)[0][0] == f"model.layers.2.{norm}.weight"
    check_coverage([te], hf_shapes(LLAMA, SHAPE))


def test_weights_deal_experts_and_cut_each() -> None:
    # tp-cp-ep-dp-pp: ranks 0 to 3 are a stage, etp varies fastest.
    train = TrainLayout(8, tp=2, pp=2, ep=2, etp=2)
    layout = megatron_layout(QWEN3_MOE, MOE, train, 3)
    experts = "0/decoder.layers.0.mlp.experts.local_experts."
    mlp = "model.layers.0.mlp."
    assert _held(layout, f"{experts}1.linear_fc1.weight") == [
        (f"{mlp}experts.5.gate_proj.weight", (6, 12), (0, 6)),
        (f"{mlp}experts.5.up_proj.weight", (6, 12), (6, 12)),
    ]
    assert layout.shapes[f"{experts}3.linear_fc2.weight"] == (16, 6)
    assert f"{experts}4.linear_fc2.weight" not in layout.shapes
    assert layout.shapes["0/decoder.layers.0.mlp.router.weight"] == (8, 16)
    # The dense layer has what the others lack, and is cut by tp.
    assert layout.shapes["0/decoder.layers.1.mlp.linear_fc1.weight"] == (32, 16)
    assert "0/decoder.layers.0.mlp.linear_fc1.weight" not in layout.shapes
    assert "0/decoder.layers.1.mlp.router.weight" not in layout.shapes


@pytest.mark.parametrize("batch", some((1, 0, 2, 3), 1))
def test_weights_with_experts_match_the_reference_in_random_layouts(batch: int) -> None:
    """Regions and padding tile all tensors; values are as Megatron and vLLM cut arrays."""
    kinds = set()
    for seed in range(batch, 60, 4):
        case = random_case_with_experts(seed)
        hf, sources = case.weights(), case.sources()
        check_coverage(sources, hf_shapes(case.family, case.shape))
        for rank, target in enumerate(case.targets()):
            for layout, wanted in (
                (sources[rank], case.trained(hf, rank)),
                (target, case.generating(hf, rank)),
            ):
                check_layout(layout)
                built = {n: np.full(s, -1, np.float32) for n, s in layout.shapes.items()}
                for region in layout.regions:
                    part = hf[region.hf][tuple(slice(*span) for span in region.hf_box)]
                    built[region.local][tuple(slice(*span) for span in region.local_box)] = part
                assert built.keys() == wanted.keys(), seed
                assert all(np.array_equal(built[n], wanted[n]) for n in wanted), seed
        alike = megatron_layouts(case.family, case.shape, case.train)
        assert [one.regions for one in alike] == [one.regions for one in sources], seed
        kinds.add((case.train.ep > 1, case.train.etp > 1, case.rollout_ep > 1))
    assert len(kinds) > 2, kinds


def test_weights_fuse_and_repeat_heads_as_vllm_does() -> None:
    layout = fused_layout(LLAMA, SHAPE, tp=4, tp_rank=3)
    attention = "model.layers.0.self_attn."
    assert _held(layout, f"{attention}qkv_proj.weight") == [
        (f"{attention}q_proj.weight", (24, 32), (0, 8)),
        (f"{attention}k_proj.weight", (4, 8), (8, 12)),
        (f"{attention}v_proj.weight", (4, 8), (12, 16)),
    ]
    # Ranks with queries of one group hold its key-value head.
    for tp_rank, head in enumerate((0, 0, 1, 1)):
        held = _held(fused_layout(LLAMA, SHAPE, 4, tp_rank), f"{attention}qkv_proj.weight")
        assert [rows for _, rows, _ in held[1:]] == [(4 * head, 4 * head + 4)] * 2
    assert _held(layout, "model.layers.0.mlp.gate_up_proj.weight") == [
        ("model.layers.0.mlp.gate_proj.weight", (24, 32), (0, 8)),
        ("model.layers.0.mlp.up_proj.weight", (24, 32), (8, 16)),
    ]
    assert layout.shapes["lm_head.weight"] == (32, 16)  # 100 tokens padded to 128
    assert layout.shapes["model.layers.0.self_attn.o_proj.weight"] == (16, 8)
    assert f"{attention}q_norm.weight" in layout.shapes


@pytest.mark.parametrize(
    ("shape", "train", "named"),
    [
        (SHAPE, TrainLayout(3, tp=3), "embed_tokens|q_proj"),
        (replace(SHAPE, ffn_size=36), TrainLayout(8, tp=8), "gate_proj"),
        (replace(SHAPE, num_kv_heads=3, num_heads=24), TrainLayout(2, tp=2), "q_proj.weight"),
        (SHAPE, TrainLayout(SHAPE.num_layers + 1, pp=SHAPE.num_layers + 1), "train.pp"),
        (replace(SHAPE, num_layers=3), TrainLayout(2, pp=2, vpp=2), "train.pp"),
    ],
)
def test_weights_refuse_layouts_that_do_not_divide(
    shape: ModelShape, train: TrainLayout, named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        megatron_layout(LLAMA, shape, train, 0)


def test_weights_coverage_names_what_is_unmapped_missing_or_doubled() -> None:
    layouts = [megatron_layout(LLAMA, SHAPE, TrainLayout(2, tp=2), rank) for rank in range(2)]
    shapes = hf_shapes(LLAMA, SHAPE)
    check_coverage(layouts, shapes)
    with pytest.raises(ModelError, match=r"extra.weight.*hole at \[0:3\]"):
        check_coverage(layouts, {**shapes, "extra.weight": (3,)})
    fewer = {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match="model.norm.weight.*not in the model"):
        check_coverage(layouts, fewer)
    with pytest.raises(ModelError, match=r"lm_head.weight.*hole at \[64:100"):
        check_coverage(layouts[:1], {"lm_head.weight": (100, 16)} | shapes)
    whole = ((0, 4),)
    doubled = RankLayout(
        (Region("a", whole, "x", whole), Region("b", whole, "x", whole)), {"x": (4,)}
    )
    with pytest.raises(ModelError, match=r"weight table: x: got overlap at \[0:4\]"):
        check_layout(doubled)
    with pytest.raises(ModelError, match=r"x: got hole at \[4:6\]"):
        check_layout(RankLayout(doubled.regions[:1], {"x": (6,)}))
    with pytest.raises(ModelError, match=r"a\[0:4\] at \[0:3\]"):
        check_layout(RankLayout((Region("a", whole, "x", ((0, 3),)),), {"x": (3,)}))


def test_weights_name_parameters_that_are_unmapped_missing_or_misshaped() -> None:
    layout = megatron_layout(LLAMA, SHAPE, TrainLayout(1), 0)
    check_tensors(layout, layout.shapes)
    adapter = {**layout.shapes, "0/decoder.layers.0.adapter.weight": (3, 3)}
    with pytest.raises(ModelError, match=r"layers.0.adapter.weight: got shape \(3, 3\).* none"):
        check_tensors(layout, adapter)
    fewer = dict(layout.shapes)
    fewer.pop("0/output_layer.weight")
    with pytest.raises(ModelError, match="0/output_layer.weight: got shape none"):
        check_tensors(layout, fewer)
    with pytest.raises(ModelError, match=r"0/output_layer.weight: got shape \(100, 16\)"):
        check_tensors(layout, {**layout.shapes, "0/output_layer.weight": (100, 16)})


def test_weights_of_a_row_of_the_users_own() -> None:
    """A family adds a column-parallel adapter; import and export cover it like any other row."""
    adapter = Row(
        "decoder.layers.{L}.adapter.weight",
        ("model.layers.{L}.adapter.weight",),
        ((8, 16),),
        "column",
    )
    family = replace(LLAMA, rows=lambda shape: (*LLAMA.rows(shape), adapter))
    train = TrainLayout(4, tp=2, pp=2)
    layouts = [megatron_layout(family, SHAPE, train, rank) for rank in range(4)]
    check_coverage(layouts, hf_shapes(family, SHAPE))
    assert _held(layouts[3], "0/decoder.layers.1.adapter.weight") == [
        ("model.layers.3.adapter.weight", (4, 8), (0, 4))
    ]


def test_weights_match_the_reference_where_megatron_cuts_a_head() -> None:
    shape = replace(SHAPE, num_heads=8, num_kv_heads=1, head_dim=2, qk_norm=False)
    train = TrainLayout(4, tp=4)  # 10 heads of 2 rows: 5 rows a rank, half of a head among them
    hf = {
        name: np.arange(np.prod(size), dtype=np.float32).reshape(size)
        for name, size in hf_shapes(LLAMA, shape).items()
    }
    name = "0/decoder.layers.0.self_attention.linear_qkv.weight"
    for rank in range(4):
        layout = megatron_layout(LLAMA, shape, train, rank)
        wanted = megatron_reference(hf, shape, train, rank)[name]
        built = np.empty(layout.shapes[name], np.float32)
        for region in layout.regions:
            if region.local == name:
                rows = slice(*region.local_box[0])
                built[rows] = hf[region.hf][slice(*region.hf_box[0])]
        assert np.array_equal(built, wanted)
