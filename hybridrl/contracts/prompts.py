"""Prompts and the parts that they are made of. No torch.

A prompt is a list of parts, in order: runs of token ids, and contents of other kinds such as an
image. A content takes the place of some tokens of the prompt, its placeholders: training sees them
in the flat `tokens`, an engine is given one of them for the whole content. The arrays of a content
belong to whoever knows its kind; everything else stores and moves them unread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

Asked = str | list[dict[str, Any]]
"""A prompt as a row has it: a text, or the messages of a chat."""
RENDERED_PROMPT = "rendered_prompt"
_HEADER = "contents"


@dataclass(frozen=True)
class Content:
    """One part of a prompt that is not text.

    Args:
        kind: Name of the kind, such as `image`.
        start: Index of its first placeholder among the prompt's tokens.
        num_tokens: Number of its placeholders, 1 or more.
        key: Text that is equal for equal contents alone, such as a digest of the arrays.
        arrays: The content itself, such as the bytes of a file.
    """

    kind: str
    start: int
    num_tokens: int
    key: str
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def end(self) -> int:
        """Index of the first token after its placeholders."""
        return self.start + self.num_tokens


Part = tuple[int, ...] | Content


@dataclass(frozen=True)
class Prompt:
    """One prompt: its number in the source, its text and tokens, and the other columns of its row.

    `response_tokens` is the demonstration with its end token in supervised data, else None. In
    preference pairs it is the better response, and `rejected_tokens` the worse. Where a response
    has several turns, `response_gaps` and `rejected_gaps` say which of its tokens are not the
    assistant's and not learned: the begin and end of each run, flat, ascending, none at its end.

    `given` is the row's prompt, a text or messages, where `text` is what a chat template made of
    it; None where the row has `text`. `contents` are the parts that are not text, in order.
    """

    prompt_id: int
    text: str
    tokens: tuple[int, ...]
    columns: Mapping[str, object] = field(default_factory=dict)
    response_tokens: tuple[int, ...] | None = None
    rejected_tokens: tuple[int, ...] | None = None
    response_gaps: tuple[int, ...] = ()
    rejected_gaps: tuple[int, ...] = ()
    given: Asked | None = None
    contents: tuple[Content, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for content in self.contents:
            if content.start < end or content.num_tokens < 1 or content.end > len(self.tokens):
                raise ValueError(
                    f"prompt {self.prompt_id}: content {content} is not after the one before it "
                    f"and within {len(self.tokens)} tokens"
                )
            end = content.end

    @property
    def parts(self) -> tuple[Part, ...]:
        """The prompt's parts in order."""
        found: list[Part] = []
        start = 0
        for content in self.contents:
            found += [self.tokens[start : content.start]] * (content.start > start) + [content]
            start = content.end
        return (*found, self.tokens[start:]) if start < len(self.tokens) else tuple(found)

    @property
    def asked(self) -> Asked:
        """The row's prompt, as rewards and environments get it."""
        return self.text if self.given is None else self.given

    @property
    def columns_with_text(self) -> dict[str, object]:
        """The other columns, and the text that the model was given as `rendered_prompt`."""
        return {**self.columns, RENDERED_PROMPT: self.text}


def contents_to_bytes(contents: Sequence[Content]) -> bytes:
    """Returns contents for one cell of a file; empty bytes where there are none."""
    if not contents:
        return b""
    about = [[one.kind, one.start, one.num_tokens, one.key] for one in contents]
    arrays = {
        f"{index}.{name}": np.ascontiguousarray(array)
        for index, one in enumerate(contents)
        for name, array in one.arrays.items()
    }
    header = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return save({_HEADER: header, **arrays})


def contents_from_bytes(saved: bytes) -> tuple[Content, ...]:
    """Returns what `contents_to_bytes` was given."""
    if not saved:
        return ()
    tensors = load(saved)
    about = json.loads(tensors.pop(_HEADER).tobytes())
    arrays: list[dict[str, NDArray[Any]]] = [{} for _ in about]
    for name, array in tensors.items():
        index, _, own = name.partition(".")
        arrays[int(index)][own] = array
    return tuple(
        Content(kind=kind, start=start, num_tokens=num_tokens, key=key, arrays=of_one)
        for (kind, start, num_tokens, key), of_one in zip(about, arrays, strict=True)
    )
