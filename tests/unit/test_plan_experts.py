"""`hybridrl plan` of mixtures of experts: what moves, what ranks hold, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.cli.plan import plan_report
from hybridrl.cli.plan_text import plan_text
from hybridrl.config.load import load_config_dict

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
