"""Tokenizers for tests of chats, made here: bytes with a few merges, and templates of the field."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same text, with the mark around what the assistant says.
MARKED = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{{ '\n' }}{% generation %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{%- endfor %}<|im_end|>{% endgeneration %}"
    "{%- else %}{{ '\n' }}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Leaves out what the assistant thought in earlier turns, as Qwen3's does.
FORGETS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Without a token that ends a turn.
BARE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def published_template(name: str) -> str:
    """Returns a model's chat template, from TRL's copies (extra `test`; Apache-2.0)."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL is not installed")
    path = Path(found.origin).parent / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def byte_tokenizer(
    template: str | None = CHATML, more_special: Sequence[str] = (), **options: Any
) -> Any:
    """Returns a fast tokenizer: GPT-2's bytes with merges of a few words, line breaks and spaces.

    `options` are the tokenizer's.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *more_special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the rain in the city\n\nis the weather in Oslo?\n\n"] * 4, trainer)
    usual = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, **{**usual, **options}
    )
