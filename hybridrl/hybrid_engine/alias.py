"""Engine parameters that need no copy: the trainer's shard holds the same rows in the same order.

Where training and generation cut a tensor alike, the engine's parameter becomes a view of the
training parameter: no second copy, nothing to move. Pure; the engine makes the views, before it
captures CUDA graphs, since a graph keeps the addresses that it was captured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridrl.hybrid_engine.wire import kept_tensors
from hybridrl.models.boxes import Box
from hybridrl.models.weights import RankLayout

if TYPE_CHECKING:  # `hybridrl plan` asks for the names, where torch takes seconds
    from torch import Tensor

Content = frozenset[tuple[str, Box, Box]]
"""What a tensor holds: (HF name, rectangle there, rectangle here) of each of its regions."""


@dataclass(frozen=True)
class TrainingShard:
    """What the trainer holds on this rank.

    Args:
        layout: what of the HF checkpoint it is.
        tensors: the parameters, at addresses that they keep for the life of the model.
    """

    layout: RankLayout
    tensors: Mapping[str, Tensor]


def shared_names(source: RankLayout, target: RankLayout) -> dict[str, str]:
    """Returns, by engine name, the training tensor that holds the same rectangles at the same
    places, with rows of the same length and no fewer of them. None of an expert, which is part of a
    parameter: `<parameter>/<index>`; none that is kept in fp32, whatever the engine's type.
    """
    kept = kept_tensors(target)
    held = {content: name for name, content in _contents(source).items()}
    found = {}
    for name, content in _contents(target).items():
        if content in held and "/" not in name and name not in kept:
            one, other = source.shapes[held[content]], target.shapes[name]
            if one[1:] == other[1:] and one[0] >= other[0]:
                found[name] = held[content]
    return found


def shared_views(shard: TrainingShard, target: RankLayout, dtype: object) -> dict[str, Tensor]:
    """Returns, by engine name, the view of a training parameter that can serve as the engine's.

    A training parameter serves if it holds the same rectangles at the same places and is contiguous
    and of the engine's dtype. Rows that pad the vocabulary may follow, and may be missing in the
    engine; what is in them is never read.

    Args:
        shard: of the trainer.
        target: the engine's layout on the same rank.
        dtype: of the engine's parameters.
    """
    views = {}
    for name, source_name in shared_names(shard.layout, target).items():
        source = shard.tensors[source_name]
        if source.dtype == dtype and source.is_contiguous():
            views[name] = source[: target.shapes[name][0]]
    return views


def _contents(layout: RankLayout) -> dict[str, Content]:
    regions: dict[str, list[tuple[str, Box, Box]]] = {}
    for region in layout.regions:
        regions.setdefault(region.local, []).append((region.hf, region.hf_box, region.local_box))
    return {name: frozenset(parts) for name, parts in regions.items()}
