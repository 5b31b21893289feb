"""Reads the images in messages that environments return and agents send. Does not import torch.

An image is the bytes of a file, an image of Pillow, or a data URI. Paths and addresses are refused:
what a tool returns must not name files of this machine, or make it connect to others.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.contracts.prompts import Content
from hybridrl.data.images import MAX_FILE_BYTES, ImageTokens, data_uri_bytes
from hybridrl.errors import short
from hybridrl.models.vision.images import ImageFault
from hybridrl.rewards.outcome import WHERE, ScorerFailure

IMAGE, TEXT = "image", "text"
_KINDS = (IMAGE, "image_url", "input_image")  # types of parts with an image
# Keys of the image, also within an object; Anthropic's `source` has base64 text as `data`.
_VALUES = ("image", "image_url", "url", "bytes", "source")
_ALLOWED = "an image file's bytes, an image of Pillow, or a data URI such as data:image/png;base64,"
MAX_DEPTH = 3  # objects within objects


def plain_content(content: Sequence[object]) -> str | list[dict[str, str]] | ScorerFailure:
    """Converts the parts of a message to a text, to texts and images as data URIs if any part is an
    image, or to a failure.
    """
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == TEXT and isinstance(part, Mapping) and isinstance(part.get(TEXT), str):
            found.append({"type": TEXT, TEXT: str(part[TEXT])})
            continue
        if not is_image(part):
            got = f"returned a message with the part {short(part)} for {WHERE}"
            return ScorerFailure(got, "parts of type text or image")
        uri = data_uri(part)
        if uri is None:
            got = f"returned the image {short(part, 120)} for {WHERE}"
            return ScorerFailure(got, f"{_ALLOWED}, of at most {MAX_FILE_BYTES} bytes")
        found.append({"type": IMAGE, IMAGE: uri})
    has_images = any(part["type"] == IMAGE for part in found)
    return found if has_images else "".join(part[TEXT] for part in found)


def is_image(part: object) -> bool:
    """Whether a part of a message says that it is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def data_uri(part: object) -> str | None:
    """Returns the image in a part of a message as a data URI; None if it has no image of at most
    MAX_FILE_BYTES that may be read.
    """
    return _data_uri(part, MAX_DEPTH)


def _data_uri(value: object, depth: int) -> str | None:
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):
        value = f"data:{value.get('media_type', '')};base64,{value['data']}"
    if isinstance(value, Mapping) and depth:
        inner = (value[key] for key in _VALUES if value.get(key) is not None)
        return _data_uri(next(inner, None), depth - 1)
    if callable(save := getattr(value, "save", None)):  # an image of Pillow
        target = io.BytesIO()
        save(target, "PNG")
        value = target.getvalue()
    if isinstance(value, bytes | bytearray) and len(value) <= MAX_FILE_BYTES:
        return f"data:;base64,{base64.b64encode(value).decode('ascii')}"
    if not isinstance(value, str) or len(value) * 3 // 4 > MAX_FILE_BYTES + 1024:
        return None
    try:
        data_uri_bytes(value)
    except ValueError:
        return None
    return value


def read_parts(
    messages: Sequence[Mapping[str, Any]], images: ImageTokens
) -> list[Content] | ScorerFailure:
    """Reads the images of plain messages, in their order; a failure if one is damaged."""
    uris = [part[IMAGE] for one in messages for part in parts_of(one) if part["type"] == IMAGE]
    try:
        return [images.processor.content(data_uri_bytes(uri)) for uri in uris]
    except ImageFault as fault:
        return ScorerFailure(f"returned {fault.found} for {WHERE}", fault.allowed)


def parts_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    """Returns the parts of a message; none if its content is a text."""
    content = message["content"]
    return () if isinstance(content, str) else content
