"""Which engine parameters are views of training parameters, and which must not be."""

from __future__ import annotations

import torch

from hybridrl.hybrid_engine.alias import TrainingShard, shared_names, shared_views
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
