"""Writes the adapters that an engine holds in addition to the policy's, for evaluations: an earlier
version of the policy, or adapters in PEFT directories.

All ranks of a replica call these functions between `begin_update` and `finish_update`, which also
clears cached keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.errors import CheckpointError
from hybridrl.models.adapters.peft_directory import PeftAdapter
from hybridrl.models.adapters.peft_files import load_peft
from hybridrl.models.adapters.rows import HF_B, is_adapter
from hybridrl.models.adapters.slots import POLICY
from hybridrl.models.weights import RankLayout
from hybridrl.rollout.build import AdapterEngine


def keep_policy(engine: AdapterEngine, name: str) -> None:
    """Copies the policy's present adapter, which must be complete, into the adapter `name`."""
    policy, other = engine.adapter_tensors(POLICY), engine.adapter_tensors(name)
    with torch.inference_mode():
        torch._foreach_copy_([other[key] for key in policy], list(policy.values()))


def read_adapter(engine: AdapterEngine, name: str, adapter: PeftAdapter) -> None:
    """Reads this rank's part of a PEFT directory into an engine's adapter `name`.

    `adapter` is of the engine's base model; its scale, rank and targets may differ from the
    policy's. Raises CheckpointError if the engine has no slots for a layer, or too small ones.
    """
    own = dict(engine.adapter_tensors(name))
    layout = _layout_of(adapter, adapter_layout(engine))
    _clear(own)
    load_peft(adapter, layout, own)
    scaled = {region.local for region in layout.regions if region.hf.endswith(HF_B)}
    with torch.no_grad():
        torch._foreach_mul_([own[key] for key in sorted(scaled)], adapter.lora.scale)


def _layout_of(adapter: PeftAdapter, policy: RankLayout) -> RankLayout:
    held = {region.hf for region in policy.regions}
    rank, regions = adapter.lora.rank, []
    for region in policy.regions:
        if region.hf not in adapter.shapes:
            continue
        dim = 1 if region.hf.endswith(HF_B) else 0  # the dim of the rank
        if rank > policy.shapes[region.local][dim]:
            raise _unfit(adapter, f"rank {rank}", f"at most {policy.shapes[region.local][dim]}")
        boxes = [
            tuple((0, rank) if i == dim else span for i, span in enumerate(box))
            for box in (region.hf_box, region.local_box)
        ]
        regions.append(replace(region, hf_box=boxes[0], local_box=boxes[1]))
    if missing := sorted(adapter.shapes.keys() - held):
        raise _unfit(adapter, missing[0], "adapters on the layers that the engine adapts")
    return replace(policy, regions=tuple(regions))


def _unfit(adapter: PeftAdapter, found: str, allowed: str) -> CheckpointError:
    remedy = "Start the engine with a larger lora.rank and with more lora.targets."
    return CheckpointError(str(adapter.directory), found, allowed, remedy)


def adapter_layout(engine: AdapterEngine) -> RankLayout:
    """Returns the part of an engine's layout that describes an adapter."""
    layout = engine.layout()
    regions = tuple(region for region in layout.regions if is_adapter(region.hf))
    names = engine.adapter_tensors(POLICY).keys()
    shapes = {name: layout.shapes[name] for name in names}
    padding = tuple((name, box) for name, box in layout.padding if name in names)
    return RankLayout(regions, shapes, padding)


def _clear(tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_zero_(list(tensors.values()))
