"""Prompts and their parts. No torch.

A prompt is a list of parts, in order: runs of token ids, and contents of other kinds, such as
images. A content occupies some tokens of the prompt, its placeholders. The flat `tokens` that
training reads have all of them; an engine gets one placeholder for the whole content. Only the code
for a content's kind reads its arrays; all other code stores and moves them unread.
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
"""The prompt of a row: a text, or the messages of a chat."""
RENDERED_PROMPT = "rendered_prompt"
_HEADER = "contents"


@dataclass(frozen=True)
class Content:
    """One part of a prompt that is not text.

    Args:
        kind: Name of the kind, such as `image`.
        start: Index of its first placeholder among the prompt's tokens.
        num_tokens: Number of its placeholders, 1 or more.
        key: Text that is equal only for equal contents, such as a digest of the arrays.
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
    """One prompt, with the other columns of its row.

    Args:
        prompt_id: Number of the prompt in its source.
        text: Text that the model gets.
        tokens: Token ids of the text, with the placeholders of contents.
        columns: Other columns of the row.
        response_tokens: Demonstration with its end token; in preference pairs, the better response.
            None in data without responses.
        rejected_tokens: The worse response of a preference pair.
        response_gaps, rejected_gaps: Runs of response tokens that are not the assistant's, in
            responses of several turns, and so are not learned: begin and end of each run, flat and
            ascending. No run is at the end.
        given: The row's prompt, a text or messages, if a chat template rendered `text` from it.
        contents: Parts that are not text, in order.
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
                    f"prompt {self.prompt_id}: content {content} overlaps the previous content, is "
                    f"empty, or reaches beyond the prompt's {len(self.tokens)} tokens"
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
        """The row's prompt, in the form that rewards and environments get."""
        return self.text if self.given is None else self.given

    @property
    def columns_with_text(self) -> dict[str, object]:
        """The other columns, and as `rendered_prompt` the text that the model got."""
        return {**self.columns, RENDERED_PROMPT: self.text}


def contents_to_bytes(contents: Sequence[Content]) -> bytes:
    """Returns contents for one cell of a file; empty bytes if there are none."""
    if not contents:
        return b""
    fields = [[c.kind, c.start, c.num_tokens, c.key] for c in contents]
    arrays = {
        f"{index}.{name}": np.ascontiguousarray(array)
        for index, content in enumerate(contents)
        for name, array in content.arrays.items()
    }
    header = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    return save({_HEADER: header, **arrays})


def contents_from_bytes(saved: bytes) -> tuple[Content, ...]:
    """Returns the contents that `contents_to_bytes` wrote."""
    if not saved:
        return ()
    tensors = load(saved)
    fields = json.loads(tensors.pop(_HEADER).tobytes())
    arrays: list[dict[str, NDArray[Any]]] = [{} for _ in fields]
    for path, array in tensors.items():
        index, _, name = path.partition(".")
        arrays[int(index)][name] = array
    return tuple(
        Content(kind, start, num_tokens, key, own)
        for (kind, start, num_tokens, key), own in zip(fields, arrays, strict=True)
    )
