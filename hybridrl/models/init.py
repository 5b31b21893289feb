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

from hybridrl.models.adapters.rows import HF_A
from hybridrl.models.boxes import box_view
from hybridrl.models.hf.stored_slices import stored_name
from hybridrl.models.weights import RankLayout

# The initial weights of projections into the residual stream are divided by sqrt(2 * layers), as in
# GPT-2 (Radford et al. 2019, 2.3).
RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "down_proj.weight",
    ".w2.weight",
    ".experts.down_proj",
    ".out_proj.weight",
)
ZEROS = ("bias", ".sinks")  # suffixes of vectors that are zero at first; the others are norms
# Parameters of gated delta nets, initialized as in transformers. Norms, which multiply by their
# weight in all models, and biases of decays are 1. DECAY is the logarithm of a uniform number.
ONES = (".linear_attn.norm.weight", ".linear_attn.dt_bias")
DECAY, MIN_DECAY, MAX_DECAY = ".linear_attn.A_log", 0.01, 16.0


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
        tensors: Local tensors by the layout's names; all are overwritten, and padding is set to
            zero.
        hf_config: Contents of config.json. `initializer_range` is the standard deviation (0.02 if
            absent); `num_hidden_layers` determines the scale of residual projections.
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
        stored = stored_name(name)
        shape, device = hf_shapes[name], tensors[held[0].local].device
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        # Generated on the device, because the host would need a minute for 7 billion numbers.
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
        if stored.endswith(DECAY):
            share = torch.rand(shape, generator=generator, device=device)
            full = (MIN_DECAY + share * (MAX_DECAY - MIN_DECAY)).log()
        elif len(shape) == 1:
            value = 0.0 if stored.endswith(ZEROS) else norm_weight
            full = torch.full(shape, 1.0 if stored.endswith(ONES) else value, device=device)
        else:
            scale = residual_std if stored.endswith(RESIDUAL_OUTPUTS) else std
            full = torch.randn(shape, generator=generator, device=device) * scale
        for region in held:
            target = box_view(tensors[region.local], region.local_box)
            target.copy_(box_view(full, region.hf_box))


def init_adapters(
    layout: RankLayout,
    hf_shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    seed: int,
) -> None:
    """Fills this rank's adapters as PEFT does: A is random, B is zero.

    A is uniform between -1/sqrt(in) and 1/sqrt(in) (Kaiming's initialization with a = sqrt(5)). It
    is drawn as a whole and then sharded, so its distribution does not depend on the layout.
    """
    for tensor in tensors.values():
        tensor.zero_()
    for region in layout.regions:
        if not region.hf.endswith(HF_A):
            continue
        target = tensors[region.local]
        digest = hashlib.blake2b(f"{seed}/{region.hf}".encode(), digest_size=7).digest()
        generator = torch.Generator(target.device)
        generator.manual_seed(int.from_bytes(digest, "little"))
        shape = hf_shapes[region.hf]
        full = torch.rand(shape, generator=generator, device=target.device) * 2 - 1
        full /= shape[1] ** 0.5
        box_view(target, region.local_box).copy_(box_view(full, region.hf_box))
