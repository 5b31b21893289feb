"""Supplies tokenized prompts in a new order each epoch, and can resume. Does not import torch.

The order depends only on the seed and the prompts, so all ranks choose the same prompts without
communication. Invariant: after `load_state(state)`, a source returns the prompts that the saved
source would have returned next.
"""

from __future__ import annotations

import hashlib
import os
import random
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.needs import Feedback
from hybridrl.config.schema import DataConfig
from hybridrl.config.supervised import PAIR_MARGIN
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.chats import ChatCounts, render_chats
from hybridrl.data.encoding import Encoded, TextEncoder, encoded_rows
from hybridrl.data.end_tokens import own_end_tokens
from hybridrl.data.feedback import check_classes, checked, equal_sides, label_columns
from hybridrl.data.forms import Kind, formed_rows, kind_of, text_columns
from hybridrl.data.images import (
    MARK,
    ImageTokens,
    expanded,
    folder_digest,
    marked_texts,
    read_images,
)
from hybridrl.data.prompt_files import digests, identity
from hybridrl.data.rows import BadRows, Row
from hybridrl.errors import BadRowError, DataError

__all__ = ["LoadedPrompts", "PromptSource", "TextEncoder", "load_prompts"]

MAX_PLACES = 100  # maximum number of too long rows whose places are recorded
_NEW = "2:"  # prefix of fingerprints that are computed from prompt digests


@dataclass
class LeftOut:
    """Counts and examples of rows that were left out or changed.

    Attributes:
        num, num_cut: Number of rows left out as too long, and of those with a truncated response.
        num_bad, first_bad: Number of unusable rows, and description of the first.
        image_folders: For each folder from which images were read, a digest of its listing.
    """

    limits: str
    num: int = 0
    num_cut: int = 0
    places: list[tuple[str, int]] = field(default_factory=list)
    in_part: set[str] = field(default_factory=set)
    chats: ChatCounts = field(default_factory=ChatCounts)
    num_bad: int = 0
    first_bad: str = ""
    image_folders: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, tokens: int, is_in_part: bool) -> None:
        self.num += 1
        if len(self.places) < MAX_PLACES:
            self.places.append((place, tokens))
            self.in_part |= {place} if is_in_part else set()

    def is_anything(self) -> bool:
        return bool(self.num or self.num_cut or self.num_bad or self.chats.report())

    def first(self) -> tuple[str, str]:
        place, tokens = self.places[0]
        return place, f"{tokens} tokens" + (" or more" if place in self.in_part else "")

    def none_left(self) -> DataError:
        place, length = self.first()
        return DataError(
            place,
            f"{self.num} rows, all too long (the first has {length})",
            f"rows of at most {self.limits}",
            "Raise data.max_prompt_tokens or use shorter prompts.",
        )


@dataclass(frozen=True)
class LoadedPrompts:
    """Prompts, the source numbers (ascending), and counts of rows left out or changed."""

    prompts: Sequence[Prompt]
    sources: NDArray[np.int32]
    left_out: LeftOut

    def report(self) -> str:
        line = f"{len(self.prompts)} prompts"
        if self.left_out.num_cut:
            line += f", {self.left_out.num_cut} with responses cut (data.long_responses=cut)"
        line += self.left_out.chats.report()
        if self.left_out.num_bad:
            line += (
                f"; {self.left_out.num_bad} bad rows dropped (first: {self.left_out.first_bad}; "
            )
            line += "set data.on_bad_row=stop to list more)"
        if not self.left_out.num:
            return line
        place, tokens = self.left_out.first()
        return (
            f"{line}; {self.left_out.num} left out as longer than {self.left_out.limits}"
            f" (first: {place}, {tokens})"
        )


@dataclass(frozen=True)
class Reading:
    """Sources, limits and options for reading prompts.

    Args:
        source: Names as in `data.prompts`, or rows in memory. Default: `config.prompts`.
        max_response_tokens: Maximum number of response tokens, including the end token. Rows with
            longer responses are left out or truncated. None for data without responses.
        feedback: Kind of feedback on the responses; None for demonstrations.
    """

    config: DataConfig
    source: Sequence[str] | Iterable[Mapping[str, object]] | None = None
    required: Sequence[str] = ()
    max_response_tokens: int | None = None
    feedback: Feedback | None = None
    limit: int | None = None

    def left_out(self) -> LeftOut:
        limits = f"data.max_prompt_tokens={self.config.max_prompt_tokens}"
        most = self.max_response_tokens
        return LeftOut(limits + ("" if most is None else f" or a response of {most}"))

    def prompts(
        self,
        tokenizer: TextEncoder,
        left_out: LeftOut,
        end_tokens: Collection[int] | None = None,
        images: ImageTokens | None = None,
    ) -> Iterator[tuple[Prompt, int]]:
        """Reads and tokenizes prompts lazily; see `PromptStore` for the arguments. Raises DataError
        for a faulty row, with file and line, or if every prompt is too long.

        Yields:
            Each prompt with the number of its source. `prompt_id` is the number of the row across
            all files, counting all rows. `columns` has the row's other columns, and the values of
            `config.answer_key` and `config.label_key` also as "answer" and "label".
        """
        bad, good = BadRows(self.config.on_bad_row), set[int]()
        config, num, labels = self.config, 0, set[bool]()
        texts, longest_response = text_columns(config, self.kind), self.max_response_tokens or 0
        most = [config.max_prompt_tokens, *[longest_response] * (len(texts) - 1)]
        rows = self._rows(texts, tokenizer, left_out, bad, images)
        ends = own_end_tokens(tokenizer) if end_tokens is None else end_tokens
        adds_special = config.add_special_tokens
        encoded = encoded_rows(rows, texts, tokenizer, most, ends, adds_special, bad)
        if images is not None:
            encoded = _with_images(encoded, images, config.max_prompt_tokens, left_out, bad)
        for found in encoded:
            if len(found.responses) == 2 and found.responses[0] == found.responses[1]:
                bad.add(found.row.source, equal_sides(found.row, config))
                continue
            good.add(found.row.source)
            longest = max(map(len, found.responses), default=0)
            over = len(found.prompt) > config.max_prompt_tokens
            kept: Encoded | None = found
            if not over and longest > longest_response and config.long_responses == "cut":
                kept = found.cut(longest_response)
                left_out.num_cut += kept is not None
            elif over or longest > longest_response:
                kept = None
            if kept is None:
                tokens = len(found.prompt) if over else longest
                left_out.add(found.row.place, tokens, found.is_in_part)
            else:
                prompt = _prompt(config, kept)
                num += 1
                labels |= {bool(prompt.columns["label"])} if self.feedback == "labels" else set()
                yield prompt, found.row.source
            if num == self.limit:
                break
        if bad.num:
            bad.check(good)
            left_out.num_bad, left_out.first_bad = bad.num, bad.first()
        if not num:
            raise left_out.none_left()
        if self.feedback == "labels":
            check_classes(labels, config)

    @property
    def kind(self) -> Kind:
        return kind_of(self.feedback, self.max_response_tokens is not None)

    def _rows(
        self,
        texts: Sequence[str],
        tokenizer: TextEncoder,
        left_out: LeftOut,
        bad: BadRows,
        images: ImageTokens | None,
    ) -> Iterable[Row]:
        config, feedback = self.config, self.feedback
        given = self.source if self.source is not None else config.prompts or ()
        others = [*self.required, *label_columns(config, feedback)]
        rows = formed_rows(given, config, self.kind, others, bad, images is not None)
        rows = checked(rows, config, feedback, bad)
        may_split = self.kind == "demonstrations"
        rows = render_chats(rows, config, tokenizer, texts[1:], left_out.chats, bad, may_split)
        return rows if images is None else marked_texts(rows, config.prompt_key, images)


def load_prompts(
    config: DataConfig,
    tokenizer: TextEncoder,
    source: Sequence[str] | Iterable[Mapping[str, object]] | None = None,
    *,
    required: Sequence[str] = (),
    max_response_tokens: int | None = None,
    feedback: Feedback | None = None,
    limit: int | None = None,
    end_tokens: Collection[int] | None = None,
    images: ImageTokens | None = None,
) -> LoadedPrompts:
    """Reads and tokenizes prompts into memory. See `Reading` for arguments and errors."""
    reading = Reading(config, source, required, max_response_tokens, feedback, limit)
    return in_memory(reading, tokenizer, end_tokens, images)


def in_memory(
    reading: Reading,
    tokenizer: TextEncoder,
    end_tokens: Collection[int] | None = None,
    images: ImageTokens | None = None,
) -> LoadedPrompts:
    left_out, prompts, sources = reading.left_out(), list[Prompt](), list[int]()
    for prompt, source in reading.prompts(tokenizer, left_out, end_tokens, images):
        prompts.append(prompt)
        sources.append(source)
    return LoadedPrompts(tuple(prompts), np.array(sources, np.int32), left_out)


def _prompt(config: DataConfig, encoded: Encoded) -> Prompt:
    row = encoded.row
    (better, worse), gaps = (*encoded.responses, None, None)[:2], (*encoded.gaps, (), ())[:2]
    used = {config.prompt_key}
    if better is not None:
        used |= set(text_columns(config, "demonstrations" if worse is None else "pairs"))
    columns = {name: value for name, value in row.columns.items() if name not in used}
    for name, key in (
        ("answer", config.answer_key),
        ("label", config.label_key),
        (PAIR_MARGIN, config.margin_key),
    ):
        if key is not None and key in columns:
            columns[name] = columns[key]
    return Prompt(
        row.number,
        encoded.text,
        encoded.prompt,
        columns,
        response_tokens=better,
        rejected_tokens=worse,
        response_gaps=gaps[0],
        rejected_gaps=gaps[1],
        given=row.given,
        contents=encoded.contents,
    )


def _with_images(
    rows: Iterable[Encoded],
    images: ImageTokens,
    max_prompt_tokens: int,
    left_out: LeftOut,
    bad: BadRows,
) -> Iterator[Encoded]:
    for row in rows:
        try:
            is_long = len(row.prompt) > max_prompt_tokens  # and will be left out
            yield row if is_long else _row_with_images(row, images, left_out)
        except BadRowError as error:
            bad.add(row.row.source, error)


def _row_with_images(encoded: Encoded, images: ImageTokens, left_out: LeftOut) -> Encoded:
    row, placeholder = encoded.row, images.placeholder
    if any(placeholder in response for response in encoded.responses):
        got = "a response with the placeholder of an image"
        raise BadRowError(row.place, got, "responses of text", "Fix or remove that row.")
    if not row.images and MARK in encoded.text:
        got = f"{MARK} in a text, in a row without an image"
        raise BadRowError(row.place, got, "as many marks as images", "Fix or remove that row.")
    contents = read_images(row, images.processor)
    for image in row.images:
        if isinstance(image, str) and (folder := os.path.dirname(image)) not in (
            left_out.image_folders
        ):
            left_out.image_folders[folder] = folder_digest(folder)
    tokens, placed = expanded(row, encoded.prompt, contents, placeholder)
    return replace(encoded, prompt=tokens, contents=placed)


def _fingerprint(prompts: Sequence[Prompt], seed: int | None) -> str:
    digest = hashlib.sha256(f"{seed}".encode())
    digest.update(digests(prompts).astype("<u8").tobytes())
    return f"{_NEW}{digest.hexdigest()[:16]}"


class PromptSource:
    """Endless supply of at least 1 prompt. The seed and an epoch's number determine its order."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("prompts", "an empty list", "1 prompt or more", "Pass some prompts.")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._order_seed = seed if shuffle else None
        self._fingerprint = _fingerprint(prompts, self._order_seed)
        self._epoch, self._index = 0, 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def epoch(self) -> float:
        """Number of passes over the prompts, including the fraction of the current pass."""
        return self._epoch + self._index / len(self._prompts)

    def take(self, num: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < num:
            if self._index == len(self._prompts):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._epoch_order()
            part = self._order[self._index : self._index + num - len(taken)]
            taken += [self._prompts[i] for i in part]
            self._index += len(part)
        return taken

    def state(self) -> dict[str, int | str]:
        return {"epoch": self._epoch, "index": self._index, "fingerprint": self._fingerprint}

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continues from `state`. Raises DataError if the prompts or the seed were different."""
        self._check(state)
        self._epoch = saved_count(state, "epoch")
        self._index = saved_count(state, "index", len(self._prompts))
        self._order = self._epoch_order()

    def older_fingerprint(self) -> str:
        """Returns the fingerprint in the format of older releases. Reads all prompts."""
        digest = hashlib.sha256(f"{self._order_seed}".encode())
        for prompt in self._prompts:
            digest.update(identity(prompt))
        return digest.hexdigest()[:16]

    def _check(self, state: Mapping[str, int | str]) -> None:
        saved = str(state.get("fingerprint"))
        if saved == self._fingerprint:
            return
        if not saved.startswith(_NEW) and saved == self.older_fingerprint():
            return
        raise DataError(
            "data.prompts",
            "prompts, an order or a seed that differ from the checkpoint's",
            "the prompts, order and seed with which the run started",
            "Restore the prompt files and run.seed, or start a new run.name. If the run predates "
            "the key data.add_special_tokens, set data.add_special_tokens=false.",
        )

    def _epoch_order(self) -> array[int]:
        order = array("q", range(len(self._prompts)))  # needs a fifth of the memory of a list
        if self._shuffle:
            # If seeded with a string, random.Random shuffles identically on every platform.
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def saved_count(state: Mapping[str, int | str], key: str, most: int | None = None) -> int:
    """Returns a count in a saved position. DataError if it is not a count, or exceeds `most`."""
    value = state.get(key)
    if type(value) is int and value >= 0 and (most is None or value <= most):
        return value
    allowed = "a whole number from 0" + (
        "" if most is None else f" to {most}, the number of prompts"
    )
    raise DataError(
        f"the checkpoint's position in the prompts, {key}",
        repr(value),
        allowed,
        "Resume another checkpoint with --resume previous.",
    )
