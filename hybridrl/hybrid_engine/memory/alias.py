"""Finds engine parameters that can share memory with training parameters. Pure.

If training and generation shard a tensor in the same way, the engine's parameter becomes a view of
the training parameter. A parameter that stacks experts becomes a single view of them, if the rank
trains the same experts and they are evenly spaced in memory (models/expert_stacks.py). The engine
creates the views before it captures CUDA graphs, because graphs contain fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hybridrl.hybrid_engine.planning.wire_elements import fixed_sizes
from hybridrl.models.adapters.slots import is_slot
from hybridrl.models.boxes import Box
from hybridrl.models.expert_stacks import are_consecutive_in_stack
from hybridrl.models.weights import RankLayout

if TYPE_CHECKING:  # `hybridrl plan` needs only `shared_names`, and importing torch takes seconds
    from torch import Tensor

    from hybridrl.models.sources import TrainingShard

# Suffixes of engine parameters that generation does not read itself: it reads copies of them
# (rollout/common/weight_copies.py).
COPIED = (".kv_b_proj.weight",)
Content = frozenset[tuple[str, Box, Box]]
"""Regions of a local tensor: (HF name, rectangle in the HF tensor, rectangle in the local tensor).
"""


def shared_names(
    source: RankLayout, target: RankLayout, has_even_stacks: bool = True
) -> dict[str, str]:
    """Returns, for each engine tensor that can be shared, the training tensor of equal content.

    The training tensor has rows of the same length, and at least as many of them. Left out are
    tensors in fp32, FP8 weights with their scales, tensors that engines copy before use (`COPIED`:
    vLLM's copies are views of the loaded parameter, whose memory would stay), and slots of
    adapters, whose addresses the engine's kernels keep in tables. The experts of a stack, named
    `<parameter>/<index>`, are shared only all together, and only if they are consecutive in
    training too.

    Args:
        has_even_stacks: Whether a stack's experts are, or may be, evenly spaced in memory
            (`stacks_are_even`); if False, no stack is shared.
    """
    fixed = fixed_sizes(target)
    held = {content: name for name, content in _contents(source).items()}
    found: dict[str, str] = {}
    stacks: dict[str, list[str]] = {}
    for name, content in _contents(target).items():
        stack, _, index = name.partition("/")
        if index:
            stacks.setdefault(stack, []).append(name)
        if name in fixed or name.endswith(COPIED) or is_slot(name):
            continue
        if index and not has_even_stacks:
            continue
        if content in held:
            one, other = source.shapes[held[content]], target.shapes[name]
            if one[1:] == other[1:] and one[0] >= other[0]:
                found[name] = held[content]
    for members in stacks.values():
        members.sort(key=_place)
        in_training = [found[member] for member in members if member in found]
        if len(in_training) < len(members) or not are_consecutive_in_stack(in_training):
            for member in members:
                found.pop(member, None)
    return found


def shared_views(shard: TrainingShard, target: RankLayout, dtype: object) -> dict[str, Tensor]:
    """Returns, for each engine parameter that can be shared, the view of training memory.

    The training parameter has the same content at the same offsets, is contiguous and has the
    engine's `dtype`. It may have additional rows that pad the vocabulary, which the engine never
    reads. In a stack of experts, (experts, rows, columns), the stride between experts is constant
    but may exceed the size of an expert.
    """
    views: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    shared = shared_names(shard.layout, target)
    for name in sorted(shared, key=_place):
        source = shard.tensors[shared[name]]
        if source.dtype == dtype and source.is_contiguous():
            stack, _, index = name.partition("/")
            view = source[: target.shapes[name][0]]
            if index:
                stacks.setdefault(stack, []).append(view)
            else:
                views[name] = view
    for stack, experts in stacks.items():
        num_experts = sum(name.startswith(f"{stack}/") for name in target.shapes)
        stacked = _stacked(experts) if len(experts) == num_experts else None
        if stacked is not None:
            views[stack] = stacked
    return views


def is_view(name: str, tensor: Tensor, views: Mapping[str, Tensor]) -> bool:
    """Whether the engine's tensor has the same address as its shared view."""
    parameter, _, index = name.partition("/")
    if parameter not in views:
        return False
    view = views[parameter][int(index)] if index else views[parameter]
    return tensor.data_ptr() == view.data_ptr()


def _stacked(experts: Sequence[Tensor]) -> Tensor | None:
    """Returns one view that stacks equal matrices; None if they are not evenly spaced."""
    first, storage = experts[0], experts[0].untyped_storage().data_ptr()
    starts = [one.storage_offset() for one in experts]
    distance = starts[1] - starts[0] if len(experts) > 1 else first.numel()
    is_even = starts == [starts[0] + i * distance for i in range(len(experts))]
    if not is_even or distance < first.numel():
        return None
    if any(one.untyped_storage().data_ptr() != storage for one in experts):
        return None
    return first.as_strided((len(experts), *first.shape), (distance, *first.stride()))


def _place(name: str) -> tuple[str, int]:
    stack, _, index = name.partition("/")
    return stack, int(index or 0)


def _contents(layout: RankLayout) -> dict[str, Content]:
    regions: dict[str, list[tuple[str, Box, Box]]] = {}
    for region in layout.regions:
        regions.setdefault(region.local, []).append((region.hf, region.hf_box, region.local_box))
    return {name: frozenset(parts) for name, parts in regions.items()}
