"""Exports of models whose files contain stacks of transposed expert matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from thread_ranks import ThreadRank, on_ranks
from torch import Tensor

from hybridrl.hybrid_engine.export import export_hf
from hybridrl.models.hf.shards import HfPlaces, HfWriter
from hybridrl.models.sources import FullWeights
from hybridrl.models.weights import hf_layout

CONFIG = {"model_type": "qwen3_vl_moe"}
EXPERTS = "model.layers.0.mlp.experts"
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 3, 6, 4
SHAPES = {"model.norm.weight": (HIDDEN,)} | {
    f"{EXPERTS}.{expert}.{matrix}_proj.weight": shape
    for expert in range(NUM_EXPERTS)
    for matrix, shape in (
        ("gate", (INTERMEDIATE, HIDDEN)),
        ("up", (INTERMEDIATE, HIDDEN)),
        ("down", (HIDDEN, INTERMEDIATE)),
    )
}
GATE, UP = (f"{EXPERTS}.1.{matrix}_proj.weight" for matrix in ("gate", "up"))


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("num_writers", [1, 2, 3])
def test_one_rank_writes_gate_and_up_of_an_expert(
    num_writers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They interleave in files: hosts with own caches of a file would lose each other's parts."""
    tensors, layout, written = drawn(), hf_layout(SHAPES), {}
    write = HfPlaces.write

    def noted(places: HfPlaces, directory: Path, name: str, tensor: Tensor) -> object:
        written[name] = id(places)
        return write(places, directory, name, tensor)

    monkeypatch.setattr(HfPlaces, "write", noted)

    def export(rank: ThreadRank) -> None:
        source = FullWeights([layout] * num_writers, tensors)
        export_hf(tmp_path / "out", source, SHAPES, torch.float32, CONFIG, peers=rank)

    on_ranks(num_writers, export)
    assert written.keys() == SHAPES.keys() and len(set(written.values())) == num_writers
    found = load_file(tmp_path / "out" / "model.safetensors")
    for expert in range(NUM_EXPERTS):
        gate, up, down = (f"{EXPERTS}.{expert}.{one}_proj.weight" for one in ("gate", "up", "down"))
        assert written[gate] == written[up]
        both = torch.cat((tensors[gate], tensors[up])).T
        assert torch.equal(found[f"{EXPERTS}.gate_up_proj"][expert], both)
        assert torch.equal(found[f"{EXPERTS}.down_proj"][expert], tensors[down].T)


def test_halves_of_different_processes_are_not_taken_for_written(tmp_path: Path) -> None:
    tensors = drawn()
    others = HfPlaces(SHAPES, torch.float32, 10**9, CONFIG)
    with (
        pytest.raises(ValueError, match="never written: .*gate_proj.*up_proj"),
        HfWriter(tmp_path / "out", SHAPES, torch.float32, CONFIG) as writer,
    ):
        for name in SHAPES.keys() - {UP}:
            writer.write(name, tensors[name])
        writer.write(GATE, tensors[GATE])  # twice is not both
        writer.wrote(others.write(writer.partial, UP, tensors[UP]))
    assert not list(tmp_path.iterdir())


def test_a_matrix_may_change_after_it_was_passed(tmp_path: Path) -> None:
    tensors = drawn()
    expected = torch.cat((tensors[GATE], tensors[UP])).T.clone()
    with HfWriter(tmp_path / "out", SHAPES, torch.float32, CONFIG) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
            tensor.zero_()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[f"{EXPERTS}.gate_up_proj"][1], expected)
