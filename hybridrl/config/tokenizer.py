"""Checks local tokenizer files before ranks start, in place of errors from transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from tokenizers import Tokenizer

from hybridrl.config.files import (
    FETCH_AGAIN,
    read_bytes,
    read_json_object,
    regular_file_bytes,
    shown,
)
from hybridrl.config.schema import ModelConfig
from hybridrl.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
JSON_FILES = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "vocab.json",
)
OTHER_FILES = ("merges.txt", "tokenizer.model", "vocab.txt")
MAX_BYTES = 1 << 28  # the largest known tokenizer.json is 33 MB


def check_tokenizer_files(model: ModelConfig) -> None:
    """Raises ModelError for a local directory for which transformers creates an empty tokenizer."""
    place = _place(model)
    if os.path.isdir(place) and not any((place / name).exists() for name in TOKENIZER_FILES):
        allowed = f"a directory with one of {', '.join(TOKENIZER_FILES)}"
        remedy = "Set model.tokenizer to the tokenizer's directory."
        raise ModelError("model.tokenizer", str(place), allowed, remedy)


def check_tokenizer_contents(model: ModelConfig, num_tokens: int) -> None:
    """Raises ModelError if a local tokenizer file is damaged or has ids from `num_tokens` on."""
    place = _place(model)
    if not os.path.isdir(place):
        return
    contents = {
        name: read_json_object(place / name, ModelError, has_unique_keys=False, max_bytes=MAX_BYTES)
        for name in JSON_FILES
        if _exists(place / name)
    }
    for name in OTHER_FILES:
        if _exists(place / name) and not regular_file_bytes(place / name, ModelError, "a file"):
            raise ModelError(str(place / name), "an empty file", "a tokenizer's file", FETCH_AGAIN)
    if _exists(file := place / "tokenizer.json"):
        check_token_numbers(str(file), _read_vocabulary(file), num_tokens)
    for where, template in _templates(place, contents):
        _check_template(where, template)


def check_token_numbers(where: str, vocabulary: Mapping[str, int], num_tokens: int) -> None:
    """Raises ModelError, which names `where`, if tokens have no row in the model's embedding."""
    beyond = [token for token, number in vocabulary.items() if number >= num_tokens]
    if beyond:
        first = min(beyond, key=lambda token: (vocabulary[token], token))
        found = f"token {shown(first)} with number {vocabulary[first]}"
        found += f", and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        allowed = f"numbers below the model's vocab_size = {num_tokens}"
        remedy = "Set model.tokenizer to the tokenizer of this model."
        raise ModelError(where, found, allowed, remedy)


def _place(model: ModelConfig) -> Path:
    place = Path(os.path.expanduser(model.tokenizer or model.path or model.init or ""))
    return place.parent if os.path.isfile(place) and model.tokenizer is None else place


def _exists(file: Path) -> bool:
    return os.path.lexists(file)  # a broken link is damage, not absence


def _read_vocabulary(file: Path) -> dict[str, int]:
    content = read_bytes(file, ModelError, "a tokenizer", MAX_BYTES)
    try:
        found: dict[str, int] = Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library is written in Rust and raises plain Exception
        what = str(error).strip() or type(error).__name__
        allowed = "a tokenizer of the tokenizers library"
        raise ModelError(
            str(file), f"a damaged file ({what.splitlines()[0][:160]})", allowed, FETCH_AGAIN
        ) from None
    return found


def _templates(
    place: Path, contents: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, object]]:
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = contents.get(name, {}).get("chat_template")
        where = f"{place / name}: chat_template"
        if isinstance(found, list):
            for part in found:
                yield where, part.get("template") if isinstance(part, dict) else part
        elif found is not None:
            yield where, found
    if _exists(file := place / "chat_template.jinja"):
        content = read_bytes(file, ModelError, "a chat template")
        yield str(file), content.decode("utf-8", errors="replace")


def _check_template(where: str, template: object) -> None:
    if not isinstance(template, str):
        raise ModelError(where, shown(template), "a text, or null", FETCH_AGAIN)
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    try:
        environment.parse(template)
    except (TemplateError, RecursionError) as error:
        line = error.lineno if isinstance(error, TemplateSyntaxError) else None
        what = f"line {line}: {error}" if line is not None else type(error).__name__
        raise ModelError(
            where, what.splitlines()[0][:160], "a Jinja template", FETCH_AGAIN
        ) from None


class _Generation(Extension):
    """Jinja extension for the block `generation`, which transformers adds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
