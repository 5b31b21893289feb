"""Initializes weights from a seed, in HF coordinates.

Each HF tensor has its own random generator, seeded with the run's seed and the tensor's name, so a
new model has the same weights in every layout. Each rank generates one whole tensor at a time and
keeps only its own rectangles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.models.hf.shards import box_view
from hybridrl.models.weights import RankLayout

# The initial weights of projections into the residual stream are divided by sqrt(2 * layers), as in
# GPT-2 (Radford et al. 2019, 2.3).
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", ".w2.weight")


def init_weights(
    layout: RankLayout,
    hf_shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    hf_config: Mapping[str, Any],
    seed: int,
    norm_weight: float = 1.0,
) -> None:
    """Fills this rank's tensors with random weights.

    The weights are the same in every layout, but differ between CPUs and GPUs.

    Args:
        layout: Layout of the rank.
        hf_shapes: Shape of every HF tensor of the model.
        tensors: Local tensors by the layout's names; all are overwritten, and padding is set to
            zero.
        hf_config: Contents of config.json. `initializer_range` is the standard deviation (0.02 if
            absent); `num_hidden_layers` determines the scale of residual projections.
        seed: Seed of the run.
        norm_weight: Initial weight of norms, chosen so that they scale by 1.
    """
    std = float(hf_config.get("initializer_range", 0.02))
    residual_std = std / (2 * int(hf_config["num_hidden_layers"])) ** 0.5
    for tensor in tensors.values():
        tensor.zero_()
    regions: dict[str, list[Any]] = {}
    for region in layout.regions:
        regions.setdefault(region.hf, []).append(region)
    for name, held in regions.items():
        shape, device = hf_shapes[name], tensors[held[0].local].device
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else norm_weight
            full = torch.full(shape, value, device=device)
        else:
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            # Generated on the device, because the host would need a minute for 7 billion numbers.
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
            scale = residual_std if name.endswith(RESIDUAL_OUTPUTS) else std
            full = torch.randn(shape, generator=generator, device=device) * scale
        for region in held:
            target = box_view(tensors[region.local], region.local_box)
            target.copy_(box_view(full, region.hf_box))
