"""Estimates what images cost a run: tokens, FLOPs and memory of the vision tower. No torch."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from hybridrl.config.schema import Config
from hybridrl.models.vision.shape import GATE_UP, VisionShape

# Elements that a tower's block keeps for each patch until its backward pass, as multiples of the
# hidden size and of the size of the feed-forward product: for plain and for gated feed-forward
# layers. Counted with torch's hooks for saved tensors, for Qwen3-VL-4B and Qwen2.5-VL-7B.
STORED, STORED_GATED = (11, 2), (15, 4)
# Elements of a block's temporary tensors, as the same multiples, and bytes that the block reads and
# writes for each patch. Rotary positions, which are computed in fp32, take 4 of these bytes per
# number.
SCRATCH_HIDDEN, SCRATCH_PRODUCT = 12, 2
TRAFFIC_HIDDEN, TRAFFIC_PRODUCT = 150, 12
# Engines compute at most as many tokens of images at the same time, or one larger image.
ENGINE_TOKENS = 4096
RESPONSE_IMAGES = "layout.mean_response_image_tokens"


class TowerWork(NamedTuple):
    """FLOPs of products and attention in a tower's forward passes; bytes of other operations."""

    flops: float = 0.0
    traffic: float = 0.0


def image_tokens(config: Config, vision: VisionShape | None) -> int:
    """Returns how many tokens of a usual prompt belong to images; 0 without a vision tower."""
    if vision is None:
        return 0
    if config.layout.mean_image_tokens is not None:
        return min(config.layout.mean_image_tokens, config.data.max_prompt_tokens)
    return largest_image(config, vision)


def shown_by(config: Config) -> str | None:
    """Returns who may show images after the prompt, as text; None if only prompts have images."""
    if config.agent.is_on:
        return "agents"
    # Environments of the package return texts only.
    return "the environment" if ":" in (config.environment.name or "") else None


def response_image_tokens(config: Config, vision: VisionShape | None) -> int:
    """Returns how many tokens of a usual response belong to images; 0 if that is not known."""
    if vision is None or shown_by(config) is None:
        return 0
    return min(config.layout.mean_response_image_tokens or 0, config.rollout.max_new_tokens)


def image_work(
    config: Config, vision: VisionShape | None, num_prompts: float, num_responses: float
) -> TowerWork:
    """Returns the work of forward passes over the images of usual prompts and responses.

    There is none without a tower.
    """
    if vision is None:
        return TowerWork()
    images, shown = image_tokens(config, vision), response_image_tokens(config, vision)
    of_prompts = tower_work(
        vision, num_prompts * images, min(images, largest_image(config, vision))
    )
    of_responses = tower_work(
        vision, num_responses * shown, min(shown, _max_image_tokens(config, vision))
    )
    return TowerWork(
        of_prompts.flops + of_responses.flops, of_prompts.traffic + of_responses.traffic
    )


def largest_image(config: Config, vision: VisionShape) -> int:
    """Returns the number of tokens of the largest image that a prompt may contain."""
    return min(_max_image_tokens(config, vision), config.data.max_prompt_tokens)


def _max_image_tokens(config: Config, vision: VisionShape) -> int:
    return config.data.max_image_pixels // (vision.patch_size * vision.merge_size) ** 2


def tower_work(vision: VisionShape, num_tokens: float, per_image: float) -> TowerWork:
    """Returns the work of forward passes over images with `num_tokens` in total.

    An image has `per_image` tokens; patches attend only to their own image.
    """
    matrices = {name: prod(size) for name, size in vision.tensors.items() if len(size) > 1}
    merging = sum(size for name, size in matrices.items() if "merger" in name)
    looked_up = matrices.get("pos_embed.weight", 0)
    patches_per_token = vision.merge_size**2
    num_patches = num_tokens * patches_per_token
    products = 2.0 * (sum(matrices.values()) - merging - looked_up) * num_patches
    products += 2.0 * merging * num_tokens
    whole = per_image * patches_per_token  # patches that a patch attends to
    windowed = min(whole, vision.window_patches or whole)
    attended = (vision.num_layers - vision.windowed_layers) * whole
    attended += vision.windowed_layers * windowed
    attention = 4.0 * vision.hidden_size * attended * num_patches
    moved = TRAFFIC_HIDDEN * vision.hidden_size + TRAFFIC_PRODUCT * vision.ffn_size
    return TowerWork(products + attention, 1.0 * moved * vision.num_layers * num_patches)


def scratch_bytes(vision: VisionShape, num_tokens: int, itemsize: int) -> int:
    """Returns the bytes of a pass's temporary tensors, for elements of `itemsize` bytes."""
    per_patch = SCRATCH_HIDDEN * vision.hidden_size + SCRATCH_PRODUCT * vision.ffn_size
    return itemsize * per_patch * num_tokens * vision.merge_size**2


def stored_bytes(vision: VisionShape, num_tokens: int, itemsize: int) -> int:
    """Returns the bytes that a pass of a trained tower keeps; arguments as in `scratch_bytes`."""
    is_gated = any(GATE_UP in name for name in vision.tensors)
    hidden, product = STORED_GATED if is_gated else STORED
    per_patch = hidden * vision.hidden_size + product * vision.ffn_size
    return itemsize * per_patch * vision.num_layers * num_tokens * vision.merge_size**2


def engine_bytes(config: Config, vision: VisionShape | None, itemsize: int) -> int:
    if vision is None:
        return 0
    largest = largest_image(config, vision)
    if shown_by(config) is not None:
        most = max(config.data.max_prompt_tokens, config.rollout.max_new_tokens)
        largest = min(_max_image_tokens(config, vision), most)
    return scratch_bytes(vision, max(largest, ENGINE_TOKENS), itemsize)


def images_report(
    config: Config, vision: VisionShape | None, itemsize: int
) -> dict[str, Any] | None:
    """Returns the images that a plan assumes, and the size of a tower; None without a tower."""
    if vision is None:
        return None
    is_given = config.layout.mean_image_tokens is not None
    assumed = "assumed: one image of data.max_image_pixels; set layout.mean_image_tokens"
    shown, not_counted = shown_by(config), None
    if shown is not None and config.layout.mean_response_image_tokens is None:
        not_counted = (
            f"images that {shown} may show are not counted: set {RESPONSE_IMAGES}, the mean number "
            "of a response's tokens that belong to them"
        )
    return {
        "tokens_per_prompt": image_tokens(config, vision),
        "source": "layout.mean_image_tokens" if is_given else assumed,
        "tokens_per_response": response_image_tokens(config, vision),
        "not_counted": not_counted,
        "tower_bytes": itemsize * vision.num_parameters,
    }
