"""Finds the images of a row, and places them among the tokens of its prompt. Does not import torch.

A row names its images in the columns `images`, `image` or `image_1`, `image_2`, ..., or in parts of
its messages. Marks in the text, `<image>` or `<image 2>`, and message parts that contain no image
themselves, say where the images of the columns are placed. Images without a mark are placed at the
start of the first message of the user.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hybridrl.config.files import plain
from hybridrl.config.hub import DATASETS
from hybridrl.contracts.prompts import Content
from hybridrl.data.messages import ASSISTANT, Message
from hybridrl.data.rows import Row
from hybridrl.errors import MISSING, BadRowError, DataError, UserError, error_text, short
from hybridrl.models.vision.images import ImageFault, ImageProcessor, Preprocessing
from hybridrl.models.vision.shape import VisionShape

IMAGES = "images"
"""Column with a row's images."""
MARK = "<image>"
_MARKS = re.compile(r"<image(?: (\d+))?>", re.ASCII)
_COLUMNS = re.compile(r"images?|image_(\d{1,9})", re.ASCII)
_VALUES = ("bytes", "path", "image", "url", "image_url")  # keys of an image in an object
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_REMOTE = re.compile(r"(?:https?|ftp|s3|gs|gcs|az|abfss?|hf|hdfs)://", re.IGNORECASE)
_PART = {"type": "image"}
_ALLOWED = (
    "an image file's bytes, its path, a data URI, or an object with one of these as bytes, path, "
    "image or url"
)
MAX_DEPTH = 3  # objects within objects
MAX_FILE_BYTES = 64 << 20
Image = bytes | str
"""Bytes of an image's file, or its absolute path."""


class Decides(Protocol):
    """Turns the bytes of an image into the content of a prompt."""

    def content(self, data: bytes) -> Content: ...


@dataclass(frozen=True)
class ImageTokens:
    """How a model's prompts contain images.

    Args:
        identity: Digest of everything that decides how images become tokens.
        text: Text that the tokenizer encodes as the tokens of an image: start, placeholder, end.
        placeholder: Token that stands for an image, and is repeated for its features.
    """

    processor: ImageProcessor
    identity: str
    text: str
    placeholder: int


def image_tokens(
    vision: VisionShape, directory: Path, tokenizer: Any, max_pixels: int
) -> ImageTokens:
    """Returns how the prompts of a model contain images; `directory` has the processor's files.
    Raises UserError if these are missing, or do not allow images of `data.max_image_pixels`.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UserError(
            "the package pillow",
            MISSING,
            "installed, because images are decoded with it",
            "Run: pip install 'hybridrl[images]'",
        )
    rule = usable_rule(vision, directory, max_pixels)
    tokens = vision.start_token, vision.image_token, vision.end_token
    text = "".join(tokenizer.convert_ids_to_tokens(list(tokens)))
    found = [int(one) for one in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if found != list(tokens):
        raise UserError(
            "model.tokenizer",
            f"{short(text)}, which becomes the tokens {found}",
            f"the tokens {list(tokens)}, with which config.json says that an image begins and ends",
            "Set model.tokenizer to the model's own tokenizer.",
        )
    processor = ImageProcessor(vision, rule, max_pixels)
    decides = [asdict(rule), max_pixels, tokens, vision.patch_size, vision.merge_size]
    identity = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    return ImageTokens(processor, identity, text, vision.image_token)


def usable_rule(vision: VisionShape, directory: Path, max_pixels: int) -> Preprocessing:
    """Returns how the processor in `directory` prepares images. Raises UserError if its files are
    unusable, or do not allow images of `data.max_image_pixels`.
    """
    rule = Preprocessing.read(directory, vision)
    if max_pixels < rule.min_pixels:
        raise UserError(
            "data.max_image_pixels",
            max_pixels,
            f"{rule.min_pixels}, the processor's smallest size, or more",
            "Raise data.max_image_pixels.",
        )
    return rule


class Found(NamedTuple):
    """A row's images, in the order of their columns.

    Args:
        numbers: Index of each image by the number in its column's name, image_1 being 1.
    """

    images: list[Image]
    columns: dict[str, object]
    numbers: dict[int, int]


def images_of(row: Row, columns: Mapping[str, object], with_numbers: bool = True) -> Found:
    """Separates a row's images from its other columns. Reads columns such as image_1 only with
    `with_numbers`. Raises BadRowError if a value is not an image.
    """
    images: list[Image] = []
    numbers: dict[int, int] = {}
    media = {
        name: match
        for name in columns
        if (match := _COLUMNS.fullmatch(name))
        and (with_numbers or match[1] is None)
        and _has_images(row, columns[name])
    }
    for name in sorted(media, key=lambda name: (int(media[name][1] or 0), name)):
        value = columns[name]
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is None:
                continue
            if media[name][1] is not None:
                numbers[int(media[name][1])] = len(images)
            images.append(read_reference(row, name, one))
    return Found(images, {k: v for k, v in columns.items() if k not in media}, numbers)


def _has_images(row: Row, value: object) -> bool:
    """Whether a value is an image; a text may also be, say, the name of a container's image."""
    if isinstance(value, str):
        if value.lower().endswith(_ENDINGS) or value.startswith(("data:", "file://")):
            return True
        return bool(_REMOTE.match(value)) or _file_size(_path(row, value)) is not None
    return value is not None and not isinstance(value, int | float)


def read_reference(row: Row, name: str, value: object, depth: int = 0) -> Image:
    """Returns an image's bytes or absolute path. BadRowError if the value is not an image."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        for key in _VALUES:
            if value.get(key) is not None:
                return read_reference(row, name, value[key], depth + 1)
    if isinstance(value, str) and value:
        return _from_text(row, name, value)
    if callable(getattr(value, "save", None)):  # an image of Pillow, in rows from Python
        target = io.BytesIO()
        value.save(target, "PNG")  # type: ignore[attr-defined]
        return target.getvalue()
    got = f"{plain(name)} = {short(value, 60)}"
    raise BadRowError(row.place, got, _ALLOWED, "Fix or remove that row.")


def _from_text(row: Row, name: str, text: str) -> Image:
    if text.startswith("data:"):
        _check_size(row, name, len(text) * 3 // 4)
        try:
            return data_uri_bytes(text)
        except ValueError as error:
            got = f"{plain(name)} = {short(text, 40)} ({error_text(error, 60)})"
            allowed = "a data URI such as data:image/png;base64,..."
            raise BadRowError(row.place, got, allowed, "Fix or remove that row.") from error
    if _REMOTE.match(text):
        got, remedy = f"{plain(name)} = {short(text, 80)}", "Download the images beforehand."
        raise BadRowError(row.place, got, "a path or a data URI", remedy)
    if row.place.startswith(DATASETS):
        got = f"{plain(name)} = {short(text, 80)}, a path"
        allowed = "images within the rows of a data set from the hub, which must not name files"
        raise BadRowError(row.place, got, allowed, "Use a data set that contains its images.")
    path = _path(row, text)
    size = _file_size(path)
    if size is None:
        got = f"{plain(name)} = {short(text, 80)}, which is no file in {folder_of(row)}"
        allowed = "a path that is absolute or relative to the rows' file"
        raise BadRowError(row.place, got, allowed, "Fix the path, or remove that row.")
    _check_size(row, name, size)
    return str(path.resolve())


def data_uri_bytes(text: str) -> bytes:
    """Returns the bytes in a data URI. Raises ValueError if the text is no such URI."""
    head, comma, body = text.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise ValueError("no ;base64,")
    return base64.b64decode(body, validate=True)


def _path(row: Row, text: str) -> Path:
    return folder_of(row) / text.removeprefix("file://")


def _file_size(path: Path) -> int | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # such as a name that is too long
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _check_size(row: Row, name: str, num_bytes: int) -> None:
    if num_bytes > MAX_FILE_BYTES:
        got = f"{plain(name)} with {num_bytes} bytes"
        allowed = f"a file of at most {MAX_FILE_BYTES} bytes"
        raise BadRowError(row.place, got, allowed, "Make the image smaller, or remove that row.")


def folder_of(row: Row) -> Path:
    """Returns the folder of relative paths: that of the row's file, or the working directory."""
    source = Path(row.place.rpartition(":")[0])
    return source.parent if source.is_file() else source if source.is_dir() else Path.cwd()


def placed(row: Row, parts: Sequence[Any], found: Found) -> tuple[list[Any], tuple[Image, ...]]:
    """Marks the place of each image in the prompt; `parts` are the row's prompt and responses.

    Returns the parts, and the images in the order of marks: a part `{"type": "image"}` in messages,
    `<image>` in a text. Raises BadRowError if marks and images differ, or a response has one.
    """
    inline = [image for part in parts for image in _inline(row, part)]
    if not found.images and not any(image is not None for image in inline):
        if inline:
            raise _miscounted(row, len(inline), 0)
        return list(parts), ()
    prompt, *responses = parts
    order: list[int] = []

    def take(number: str | None) -> None:
        index = len(order)
        if number is not None:
            index = _index_of(row, number, found)
        order.append(index)

    owned: list[Image | None] = []
    if isinstance(prompt, str):
        for match in _MARKS.finditer(prompt):
            take(match[1])
        prompt = _MARKS.sub(MARK, prompt)
        if not order:
            prompt = MARK * len(found.images) + prompt
            order = list(range(len(found.images)))
        owned = [None] * len(order)
    else:
        prompt, owned = _in_messages(row, prompt, take, found)
    for response in responses:
        if not isinstance(response, str) and any(_has_image(message) for message in response):
            got = "an image after the first message of the assistant"
            remedy = "Remove that row, or end it before that image."
            raise BadRowError(row.place, got, "images in the prompt only", remedy)
    own = iter(order)
    images: list[Image] = []
    used: set[int] = set()
    for image in owned:
        if image is not None:
            images.append(image)
            continue
        index = next(own)
        if not 0 <= index < len(found.images):
            raise _miscounted(row, len(owned), len(found.images))
        used.add(index)
        images.append(found.images[index])
    if len(used) != len(found.images):
        raise _miscounted(row, len(owned), len(found.images))
    return [prompt, *responses], tuple(images)


def _index_of(row: Row, number: str, found: Found) -> int:
    numbers = found.numbers or {index + 1: index for index in range(len(found.images))}
    index = numbers.get(int(number)) if len(number) < 10 else None
    if index is None:
        got = f"<image {number[:20]}>, but no image with this number"
        named = ", ".join(map(str, sorted(numbers)[:10])) or "none"
        allowed = f"a number of the row's images: {named}"
        raise BadRowError(row.place, got, allowed, "Fix or remove that row.")
    return index


def _miscounted(row: Row, num_marks: int, num_images: int) -> BadRowError:
    places = "1 place for an image" if num_marks == 1 else f"{num_marks} places for images"
    got = f"{places}, but {num_images} image{'' if num_images == 1 else 's'}"
    allowed = f"as many {MARK} or image parts as images, or none"
    return BadRowError(row.place, got, allowed, "Fix or remove that row.")


def _inline(row: Row, part: Any) -> list[Image | None]:
    if isinstance(part, str):
        return []
    contents = [message["content"] for message in part if isinstance(message["content"], list)]
    pieces = [piece for content in contents for piece in content if piece["type"] == "image"]
    return [_own_image(row, piece) for piece in pieces]


def _own_image(row: Row, piece: Mapping[str, Any]) -> Image | None:
    value = piece.get("image")
    return None if value is None else read_reference(row, "an image part", value)


def _has_image(message: Message) -> bool:
    return isinstance(message["content"], list)


def _in_messages(
    row: Row, messages: list[Message], take: Callable[[str | None], None], found: Found
) -> tuple[list[Message], list[Image | None]]:
    """Returns messages with a part for each image, and the images; None for those in columns."""
    owned: list[Image | None] = []
    made: list[Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] == ASSISTANT and isinstance(content, str):
            made.append(message)
            continue
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        pieces: list[dict[str, str]] = []
        for piece in given:
            if piece["type"] == "image":
                image = _own_image(row, piece)
                owned.append(image)
                pieces.append(dict(_PART))
                if image is None:
                    take(None)
                continue
            last = 0
            text = piece["text"]
            for match in _MARKS.finditer(text) if found.images else ():
                pieces += _text(text[last : match.start()])
                pieces.append(dict(_PART))
                owned.append(None)
                take(match[1])
                last = match.end()
            pieces += _text(text[last:])
        has_images = any(piece["type"] == "image" for piece in pieces)
        made.append({**message, "content": pieces} if has_images else message)
    if None not in owned and found.images:
        number, first = next(
            ((i, one) for i, one in enumerate(made) if one["role"] == "user"), (0, made[0])
        )
        given = first["content"]
        rest = _text(given) if isinstance(given, str) else given
        earlier = sum(_num_images(message) for message in made[:number])
        made[number] = {**first, "content": [dict(_PART) for _ in found.images] + rest}
        owned[earlier:earlier] = [None] * len(found.images)
        for _ in found.images:
            take(None)
    return made, owned


def in_message(text: str) -> list[Message]:
    pieces: list[dict[str, str]] = []
    for number, part in enumerate(text.split(MARK)):
        pieces += [dict(_PART)] * (number > 0) + _text(part)
    return [{"role": "user", "content": pieces}]


def _num_images(message: Message) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(one["type"] == "image" for one in content)


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def refuse_images(row: Row) -> DataError:
    """Returns the error for images that the model cannot read; the task needs them."""
    got = f"{len(row.images)} images" if len(row.images) > 1 else "an image"
    allowed = "rows of text, because the model reads no images"
    remedy = (
        "Remove such rows, or choose a model with a vision tower; for Qwen3.5, set "
        "model.family=qwen3_5 or qwen3_5_moe (docs/guides/images.md)."
    )
    return DataError(row.place, got, allowed, remedy)


def read_images(row: Row, processor: Decides) -> list[Content]:
    """Reads and decodes a row's images. Raises BadRowError if one is damaged or cannot be used."""
    found = []
    for number, image in enumerate(row.images, 1):
        name = f"image {number}" if isinstance(image, bytes) else str(image)
        try:
            data = image if isinstance(image, bytes) else Path(image).read_bytes()
            found.append(processor.content(data))
        except ImageFault as fault:
            got = f"{name}: {fault.found}"
            raise BadRowError(row.place, got, fault.allowed, "Fix or remove it.") from fault
        except OSError as error:
            got = f"{name}, which cannot be read ({error_text(error, 80)})"
            raise BadRowError(row.place, got, "a file that can be read", "Fix it.") from error
    return found


def marked_texts(rows: Iterable[Row], prompt_key: str, images: ImageTokens) -> Iterator[Row]:
    """Yields rows; in prompts without a template, marks become the text of the images' tokens."""
    for row in rows:
        if not row.images or row.is_rendered:
            yield row
            continue
        text = str(row.columns[prompt_key]).replace(MARK, images.text)
        yield replace(row, columns={**row.columns, prompt_key: text})


def folder_digest(folder: str) -> str:
    """Returns a digest of the names, sizes and times of a folder's files; "" if it is gone."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(
                (entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries
            )
    except OSError:
        return ""
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def expanded(
    row: Row, tokens: tuple[int, ...], contents: Sequence[Content], placeholder: int
) -> tuple[tuple[int, ...], tuple[Content, ...]]:
    """Repeats an image's placeholder for its features. Raises BadRowError if numbers differ."""
    num_places = tokens.count(placeholder)
    if num_places != len(contents):
        got = f"{num_places} placeholders of images in the prompt's tokens, for {len(contents)}"
        allowed = (
            "one placeholder for each image, which the chat template writes, and none in texts"
        )
        raise BadRowError(row.place, got, allowed, "Fix that row, or the chat template.")
    found, images = with_features(tokens, contents, placeholder)
    return tuple(found), images


def with_features(
    tokens: Sequence[int], contents: Sequence[Content], placeholder: int
) -> tuple[list[int], tuple[Content, ...]]:
    """Repeats the placeholder of each image for its features; there are as many as images.

    Returns the tokens, and the images at their places among them.
    """
    found: list[int] = []
    images: list[Content] = []
    for token in tokens:
        if token == placeholder:
            images.append(replace(contents[len(images)], start=len(found)))
            found += [token] * images[-1].num_tokens
        else:
            found.append(token)
    return found, tuple(images)
