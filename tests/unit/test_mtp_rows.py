"""Rules and rows of layers for multi-token prediction (MTP) that are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridrl.config.schema import TrainConfig
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.passed_over import passed_over
from hybridrl.models.megatron.mtp import target_rows
from hybridrl.models.mtp import mtp_rules
from hybridrl.models.weights import check_coverage, hf_shapes, megatron_layout
from hybridrl.parallel.layout import TrainLayout

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": 200,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
UNTIED = CONFIG | {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "train", "is_adapted", "reason"),
    [
        (CONFIG, {}, False, ""),
        (CONFIG, {"tp": 2, "pp": 2}, False, ""),
        (UNTIED, {"tp": 2}, False, ""),
        (UNTIED, {"pp": 2}, False, "train.pp > 1 and untied"),
        (CONFIG, {"cp": 2}, False, "train.cp > 1"),
        (CONFIG, {"share_prompts": True}, False, "train.share_prompts=true"),
        (CONFIG, {}, True, "lora.rank"),
        (CONFIG | {"mtp_num_hidden_layers": 0}, {}, False, "mtp_num_hidden_layers=0"),
        (CONFIG | {"mtp_num_hidden_layers": 2}, {}, False, "mtp_num_hidden_layers=2"),
        (CONFIG | {"model_type": "qwen3"}, {}, False, "family qwen3"),
    ],
)
def test_layers_that_cannot_be_trained_are_refused(
    config: dict[str, Any], train: dict[str, Any], is_adapted: bool, reason: str
) -> None:
    family = resolve_family(None, config)
    sizes = family.shape(config)
    wanted = TrainConfig(mtp_coef=0.1, **train)
    found = list(mtp_rules(wanted, True, is_adapted, family, sizes, config))
    assert [one.name for one in found] == ["train.mtp_coef"] * bool(reason)
    assert all(reason in one.allowed for one in found)
    (without_policy,) = mtp_rules(wanted, False, is_adapted, family, sizes, config)
    assert "does not train a policy" in without_policy.allowed
    assert not list(mtp_rules(TrainConfig(**train), True, is_adapted, family, sizes, config))


def test_a_trained_layer_is_in_the_table_and_no_longer_passed_over() -> None:
    family = resolve_family(None, CONFIG)
    shape = replace(family.shape(CONFIG), has_mtp=True)
    plain, whole = hf_shapes(family, family.shape(CONFIG)), hf_shapes(family, shape)
    own = whole.keys() - plain.keys()
    assert {name.split(".")[0] for name in own} == {"mtp"}
    assert set(passed_over(whole, plain)) == own and not passed_over(whole, whole)
    # A gate of the query doubles its rows, as in the model's own attention.
    attention = "layers.3.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"
    assert whole[f"model.{attention[0]}"] == whole[f"mtp.{attention[1]}"] == (256, 64)
    layout = TrainLayout(4, tp=2, pp=2)
    parts = [megatron_layout(family, shape, layout, rank) for rank in range(4)]
    check_coverage(parts, whole)
    holds = [any("predictor" in name for name in part.shapes) for part in parts]
    assert holds == [layout.coordinates(rank).pp == 1 for rank in range(4)]


def test_targets_are_in_the_sequence_of_their_position() -> None:
    """Sequences of 3, 1 and 4; the second's only position predicts its own next token alone."""
    bounds = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    rows, counts = target_rows(torch.tensor([0, 1, 3, 6]), bounds, 8)
    assert rows.tolist() == [7, 0, 2, 5]
    assert counts.tolist() == [False, True, False, True]
