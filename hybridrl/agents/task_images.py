"""Writes images into the tasks of agents, and reads them in requests. Does not import torch."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from hybridrl.contracts.prompts import Asked, Content, Prompt
from hybridrl.data.images import MARK, MAX_FILE_BYTES, ImageTokens, data_uri_bytes, in_message
from hybridrl.environments.image_parts import IMAGE, data_uri
from hybridrl.errors import short
from hybridrl.models.vision.images import FILE, ImageFault, Recent, media_type

RECENT_BYTES = 256 << 20
ALLOWED = (
    f"an image as base64, such as data:image/png;base64,..., of at most {MAX_FILE_BYTES} bytes. "
    "The endpoint reads no addresses and no files"
)


class ImageReader:
    """Reads images, and keeps the newest: each request repeats the images of its conversation."""

    def __init__(self, images: ImageTokens) -> None:
        self._processor = images.processor
        self._recent: Recent[Content] = Recent(RECENT_BYTES)

    def read(self, part: Mapping[str, Any]) -> Content:
        """Returns the image in a part of a message, not yet at its place among tokens.

        Raises:
            ImageFault: The part has no image that may be read, or the image cannot be used.
        """
        uri = data_uri(part)
        if uri is None:
            raise ImageFault(short(part, 120), ALLOWED)
        data = data_uri_bytes(uri)
        key = hashlib.sha256(data).digest()
        content = self._recent.get(key)
        if content is None:
            content = self._processor.content(data)
            self._recent.add(key, content, content.arrays[FILE].nbytes)
        return content


def prompt_with_images(prompt: Prompt, images: ImageTokens | None) -> Asked:
    """Returns the prompt of a row as agents receive it: messages, with images in OpenAI's form, if
    it has images; otherwise as it is.
    """
    asked = prompt.asked
    if not prompt.contents or images is None:
        return asked
    if isinstance(asked, str):  # not rendered with a chat template
        asked = in_message(asked.replace(images.text, MARK))
    contents = iter(prompt.contents)
    found = []
    for message in asked:
        parts = message["content"]
        if not isinstance(parts, str):
            parts = [_shown(next(contents)) if one["type"] == IMAGE else one for one in parts]
        found.append({**message, "content": parts})
    return found


def _shown(content: Content) -> dict[str, Any]:
    data = content.arrays[FILE].tobytes()
    uri = f"data:{media_type(data)};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": uri}}
