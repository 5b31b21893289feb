"""`hybridrl plan` of mixtures of experts: what moves, what ranks hold, and how it is said."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config.load import load_config_dict
from hybridrl.config.rules_experts import replays
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.hybrid_engine.planning.wire_elements import wire_layouts, wire_views
from hybridrl.metrics.flops import matmul_params
from hybridrl.models.family import read_model, resolve_family
from hybridrl.models.weights import NOTHING, RankLayout, Region, hf_shapes
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text

LAYERS, HIDDEN, EXPERTS, WIDTH = 4, 64, 8, 48
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
ALL_EXPERTS = LAYERS * EXPERTS * 3 * WIDTH * HIDDEN


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def report(config_file: Path, *overrides: str, world: int = 8) -> dict[str, Any]:
    content = {
        "run": {"name": "a"},
        "model": {"init": str(config_file), "dtype": "bfloat16"},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 8},
    }
    found, violations = plan_report(load_config_dict(content, list(overrides)), world)
    assert violations == []
    return found


def test_plan_of_experts_counts_what_moves(config_file: Path) -> None:
    """The router, norms and attention are on every rank already."""
    vllm = ("rollout.engine=vllm", "rollout.tp=8", "train.ep=8")
    dealt = report(config_file, *vllm, "rollout.ep=8")
    assert dealt["reshard"]["receive_bytes"] == [0] * 8
    assert (dealt["rollout"]["ep"], dealt["train"]["etp"], dealt["train"]["edp"]) == (8, 1, 1)
    cut = report(config_file, *vllm)  # an eighth of each expert, of which a rank has one
    assert cut["reshard"]["receive_bytes"] == [2 * ALL_EXPERTS // 8 * 7 // 8] * 8
    whole = report(config_file, "rollout.engine=vllm", "train.ep=8")
    assert whole["reshard"]["receive_bytes"] == [2 * ALL_EXPERTS * 7 // 8] * 8
    said = plan_text(dealt)
    assert "at tp 8 ep 8" in said and "etp1 edp1" in said and "without experts" in said


def test_plan_of_experts_counts_what_ranks_hold(config_file: Path) -> None:
    """Dealt experts have as much optimizer state on a rank as replicated ones, and less else."""
    vllm = ("rollout.engine=vllm", "rollout.transport=packed")
    one, four = (report(config_file, *vllm, f"train.ep={ep}")["memory"] for ep in (1, 4))
    less = one["train_peak_bytes"] - four["train_peak_bytes"]
    groups = 3 * 768 * 2**20  # of ep, of etp * ep and of edp ranks
    assert less == (2 + 4) * ALL_EXPERTS * 3 // 4 - groups
    cut = report(config_file, *vllm, "train.ep=4", "train.etp=2")["memory"]
    exchanged = 4096 * 2 * 2 * HIDDEN * LAYERS * 2  # tokens, in and out, experts a token, bytes
    less = four["train_peak_bytes"] - cut["train_peak_bytes"]
    assert less == (2 + 4) * ALL_EXPERTS // 8 - exchanged  # as many groups


def test_plan_of_experts_counts_what_is_not_kept(config_file: Path) -> None:
    """The product of the two halves, of each of a token's two experts, in all layers."""
    none, selective = (
        report(config_file, "rollout.engine=vllm", f"train.recompute={way}")["memory"]
        for way in ("none", "selective")
    )
    less = none["train_peak_bytes"] - selective["train_peak_bytes"]
    assert less == 4096 * 2 * WIDTH * LAYERS * 2


def test_plan_of_replayed_experts_counts_what_they_take(config_file: Path) -> None:
    vllm = ("rollout.engine=vllm", "rollout.max_new_tokens=100")
    sizes = ("data.max_prompt_tokens=28", "rollout.max_batch=16", "steps.prompts_per_step=32")
    off = report(config_file, *vllm, *sizes)["memory"]
    on = report(config_file, *vllm, *sizes, "algorithm.router_replay=rollout")
    memory, token = on["memory"], LAYERS * 2
    assert off["router_replay"] is None
    assert memory["router_replay"] == {
        "token_bytes": token,
        "step_bytes": token * 128 * 32 * 8,
        "train_bytes": token * 4096,
        "rollout_bytes": token * 128 * 16,
    }
    assert memory["train_peak_bytes"] - off["train_peak_bytes"] == token * 4096
    assert memory["rollout_peak_bytes"] - off["rollout_peak_bytes"] == token * 128 * 16
    assert "replayed experts: 8 B per token, at most 0.2 MiB per step" in plan_text(on)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["rollout.engine=scripted"], "algorithm.router_replay", "does not report which experts"),
        (["model.init=DENSE"], "algorithm.router_replay", "off with a dense model"),
    ],
)
def test_replay_is_refused_before_ranks_start(
    tmp_path: Path, config_file: Path, overrides: list[str], key: str, said: str
) -> None:
    dense = tmp_path / "dense" / "config.json"
    dense.parent.mkdir()
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    dense.write_text(
        json.dumps({k: v for k, v in MODEL.items() if "expert" not in k and "moe" not in k} | names)
    )
    content = {
        "run": {"name": "a"},
        "model": {"init": str(config_file)},
        "algorithm": {"name": "grpo", "router_replay": "rollout"},
    }
    overrides = [one.replace("DENSE", str(dense)) for one in overrides]
    _, violations = plan_report(load_config_dict(content, overrides), 1)
    found = [one for one in violations if one.name == key]
    assert len(found) == 1 and said in str(found[0].allowed) and "=off" in found[0].remedy


def test_off_is_off_also_as_yaml_reads_it() -> None:
    content = {"run": {"name": "a"}, "model": {"init": "x"}, "algorithm": {"name": "grpo"}}
    assert not replays(load_config_dict(content, ["algorithm.router_replay=off"]))
    assert replays(load_config_dict(content, ["algorithm.router_replay=rollout"]))


def test_plan_says_how_experts_are_dealt_where_that_saves_bytes(config_file: Path) -> None:
    """EP2 to TP4 and EP4: halves lie on ranks in turns, an engine's rank needs a quarter."""
    vllm = ("rollout.engine=vllm", "rollout.tp=4", "rollout.ep=4", "train.ep=2")
    found = report(config_file, *vllm, world=4)
    assert found["reshard"]["receive_bytes"] == [0] * 4
    rollout = found["rollout"]
    assert [list(one) for one in rollout["experts"]] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    in_order = rollout["choices"]["experts_in_order"]["max_receive_bytes"]
    assert in_order == 2 * ALL_EXPERTS // 4
    said = plan_text(found)
    assert "ranks generate with experts that they train where possible" in said
    assert "at most 0 B; if experts were assigned in order, it would be 147 kB" in said
    same = report(config_file, *vllm[:-1], "train.ep=4", world=4)
    assert same["rollout"]["experts"] is None and "experts in order" not in plan_text(same)
    assert "experts_in_order" not in same["rollout"]["choices"]
    other = report(config_file, *vllm, "rollout.engine=sglang", world=4)["rollout"]
    assert other["experts"] is None and other["choices"]["used"]["max_receive_bytes"] == in_order


DEEPSEEK_V3 = Path(__file__).parents[2] / "benchmarks/models/deepseek-v3.json"


def test_plan_of_deepseek_v3_counts_its_parameters_and_its_cache(tmp_path: Path) -> None:
    content = json.loads(DEEPSEEK_V3.read_text())
    family, shape = read_model(None, content)
    sizes = {name: prod(size) for name, size in hf_shapes(family, shape).items()}
    assert round(sum(sizes.values()) / 1e9, 1) == 671.0
    embeddings = 2 * shape.vocab_size * shape.hidden_size
    assert round((matmul_params(shape) + embeddings / 2) / 1e9, 1) == 36.6  # 37 active, embedded
    shallow = tmp_path / "config.json"
    shallow.write_text(json.dumps(content | {"num_hidden_layers": 6}))
    vllm = ("rollout.engine=vllm", "train.tp=8", "train.ep=64", "train.recompute=full")
    sizes_of = ("rollout.tp=32", "rollout.ep=32", "rollout.transport=packed")
    few, many = (
        report(shallow, *vllm, *sizes_of, f"rollout.max_batch={n}", world=64) for n in (16, 48)
    )
    # A latent and a rotary key of each token and layer, whole on every rank of a replica.
    tokens = 768  # of the longest request
    more = many["memory"]["rollout_peak_bytes"] - few["memory"]["rollout_peak_bytes"]
    assert more == 32 * tokens * 6 * (512 + 64) * 2
    # Half of each rank's experts are there already; the rest of the model is cut otherwise.
    assert few["reshard"]["receive_bytes"] == many["reshard"]["receive_bytes"]
    held = hf_shapes(family, read_model(None, json.loads(shallow.read_text()))[1]).values()
    assert 0 < max(few["reshard"]["receive_bytes"]) < 2 * sum(map(prod, held)) // 32


def test_bias_of_a_router_travels_in_fp32_beside_other_types() -> None:
    layout = RankLayout(
        (
            Region("w", ((0, 4), (0, 2)), "w", ((0, 4), (0, 2))),
            Region("l.e_score_correction_bias", ((0, 6),), "b", ((0, 6),)),
        ),
        {"w": (4, 2), "b": (6,)},
    )
    plan = plan_reshard([layout, NOTHING], [NOTHING, layout], 2)
    assert plan.receive_bytes == (0, 4 * 2 * 2 + 6 * 4)
    prove(plan, [layout, NOTHING], [NOTHING, layout])
    tensors = {"w": torch.zeros(4, 2, dtype=torch.bfloat16), "b": torch.rand(6)}
    views = wire_views(tensors, layout, torch.bfloat16)
    assert views["w"] is tensors["w"] and views["b"].shape == (12,)
    assert views["b"].data_ptr() == tensors["b"].data_ptr()
    assert wire_views(tensors, layout, torch.float32) is tensors
    assert wire_layouts([layout, layout], 4, 4) == [layout, layout]
    with pytest.raises(ModelError, match="parameter b: got torch.bfloat16; allowed: float32"):
        wire_views({"b": torch.zeros(6, dtype=torch.bfloat16)}, layout, torch.bfloat16)


def test_bias_update_is_refused_where_routers_have_no_bias(config_file: Path) -> None:
    content = {
        "run": {"name": "a"},
        "model": {"init": str(config_file)},
        "algorithm": {"name": "grpo"},
        "steps": {"samples_per_prompt": 8},
        "train": {"moe": {"bias_update_rate": 0.001}},
    }
    _, violations = plan_report(load_config_dict(content, []), 8)
    (violation,) = violations
    assert "train.moe.bias_update_rate" in str(violation) and "no bias" in str(violation)


def test_engines_are_told_what_a_config_leaves_out_or_null() -> None:
    family = resolve_family("deepseek_v3", {})
    assert family.stated
    for given in ({}, dict.fromkeys(family.stated)):
        told = family.for_engines({"hidden_size": 8, "q_lora_rank": None, **given})
        assert told == {**family.stated, "hidden_size": 8, "q_lora_rank": None}
    key = next(iter(family.stated))
    assert family.for_engines({key: "another"})[key] == "another"
