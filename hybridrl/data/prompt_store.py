"""Stores tokenized prompts for all ranks of a node and for later runs. Does not import torch.

One rank of each node calls `load` once per source and writes the files. The other ranks receive its
list of files through `follow`, and call `load` in the same order to map them. No collectives.

Files are in `prompts_folder()`; a name contains a digest of everything that determines the content.
Files that no run has used for KEPT_DAYS are removed by the next run that writes there. If the
folder is not writable, or the origin of the content is unknown (rows from Python), files are in a
temporary folder until all ranks have mapped them. Values that JSON cannot represent, and iterators
that can be read only once, stay in each rank's memory.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hybridrl.config import files
from hybridrl.config.cache import cache_folder
from hybridrl.config.needs import Needs
from hybridrl.config.schema import DataConfig, RolloutConfig
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.images import ImageTokens, folder_digest
from hybridrl.data.prompt_files import (
    UnstorableError,
    is_intact,
    read_prompts,
    rename_by_content,
    write_prompts,
)
from hybridrl.data.prompts import LeftOut, LoadedPrompts, Reading, TextEncoder, in_memory
from hybridrl.data.sets import source_identity
from hybridrl.errors import UserError, error_text
from hybridrl.models.vision import images as vision_images

ENDING = ".arrow"
CHECKED = ".checked"  # suffix of files that record that all rows passed the checks
KEPT_DAYS = 30
# Keys in the section `data` that only select prompts and do not change their content.
_SELECTION_KEYS = {
    *("prompts", "weights", "shuffle", "validation", "eval_prompts", "eval_share", "eval_limit"),
    "max_response_tokens",  # a field of Reading
}
_CODE = [
    *sorted(Path(__file__).parent.glob("*.py")),
    *map(Path, (files.__file__, vision_images.__file__, inspect.getfile(Prompt))),
]
_LEFT_OUT = TypeAdapter(LeftOut)

Rows = Iterable[Mapping[str, object]]


def prompts_folder() -> Path:
    return cache_folder("prompts")


class PromptStore:
    """Loads prompts on one rank.

    Args:
        end_tokens: End tokens of responses. Default: those of the tokenizer and its template.
        images: How the model's prompts contain images; None if it reads only text.

    Attributes:
        files: File for each loaded source, in order; None for a source kept in memory.
    """

    def __init__(
        self,
        tokenizer: TextEncoder,
        folder: Path | None = None,
        end_tokens: Sequence[int] | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        self.files: list[str | None] = []
        self.notes: list[str] = []
        self._tokenizer, self._folder = tokenizer, folder or prompts_folder()
        self._ends, self._images = end_tokens, images
        self._given_files: list[str | None] | None = None
        self._temporary: Path | None = None

    @property
    def reads_images(self) -> bool:
        return self._images is not None

    def follow(self, files: Sequence[str | None]) -> None:
        """Makes `load` map these files. They are the attribute `files` of another rank's store."""
        self._given_files = list(files)

    def load(self, reading: Reading) -> LoadedPrompts:
        """Returns prompts, mapped from a file if possible; errors as in `Reading.prompts`."""
        if self._given_files is not None:
            file = self._given_files[len(self.files)]
        else:
            found = self._file_of(reading)
            file = None if found is None else str(found)
        self.files.append(file)
        if file is None:
            return in_memory(reading, self._tokenizer, self._ends, self._images)
        prompts, left_out = read_prompts(Path(file))
        sources = prompts.numbers("source")
        return LoadedPrompts(prompts, sources, _LEFT_OUT.validate_json(left_out))

    def close(self) -> None:
        """Removes temporary files. All ranks must have mapped the files before this call."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _file_of(self, reading: Reading) -> Path | None:
        """Returns the file with the prompts, written if needed; None if it cannot be."""
        if not isinstance(reading.source, Sized | None):
            return None  # these rows can be read only once and would be lost if writing failed
        key = self._key(reading) if _has_names(reading) else None
        if key is None and _has_names(reading):
            self._note(
                "prompts are tokenized at each start: the tokenizer or a source has no version"
            )
        if key is not None and (path := self._find_intact(key)) is not None:
            return path
        try:
            if key is not None:
                try:
                    return self._write(reading, self._folder, key)
                except OSError as error:
                    self._note(
                        f"prompts are tokenized at each start: {self._folder} cannot be written"
                        f" ({error_text(error, 160)}); set HYBRIDRL_CACHE to another folder"
                    )
            try:
                self._temporary = self._temporary or Path(tempfile.mkdtemp(prefix="hybridrl-"))
                return self._write(reading, self._temporary, None)
            except OSError as error:
                why = f"no temporary file can be written ({error_text(error, 160)})"
        except UnstorableError as error:
            why = str(error)
        except _SourceError as error:
            raise error.fault from None
        self._note(f"each rank keeps all prompts in memory: {why}")
        return None

    def _key(self, reading: Reading) -> str | None:
        return content_key(reading, self._tokenizer, self._ends, self._images)

    def _find_intact(self, key: str) -> Path | None:
        for path in self._folder.glob(f"{key}-*{ENDING}"):
            with suppress(OSError):  # the file system may be read-only
                if is_intact(path) and _has_same_images(path):
                    os.utime(path)
                    return path
                is_damaged = not is_intact(path)
                why = "is damaged" if is_damaged else "has images from folders that changed"
                self._note(f"{path} {why}; it is written again")
                path.unlink()
        return None

    def _write(self, reading: Reading, folder: Path, key: str | None) -> Path:
        """Tokenizes prompts into a file. Raises OSError if the folder cannot be written."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_old(folder)
        began, left_out = time.monotonic(), reading.left_out()
        handle, name = tempfile.mkstemp(".part", dir=folder)
        os.close(handle)
        try:
            prompts = self._read(reading, left_out)
            write_prompts(Path(name), prompts, lambda: _LEFT_OUT.dump_json(left_out))
            # If a source changed during reading, the key does not describe the rows.
            if key is None or self._key(reading) != key:
                key = Path(name).stem
            path = rename_by_content(Path(name), key, ENDING)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
        mib, seconds = path.stat().st_size / 2**20, time.monotonic() - began
        self._note(f"prompts tokenized into {path}: {mib:.1f} MiB, {seconds:.1f} s")
        return path

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def _read(self, reading: Reading, left_out: LeftOut) -> Iterator[tuple[Prompt, int]]:
        try:
            yield from reading.prompts(self._tokenizer, left_out, self._ends, self._images)
        except OSError as error:
            raise _SourceError(error) from error


class _SourceError(Exception):
    """Raised if reading a source fails, to distinguish it from an error in the cache folder."""

    def __init__(self, fault: OSError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def _has_same_images(path: Path) -> bool:
    """Whether the folders of images have not changed; images in rows are in the key."""
    folders = _LEFT_OUT.validate_json(read_prompts(path)[1]).image_folders
    return all(folder_digest(folder) == digest for folder, digest in folders.items())


def _has_names(reading: Reading) -> bool:
    source = reading.config.prompts if reading.source is None else reading.source
    return isinstance(source, Sequence) and all(isinstance(name, str) for name in source)


def remove_old(folder: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86400
    for path in folder.iterdir():
        with suppress(OSError):  # another run may remove the same file
            if path.stat().st_mtime < oldest:
                path.unlink()


def unless_checked(
    config: DataConfig,
    names: Sequence[str],
    criteria: Sequence[object],
    check: Callable[[], list[UserError]],
) -> list[UserError]:
    """Returns the errors that `check` finds; [] if an earlier run checked the rows in this way."""
    folder, key = prompts_folder(), _checked_key(config, names, criteria)
    if key is not None and (folder / f"{key}{CHECKED}").exists():
        with suppress(OSError):  # the file system may be read-only
            os.utime(folder / f"{key}{CHECKED}")
        return []
    found = check()
    # If a source changed during reading, the key does not describe the rows.
    if not found and key is not None and _checked_key(config, names, criteria) == key:
        with suppress(OSError):  # otherwise the next run checks the rows again
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_old(folder)
            (folder / f"{key}{CHECKED}").touch()
    return found


def _checked_key(
    config: DataConfig, names: Sequence[str], criteria: Sequence[object]
) -> str | None:
    decides = _reading_inputs(config, names)
    return None if decides is None else _key([decides, list(criteria)])


def content_key(
    reading: Reading,
    tokenizer: TextEncoder,
    end_tokens: Sequence[int] | None = None,
    images: ImageTokens | None = None,
) -> str | None:
    """Returns a digest of everything that determines the prompts; None if part of it is unknown."""
    config = reading.config
    given = config.prompts if reading.source is None else reading.source
    encoder = tokenizer_identity(tokenizer)
    read = None if encoder is None else _reading_inputs(config, list(map(str, given or ())))
    if read is None:
        return None
    limits = [list(reading.required), reading.max_response_tokens, reading.feedback, reading.limit]
    decides = [read, encoder, None if end_tokens is None else list(end_tokens), limits]
    return _key([*decides, images.identity] if images is not None else decides)


def _key(decides: object) -> str:
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _reading_inputs(config: DataConfig, names: Sequence[str]) -> list[object] | None:
    """Returns, as JSON, all that determines these sources' rows; None if part is unknown."""
    sources = list(map(source_identity, names))
    if None in sources:
        return None
    section = config.model_dump(mode="json", exclude=_SELECTION_KEYS)
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _CODE]
    return [list(names), sources, section, code]


def tokenizer_identity(tokenizer: Any) -> str | None:
    """Returns a digest of everything that determines how texts are tokenized and rendered; None if
    the tokenizer is not one of transformers' own fast classes, or its template inserts the date.
    """
    kind = type(tokenizer)
    is_known = kind.__module__.startswith("transformers.") and hasattr(tokenizer, "_tokenizer")
    if not is_known or "strftime_now" in str(tokenizer.chat_template):
        return None
    import tokenizers
    import transformers

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):  # set again by every call
        content.pop(name, None)
    decides = [
        kind.__qualname__,
        [transformers.__version__, tokenizers.__version__],
        content,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        [tokenizer.eos_token_id, tokenizer.split_special_tokens],
    ]
    text = json.dumps(decides, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def load_rows(
    data: DataConfig,
    rollout: RolloutConfig,
    store: PromptStore,
    needs: Needs,
    rows: Rows | None = None,
) -> LoadedPrompts:
    """Loads the configured prompts, or `rows`, with the responses that an algorithm needs."""
    return store.load(replace(reading_of(data, rollout, needs), source=rows))


def reading_of(data: DataConfig, rollout: RolloutConfig, needs: Needs) -> Reading:
    if needs.rollouts:
        return Reading(data)
    longest = data.longest_response(rollout.max_new_tokens)
    return Reading(data, max_response_tokens=longest, feedback=needs.feedback)
