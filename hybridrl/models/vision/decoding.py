"""Decodes images in other threads before they are needed. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import ImageProcessor

# Limit on images that are decoded ahead: 32 images of a million pixels. Decoding one takes 25 ms,
# in which a GPU would wait. Pillow and NumPy release Python's lock.
MAX_AHEAD_BYTES, MAX_AHEAD, NUM_DECODERS = 96 << 20, 256, 4


class DecodedAhead:
    """Patches of images, most of which are already decoded when somebody asks for them."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._started: dict[str, Future[NDArray[np.uint8]]] = {}
        self._pool = ThreadPoolExecutor(NUM_DECODERS, "images")

    def begin(self, contents: Iterable[Content]) -> None:
        """Decodes the first of these images in threads, up to MAX_AHEAD_BYTES but at least one;
        forgets all others.
        """
        following = {content.key: content for content in islice(contents, MAX_AHEAD)}
        for key in [key for key in self._started if key not in following]:
            self._started.pop(key).cancel()
        num_bytes = sum(self.processor.num_bytes(following[key]) for key in self._started)
        for key, content in following.items():
            if key not in self._started:
                num_bytes += self.processor.num_bytes(content)
                if self._started and num_bytes > MAX_AHEAD_BYTES:
                    return
                self._started[key] = self._pool.submit(self.processor.patches, content)

    def patches(self, content: Content) -> NDArray[np.uint8]:
        """Returns an image's patches, (P, 3, patch_size, patch_size), as `ImageProcessor.patches`.

        Raises:
            ImageFault: The image is damaged.
        """
        started = self._started.pop(content.key, None)
        return self.processor.patches(content) if started is None else started.result()
