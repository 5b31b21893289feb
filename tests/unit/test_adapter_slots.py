"""The slots of adapters in an engine's layout: names, cuts, padding, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import ModelError, UserError
from hybridrl.hybrid_engine.memory.alias import shared_names
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import adapted, base_of, is_adapter, only_adapters, target_names
from hybridrl.models.adapters.slots import EngineSlots, is_slot, slot_rank, slot_rules
from hybridrl.models.family import LatentShape, ModelShape, MoeShape, resolve_family
from hybridrl.models.weights import (
    RankLayout,
    check_coverage,
    fused_layout,
    fused_layouts,
    hf_shapes,
    megatron_layout,
)
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.model_rules import held_family, merged_transport_rules, merging_notice

LLAMA, PHI3 = resolve_family("llama", {}), resolve_family("phi3", {})
SHAPE = ModelShape(4, 16, 8, 2, 4, 32, 100, qkv_bias=True)
LATENT = LatentShape(12, 20, 12, 8, 10)
WHOLE = (0, 16)


def held(layout: RankLayout, local: str) -> list[tuple[str, Sequence[object], Sequence[object]]]:
    return [(one.hf, one.hf_box, one.local_box) for one in layout.regions if one.local == local]


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slots_and_parameters_cover_the_model_with_its_adapters(name: str, tp: int) -> None:
    moe = MoeShape(8, 2, 12, 24 if name == "deepseek_v3" else 0, (1,))
    latent = LATENT if name == "deepseek_v3" else None
    has_experts = name in ("qwen3_moe", "deepseek_v3")
    shape = ModelShape(4, 16, 8, 2, 4, 32, 100, moe=moe if has_experts else None, latent=latent)
    plain = resolve_family(name, {})
    some = target_names(plain, shape)[1::2]
    for targets in (("all-linear",), tuple(some)):
        for rank in (8, 3):
            family = adapted(plain, Lora(rank, 16.0, targets))
            parts = fused_layouts(family, shape, tp)
            check_coverage(parts, hf_shapes(family, shape))
            for layout, without in zip(parts, fused_layouts(plain, shape, tp), strict=True):
                own = {n: size for n, size in layout.shapes.items() if not is_slot(n)}
                assert own == without.shapes
                assert {is_slot(one.local) == is_adapter(one.hf) for one in layout.regions} == {
                    True
                }
            only = fused_layouts(only_adapters(family), shape, tp)
            check_coverage(only, hf_shapes(only_adapters(family), shape))
            assert all(map(is_slot, only[0].shapes))


def test_slots_cut_adapters_as_the_engine_cuts_their_layers() -> None:
    layout = fused_layout(adapted(LLAMA, Lora(8, 16.0)), SHAPE, tp=4, tp_rank=3)
    layer = "model.layers.2.self_attn."
    for index, (proj, rows) in enumerate((("q", (24, 32)), ("k", (4, 8)), ("v", (4, 8)))):
        name, size = f"{layer}{proj}_proj.lora", rows[1] - rows[0]
        assert held(layout, f"{layer}qkv_proj.lora_a_stacked.{index}") == [
            (f"{name}_A.weight", ((0, 8), WHOLE), ((0, 8), WHOLE))
        ]
        assert held(layout, f"{layer}qkv_proj.lora_b_stacked.{index}") == [
            (f"{name}_B.weight", (rows, (0, 8)), ((0, size), (0, 8)))
        ]
    assert held(layout, f"{layer}o_proj.lora_a_stacked.0") == [
        (f"{layer}o_proj.lora_A.weight", ((0, 8), (24, 32)), ((0, 8), (0, 8)))
    ]
    assert held(layout, f"{layer}o_proj.lora_b_stacked.0") == [
        (f"{layer}o_proj.lora_B.weight", (WHOLE, (0, 8)), (WHOLE, (0, 8)))
    ]
    up = "model.layers.2.mlp.gate_up_proj.lora_b_stacked.1"
    assert held(layout, up) == [
        ("model.layers.2.mlp.up_proj.lora_B.weight", ((24, 32), (0, 8)), ((0, 8), (0, 8)))
    ]
    assert [name for name, _ in layout.padding if is_slot(name)] == []


def test_slots_beyond_the_rank_and_of_other_projections_are_padding() -> None:
    family = adapted(LLAMA, Lora(3, 16.0, ("k_proj", "down_proj")))
    layout = fused_layout(family, SHAPE, tp=2, tp_rank=1)
    attention, down = "model.layers.0.self_attn.qkv_proj.", "model.layers.0.mlp.down_proj."
    padding = dict(layout.padding)
    assert padding[f"{attention}lora_a_stacked.0"] == ((0, 8), WHOLE)
    assert padding[f"{attention}lora_a_stacked.1"] == ((3, 8), WHOLE)
    assert padding[f"{attention}lora_b_stacked.2"] == ((0, 4), (0, 8))
    assert padding[f"{down}lora_b_stacked.0"] == (WHOLE, (3, 8))
    assert held(layout, f"{attention}lora_b_stacked.2") == []
    assert "model.layers.0.self_attn.o_proj.lora_a_stacked.0" not in layout.shapes
    slots = EngineSlots.of(Lora(3, 16.0), layout.shapes)
    assert slots == EngineSlots(8, ("down_proj", "qkv_proj"))


def test_projections_of_one_tensor_have_the_same_a_and_their_own_rows_of_b() -> None:
    layout = fused_layout(adapted(PHI3, Lora(8, 16.0)), SHAPE, tp=2, tp_rank=1)
    layer = "model.layers.0.mlp.gate_up_proj."
    for index in range(2):
        assert held(layout, f"{layer}lora_a_stacked.{index}") == [
            (f"{layer}lora_A.weight", ((0, 8), WHOLE), ((0, 8), WHOLE))
        ]
    assert held(layout, f"{layer}lora_b_stacked.1") == [
        (f"{layer}lora_B.weight", ((48, 64), (0, 8)), ((0, 16), (0, 8)))
    ]


def test_slots_never_share_the_trainers_memory() -> None:
    family = adapted(LLAMA, Lora(8, 16.0))
    source = megatron_layout(family, SHAPE, TrainLayout(1), 0)
    shared = shared_names(source, fused_layout(family, SHAPE, 1, 0))
    assert shared and not any(map(is_slot, shared))


def test_slots_have_a_rank_that_the_engine_allows() -> None:
    assert [slot_rank(Lora(rank, 1.0)) for rank in (1, 2, 32, 33, 300)] == [1, 8, 32, 64, 320]
    with pytest.raises(UserError, match="lora.rank: got 513; allowed: at most 512"):
        fused_layout(adapted(LLAMA, Lora(513, 1.0)), SHAPE, 1, 0)
    with pytest.raises(ModelError, match="divides"):
        fused_layout(adapted(LLAMA, Lora(8, 1.0)), SHAPE, 3, 0)


def test_adapters_of_copied_weights_are_refused() -> None:
    shape = ModelShape(4, 16, 8, 8, 4, 32, 100, moe=MoeShape(8, 2, 12), latent=LATENT)
    plain = resolve_family("deepseek_v3", {})
    (error,) = slot_rules(adapted(plain, Lora(8, 1.0)), shape, True)
    assert "targets without kv_b_proj" in str(error) and "q_a_proj, " in str(error)
    some = adapted(plain, Lora(8, 1.0, ("q_b_proj", "o_proj")))
    assert not list(slot_rules(some, shape, False))
    assert not list(slot_rules(plain, shape, False))
    direct = replace(shape, latent=replace(LATENT, query_rank=0))
    family = adapted(plain, Lora(8, 1.0, ("q_proj", "o_proj")))
    assert not list(slot_rules(family, direct, True))
    assert held_family("vllm", family, direct) is family
    assert held_family("sglang", family, direct) is base_of(family)
    reason = merging_notice("sglang", family, direct)
    assert "targets without q_proj, because the engine has no slots" in str(reason)
    all_linear = adapted(plain, Lora(8, 1.0))
    assert held_family("hf", all_linear, shape) is all_linear
    assert held_family("vllm", all_linear, shape) is base_of(all_linear)
    assert held_family("vllm", plain, shape) is plain


def test_ranks_cannot_read_merged_weights_in_each_others_memory() -> None:
    shape = ModelShape(4, 16, 8, 8, 4, 32, 100, moe=MoeShape(8, 2, 12), latent=LATENT)
    plain = resolve_family("deepseek_v3", {})
    family = adapted(plain, Lora(8, 1.0))
    peer = RolloutConfig(transport="peer", engine="vllm")
    (error,) = merged_transport_rules(peer, family, shape)
    assert "rollout.transport: got peer" in str(error) and "kv_b_proj" in str(error)
    partly = adapted(plain, Lora(8, 1.0, ("o_proj", "experts")))
    (error,) = merged_transport_rules(peer, partly, shape)
    assert "experts, for which the engine has no slots" in str(error)
    assert not list(
        merged_transport_rules(RolloutConfig(transport="peer", engine="hf"), partly, shape)
    )
    some = adapted(plain, Lora(8, 1.0, ("o_proj",)))
    assert not list(merged_transport_rules(peer, some, shape))
    assert not list(merged_transport_rules(peer, plain, shape))
    assert not list(merged_transport_rules(RolloutConfig(engine="vllm"), family, shape))


def test_an_engine_holds_all_adapters_or_those_of_other_layers_than_experts_or_none() -> None:
    shape = ModelShape(4, 16, 8, 2, 4, 32, 100, moe=MoeShape(8, 2, 12))
    plain = resolve_family("qwen3_moe", {})
    both = adapted(plain, Lora(8, 1.0, ("all-linear", "experts")))
    (error,) = slot_rules(both, shape, True)
    assert "targets without experts, for which the engine has no slots" in str(error)
    for engine, targets in (("hf", both.lora.targets), ("vllm", ("all-linear",))):
        lora = held_family(engine, both, shape).lora
        assert lora is not None and lora.targets == targets
    alone = adapted(plain, Lora(8, 1.0, ("experts",)))
    assert held_family("vllm", alone, shape) is base_of(alone)
    assert merging_notice("hf", both, shape) is None
    assert "merged weights of experts (" in str(merging_notice("vllm", both, shape))
    assert "merged weights (" in str(merging_notice("vllm", alone, shape))
    latent = ModelShape(4, 16, 8, 8, 4, 32, 100, moe=MoeShape(8, 2, 12), latent=LATENT)
    copied = adapted(resolve_family("deepseek_v3", {}), Lora(8, 1.0, ("all-linear", "experts")))
    assert held_family("vllm", copied, latent) is base_of(copied)
