"""Writes small copies of the images in dumped samples to `rollouts/images/`, for the report."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import FILE, IMAGE, decoded

FOLDER = "images"  # in rollouts/
MAX_SIDE = 384  # pixels of a copy, which has about 10 to 40 kB
QUALITY = 80  # of JPEG
NAME_LENGTH = 32  # characters of the image's key


class SamplePictures:
    """Copies of images, each of which is written once.

    Args:
        directory: The run's folder `rollouts`.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def write(self, contents: Iterable[Content]) -> list[str]:
        """Writes copies of a prompt's images, and returns their names, in order."""
        names = []
        for content in contents:
            if content.kind != IMAGE:
                continue
            name = content.key[:NAME_LENGTH]
            names.append(name)
            file = self._folder / f"{name}.jpg"
            if file.exists():
                continue
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_bytes(small_copy(content.arrays[FILE].tobytes()))
            partial.replace(file)
        return names


def small_copy(data: bytes) -> bytes:
    """Returns an image's file as a JPEG file of at most MAX_SIDE pixels in each direction."""
    image = decoded(data)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    target = io.BytesIO()
    image.save(target, "JPEG", quality=QUALITY)
    return target.getvalue()
