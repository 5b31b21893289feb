"""Passes images to vLLM, as pixel values that the trainer's own code has made.

vLLM's processor of images would resize and normalize with other code than the trainer, needs a
tokenizer, and on CPUs a torchvision that loads. Here a request to vLLM's core contains the prompt's
tokens, with a placeholder for each feature of an image, and the vision tower's inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.prompts import Content
from hybridrl.models.family import ModelShape
from hybridrl.models.vision.images import GRID
from hybridrl.rollout.common.image_pixels import Pixels
from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.common.settings import EngineSettings

IMAGE = "image"
MAX_IMAGES = 999  # per prompt, as in vLLM


def image_arguments() -> dict[str, Any]:
    return {
        "limit_mm_per_prompt": {IMAGE: MAX_IMAGES, "video": 0},
        # Every rank has a whole tower, as in training.
        "mm_encoder_tp_mode": "data",
        # The processor's cache and profiling need vLLM's own processor.
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
    }


@contextlib.contextmanager
def without_processor(shape: ModelShape, settings: EngineSettings) -> Iterator[None]:
    """Makes engines that start in this context have no processor of images.

    vLLM asks the processor only for the processor's cache, and for limits, from which it computes
    the size of the feature cache: an image has at most as many tokens as a request.
    """
    if shape.vision is None:
        yield
        return
    from vllm.multimodal.registry import MultiModalRegistry

    def create_processor(_: Any, model_config: Any, *__: Any, **___: Any) -> Any:
        info = SimpleNamespace(
            ctx=SimpleNamespace(model_config=model_config),
            supported_mm_limits={IMAGE: None},
            allowed_mm_limits={IMAGE: MAX_IMAGES},
            skip_prompt_length_check=False,
            get_mm_max_tokens_per_item=lambda **_: {IMAGE: settings.max_tokens},
        )
        return SimpleNamespace(info=info, cache=None)  # 0.26 asks for the cache

    with replaced(MultiModalRegistry, "create_processor", create_processor):
        yield


def encode_once(scheduler: Any) -> None:
    """Makes a new engine's tower compute an image once for all samples of a prompt.

    The cache of features holds the images of two steps, because vLLM schedules a step before the
    previous step ends. A request waits until the tower can compute its next image. vLLM would
    compute the tokens before that image first, for all samples; they would then no longer start
    with the keys and features of the prompt's first sample (scheduler.py, 0.26 and 0.32).
    """
    manager = scheduler.encoder_cache_manager
    scheduler.encoder_cache_manager = manager = type(manager)(2 * manager.cache_size)
    try_schedule = scheduler._try_schedule_encoder_inputs

    def schedule_or_wait(
        request: Any, num_computed: int, num_new: int, *args: Any, **keywords: Any
    ) -> tuple[Any, ...]:
        images, num_possible, *rest = try_schedule(
            request, num_computed, num_new, *args, **keywords
        )
        is_running = request.status.name == "RUNNING"
        if not is_running and not images and num_possible < num_new:
            manager.free(request)  # otherwise waiting requests could keep images from each other
            num_possible = 0
        return images, num_possible, *rest

    scheduler._try_schedule_encoder_inputs = schedule_or_wait


class PixelItems(Pixels[Any]):
    """Pixel values of requests' images, as vLLM stores them."""

    def features_of(self, contents: Sequence[Content], num_updates: int) -> list[Any]:
        """Returns vLLM's description of a prompt's images. The number of weight updates is part of
        the name by which vLLM caches features, so those of an earlier tower are not used. Versions
        of weights would not do, because they may repeat.
        """
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        return [
            MultiModalFeatureSpec(
                data=self.values_of(content),
                modality=IMAGE,
                identifier=f"{content.key}-{num_updates}",
                mm_position=PlaceholderRange(offset=content.start, length=content.num_tokens),
            )
            for content in contents
        ]

    def stored(self, content: Content, values_PC: Tensor) -> Any:
        """Returns vLLM's description of an image's values."""
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        grids = torch.from_numpy(content.arrays[GRID])[None]
        given: Any = {"pixel_values": values_PC, "image_grid_thw": grids}
        fields: Mapping[str, Any] = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(IMAGE, grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
        }
        (item,) = MultiModalKwargsItems.from_hf_inputs(given, fields)[IMAGE]
        return item
