"""Tokenizes rows: adds the end token to texts, and finds the learned tokens of chats. No torch.

If a text far exceeds its limit, only enough is tokenized to prove that it is too long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hybridrl.contracts.prompts import Content, in_gaps
from hybridrl.data.chats import Chat, chats_of, sample, shared_prompt, token_runs
from hybridrl.data.rows import BadRows, Row
from hybridrl.data.text_tokens import Encode, TextTokens
from hybridrl.errors import BadRowError, DataError, error_text, short

# Limits on the rows in one tokenizer call.
_MAX_CHUNK_ROWS, _MAX_CHUNK_CHARACTERS = 1024, 1 << 23
# The first call tokenizes this many characters per allowed token, but at least _MIN_CHARACTERS. If
# the result exceeds twice the allowed number of tokens, the text is too long and the rest is
# skipped.
_CHARACTERS_PER_TOKEN, _MIN_CHARACTERS = 64, 100_000

Tokens = tuple[int, ...]


class TextEncoder(Protocol):
    """The tokenizer interface used here, as in transformers; chats need a fast tokenizer."""

    eos_token_id: int | None

    def __call__(
        self, text: list[str], *, add_special_tokens: bool
    ) -> Mapping[str, list[list[int]]]:
        """Returns a mapping `{"input_ids": tokens of each text}`."""


@dataclass(frozen=True)
class Encoded:
    """A row's tokens.

    Args:
        responses: Tokens of each response, up to the last learned token.
        gaps: For each response, the start and end of each run of tokens that are not learned, flat.
        is_in_part: Whether only the first part was tokenized, because the row is too long.
    """

    row: Row
    text: str
    prompt: Tokens
    responses: tuple[Tokens, ...]
    gaps: tuple[Tokens, ...]
    is_in_part: bool
    contents: tuple[Content, ...] = ()

    def cut(self, most: int) -> Encoded | None:
        """Truncates the responses; None if one has no learned tokens left or both are equal."""
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
    """Yields the tokenized rows, in order.

    Args:
        rows: Rows with texts, or with Chats as responses.
        names, limits: Columns of the prompt and of the responses, with the most tokens of each.
        ends: End tokens; a response that ends with none of them receives the tokenizer's end token.
        adds_special: Whether prompts that no template rendered get leading special tokens.
        bad: Collects rows in which a text has no tokens; these rows are not yielded.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})  # not every TextEncoder has them
    # Before any other step, a tokenizer splits a text at special tokens.
    special = frozenset(number for number, token in added.items() if token.special)
    encoder = TextTokens(tokenizer)
    front = encoder.front if adds_special else ()

    def of_texts(rows: Sequence[Row]) -> list[Encoded | None]:
        try:
            return list(_encode_texts(rows, names, tokenizer, encoder, limits, ends, front))
        except BadRowError as error:
            if len(rows) > 1:
                return [found for row in rows for found in of_texts([row])]
            bad.add(rows[0].source, error)
            return [None]

    for chunk in _chunks(rows, names):
        are_chats = [bool(chats_of(row.columns, names[1:])) for row in chunk]
        plain = [row for row, is_chat in zip(chunk, are_chats, strict=True) if not is_chat]
        texts = iter(of_texts(plain) if plain else [])
        for row, is_chat in zip(chunk, are_chats, strict=True):
            try:
                found = (
                    _encode_chat(row, names, tokenizer, encoder, special, limits, ends)
                    if is_chat
                    else next(texts)
                )
                if found is not None and not found.prompt:
                    raise _without_tokens(row.place, found.text, "1 token or more")
            except BadRowError as error:
                bad.add(row.source, error)
                continue
            if found is not None:
                yield found


def _chunks(rows: Iterable[Row], names: Sequence[str]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    num = 0
    for row in rows:
        parts = (row.columns[name] for name in names)
        num += sum(len(part.text if isinstance(part, Chat) else str(part)) for part in parts)
        chunk.append(row)
        if len(chunk) == _MAX_CHUNK_ROWS or num >= _MAX_CHUNK_CHARACTERS:
            yield chunk
            chunk, num = [], 0
    if chunk:
        yield chunk


def _encode_texts(
    chunk: Sequence[Row],
    names: Sequence[str],
    tokenizer: TextEncoder,
    encoder: TextTokens,
    limits: Sequence[int],
    ends: Collection[int],
    front: Tokens,
) -> Iterator[Encoded]:
    """Yields the rows of a chunk of texts; `front` begins prompts without a template."""
    encoded: list[list[list[int]]] = []
    encode: Encode = encoder.plain
    for name, limit in zip(names, limits, strict=True):
        texts = [(row.place, str(row.columns[name])) for row in chunk]
        encoded.append(_tokenize(texts, encode, limit))
        encode = encoder.continued
    for i, row in enumerate(chunk):
        tokens = [part[i] for part in encoded]
        responses = tuple(
            tuple(part) if part and part[-1] in ends else (*part, _end_token(tokenizer))
            for part in tokens[1:]
        )
        is_in_part = any(
            len(str(row.columns[name])) > _first_characters(limit) and len(some) > 2 * limit
            for name, some, limit in zip(names, tokens, limits, strict=True)
        )
        text, gaps, prompt = str(row.columns[names[0]]), ((),) * len(responses), tuple(tokens[0])
        # Do not add a second BOS to a text that already begins with one.
        if prompt and not row.is_rendered and prompt[: len(front)] != front:
            prompt = (*front, *prompt)
        yield Encoded(row, text, prompt, responses, gaps, is_in_part)


def _encode_chat(
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
        tokens, offsets = _chat_tokens(row.place, chat, encoder, special, limit)
        runs = token_runs(offsets, chat.spans)
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
    """Moves the end of a turn's token run to its end token, at which a rollout would stop.

    Cuts off what a template puts after the end token (Phi-3 ends a chat with a second end token).
    Adds the end token if it directly follows the text that a template marks.
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


def _first_characters(limit: int) -> int:
    return max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * limit)


def _chat_tokens(
    place: str, chat: Chat, encoder: TextTokens, special: frozenset[int], limit: int
) -> tuple[list[int], Sequence[Sequence[int]]]:
    """Returns the tokens of a chat, with the character offsets of each.

    The tokens before a learned run equal those that the model receives during generation. If
    tokenizing the whole text gives others at the start of a run ("\\n\\n" before a word), the text
    from there on is tokenized separately.
    """
    tokens, offsets = _tokenize_with_offsets(place, chat.text, encoder, limit)
    if chat.is_marked:
        return tokens, offsets
    for begin, _ in chat.spans:
        if not offsets or offsets[-1][1] < begin:  # only part of the text was tokenized
            break
        # Tokens before a special token do not depend on the text after it.
        first = bisect_right(offsets, begin, key=lambda offset: offset[1]) - 1
        while first > 0 and tokens[first] not in special:
            first -= 1
        first = max(first, 0)
        start = offsets[first][0] if first else 0
        given, of_given = _tokenize_with_offsets(place, chat.text[start:begin], encoder, limit)
        num = first + len(given)
        is_alike = tokens[first:num] == given and (num == len(tokens) or offsets[num][0] >= begin)
        if not is_alike:
            rest, of_rest = _tokenize_with_offsets(place, chat.text[begin:], encoder, limit, True)
            tokens = [*tokens[:first], *given, *rest]
            moved = ((start, of_given), (begin, of_rest))
            offsets = [
                *offsets[:first],
                *((by + a, by + b) for by, found in moved for a, b in found),
            ]
    return tokens, offsets


def _tokenize_with_offsets(
    place: str, text: str, encoder: TextTokens, limit: int, is_continued: bool = False
) -> tuple[list[int], Sequence[Sequence[int]]]:
    """Returns the tokens of a text, or its first ones if it is far too long, with offsets."""
    most = _first_characters(limit)
    while True:
        try:
            tokens, offsets = encoder.with_offsets(text[:most], is_continued)
        except NotImplementedError as error:  # raised by tokenizers written in Python
            raise DataError(
                "model.tokenizer",
                f"{encoder.name}, which does not return the character offsets of tokens",
                "a fast tokenizer, for chats with responses",
                "Set model.tokenizer to a directory with tokenizer.json.",
            ) from error
        except Exception as error:  # tokenizers raise various classes on unknown words
            allowed = f"a text that the tokenizer can encode ({error_text(error, 160)})"
            raise _without_tokens(place, text, allowed) from error
        if most >= len(text) or len(tokens) > 2 * limit:
            return list(tokens), offsets
        most *= 2


def _tokenize(texts: Sequence[tuple[str, str]], encode: Encode, limit: int) -> list[list[int]]:
    """Returns the tokens of texts with their places. Raises BadRowError if the tokenizer fails."""
    try:
        parts = [text[: _first_characters(limit)] for _, text in texts]
        found = encode(parts)
        for number, (_, text) in enumerate(texts):
            most = _first_characters(limit)
            while most < len(text) and len(found[number]) <= 2 * limit:
                most *= 2  # long tokens, or characters without a token
                (found[number],) = encode([text[:most]])
    except Exception as error:  # tokenizers raise various classes on unknown words
        if len(texts) > 1:
            return [_tokenize([text], encode, limit)[0] for text in texts]
        ((place, text),) = texts
        allowed = f"a text that the tokenizer can encode ({error_text(error, 160)})"
        raise _without_tokens(place, text, allowed) from error
    return found


def _without_tokens(place: str, text: object, allowed: str) -> BadRowError:
    return BadRowError(place, f"{short(text)}, which has no tokens", allowed, "Fix that row.")


def _end_token(tokenizer: TextEncoder) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "model.tokenizer",
            "a tokenizer without an end token (eos_token)",
            "a tokenizer with an end token, which ends every demonstration",
            "Set eos_token in its tokenizer_config.json.",
        )
    return tokenizer.eos_token_id
