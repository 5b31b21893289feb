"""Detects stop strings in the decoded text of a response's last tokens. No torch.

The decoded text is searched because a stop string may be tokenized in several ways and may end
within a token. Engines do not have a tokenizer; TokenTexts provides one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A token consists of at least one byte of text, and a UTF-8 character has at most four bytes.
_MAX_TOKENS_PER_CHARACTER = 4


class TokenTexts:
    """Finds stop strings at the end of responses, using a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def ends(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the last tokens contain one of the strings; must be called after each token."""
        longest = max(map(len, strings))
        # One more token, because the string may end within the last token.
        last = tokens[-(_MAX_TOKENS_PER_CHARACTER * longest + 1) :]
        text: str = self._tokenizer.decode(list(last), skip_special_tokens=False)
        return any(string in text for string in strings)
