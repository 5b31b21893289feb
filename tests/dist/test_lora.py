"""LoRA adapters in Megatron's layers: PEFT's log-probabilities and gradients in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import FAMILIES, HYBRID_EXPERTS, WITH_EXPERTS, save_tiny_models

WORKER = str(Path(__file__).with_name("lora_worker.py"))
OTHERS = ("mistral", "smollm3", "phi3", "phi35", "phi4mini", "glm4", "granite", "olmo2")
WITH_CAPS = ("gemma2", "gemma3_text")
TWO_RANKS = ("2,1,1,1,selective", "1,2,1,2,full", "1,1,2,1")
# With embeddings, head and norms trained too, and with models that share the base.
WHOLE = ("2,1,1,1,whole", "1,2,1,1,whole")
ROLES = ("2,1,1,1,roles", "1,2,1,2,full,whole,roles", "1,1,2,1,selective,roles")
ROLES_OF_EXPERTS = ("2,1,1,1,ep=2,experts,roles", "1,2,1,1,experts,roles")
WITH_EXPERTS_ON_TWO = (
    "2,1,1,1,ep=2,experts,selective",
    "2,1,1,1,etp=2,experts",
    "1,2,1,1,experts",
)
MORE_ON_TWO = (
    "1,1,1,1,ep=2,experts,full",
    "1,1,1,1,etp=2,experts",
    "1,2,1,2,experts",
    "1,1,2,1,experts",
    "2,1,1,1,ep=2",
)
WITH_EXPERTS_ON_FOUR = (
    "2,2,1,1,experts",
    "2,1,1,1,ep=2,experts",
    "2,1,1,1,etp=2,experts",
    "1,1,1,1,ep=2,etp=2,experts,full",
    "4,1,1,1,etp=2,ep=2,experts,selective",
)
RECURRENT = ("2,1,1,1", "1,2,1,2,full")
FOUR_RANKS = ("2,2,1,1", "4,1,1,1", "1,1,1,1,ep=4")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "families", "layouts"),
    [
        (2, ("qwen2", "phi3"), TWO_RANKS),
        (2, ("llama",), (WHOLE[1], "2,1,1,1,whole,roles")),
        (2, ("qwen3_moe", "deepseek_v3"), WITH_EXPERTS_ON_TWO),
        pytest.param(1, (*OTHERS, *WITH_CAPS, "mixtral"), ("1,1,1,1",), marks=pytest.mark.full),
        pytest.param(2, FAMILIES, (*TWO_RANKS, "1,1,1,1"), marks=pytest.mark.full),
        pytest.param(2, ("llama", "qwen2"), (*WHOLE, *ROLES), marks=pytest.mark.full),
        pytest.param(2, WITH_EXPERTS[:7:2], ROLES_OF_EXPERTS, marks=pytest.mark.full),
        pytest.param(4, ("llama",), ("2,2,1,1,whole,roles",), marks=pytest.mark.full),
        pytest.param(4, ("qwen2", "llama"), FOUR_RANKS[:2], marks=pytest.mark.full),
        pytest.param(4, WITH_EXPERTS[:1], FOUR_RANKS, marks=pytest.mark.full),
        pytest.param(2, ("gpt_oss",), ("2,1,1,1,ep=2", "1,2,1,1"), marks=pytest.mark.full),
        pytest.param(2, ("qwen3_5_text",), RECURRENT, marks=pytest.mark.full),
        pytest.param(2, HYBRID_EXPERTS, (*RECURRENT, "2,1,1,1,ep=2"), marks=pytest.mark.full),
        pytest.param(2, WITH_EXPERTS[1:5], WITH_EXPERTS_ON_TWO, marks=pytest.mark.full),
        pytest.param(2, ("qwen3_moe", "deepseek_v3"), MORE_ON_TWO, marks=pytest.mark.full),
        pytest.param(4, ("qwen3_moe", "deepseek_v3"), WITH_EXPERTS_ON_FOUR, marks=pytest.mark.full),
    ],
)
def test_adapters_compute_and_learn_as_in_peft(
    world: int, families: tuple[str, ...], layouts: tuple[str, ...], tmp_path: Path
) -> None:
    save_tiny_models(tmp_path, families)
    run_ranks(world, WORKER, [str(tmp_path), ",".join(families), *layouts], timeout_s=400)
