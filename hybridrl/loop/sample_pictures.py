"""Writes small copies of the images in dumped samples to `rollouts/images/`, for the report."""

from __future__ import annotations

import io
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import FILE, IMAGE, decoded

FOLDER = "images"  # in rollouts/
MAX_SIDE = 384  # pixels of a copy, which has about 10 to 40 kB
QUALITY = 80  # of JPEG
NUM_THREADS = 4  # Pillow releases Python's lock; more would need more memory for large images
NAME_LENGTH = 32  # characters of the image's key


class SamplePictures:
    """Writes copies of images once each, in other threads, to the run's folder `rollouts`. At its
    end, waits for all copies and raises the first error of writing one.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._pool = ThreadPoolExecutor(NUM_THREADS, "pictures")
        self._started: dict[str, Future[None]] = {}

    def __enter__(self) -> SamplePictures:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for started in self._started.values():
                started.result()

    def write(self, contents: Iterable[Content]) -> list[str]:
        """Starts to write copies of a prompt's images, and returns their names, in order."""
        names = []
        for content in contents:
            if content.kind != IMAGE:
                continue
            name = content.key[:NAME_LENGTH]
            names.append(name)
            file = self._folder / f"{name}.jpg"
            if name not in self._started and not file.exists():
                self._started[name] = self._pool.submit(_write, file, content)
        return names


def _write(file: Path, content: Content) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(small_copy(content.arrays[FILE].tobytes()))
    partial.replace(file)


def small_copy(data: bytes) -> bytes:
    """Returns an image's file as a JPEG file of at most MAX_SIDE pixels in each direction."""
    image = decoded(data, enough=MAX_SIDE)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    target = io.BytesIO()
    image.save(target, "JPEG", quality=QUALITY)
    return target.getvalue()
