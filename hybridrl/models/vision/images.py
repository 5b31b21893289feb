"""Decodes images, and prepares them for vision towers of Qwen-VL models. Does not import torch.

The trainer and every engine take an image's pixels from this module, so both compute with the same
numbers. `preprocessor_config.json` says how a model's images are resized and normalized; the
results are those of transformers' Qwen2VLImageProcessorPil, bit for bit.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.files import read_json_object, shown
from hybridrl.contracts.prompts import Content
from hybridrl.errors import MISSING, ModelError
from hybridrl.models.vision.shape import VisionShape

if TYPE_CHECKING:
    from PIL import Image

Value = TypeVar("Value")
IMAGE = "image"
"""Kind of the contents that this module makes."""
FILE, GRID = "file", "grid"  # arrays of such a content
# A file that decodes to more is refused. Decoding one takes about 0.5 GiB of memory: Pillow stores
# 4 bytes for each RGB or RGBA pixel, and an image with transparency is copied onto white.
MAX_DECODED_PIXELS = 1 << 26
STRIP_PIXELS = 1 << 20  # converted together, if a pixel has 16 bits
MAX_ASPECT = 200  # limit of Qwen-VL's processors
CACHE_BYTES = 512 << 20
# Pillow's other formats start programs, or have decoders that few people test. JPEG includes MPO.
# If MPO were named, Pillow would find no reader for it and fail for all formats that follow.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Classes that Pillow raises for damaged files.
_DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
)
FILES = ("preprocessor_config.json", "processor_config.json")
_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_BICUBIC = 3


class ImageFault(Exception):
    """Raised for an image that cannot be read or used."""

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(f"{found}; allowed: {allowed}")
        self.found, self.allowed = found, allowed


@dataclass(frozen=True)
class Preprocessing:
    """How a model's images are resized and normalized.

    Args:
        min_pixels, max_pixels: Limits on the number of pixels after resizing.
        mean, std: Mean and standard deviation of each channel, from 0 to 1.
        rescale: Factor that maps bytes to numbers from 0 to 1.
    """

    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float = 1 / 255

    @staticmethod
    def read(directory: Path, vision: VisionShape) -> Preprocessing:
        """Reads the files of an HF directory.

        Raises:
            ModelError: There is no such file, or it describes other processing.
        """
        for name in FILES:
            if (file := directory / name).is_file():
                content: Mapping[str, Any] = read_json_object(file, ModelError)
                content = content.get("image_processor", content)
                if "image_processor_type" in content or name == FILES[0]:
                    return _preprocessing(str(file), content, vision)
        raise ModelError(
            str(directory / FILES[0]),
            MISSING,
            "the description of a model's image processing",
            "Download the model's processor files, or set model.tokenizer to a directory that has "
            "them.",
        )


def _preprocessing(file: str, content: Mapping[str, Any], vision: VisionShape) -> Preprocessing:
    def need(key: str, default: object, allowed: tuple[object, ...]) -> None:
        value = content.get(key, default)
        if value not in allowed:
            given = " or ".join(map(shown, allowed))
            raise ModelError(f"{file}: {key}", shown(value), given, "Use the model's own file.")

    need("image_processor_type", _KINDS[0], _KINDS)
    need("patch_size", vision.patch_size, (vision.patch_size,))
    need("merge_size", vision.merge_size, (vision.merge_size,))
    need("temporal_patch_size", 2, (vision.config.get("temporal_patch_size", 2),))
    need("resample", _BICUBIC, (_BICUBIC,))
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        need(key, True, (True,))
    size = content.get("size") or {}
    limits = []
    for edge, key, default in (
        ("shortest_edge", "min_pixels", 56 * 56),
        ("longest_edge", "max_pixels", 28 * 28 * 1280),
    ):
        limit = content.get(key) or size.get(edge) or default
        if type(limit) is not int or limit < 1:
            allowed = "a number of pixels, 1 or more"
            raise ModelError(f"{file}: {key}", shown(limit), allowed, "Fix the file.")
        limits.append(limit)
    channels = []
    for key, of_clip in (
        ("image_mean", (0.48145466, 0.4578275, 0.40821073)),
        ("image_std", (0.26862954, 0.26130258, 0.27577711)),
    ):
        values: Any = content.get(key) or of_clip
        is_list = isinstance(values, list | tuple) and len(values) == 3
        if not is_list or not all(isinstance(one, int | float) for one in values):
            raise ModelError(f"{file}: {key}", shown(values), "three numbers", "Fix the file.")
        channels.append((float(values[0]), float(values[1]), float(values[2])))
    return Preprocessing(
        limits[0],
        limits[1],
        channels[0],
        channels[1],
        float(content.get("rescale_factor", 1 / 255)),
    )


def opened(data: bytes) -> Image.Image:
    """Returns an undecoded image. ImageFault if its format is unknown, or it is too large."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except _DAMAGE as error:
        allowed = "a PNG, JPEG, WebP, GIF, BMP or TIFF file"
        raise ImageFault(f"{len(data)} bytes that are not an image", allowed) from error
    except Image.DecompressionBombError as error:
        raise ImageFault("an image too large to decode", _most()) from error
    if image.width * image.height > MAX_DECODED_PIXELS:
        raise ImageFault(f"an image of {image.width} x {image.height} pixels", _most())
    return image


def media_type(data: bytes) -> str:
    """Returns the media type of an image's file, such as `image/png`. Raises as `opened`."""
    from PIL import Image

    return Image.MIME[str(opened(data).format)]


def _most() -> str:
    return f"at most {MAX_DECODED_PIXELS} pixels"


def decoded(data: bytes, enough: int | None = None) -> Image.Image:
    """Returns an image as RGB, turned as its EXIF orientation says, on white where it is
    transparent.

    Args:
        enough: If given, a JPEG image may be decoded at a fraction of its size, as long as each
            side has this many pixels. This is several times faster.

    Raises:
        ImageFault: The image is damaged, or too large to decode.
    """
    from PIL import Image, ImageOps

    image: Image.Image = opened(data)
    try:
        if enough is not None:
            image.draft(None, (enough, enough))
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith(("I", "F")):
            return _from_wide(image)
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            if image.mode != "RGBA":
                image = image.convert("RGBA")
            white = Image.new("RGB", image.size, (255, 255, 255))
            white.paste(image, mask=image)
            return white
        return image.convert("RGB")
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:120]
        raise ImageFault(f"a damaged image ({reason})", "an image that decodes") from error


def _from_wide(image: Image.Image) -> Image.Image:
    """Returns an image of 16 bits per pixel as RGB; Pillow would clip it to 255."""
    from PIL import Image

    extrema: Any = image.getextrema()
    divisor = 257 if extrema[1] > 255 else 1
    grey = Image.new("L", image.size)
    step = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, step):
        strip = image.crop((0, top, image.width, min(top + step, image.height)))
        values = np.asarray(strip).astype(np.float64) / divisor
        grey.paste(Image.fromarray(values.round().clip(0, 255).astype(np.uint8), "L"), (0, top))
    return grey.convert("RGB")


def fitted_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Returns the height and width, multiples of `factor`, to which an image is resized.

    The aspect ratio changes as little as possible (Qwen2-VL, Wang et al. 2024, section 2.1, as in
    its `smart_resize`).

    Raises:
        ImageFault: The image is too long and narrow.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        found = f"an image of {width} x {height} pixels"
        raise ImageFault(found, f"one side at most {MAX_ASPECT} times as long as the other")
    high, wide = (round(side / factor) * factor for side in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        high, wide = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
        )
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return high, wide


class Recent(Generic[Value]):
    """The most recently used values of images, of at most `max_bytes` in total."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._found: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        """Returns the value with this key, if it is still here."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def add(self, key: Hashable, value: Value, num_bytes: int) -> None:
        """Adds a value, and removes the oldest if they exceed the limit."""
        with self._lock:
            if key not in self._found:
                self._found[key] = value, num_bytes
                self._bytes += num_bytes
            while self._bytes > self._max_bytes and len(self._found) > 1:
                self._bytes -= self._found.popitem(last=False)[1][1]


# Patches, for all models of the process.
_RECENT: Recent[NDArray[np.uint8]] = Recent(CACHE_BYTES)


class ImageProcessor:
    """Prepares images for a vision tower.

    Args:
        max_pixels: Further limit on the number of pixels (`data.max_image_pixels`).
    """

    def __init__(
        self, vision: VisionShape, preprocessing: Preprocessing, max_pixels: int | None = None
    ) -> None:
        self.vision, self.preprocessing = vision, preprocessing
        self.max_pixels = min(preprocessing.max_pixels, max_pixels or preprocessing.max_pixels)

    @property
    def factor(self) -> int:
        """Width and height of the pixels that one token stands for."""
        return self.vision.patch_size * self.vision.merge_size

    def content(self, data: bytes) -> Content:
        """Returns an image of a prompt, placed at its first token. Decodes it to find damage.

        Raises:
            ImageFault: The image cannot be used.
        """
        image = decoded(data)
        least = min(self.preprocessing.min_pixels, self.max_pixels)
        high, wide = fitted_size(image.height, image.width, self.factor, least, self.max_pixels)
        patch = self.vision.patch_size
        grid = np.array([1, high // patch, wide // patch], np.int64)
        return Content(
            IMAGE,
            0,
            high * wide // self.factor**2,
            hashlib.sha256(data + grid.tobytes()).hexdigest(),
            {FILE: np.frombuffer(data, np.uint8), GRID: grid},
        )

    def resized(self, content: Content) -> Image.Image:
        """Returns an image as RGB in the size that the tower reads."""
        image = decoded(content.arrays[FILE].tobytes())
        _, high, wide = (content.arrays[GRID] * self.vision.patch_size).tolist()
        if image.size == (wide, high):
            return image
        from PIL.Image import Resampling

        return image.resize((wide, high), Resampling.BICUBIC)

    def patches(self, content: Content) -> NDArray[np.uint8]:
        """Returns an image's patches, (P, 3, patch_size, patch_size), in the order in which the
        tower reads them: the patches of one token follow one another.
        """
        patch, merge = self.vision.patch_size, self.vision.merge_size
        key = (content.key, patch, merge)
        if (found := _RECENT.get(key)) is not None:
            return found
        pixels = np.asarray(self.resized(content))
        _, high, wide = content.arrays[GRID].tolist()
        blocks = pixels.reshape(high // merge, merge, patch, wide // merge, merge, patch, 3)
        made = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5))
        made = made.reshape(high * wide, 3, patch, patch)
        _RECENT.add(key, made, made.nbytes)
        return made

    def num_bytes(self, content: Content) -> int:
        """Returns the size of an image's patches."""
        return 3 * self.vision.patch_size**2 * int(content.arrays[GRID].prod())

    def channel_values(self) -> NDArray[np.float32]:
        """Returns the number that the tower reads for each channel and byte, (3, 256)."""
        rule = self.preprocessing
        value = np.arange(256, dtype=np.float64) * rule.rescale
        scaled = value.astype(np.float32)[None]
        mean, std = (np.array(one, np.float32)[:, None] for one in (rule.mean, rule.std))
        return ((scaled - mean) / std).astype(np.float32)


def random_image(seed: int, factor: int, high: int, wide: int) -> bytes:
    """Returns a PNG file of random colours, of high x wide tokens unless the model enlarges it."""
    from PIL import Image

    size = high * factor, wide * factor, 3
    values = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    target = io.BytesIO()
    Image.fromarray(values).save(target, "PNG")
    return target.getvalue()


def position_offset(contents: tuple[Content, ...], merge_size: int) -> int:
    """Returns the difference between the position and the index of a token after all images."""
    sides = [int(content.arrays[GRID][1:].max()) // merge_size for content in contents]
    return sum(sides) - sum(content.num_tokens for content in contents)


def positions(contents: tuple[Content, ...], merge_size: int, num_tokens: int) -> NDArray[np.int64]:
    """Returns the positions of a sequence's tokens in time, height and width, (num_tokens, 3).

    Text continues after the largest earlier position. The tokens of an image share the position in
    time, and differ in height and width (Qwen2-VL, Wang et al. 2024, section 2.1).
    """
    found = np.empty((num_tokens, 3), np.int64)
    done, position = 0, 0
    for content in contents:
        num_text = content.start - done
        found[done : content.start] = np.arange(position, position + num_text)[:, None]
        position += num_text
        _, high, wide = (content.arrays[GRID] // [1, merge_size, merge_size]).tolist()
        rows, columns = np.divmod(np.arange(content.num_tokens), wide)
        found[content.start : content.end] = position
        found[content.start : content.end, 1] += rows
        found[content.start : content.end, 2] += columns
        position, done = position + max(high, wide), content.end
    found[done:] = np.arange(position, position + num_tokens - done)[:, None]
    return found
