"""What `train.freeze` names, what is refused, and what plans count of the rest."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from weight_cases import random_case, random_case_with_experts

from hybridrl.metrics.flops import matmul_params, train_flops
from hybridrl.models.family import ModelShape, MoeShape, resolve_family
from hybridrl.models.trainable import (
    ALL,
    BackwardShares,
    _matmul_weights,
    backward_shares,
    freeze_rules,
    trained_family,
)
from hybridrl.models.weights import hf_shapes, megatron_layouts
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.phase_memory import fullest
from hybridrl.services.planner.sizes import fullest_stage

QWEN = resolve_family("qwen2", {})
SHAPE = ModelShape(4, 64, 4, 2, 16, 96, 512, qkv_bias=True)
MIXTURE = resolve_family("qwen3_moe", {})
WITH_EXPERTS = replace(SHAPE, qkv_bias=False, moe=MoeShape(8, 2, 32, dense_layers=(1,)))


def trained_names(*freeze: str, family=QWEN, shape=SHAPE) -> set[str]:
    return set(hf_shapes(trained_family(family, shape, freeze), shape))


def frozen_names(*freeze: str, family=QWEN, shape=SHAPE) -> set[str]:
    return set(hf_shapes(family, shape)) - trained_names(*freeze, family=family, shape=shape)


def test_names_stand_for_parts_of_the_model() -> None:
    assert frozen_names() == set()
    assert frozen_names("embeddings") == {"model.embed_tokens.weight"}
    assert frozen_names("head") == {"lm_head.weight"}
    first = frozen_names("layers.0-1")
    assert first == {
        name for name in trained_names() if name[:14] in ("model.layers.0", "model.layers.1")
    }
    assert frozen_names("layers.3") == frozen_names("model.layers.3.*")
    norms = frozen_names("norms")
    assert len(norms) == 2 * SHAPE.num_layers + 1 and all("norm" in name for name in norms)
    of = {"family": MIXTURE, "shape": WITH_EXPERTS}
    experts = frozen_names("experts", **of)
    assert len(experts) == 3 * 3 * 8 and all(".mlp.experts." in name for name in experts)
    assert frozen_names("router", **of) == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 2, 3)}


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["embedings"], "Did you mean 'embeddings'?"),
        (["layers.4"], "layers.N or layers.A-B up to 3"),
        (["vision"], "embeddings, head, norms, layers, layers.N"),
        (["model.layers.0.mlp.gate_proj.*"], "gate_proj.weight, model.layers.0.mlp.up_proj.weight"),
        (["model.layers.*.self_attn.*_proj.weight"], "q_proj.bias, model.layers.0.self_attn"),
        (["*"], "at least one parameter that is not frozen"),
    ],
)
def test_what_cannot_be_frozen_is_refused_by_name(freeze: list[str], message: str) -> None:
    (error,) = freeze_rules(freeze, QWEN, SHAPE)
    assert error.name == "train.freeze" and message in str(error)


def test_rules_know_the_model() -> None:
    tied = replace(SHAPE, tied_embeddings=True)
    (error,) = freeze_rules(["head"], QWEN, tied)
    assert "name embeddings to freeze both" in str(error)
    (error,) = freeze_rules(["model.layers.*.mlp.experts.[0-3].*"], MIXTURE, WITH_EXPERTS)
    assert "frozen together" in str(error)
    assert not list(freeze_rules(["*"], QWEN, SHAPE, "value"))  # its own head is left to train
    (error,) = freeze_rules(["head"], QWEN, SHAPE, "value")
    assert error.value == "head"


def test_a_backward_pass_ends_at_the_first_trained_layer() -> None:
    def shares(*freeze: str, head="lm") -> BackwardShares:
        return backward_shares(QWEN, SHAPE, freeze, head)

    assert shares() == ALL
    assert shares("norms") == replace(ALL)
    assert shares("layers.0-1") == BackwardShares(0.5, 1, 1, 1, 1)
    assert shares("layers.0-1", "embeddings") == BackwardShares(0.5, 0.5, 0.5, 1, 1)
    assert shares("layers", "embeddings") == BackwardShares(0, 0, 0, 1, 1)
    assert shares("layers.3", "head") == BackwardShares(0.75, 1, 1, 0, 1)
    assert shares("layers", "embeddings", "norms") == BackwardShares(0, 0, 0, 1, 0)
    lengths, tokens = [7, 9], 10
    whole = train_flops(SHAPE, lengths, tokens)
    frozen = train_flops(SHAPE, lengths, tokens, backward=shares("layers.0-1"))
    assert whole - frozen == matmul_params(SHAPE) * sum(lengths)  # 2 FLOPs of half the weights


@pytest.mark.parametrize("seed", range(12))
def test_counts_of_the_trained_are_those_of_the_weight_table(seed: int) -> None:
    case = (random_case if seed % 2 else random_case_with_experts)(seed)
    family, shape = case.family, case.shape
    assert sum(_matmul_weights(family.rows(shape), shape)) == matmul_params(shape)
    freeze = ("embeddings", "norms", "layers.0")
    trained = trained_family(family, shape, freeze)
    parts = megatron_layouts(trained, shape, case.train)
    assert fullest_stage(trained, shape, case.train) == fullest(parts)
    whole = megatron_layouts(family, shape, TrainLayout(1))[0].shapes
    left = megatron_layouts(trained, shape, TrainLayout(1))[0].shapes
    assert all(whole[name] == size for name, size in left.items())
    gone = sum(prod(whole[name]) for name in whole.keys() - left.keys())
    assert gone > shape.hidden_size * shape.vocab_size
