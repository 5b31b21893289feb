"""Which engine parameters are views of training parameters, and which must not be."""

from __future__ import annotations

import torch

from hybridrl.hybrid_engine.memory.alias import (
    is_view,
    shared_names,
    shared_views,
)
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout, Region


def layout(name: str, rows: int, held: int = 4) -> RankLayout:
    """A tensor of so many rows, of which the first are the rows of an HF tensor."""
    box = ((0, held), (0, 3))
    padding = ((name, ((held, rows), (0, 3))),) if rows > held else ()
    return RankLayout((Region("hf", box, name, box),), {name: (rows, 3)}, padding)


def test_an_engine_shares_rows_that_the_trainer_has() -> None:
    assert shared_names(layout("t", 4), layout("e", 4)) == {"e": "t"}
    # Rows that pad a vocabulary may be missing in the engine, not in the trainer.
    assert shared_names(layout("t", 6), layout("e", 4)) == {"e": "t"}
    assert shared_names(layout("t", 4), layout("e", 6)) == {}
    assert shared_names(layout("t", 4, held=3), layout("e", 4)) == {}


def test_a_view_is_of_the_engines_type_and_in_one_piece() -> None:
    weight = torch.arange(18.0).view(6, 3)
    shard = TrainingShard(layout("t", 6), {"t": weight})
    view = shared_views(shard, layout("e", 4), torch.float32)["e"]
    assert view.shape == (4, 3) and view.data_ptr() == weight.data_ptr()
    assert shared_views(shard, layout("e", 4), torch.bfloat16) == {}
    apart = TrainingShard(layout("t", 6), {"t": torch.zeros(3, 6).t()})
    assert shared_views(apart, layout("e", 4), torch.float32) == {}


def experts(names: list[str], first: int = 0) -> RankLayout:
    """One matrix of (4, 3) for each of these tensors, of as many experts from `first` on."""
    box = ((0, 4), (0, 3))
    regions = tuple(Region(f"hf{first + i}", box, name, box) for i, name in enumerate(names))
    return RankLayout(regions, dict.fromkeys(names, (4, 3)), ())


def grouped(*places: int) -> list[str]:
    return [f"0/decoder.layers.1.mlp.experts.linear_fc1.weight{i}" for i in places]


def test_experts_are_shared_all_or_none_and_in_training_order() -> None:
    engine = ["w13/0", "w13/1"]
    assert shared_names(experts(grouped(0, 1)), experts(engine)) == dict(
        zip(engine, grouped(0, 1), strict=True)
    )
    # The engine has the last two of four.
    found = shared_names(experts(grouped(0, 1, 2, 3)), experts(engine, first=2))
    assert found == dict(zip(engine, grouped(2, 3), strict=True))
    assert shared_names(experts(grouped(0, 1)), experts(engine, first=1)) == {}, "one is missing"
    assert shared_names(experts(grouped(1, 0)), experts(engine)) == {}, "in another order"
    several = experts([*grouped(0), "0/decoder.layers.2.mlp.experts.linear_fc1.weight1"])
    assert shared_names(several, experts(engine)) == {}, "of two layers"


def test_parameters_that_engines_compute_with_copies_of_stay_theirs() -> None:
    for engine in ("model.layers.0.self_attn.kv_b_proj.weight", "model.norm.weight"):
        expected = {} if "kv_b_proj" in engine else {engine: "t"}
        assert shared_names(layout("t", 4), layout(engine, 4)) == expected


def test_stacks_that_lie_unevenly_are_not_found() -> None:
    both = RankLayout(
        experts(grouped(0, 1)).regions + layout("t", 4).regions,
        {**experts(grouped(0, 1)).shapes, "t": (4, 3)},
    )
    engine = RankLayout(
        experts(["w13/0", "w13/1"]).regions + layout("e", 4).regions,
        {"w13/0": (4, 3), "w13/1": (4, 3), "e": (4, 3)},
    )
    assert set(shared_names(both, engine)) == {"w13/0", "w13/1", "e"}
    assert shared_names(both, engine, has_even_stacks=False) == {"e": "t"}


def test_experts_that_lie_as_far_apart_are_one_view() -> None:
    names, engine = grouped(0, 1, 2), experts(["w13/0", "w13/1", "w13/2"])
    buffer = torch.arange(60.0)

    def views(*starts: int) -> dict[str, torch.Tensor]:
        parts = [buffer[start : start + 12].view(4, 3) for start in starts]
        shard = TrainingShard(experts(names), dict(zip(names, parts, strict=True)))
        return shared_views(shard, engine, torch.float32)

    for starts in ((0, 12, 24), (5, 25, 45)):
        view = views(*starts)["w13"]
        assert view.shape == (3, 4, 3)
        assert [int(view[i, 0, 0]) for i in range(3)] == list(starts)
        assert is_view("w13/2", buffer[starts[2] :], {"w13": view})
        assert not is_view("w13/1", buffer[starts[2] :], {"w13": view})
    assert views(0, 12, 30) == {}, "unevenly"
    assert views(24, 12, 0) == {}, "descending: no tensor has such strides"
    apart = [torch.zeros(4, 3) for _ in names]
    shard = TrainingShard(experts(names), dict(zip(names, apart, strict=True)))
    assert shared_views(shard, engine, torch.float32) == {}, "in several buffers"
