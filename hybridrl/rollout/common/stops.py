"""Ends of responses by text: what a tokenizer makes of the last tokens. No torch.

A stop string may be tokenized in any way and may end within a token, so it is looked for in text.
Engines know tokens only; one that ends responses so is given TokenTexts before it gets requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A token has at least one byte of text, and UTF-8 at most four bytes a character.
_MOST_TOKENS_A_CHARACTER = 4


class TokenTexts:
    """Finds stop strings at the end of responses, by a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def ends(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether one of the strings is in the text of a response, and was not before its last
        token.
        """
        longest = max(map(len, strings))
        # One more, which the text goes on within.
        last = tokens[-(_MOST_TOKENS_A_CHARACTER * longest + 1) :]
        text: str = self._tokenizer.decode(list(last), skip_special_tokens=False)
        return any(string in text for string in strings)
