"""Every parallel layout against one process, and one process against transformers.

Random weights, fp32, packed sequences of unequal lengths; the checks are in parity_worker.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import FAMILIES, HYBRID_EXPERTS, WITH_EXPERTS, save_tiny_models

WORKER = str(Path(__file__).with_name("parity_worker.py"))
NAMES = (*FAMILIES, "olmo")
# Each with one thing of its own, on two tensor-parallel ranks: what has to do with positions is cut
# along the sequence too, the rest in stages; `make test-full` has both ways for all.
BY_SEQUENCE = ("mistral", "smollm3", "phi35", "phi4mini", "glm4", "gemma3_text")
BY_STAGES = ("granite", "phi3", "olmo2", "gemma2")
HYBRID = ("qwen3_5_text",)  # recurrent layers, which context parallelism cannot split
OTHERS = (*BY_SEQUENCE, *BY_STAGES, *HYBRID)
# windowed: qwen2, and windows. The others are on four ranks too.
WITH_WINDOWS = (("windowed", "olmo"), pytest.param(("llama", "qwen3"), marks=pytest.mark.full))
ORDER = "tp-cp-ep-dp-pp"
# tp, pp, cp, vpp, order of the axes, ep or etp, recompute; what is left of the world is data
# parallel.
TWO_RANKS = (
    f"2,1,1,1,{ORDER}",
    f"1,2,1,1,{ORDER}",
    f"1,1,2,1,{ORDER}",
    f"1,1,1,1,{ORDER}",
    f"1,2,1,2,{ORDER}",
    f"2,1,1,1,{ORDER},selective",
    f"1,1,1,1,{ORDER},full",
)
# In `make test` two kinds of cuts share a layout; `make test-full` has each by itself too.
TWO_RANKS_SHORT = (
    f"2,1,1,1,{ORDER},selective",
    f"1,2,1,2,{ORDER},full",
    f"1,1,2,1,{ORDER}",
    f"1,1,1,1,{ORDER}",
)
FOUR_RANKS = (
    f"1,4,1,1,{ORDER}",
    f"2,2,1,1,{ORDER}",
    f"4,1,1,1,{ORDER}",
    f"2,1,2,1,{ORDER}",
    f"1,2,1,2,{ORDER}",
    "2,2,1,1,pp-tp-cp-ep-dp",  # tensor-parallel groups {0,2} and {1,3}
    "2,1,1,1,dp-tp-cp-ep-pp",
)
FOUR_RANKS_SHORT = FOUR_RANKS[2:4] + FOUR_RANKS[5:]


# With experts, also where tp is not etp, so that their ranks are others than those of the dense.
TWO_RANKS_WITH_EXPERTS = (
    f"1,1,1,1,{ORDER},ep=2",
    f"1,1,1,1,{ORDER}",
    f"2,1,1,1,{ORDER}",
    f"2,1,1,1,{ORDER},ep=2",
    f"2,1,1,1,{ORDER},etp=2",
    f"1,1,1,1,{ORDER},etp=2",
    f"1,2,1,1,{ORDER}",
    f"1,2,1,2,{ORDER}",
    f"1,1,2,1,{ORDER},ep=2",
    f"1,1,1,1,{ORDER},ep=2,full",
    f"2,1,1,1,{ORDER},ep=2,selective",
)
TWO_RANKS_WITH_EXPERTS_SHORT = (
    f"1,1,1,1,{ORDER},ep=2",
    f"2,1,1,1,{ORDER},ep=2,selective",
    f"2,1,1,1,{ORDER},etp=2",
    f"1,1,1,1,{ORDER},etp=2",
    f"1,2,1,2,{ORDER}",
    f"1,1,2,1,{ORDER},ep=2,full",
)
# Of deepseek_v3, whose gradients are compared with those of one process there too.
TWO_RANKS_WITH_BIASES = (
    f"1,1,1,1,{ORDER},ep=2",
    f"2,1,1,1,{ORDER},ep=2",
    f"1,2,1,2,{ORDER}",
    f"1,1,2,1,{ORDER},ep=2",
    f"1,1,1,1,{ORDER},full",
)
FOUR_RANKS_WITH_EXPERTS = (
    f"1,1,1,1,{ORDER},ep=4",
    f"2,1,1,1,{ORDER},ep=2",
    f"1,2,1,1,{ORDER},ep=2",
    f"2,2,1,2,{ORDER},ep=2",
    f"2,1,2,1,{ORDER},ep=2,etp=2",
    f"4,1,1,1,{ORDER},ep=2,etp=2",
    "2,1,1,1,dp-tp-cp-ep-pp,ep=2",
)
FOUR_RANKS_WITH_EXPERTS_SHORT = (
    FOUR_RANKS_WITH_EXPERTS[0],
    *FOUR_RANKS_WITH_EXPERTS[3:5],
    FOUR_RANKS_WITH_EXPERTS[6],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    names = (*NAMES, "windowed", *OTHERS, *WITH_EXPERTS)
    save_tiny_models(folder, names)
    names += ("qwen3_moe+z", "qwen3_moe+aux", "qwen3_moe+replay")
    names += ("deepseek_v3+bias", "deepseek_v3+replay", "gpt_oss+replay")
    run_ranks(1, WORKER, ["reference", str(folder), ",".join(names)], timeout_s=200)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("names", WITH_WINDOWS)
def test_two_ranks_give_the_gradients_of_one_process(
    names: tuple[str, ...], models: Path, is_full: bool
) -> None:
    layouts = TWO_RANKS if is_full else TWO_RANKS_SHORT
    run_ranks(2, WORKER, ["compare", str(models), ",".join(names), *layouts], timeout_s=300)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (f"2,1,2,1,{ORDER}", BY_SEQUENCE),
        (f"2,2,1,1,{ORDER}", (*BY_STAGES, *HYBRID)),
        pytest.param(f"2,2,1,1,{ORDER}", BY_SEQUENCE, marks=pytest.mark.full),
        pytest.param(f"2,1,2,1,{ORDER}", BY_STAGES, marks=pytest.mark.full),
    ],
)
def test_other_families_have_the_gradients_of_one_process(
    layout: str, names: tuple[str, ...], models: Path
) -> None:
    run_ranks(4, WORKER, ["compare", str(models), ",".join(names), layout], timeout_s=400)


@pytest.mark.full
@pytest.mark.dist
def test_recurrent_layers_have_the_gradients_of_one_process(models: Path) -> None:
    layouts = [one for one in TWO_RANKS if one != f"1,1,2,1,{ORDER}"]
    run_ranks(2, WORKER, ["compare", str(models), ",".join(HYBRID), *layouts], timeout_s=300)


# llama has scaled rope and tied embeddings, qwen3 norms of queries and keys.
@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("names", [("llama", "qwen3"), ("qwen2", "olmo")])
def test_four_ranks_give_the_gradients_of_one_process(
    names: tuple[str, ...], models: Path, is_full: bool
) -> None:
    layouts = FOUR_RANKS if is_full else FOUR_RANKS_SHORT
    run_ranks(4, WORKER, ["compare", str(models), ",".join(names), *layouts], timeout_s=500)


OF_MIXTRAL = pytest.param("mixtral", marks=pytest.mark.full)
# Families made of parts that the others have, except for the gate of a shared expert.
COMBINED = ("qwen2_moe", "olmoe", "glm4_moe")
# `make test` has it with recorded experts.
OF_GPT_OSS = pytest.param("gpt_oss", marks=pytest.mark.full)


def without_cut_experts(name: str, layouts: Sequence[str]) -> list[str]:
    """Returns the layouts that a model can have: experts with biases are never cut."""
    return [one for one in layouts if name != "gpt_oss" or "etp=2" not in one]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", OF_MIXTRAL, OF_GPT_OSS])
def test_experts_have_the_gradients_of_one_process(name: str, models: Path, is_full: bool) -> None:
    layouts = list(TWO_RANKS_WITH_EXPERTS if is_full else TWO_RANKS_WITH_EXPERTS_SHORT)
    layouts = without_cut_experts(name, layouts)
    if name == "deepseek_v3" and not is_full:
        layouts = [one for one in layouts if one not in TWO_RANKS_WITH_BIASES]
    run_ranks(2, WORKER, ["compare", str(models), name, *layouts], timeout_s=300)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "deepseek_v3", OF_MIXTRAL, OF_GPT_OSS],
)
def test_experts_on_four_ranks_have_the_gradients_of_one_process(
    name: str, models: Path, is_full: bool
) -> None:
    layouts = FOUR_RANKS_WITH_EXPERTS if is_full else FOUR_RANKS_WITH_EXPERTS_SHORT
    layouts = without_cut_experts(name, layouts)
    run_ranks(4, WORKER, ["compare", str(models), name, *layouts], timeout_s=500)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, (f"2,1,1,1,{ORDER},ep=2,selective",)),
        pytest.param(2, TWO_RANKS_WITH_EXPERTS, marks=pytest.mark.full),
        pytest.param(
            4,
            (f"2,2,1,1,{ORDER}", *FOUR_RANKS_WITH_EXPERTS[:5], FOUR_RANKS_WITH_EXPERTS[6]),
            marks=pytest.mark.full,
        ),
    ],
)
def test_combined_families_have_the_gradients_of_one_process(
    world: int, layouts: tuple[str, ...], models: Path
) -> None:
    names = ",".join(COMBINED)
    run_ranks(world, WORKER, ["compare", str(models), names, *layouts], timeout_s=550)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "names", "layouts"),
    [
        (2, HYBRID_EXPERTS, (f"2,1,1,1,{ORDER},ep=2,selective",)),
        pytest.param(
            2,
            HYBRID_EXPERTS,
            [one for one in TWO_RANKS_WITH_EXPERTS if not one.startswith("1,1,2")],
            marks=pytest.mark.full,
        ),
        pytest.param(
            4,
            HYBRID_EXPERTS,
            (f"2,2,1,1,{ORDER}", *FOUR_RANKS_WITH_EXPERTS[:4]),
            marks=pytest.mark.full,
        ),
    ],
)
def test_recurrent_layers_with_experts_have_the_gradients_of_one_process(
    world: int, names: tuple[str, ...], layouts: tuple[str, ...], models: Path
) -> None:
    run_ranks(world, WORKER, ["compare", str(models), ",".join(names), *layouts], timeout_s=550)


@pytest.mark.dist
def test_stages_of_unequal_sizes_give_the_gradients_of_one_process(models: Path) -> None:
    """Four layers on three stages; llama's embeddings are tied, from the first to the last."""
    names = "llama,qwen3_moe,deepseek_v3"
    run_ranks(3, WORKER, ["compare", str(models), names, f"1,3,1,1,{ORDER}"], timeout_s=300)


@pytest.mark.dist
def test_losses_of_routers_are_scaled_by_no_layout(models: Path) -> None:
    """The z-loss is a mean over tokens; load-balancing losses need micro-batches cut alike."""
    z = (f"1,1,1,1,{ORDER},ep=2", f"1,2,1,2,{ORDER},full", f"2,1,1,1,{ORDER},ep=2")
    run_ranks(2, WORKER, ["compare", str(models), "qwen3_moe+z", *z], timeout_s=300)
    aux = (f"2,1,1,1,{ORDER},ep=2", f"2,1,1,1,{ORDER},etp=2", f"1,2,1,1,{ORDER}")
    run_ranks(2, WORKER, ["compare", str(models), "qwen3_moe+aux", *aux], timeout_s=300)


@pytest.mark.dist
def test_biases_of_routers_move_by_the_whole_batch_in_every_layout(models: Path) -> None:
    """As in two replicas, more micro-batches, recomputation, and passes without gradients."""
    layouts = ["compare", str(models), "deepseek_v3+bias", *TWO_RANKS_WITH_BIASES]
    run_ranks(2, WORKER, layouts, timeout_s=300)


@pytest.mark.dist
def test_recorded_experts_have_the_gradients_of_one_process(models: Path) -> None:
    """As those of the router's own choice, which transformers' routers take too."""
    two = (
        f"2,1,1,1,{ORDER},ep=2",
        f"1,2,1,2,{ORDER},full",
        f"1,1,2,1,{ORDER},ep=2",
    )
    names = "qwen3_moe+replay,deepseek_v3+replay,gpt_oss+replay"
    run_ranks(2, WORKER, ["compare", str(models), names, *two], timeout_s=400)


def test_four_ranks_take_all_families() -> None:
    mark = next(iter(test_four_ranks_give_the_gradients_of_one_process.pytestmark))
    taken = [getattr(names, "values", (names,))[0] for names in mark.args[1]]
    assert sorted(name for names in taken for name in names) == sorted(NAMES)
