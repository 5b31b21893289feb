"""LoRA adapters from every training layout into every engine; the checks: lora_pairs_worker.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import make_reference
from launch import run_ranks
from lora_worker import ALPHA, RANK, peft_folder
from packaged import PACKAGED, needs

from hybridrl.models.adapters.lora import ALL_LINEAR, EXPERTS, Lora
from hybridrl.models.adapters.rows import adapted
from hybridrl.models.family import resolve_family

WORKER = str(Path(__file__).with_name("lora_pairs_worker.py"))
ENGINES = [*PACKAGED, "hf"]
# Sizes of tp, pp and cp by the number of ranks; the rest is data-parallel.
LAYOUTS = {
    1: ["1,1,1"],
    2: ["2,1,1", "1,2,1", "1,1,2", "1,1,1"],
    4: ["2,2,1", "2,1,2", "2,1,1"],
}
MODEL, MIXTURE = "vllm-qwen2-tied", "vllm-qwen3-moe"
ON_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def pairs(engine: str, num_ranks: int) -> list[str]:
    """Returns all pairs of training and engine layouts; half of them with `peer`."""
    sizes = [1] if engine == "hf" else [tp for tp in (1, 2) if tp <= num_ranks]
    return [
        f"{layout},1>{tp},1" + ",peer" * (num_ranks > 1 and (place + tp) % 2)
        for place, layout in enumerate(LAYOUTS[num_ranks])
        for tp in sizes
    ]


def cases() -> Iterator[Any]:
    """Yields an engine and a world."""
    for engine in ENGINES:
        name = engine if isinstance(engine, str) else engine.values[0]
        marks = () if isinstance(engine, str) else engine.marks
        for num_ranks in LAYOUTS:
            marked = (*marks, pytest.mark.full)
            yield pytest.param(name, num_ranks, marks=marked, id=f"{name}-{num_ranks}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "num_ranks"), cases())
def test_adapters_reach_the_engine_in_every_pair_of_layouts(
    engine: str, num_ranks: int, tmp_path: Path
) -> None:
    save(tmp_path, MODEL, (ALL_LINEAR,))
    arguments = [str(tmp_path), MODEL, engine, *pairs(engine, num_ranks)]
    run_ranks(num_ranks, WORKER, arguments, timeout_s=1200)


def save(folder: Path, model: str, targets: tuple[str, ...]) -> None:
    """Saves a model and an adapter with these targets."""
    reference = make_reference(model)
    reference.save_pretrained(folder / "base")
    config = reference.config.to_dict()
    family = resolve_family(None, config)
    lora = Lora(RANK, ALPHA, targets)
    peft_folder(folder / "base", folder / "peft", adapted(family, lora), family.shape(config))


def mixture_cases() -> Iterator[Any]:
    """Yields an engine, the targets of adapters on a mixture, and pairs of layouts."""
    vllm = needs("vllm")
    some, both = (*ON_ATTENTION, EXPERTS), (ALL_LINEAR, EXPERTS)
    full = (*vllm, pytest.mark.full)
    yield pytest.param("vllm", 2, some, ("1,1,1,2>2,2",), marks=full)
    yield pytest.param("vllm", 2, ON_ATTENTION, ("1,1,1,2>2,2,peer", "1,1,1,2>2,1"), marks=full)
    yield pytest.param("vllm", 2, both, ("1,1,1,2>2,1", "2,1,1,1>2,2", "1,2,1,1>1,1"), marks=full)
    yield pytest.param("vllm", 4, both, ("1,1,1,4>4,4", "1,1,1,4>4,1"), marks=full)
    yield pytest.param("vllm", 4, ON_ATTENTION, ("1,1,1,4>4,4", "1,1,1,4>4,1"), marks=full)
    yield pytest.param("hf", 2, both, ("1,1,1,2>1,1,peer", "1,2,1,1>1,1"), marks=pytest.mark.full)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "num_ranks", "targets", "of_mixture"), mixture_cases())
def test_adapters_of_a_mixture_reach_the_engine(
    engine: str,
    num_ranks: int,
    targets: tuple[str, ...],
    of_mixture: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """vLLM receives merged experts, and all other adapters as A and B."""
    save(tmp_path, MIXTURE, targets)
    run_ranks(num_ranks, WORKER, [str(tmp_path), MIXTURE, engine, *of_mixture], timeout_s=600)


def test_there_are_thirty_pairs_and_more() -> None:
    names = [one if isinstance(one, str) else one.values[0] for one in ENGINES]
    every = {
        (name, num_ranks, pair.removesuffix(",peer"))
        for name in names
        for num_ranks in LAYOUTS
        for pair in pairs(name, num_ranks)
    }
    assert len(every) >= 30, len(every)
