"""Pixel values of the images in a package's requests, made by the trainer's own code.

Requests with the same image, such as the samples of a prompt, share its values. Images of waiting
requests are decoded ahead in other threads. Requests wait if the values of running requests would
exceed MAX_PIXEL_BYTES of host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Self, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hybridrl.contracts.prompts import Content
from hybridrl.models.family import ModelShape
from hybridrl.models.vision.decoding import DecodedAhead
from hybridrl.models.vision.images import ImageProcessor, Preprocessing
from hybridrl.models.vision.tower import pixel_values
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Request

# Limit on the pixel values of requests that one rank's engine has at the same time, in host memory.
MAX_PIXEL_BYTES = 2 << 30
NUM_FOLLOWING = 64  # requests whose images are decoded ahead

Values = TypeVar("Values")


class Pixels(ABC, Generic[Values]):
    """Pixel values of requests' images, as a package stores them, rounded to the tower's `dtype`.
    Requests with the same image share its values.
    """

    def __init__(self, processor: ImageProcessor, dtype: torch.dtype) -> None:
        self._processor, self._dtype = processor, dtype
        self._values: WeakValueDictionary[str, Values] = WeakValueDictionary()
        self._decoded = DecodedAhead(processor)

    @abstractmethod
    def stored(self, content: Content, values_PC: Tensor) -> Values:
        """Returns an image's values, (P, C) for P patches, as the package stores them."""

    @classmethod
    def of(cls, settings: EngineSettings, shape: ModelShape) -> Self:
        """Returns the pixel values of an engine whose model reads images."""
        assert shape.vision is not None and settings.directory is not None
        rules = Preprocessing.read(settings.directory, shape.vision)
        return cls(ImageProcessor(shape.vision, rules), getattr(torch, settings.dtype))

    def admitted(self, waiting: Sequence[Request], running: Iterable[Request]) -> Sequence[Request]:
        """Returns the first waiting requests whose images, together with those of `running`, have
        at most MAX_PIXEL_BYTES; at least one request if none runs.
        """
        held = list(running)
        sizes = self._sizes(content for request in held for content in request.contents)
        num_bytes = sum(sizes.values())
        for index, request in enumerate(waiting):
            added = self._sizes(request.contents)
            num_bytes += sum(size for key, size in added.items() if key not in sizes)
            if added and (held or index) and num_bytes > MAX_PIXEL_BYTES:
                return waiting[:index]
            sizes |= added
        return waiting

    def decode_following(self, waiting: Sequence[Request]) -> None:
        """Decodes images of the first waiting requests in other threads, unless a request already
        has their values.
        """
        following = (one for request in waiting[:NUM_FOLLOWING] for one in request.contents)
        self._decoded.begin(one for one in following if one.key not in self._values)

    def values_of(self, content: Content) -> Values:
        """Returns an image's values; the same object as long as a request holds it."""
        if (found := self._values.get(content.key)) is not None:
            return found
        values_PC = pixel_values(
            self._processor, [self._decoded.patches(content)], self._dtype, torch.device("cpu")
        )
        made = self._values[content.key] = self.stored(content, values_PC)
        return made

    def _sizes(self, contents: Iterable[Content]) -> dict[str, int]:
        """Returns the bytes of each different image's values, by key."""
        copies = self._processor.vision.config.get("temporal_patch_size", 2) * self._dtype.itemsize
        return {one.key: self._processor.num_bytes(one) * copies for one in contents}
