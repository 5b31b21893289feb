"""Prompts, a tokenizer and a reward for models with random weights."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def random_prompts(number: int, num_tokens: int, vocab_size: int) -> list[dict[str, str]]:
    """Returns random prompts of exactly so many words, none of which comes twice."""
    draw = random.Random(0)
    return [
        {
            "prompt": " ".join(str(draw.randrange(vocab_size)) for _ in range(num_tokens)),
            "answer": "",
        }
        for _ in range(number)
    ]


def word_tokenizer(
    vocab_size: int, special: Mapping[int, str] = MappingProxyType({})
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a word for each token, its number, and `special` names."""
    words = {special.get(i, str(i)): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def checksum_reward(prompt: str, response: str, columns: Mapping[str, Any]) -> float:
    """Returns a number that random responses share with few others: advantages are never zero."""
    return zlib.crc32(response.encode()) % 1000 / 1000
