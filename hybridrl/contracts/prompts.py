"""Defines prompts, their parts and finished responses to them. Does not import torch.

A prompt is an ordered list of parts: runs of token ids, and non-text content such as images. In
`tokens`, which training reads, a piece of content is one or more placeholder tokens; an engine
receives a single placeholder for it. Only code for a kind of content reads its arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from hybridrl.contracts.blobs import Blobs

Asked = str | list[dict[str, Any]]
"""Prompt of a row: a text, or the messages of a chat."""
UNKNOWN_LOGP = 1.0
"""Placeholder shown for a non-finite log-probability; real log-probabilities are at most 0."""
RENDERED_PROMPT = "rendered_prompt"
_HEADER = "contents"


@dataclass(frozen=True)
class Content:
    """A part of a prompt that is not text, such as a `kind` `image`.

    Args:
        start: Index of the first placeholder among the prompt's tokens.
        key: Text that identifies the content, such as a digest of the arrays. Different content
            must have different keys.
        arrays: Data of the content, such as the bytes of a file.
    """

    kind: str
    start: int
    num_tokens: int
    key: str
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


Part = tuple[int, ...] | Content


@dataclass(frozen=True)
class Prompt:
    """A prompt, with the other columns of its row.

    Args:
        prompt_id: Number of the prompt among all rows of the run's data.
        response_tokens: Demonstration including its end token; in preference pairs, the better
            response. None in data without responses.
        rejected_tokens: Worse response of a preference pair.
        response_gaps, rejected_gaps: Start and end of each run of response tokens that are not
            learned, in one flat ascending tuple. These runs separate the assistant's turns; no run
            is at the end of a response.
        given: The row's original prompt (a text or messages), if a chat template rendered `text`.
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
    def input_key(self) -> str:
        """Text that is equal for prompts with equal tokens and images."""
        return f"{self.tokens}{''.join(content.key for content in self.contents)}"

    @property
    def parts(self) -> tuple[Part, ...]:
        found: list[Part] = []
        start = 0
        for content in self.contents:
            found += [self.tokens[start : content.start]] * (content.start > start) + [content]
            start = content.end
        return (*found, self.tokens[start:]) if start < len(self.tokens) else tuple(found)

    @property
    def asked(self) -> Asked:
        """The row's prompt in the form that rewards and environments receive."""
        return self.text if self.given is None else self.given

    @property
    def columns_with_text(self) -> dict[str, object]:
        """The other columns, plus `rendered_prompt`, the text that the model received."""
        return {**self.columns, RENDERED_PROMPT: self.text}


@dataclass(frozen=True)
class Rollout:
    """One finished response.

    Args:
        tokens: Token ids, with the end token if it was sampled.
        logps: Log-probability of each token; 0 on observations.
        finish_reason: `stop` if the response ended with an end token or stop text; `length` if it
            reached a limit.
        version: Version of the weights that sampled the response.
        observed: For each token, whether it came from an environment; None if none did.
        versions: Pairs (version, number of tokens) if several versions sampled the response;
            otherwise empty.
        sequence: Index of this sequence among those of its sample, for which `prompt` has the
            context; None if every sample is one sequence.
    """

    sample_id: int
    prompt: Prompt
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    version: int
    observed: tuple[bool, ...] | None = None
    blobs: Blobs = field(default_factory=dict, compare=False)
    versions: tuple[tuple[int, int], ...] = ()
    sequence: int | None = None


def in_gaps(num: int, gaps: Sequence[int]) -> tuple[bool, ...]:
    """Returns for each of `num` response tokens whether it is inside one of the `gaps`."""
    found = [False] * num
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        found[begin:end] = [True] * (end - begin)
    return tuple(found)


def contents_to_bytes(contents: Sequence[Content]) -> bytes:
    """Serializes the contents of one prompt for a parquet cell; empty bytes for none."""
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
