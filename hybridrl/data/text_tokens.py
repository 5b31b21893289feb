"""Tokenizes texts that no template rendered: prompts and their continuations. No torch.

A prompt begins a sequence, so it receives the special tokens that the tokenizer puts before a text
(usually BOS). A response or an observation continues a sequence. Some tokenizers insert a space
before every text (Llama 2, older Mistral). This module removes that space from continuations;
otherwise "2+3=" and "5" would be joined to "2+3= 5".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

Encode = Callable[[list[str]], list[list[int]]]
"""Returns the tokens of each text."""
Offsets = Sequence[Sequence[int]]
"""First character and end of each token."""
_PROBES = ("a", "1", "the", "0 1")


class TextTokens:
    """Tokenizes texts.

    The inserted space is removed only for transformers' fast tokenizers, because others do not
    reveal whether they insert one. `name` is the tokenizer's class, for messages.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name = type(tokenizer).__name__
        self._tokenizer = tokenizer
        self._without_space = _without_first_space(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})  # some TextEncoders lack them
        self._added = frozenset(added)

    @cached_property
    def front(self) -> tuple[int, ...]:
        """Special tokens that a transformers tokenizer puts before a text."""
        tokenizer = self._tokenizer
        count = getattr(tokenizer, "num_special_tokens_to_add", None)  # some TextEncoders lack it
        if count is None or not count():
            return ()
        for probe in _PROBES:
            try:
                (plain,) = self.plain([probe])
                (whole,) = tokenizer([probe], add_special_tokens=True)["input_ids"]
            except Exception:  # tokenizers raise various classes on unknown words
                continue
            for num in range(len(whole) - len(plain) + 1):
                if plain and list(whole[num : num + len(plain)]) == list(plain):
                    return tuple(whole[:num])
        (whole,) = tokenizer([""], add_special_tokens=True)["input_ids"]
        begins = tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id]
        return tuple(whole[:1]) if begins else ()

    def plain(self, texts: list[str]) -> list[list[int]]:
        """Tokenizes texts that begin a sequence, without special tokens."""
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"])

    def continued(self, texts: list[str]) -> list[list[int]]:
        """Tokenizes continuations, without special tokens and the tokenizer's first space."""
        if self._without_space is None:
            return self.plain(texts)
        return [tokens for tokens, _ in self._tokens_and_offsets(texts, is_continued=True)]

    def with_offsets(self, text: str, is_continued: bool = False) -> tuple[list[int], Offsets]:
        """Returns tokens and character offsets. Raises NotImplementedError for slow tokenizers."""
        return self._tokens_and_offsets([text], is_continued)[0]

    def _tokens_and_offsets(
        self, texts: list[str], is_continued: bool
    ) -> list[tuple[list[int], Offsets]]:
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        found = self._tokenizer(texts, **options)
        whole = list(zip(found["input_ids"], found["offset_mapping"], strict=True))
        if not is_continued or self._without_space is None:
            return [(list(tokens), offsets) for tokens, offsets in whole]
        # The tokenizer inserts no space after an added token, so the tokens from the first added
        # token on are correct.
        starts, rest = [], []
        for text, (tokens, offsets) in zip(texts, whole, strict=True):
            first = next((i for i, token in enumerate(tokens) if token in self._added), len(tokens))
            starts.append(text if first == len(tokens) else text[: offsets[first][0]])
            rest.append((tokens[first:], offsets[first:]))
        firsts = self._without_space.encode_batch(starts, add_special_tokens=False)
        return [
            ([*part.ids, *tokens], [*part.offsets, *offsets])
            for part, (tokens, offsets) in zip(firsts, rest, strict=True)
        ]


def _without_first_space(tokenizer: Any) -> Any:
    """Returns a fast tokenizer's backend without its first space; None if no space is known."""
    backend: Any = getattr(tokenizer, "_tokenizer", None)  # only fast tokenizers have it
    if not hasattr(backend, "to_str"):
        return None
    content = json.loads(backend.to_str())
    if not _drop_first_space(content):
        return None
    found = type(backend).from_str(json.dumps(content))
    found.encode_special_tokens = backend.encode_special_tokens
    found.no_truncation()
    found.no_padding()
    return found


def _drop_first_space(content: dict[str, Any]) -> bool:
    """Changes a tokenizer.json's content to insert no first space; returns whether it changed."""
    changed = False
    for key, parts in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        section = content.get(key) or {}
        steps: Sequence[dict[str, Any]] = section.get(parts, [section])
        for step in steps:
            changed |= step.get("type") == "Prepend"
            changed |= step.get("prepend_scheme", "never") != "never"
            changed |= bool(step.get("add_prefix_space"))
            if "prepend_scheme" in step:
                step["prepend_scheme"] = "never"
            if "add_prefix_space" in step:
                step["add_prefix_space"] = False
        kept = [step for step in steps if step and step.get("type") != "Prepend"]
        if parts in section:
            section[parts] = kept
        elif not kept:
            content[key] = None
    return changed
