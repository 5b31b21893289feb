"""Tokens of rows: of texts, with the end token, and of chats, with what of them is learned. No
torch.

Owns how much of a text is tokenized: one that is far beyond its limit only as far as shows that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridrl.contracts.samples import in_gaps
from hybridrl.data.chats import Chat, chats_of, learned, sample, shared_prompt
from hybridrl.data.rows import BadRows, Row
from hybridrl.data.text_tokens import Encode, TextTokens
from hybridrl.errors import DataError, RowError, said, short

# Rows that are tokenized by one call: so many, and no more than have so many characters.
_TOKENIZED_TOGETHER, _MOST_CHARACTERS = 1024, 1 << 23
# Of a text, so many characters a token that it may have, and at least SURELY_READ, are tokenized.
# Where these give more than twice the tokens, so does the whole: a longer text cannot fit.
_CHARACTERS_A_TOKEN, _SURELY_READ = 64, 100_000

Tokens = tuple[int, ...]


class TextEncoder(Protocol):
    """What is used of a tokenizer here; any transformers tokenizer fits, for chats any fast one."""

    eos_token_id: int | None

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Returns `{"input_ids": tokens of each text}`."""
        ...


@dataclass(frozen=True)
class Encoded:
    """A row's tokens.

    Args:
        row: the row.
        text: the prompt's.
        prompt: its tokens.
        responses: those of its responses, each to the last token that is learned.
        gaps: of each response where runs of tokens begin and end that are not, flat.
        is_in_part: no more was tokenized than shows that it is too long.
    """

    row: Row
    text: str
    prompt: Tokens
    responses: tuple[Tokens, ...]
    gaps: tuple[Tokens, ...]
    is_in_part: bool

    def cut(self, most: int) -> Encoded | None:
        """Returns the row with responses of at most so many tokens; None where nothing would be
        learned of one, or both would be the same.
        """
        responses, gaps = [], []
        for response, of_response in zip(self.responses, self.gaps, strict=True):
            flags = in_gaps(len(response), of_response)[:most]
            if False not in flags:
                return None
            num = len(flags) - flags[::-1].index(False)
            responses.append(response[:num])
            bounds = zip(of_response[::2], of_response[1::2], strict=True)
            gaps.append(tuple(place for pair in bounds if pair[1] < num for place in pair))
        if len(responses) == 2 and responses[0] == responses[1]:
            return None
        return replace(self, responses=tuple(responses), gaps=tuple(gaps))


def encoded_rows(
    rows: Iterable[Row],
    names: Sequence[str],
    tokenizer: TextEncoder,
    limits: Sequence[int],
    ends: Collection[int],
    adds_special: bool,
    bad: BadRows,
) -> Iterator[Encoded]:
    """Yields the tokens of rows, in their order.

    Args:
        rows: of texts, or with Chats in the place of responses.
        names: columns of the prompt and of the responses.
        tokenizer: called with lists of texts.
        limits: tokens that each may have.
        ends: the end tokens of responses; one that ends in none of them gets the tokenizer's.
        adds_special: whether prompts that no template rendered begin with the special tokens that
            the tokenizer puts in front of a text.
        bad: counts rows with a text that has no tokens, which are left out.
    """
    special, encoder = _special_tokens(tokenizer), TextTokens(tokenizer)
    front = encoder.front if adds_special else ()

    def of_texts(rows: Sequence[Row]) -> list[Encoded | None]:
        try:
            return list(_of_texts(rows, names, tokenizer, encoder, limits, ends, front))
        except RowError as error:
            if len(rows) > 1:
                return [found for row in rows for found in of_texts([row])]
            bad.add(rows[0].source, error)
            return [None]

    for chunk in _chunks(rows, names):
        are_chats = [bool(chats_of(row.columns, names[1:])) for row in chunk]
        plain = [one for one, is_chat in zip(chunk, are_chats, strict=True) if not is_chat]
        texts = iter(of_texts(plain) if plain else [])
        for row, is_chat in zip(chunk, are_chats, strict=True):
            try:
                found = (
                    _of_chat(row, names, tokenizer, encoder, special, limits, ends)
                    if is_chat
                    else next(texts)
                )
                if found is not None and not found.prompt:
                    raise _without_tokens(row.place, found.text, "1 token or more")
            except RowError as error:
                bad.add(row.source, error)
                continue
            if found is not None:
                yield found


def _chunks(rows: Iterable[Row], names: Sequence[str]) -> Iterator[list[Row]]:
    """Yields rows some at a time, as bounded by what is tokenized together."""
    chunk: list[Row] = []
    num = 0
    for row in rows:
        parts = (row.columns[name] for name in names)
        num += sum(len(part.text if isinstance(part, Chat) else str(part)) for part in parts)
        chunk.append(row)
        if len(chunk) == _TOKENIZED_TOGETHER or num >= _MOST_CHARACTERS:
            yield chunk
            chunk, num = [], 0
    if chunk:
        yield chunk


def _of_texts(
    chunk: Sequence[Row],
    names: Sequence[str],
    tokenizer: TextEncoder,
    encoder: TextTokens,
    limits: Sequence[int],
    ends: Collection[int],
    front: Tokens,
) -> Iterator[Encoded]:
    """Yields the tokens of rows of texts.

    Args:
        encoder: of the tokenizer; a response continues its prompt.
        front: the tokens with which a prompt begins that no template rendered.
    """
    encoded: list[list[list[int]]] = []
    encode: Encode = encoder.plain
    for name, limit in zip(names, limits, strict=True):
        texts = [(row.place, str(row.columns[name])) for row in chunk]
        encoded.append(_encoded(texts, encode, limit))
        encode = encoder.continued
    for i, row in enumerate(chunk):
        tokens = [part[i] for part in encoded]
        responses = tuple(
            tuple(part) if part and part[-1] in ends else (*part, _end_token(tokenizer))
            for part in tokens[1:]
        )
        is_in_part = any(
            len(str(row.columns[name])) > _read_at_first(limit) and len(some) > 2 * limit
            for name, some, limit in zip(names, tokens, limits, strict=True)
        )
        text, gaps, prompt = str(row.columns[names[0]]), ((),) * len(responses), tuple(tokens[0])
        # A text in which BOS is written already gets no second.
        if prompt and not row.is_rendered and prompt[: len(front)] != front:
            prompt = (*front, *prompt)
        yield Encoded(row, text, prompt, responses, gaps, is_in_part)


def _of_chat(
    row: Row,
    names: Sequence[str],
    tokenizer: TextEncoder,
    encoder: TextTokens,
    special: frozenset[int],
    limits: Sequence[int],
    ends: Collection[int],
) -> Encoded:
    chats, limit = chats_of(row.columns, names[1:]), sum(limits[:2])
    sides = []
    for chat in chats:
        tokens, offsets = _of_text(row.place, chat, encoder, special, limit)
        runs = learned(offsets, chat.spans)
        if len(tokens) > 2 * limit and offsets[-1][1] < len(chat.text):
            first = next((a for a, _ in runs), len(tokens))
            parts = tuple(tokens[:first]), (tuple(tokens[first:]),) * len(chats)
            return Encoded(row, chat.text, *parts, ((),) * len(chats), True)
        if not runs:
            raise _without_tokens(row.place, chat.text, "a response of 1 token or more")
        runs = [_to_end(run, chat.text, tokens, offsets, ends) for run in runs]
        if chat.lacks_end and tokens[runs[-1][1] - 1] not in ends:
            end = _end_token(tokenizer)
            tokens, runs[-1] = [*tokens[: runs[-1][1]], end], (runs[-1][0], runs[-1][1] + 1)
        sides.append((tokens, runs))
    num = shared_prompt(sides)
    cuts = [sample(tokens, runs, num) for tokens, runs in sides]
    text = chats[0].text[: chats[0].spans[0][0]]
    responses, gaps = tuple(c.response for c in cuts), tuple(c.gaps for c in cuts)
    return Encoded(row, text, cuts[0].prompt, responses, gaps, False)


def _to_end(
    run: tuple[int, int],
    text: str,
    tokens: Sequence[int],
    offsets: Sequence[Sequence[int]],
    ends: Collection[int],
) -> tuple[int, int]:
    """Returns the tokens of a turn up to its end token, where a rollout would stop: without what a
    template puts after it (Phi-3 ends a chat with a second one), and with one that follows directly
    on what a template marks.
    """
    first, stop = run
    if tokens[stop - 1] not in ends and stop < len(tokens) and tokens[stop] in ends:
        return first, stop + 1
    end = stop
    for place in range(stop - 1, first - 1, -1):
        if tokens[place] in ends:
            end = place + 1
        elif text[offsets[place][0] : offsets[place][1]].strip():
            break
    return first, end


def _read_at_first(limit: int) -> int:
    return max(_SURELY_READ, _CHARACTERS_A_TOKEN * limit)


def _of_text(
    place: str, chat: Chat, encoder: TextTokens, special: frozenset[int], limit: int
) -> tuple[list[int], Sequence[Sequence[int]]]:
    """Returns the tokens of a chat with the characters of each.

    Up to a run that is learned they are the tokens that the model is given when it responds. In
    the whole text these may be others ("\\n\\n" before a word); then what follows is tokenized
    separately.
    """
    tokens, offsets = _with_offsets(place, chat.text, encoder, limit)
    if chat.is_marked:
        return tokens, offsets
    for begin, _ in chat.spans:
        if not offsets or offsets[-1][1] < begin:  # only a part was tokenized
            break
        # Tokens before a special one do not depend on what follows it.
        first = bisect_right(offsets, begin, key=lambda offset: offset[1]) - 1
        while first > 0 and tokens[first] not in special:
            first -= 1
        first = max(first, 0)
        start = offsets[first][0] if first else 0
        given, of_given = _with_offsets(place, chat.text[start:begin], encoder, limit)
        num = first + len(given)
        is_alike = tokens[first:num] == given and (num == len(tokens) or offsets[num][0] >= begin)
        if not is_alike:
            rest, of_rest = _with_offsets(place, chat.text[begin:], encoder, limit, True)
            tokens = [*tokens[:first], *given, *rest]
            moved = ((start, of_given), (begin, of_rest))
            offsets = [
                *offsets[:first],
                *((by + a, by + b) for by, found in moved for a, b in found),
            ]
    return tokens, offsets


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Returns the special tokens, which a tokenizer cuts out of a text before anything else."""
    added = getattr(tokenizer, "added_tokens_decoder", {})  # not every TextEncoder has them
    return frozenset(number for number, token in added.items() if token.special)


def _with_offsets(
    place: str, text: str, encoder: TextTokens, limit: int, is_continued: bool = False
) -> tuple[list[int], Sequence[Sequence[int]]]:
    """Returns the tokens of a text with the characters of each; of a text that is far beyond the
    limit only the first.

    Args:
        is_continued: whether the text continues a sequence.
    """
    most = _read_at_first(limit)
    while True:
        try:
            tokens, offsets = encoder.with_offsets(text[:most], is_continued)
        except NotImplementedError as error:  # of tokenizers in Python
            raise DataError(
                "model.tokenizer",
                f"{encoder.name}, which does not say where its tokens are in a text",
                "a fast tokenizer, for chats with responses",
                "Set model.tokenizer to a directory with tokenizer.json.",
            ) from error
        except Exception as error:  # tokenizers raise no class of their own, of unknown words
            allowed = f"a text that the tokenizer knows ({said(error, 160)})"
            raise _without_tokens(place, text, allowed) from error
        if most >= len(text) or len(tokens) > 2 * limit:
            return list(tokens), offsets
        most *= 2


def _encoded(texts: Sequence[tuple[str, str]], encode: Encode, limit: int) -> list[list[int]]:
    """Returns the tokens of texts, given with their places.

    Raises:
        RowError: the tokenizer has none for one of them; names its place.
    """
    try:
        parts = [text[: _read_at_first(limit)] for _, text in texts]
        found = encode(parts)
        for number, (_, text) in enumerate(texts):
            most = _read_at_first(limit)
            while most < len(text) and len(found[number]) <= 2 * limit:
                most *= 2  # few tokens of many characters, or characters that give none
                (found[number],) = encode([text[:most]])
    except Exception as error:  # tokenizers raise no class of their own, of unknown words
        if len(texts) > 1:
            return [_encoded([one], encode, limit)[0] for one in texts]
        ((place, text),) = texts
        allowed = f"a text that the tokenizer knows ({said(error, 160)})"
        raise _without_tokens(place, text, allowed) from error
    return found


def _without_tokens(place: str, text: object, allowed: str) -> RowError:
    return RowError(place, f"{short(text)}, which has no tokens", allowed, "Mend that row.")


def _end_token(tokenizer: TextEncoder) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "model.tokenizer",
            "a tokenizer without an end token (eos_token)",
            "a tokenizer with one, which ends every demonstration",
            "Set eos_token in its tokenizer_config.json.",
        )
    return tokenizer.eos_token_id
