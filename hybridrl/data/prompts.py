"""Prompts as the trainer takes them: tokenized, shuffled a new way each epoch, resumable. No
torch.

Owns which prompt comes when; the order follows from the seed and the prompts alone, so every rank
takes the same ones without asking the others. Files are read by rows.py. Invariant: after
`load_state(state)` the source gives what the source that returned `state` would have given.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

from hybridrl.config.needs import Feedback
from hybridrl.config.schema import DataConfig
from hybridrl.config.supervised import PAIR_MARGIN
from hybridrl.contracts.samples import Prompt
from hybridrl.data.chats import as_chats, chat_column
from hybridrl.data.feedback import (
    check_classes,
    checked,
    equal_sides,
    label_columns,
    response_columns,
)
from hybridrl.data.prompt_file import NONE, identities
from hybridrl.data.rows import Row, read_rows, validate_file
from hybridrl.errors import DataError, said, short

__all__ = ["LoadedPrompts", "PromptSource", "TextEncoder", "load_prompts", "validate_file"]

_TOKENIZED_TOGETHER = 1024
MOST_PLACES = 100  # of rows left out, that are remembered
# Of a text, so many characters a token that it may have, and at least SURELY_READ, are tokenized.
# Where these give more than twice the tokens, so does the whole: a longer text cannot fit.
_CHARACTERS_A_TOKEN, _SURELY_READ = 64, 100_000


class TextEncoder(Protocol):
    """What is used of a tokenizer here; any transformers tokenizer fits."""

    eos_token_id: int | None

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Returns `{"input_ids": tokens of each text}`."""
        ...


@dataclass
class LeftOut:
    """The rows that are left out for being too long.

    `limits` is what is allowed; `places` the place and number of tokens of the first MOST_PLACES of
    them; `in_part` those of these places whose text is so long that only the first tokens were
    counted.
    """

    limits: str
    num: int = 0
    places: list[tuple[str, int]] = field(default_factory=list)
    in_part: set[str] = field(default_factory=set)

    def add(self, place: str, tokens: int, is_in_part: bool) -> None:
        """Counts one."""
        self.num += 1
        if len(self.places) < MOST_PLACES:
            self.places.append((place, tokens))
            self.in_part |= {place} if is_in_part else set()

    def first(self) -> tuple[str, str]:
        """Returns the place of the first of them, and its length in words."""
        place, tokens = self.places[0]
        return place, f"{tokens} tokens" + (" or more" if place in self.in_part else "")

    def none_left(self) -> DataError:
        """Returns the error of rows that are all too long."""
        place, length = self.first()
        return DataError(
            place,
            f"{self.num} rows, all too long (the first has {length})",
            f"rows of at most {self.limits}",
            "Raise data.max_prompt_tokens or use shorter prompts.",
        )


@dataclass(frozen=True)
class LoadedPrompts:
    """The prompts of a source in its order, the number of each one's source, ascending, and what
    was left out.
    """

    prompts: Sequence[Prompt]
    sources: Sequence[int]
    left_out: LeftOut

    def report(self) -> str:
        """Returns one line for the user."""
        line = f"{len(self.prompts)} prompts"
        if not self.left_out.num:
            return line
        place, tokens = self.left_out.first()
        return (
            f"{line}; {self.left_out.num} left out as longer than {self.left_out.limits}"
            f" (first: {place}, {tokens})"
        )


@dataclass(frozen=True)
class Reading:
    """What is read, and how.

    Args:
        config: the keys of the columns, and `max_prompt_tokens`.
        source: names as in `data.prompts`, or rows in memory; None reads `config.prompts`.
        required: further columns that every row must have.
        max_response_tokens: given for data with responses: their columns are needed, their tokens
            and the end token become `response_tokens`, and longer ones are left out too.
        feedback: what such rows say of their responses; None: demonstrations.
        limit: stop after so many prompts; None reads all.
    """

    config: DataConfig
    source: Sequence[str] | Iterable[Mapping[str, object]] | None = None
    required: Sequence[str] = ()
    max_response_tokens: int | None = None
    feedback: Feedback | None = None
    limit: int | None = None

    def left_out(self) -> LeftOut:
        """Returns the count, at 0, of the rows that are left out."""
        limits = f"data.max_prompt_tokens={self.config.max_prompt_tokens}"
        most = self.max_response_tokens
        return LeftOut(limits + ("" if most is None else f" or a response of {most}"))

    def prompts(self, tokenizer: TextEncoder, left_out: LeftOut) -> Iterator[tuple[Prompt, int]]:
        """Reads and tokenizes prompts, some at a time.

        Args:
            tokenizer: called with lists of texts, no special tokens added.
            left_out: counts the rows that are.

        Yields:
            Each prompt with the number of its source; `prompt_id` is the row's number over all
            files, so leaving out rows moves no other. `columns` has the row's other columns, and
            under "answer" and "label" those that `config.answer_key` and `config.label_key` name.

        Raises:
            DataError: names the file and line of the first thing that is wrong, or says that every
                prompt is too long.
        """
        config, num, labels = self.config, 0, set[bool]()
        texts = self._texts()
        most = [config.max_prompt_tokens, *[self.max_response_tokens or 0] * (len(texts) - 1)]
        for number, row, tokens, responses in _tokenized(
            self._rows(texts, tokenizer), texts, tokenizer, most
        ):
            if not tokens:
                raise _without_tokens(row.place, row.columns[config.prompt_key], "1 token or more")
            longest = max(map(len, responses), default=0)
            over = len(tokens) > config.max_prompt_tokens
            if over or (self.max_response_tokens is not None and longest > most[-1]):
                is_in_part = _is_in_part(row, texts, [tokens, *responses], most)
                left_out.add(row.place, len(tokens) if over else longest, is_in_part)
            else:
                prompt = _prompt(config, number, row, tokens, responses)
                num += 1
                labels |= {bool(prompt.columns["label"])} if self.feedback == "labels" else set()
                yield prompt, row.source
            if num == self.limit:
                break
        if not num:
            raise left_out.none_left()
        if self.feedback == "labels":
            check_classes(labels, config)

    def _texts(self) -> list[str]:
        """Returns the columns that are tokenized, the prompt's first."""
        is_supervised = self.max_response_tokens is not None
        responses = response_columns(self.config, self.feedback) if is_supervised else []
        return [self.config.prompt_key, *responses]

    def _rows(self, texts: Sequence[str], tokenizer: TextEncoder) -> Iterable[Row]:
        config, feedback = self.config, self.feedback
        given = self.source if self.source is not None else config.prompts or ()
        others = [*self.required, *label_columns(config, feedback)]
        rows = checked(read_rows(given, texts, others, chat_column(config)), config, feedback)
        return as_chats(rows, config, tokenizer) if config.chat_template else rows


def load_prompts(
    config: DataConfig,
    tokenizer: TextEncoder,
    source: Sequence[str] | Iterable[Mapping[str, object]] | None = None,
    *,
    required: Sequence[str] = (),
    max_response_tokens: int | None = None,
    feedback: Feedback | None = None,
    limit: int | None = None,
) -> LoadedPrompts:
    """Reads and tokenizes prompts into memory; arguments and errors as of `Reading`."""
    reading = Reading(config, source, required, max_response_tokens, feedback, limit)
    return in_memory(reading, tokenizer)


def in_memory(reading: Reading, tokenizer: TextEncoder) -> LoadedPrompts:
    """Returns what is read as a tuple of prompts."""
    left_out, prompts, sources = reading.left_out(), list[Prompt](), array("i")
    for prompt, source in reading.prompts(tokenizer, left_out):
        prompts.append(prompt)
        sources.append(source)
    return LoadedPrompts(tuple(prompts), sources, left_out)


def _tokenized(
    rows: Iterable[Row],
    text_columns: Sequence[str],
    tokenizer: TextEncoder,
    limits: Sequence[int],
) -> Iterator[tuple[int, Row, tuple[int, ...], list[tuple[int, ...]]]]:
    """Yields each row's number, the row, the tokens of its prompt and of its responses, with the
    end; of a text that is far beyond its column's limit only the first tokens.
    """
    numbered = enumerate(rows)
    while chunk := list(islice(numbered, _TOKENIZED_TOGETHER)):
        encoded = []
        for name, limit in zip(text_columns, limits, strict=True):
            texts = [(row.place, str(row.columns[name])) for _, row in chunk]
            encoded.append(_encoded(texts, tokenizer, limit))
        for i, (number, row) in enumerate(chunk):
            responses = [(*tokens[i], _end_token(tokenizer)) for tokens in encoded[1:]]
            yield number, row, tuple(encoded[0][i]), responses


def _read_at_first(limit: int) -> int:
    return max(_SURELY_READ, _CHARACTERS_A_TOKEN * limit)


def _is_in_part(
    row: Row, names: Sequence[str], tokens: Sequence[Sequence[int]], limits: Sequence[int]
) -> bool:
    """Whether no more of one of a row's texts was tokenized than shows that it is too long."""
    return any(
        len(str(row.columns[name])) > _read_at_first(limit) and len(some) > 2 * limit
        for name, some, limit in zip(names, tokens, limits, strict=True)
    )


def _encoded(
    texts: Sequence[tuple[str, str]], tokenizer: TextEncoder, limit: int
) -> list[list[int]]:
    """Returns the tokens of texts, given with their places.

    Raises:
        DataError: the tokenizer has none for one of them; names its place.
    """
    try:
        parts = [text[: _read_at_first(limit)] for _, text in texts]
        found = list(tokenizer(parts, add_special_tokens=False)["input_ids"])
        for number, (_, text) in enumerate(texts):
            most = _read_at_first(limit)
            while most < len(text) and len(found[number]) <= 2 * limit:
                most *= 2  # few tokens of many characters, or characters that give none
                (found[number],) = tokenizer([text[:most]], add_special_tokens=False)["input_ids"]
    except Exception as error:  # tokenizers raise no class of their own, of unknown words
        if len(texts) > 1:
            return [_encoded([one], tokenizer, limit)[0] for one in texts]
        ((place, text),) = texts
        allowed = f"a text that the tokenizer knows ({said(error, 160)})"
        raise _without_tokens(place, text, allowed) from error
    return found


def _without_tokens(place: str, text: object, allowed: str) -> DataError:
    return DataError(place, f"{short(text)}, which has no tokens", allowed, "Mend that row.")


def _end_token(tokenizer: TextEncoder) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "model.tokenizer",
            "a tokenizer without an end token (eos_token)",
            "a tokenizer with one, which ends every demonstration",
            "Set eos_token in its tokenizer_config.json.",
        )
    return tokenizer.eos_token_id


def _prompt(
    config: DataConfig,
    number: int,
    row: Row,
    tokens: tuple[int, ...],
    responses: Sequence[tuple[int, ...]],
) -> Prompt:
    better, worse = (*responses, None, None)[:2]
    if better is not None and better == worse:
        raise equal_sides(row, config)
    used = {config.prompt_key}
    if responses:
        used |= set(response_columns(config, "pairs" if worse else None))
    columns = {name: value for name, value in row.columns.items() if name not in used}
    for name, key in (
        ("answer", config.answer_key),
        ("label", config.label_key),
        (PAIR_MARGIN, config.margin_key),
    ):
        if key is not None and key in columns:
            columns[name] = columns[key]
    return Prompt(number, str(row.columns[config.prompt_key]), tokens, columns, better, worse)


def at_once(compute: Callable[[], Any]) -> Any:
    """Returns what `compute` gives."""
    return compute()


Once = Callable[[Callable[[], Any]], Any]
"""Returns what a function gives, be it that it was called on another rank."""


def _fingerprint(prompts: Sequence[Prompt], seed: int | None) -> str:
    """Returns a digest of prompts and of the seed that they are shuffled with."""
    digest = hashlib.sha256(f"{seed}".encode())
    for number, tokens, response, rejected, label in identities(prompts):
        digest.update(b"%d%b%b" % (number, tokens, response))
        if rejected != NONE:
            digest.update(rejected)
        if label is not None and response not in (NONE, b"()"):
            digest.update(f"{label}".encode())
    return digest.hexdigest()[:16]


class PromptSource:
    """Gives prompts without end, each epoch in a new order.

    Args:
        prompts: what it gives; not empty.
        seed: sets the order, together with the number of the epoch.
        shuffle: False gives every epoch in the order of `prompts`.
        once: computes what is the same on all ranks and takes long.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, once: Once = at_once
    ) -> None:
        if not prompts:
            raise DataError("prompts", "nothing", "1 prompt or more", "Pass some prompts.")
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._fingerprint: str = once(partial(_fingerprint, prompts, seed if shuffle else None))
        self._epoch, self._index = 0, 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def epoch(self) -> float:
        """How many times the prompts were gone through, with the part of the current time."""
        return self._epoch + self._index / len(self._prompts)

    def take(self, num: int) -> list[Prompt]:
        """Returns the next `num` prompts, going on into the next epoch where one ends."""
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
        """Returns what `load_state` needs, as plain JSON values."""
        return {"epoch": self._epoch, "index": self._index, "fingerprint": self._fingerprint}

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Goes on where the source that returned `state` stood.

        Raises:
            DataError: that source had other prompts, or another seed.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise self.differs()
        self._epoch = saved_count(state, "epoch")
        self._index = saved_count(state, "index", len(self._prompts))
        self._order = self._epoch_order()

    @staticmethod
    def differs() -> DataError:
        """Returns the error of a state of another source."""
        return DataError(
            "data.prompts",
            "prompts, an order or a seed that differ from the checkpoint's",
            "what the run began with",
            "Restore the prompt files and run.seed, or start a new run.name.",
        )

    def _epoch_order(self) -> array[int]:
        order = array("q", range(len(self._prompts)))  # a fifth of a list's memory
        if self._shuffle:
            # random.Random over a text: the same on every platform and Python version since 3.2.
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def saved_count(state: Mapping[str, int | str], key: str, most: int | None = None) -> int:
    """Returns a count of a saved cursor.

    Raises:
        DataError: it is no count, or larger than `most`.
    """
    value = state.get(key)
    if type(value) is int and value >= 0 and (most is None or value <= most):
        return value
    allowed = "a whole number from 0" + ("" if most is None else f" to {most}, the prompts")
    raise DataError(
        f"the checkpoint's cursor of prompts, {key}",
        repr(value),
        allowed,
        "Go on from another checkpoint, with --resume previous.",
    )
