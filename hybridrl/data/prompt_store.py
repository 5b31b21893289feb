"""Where the ranks of a node share tokenized prompts: who waits for whom, and what is kept.

One rank of each node builds: it calls `load` for each source, in the order of the run. The others
wait for all of its sources, are told the files with `follow`, and call `load` in the same order,
which maps them. No torch, no collective: the trainer brings what is told to the others.

Files stand in HYBRIDRL_CACHE, else in the user's cache folder ($XDG_CACHE_HOME or ~/.cache), under
hybridrl/prompts. A file's name is a digest of all that decides its content: the sources' bytes or
commits, the tokenizer, the keys and limits, and the code that reads. A file that no run has used
for KEPT_DAYS is removed by the next one that writes there. Where that folder cannot be written, or
what decides is not known, files stand in a temporary folder until all ranks have mapped them; the
user is told; rows from Python are of that kind. Rows with values that JSON has not, and rows of an
iterator, which come once, stay in each rank's memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.cache import cache_folder
from hybridrl.config.needs import Needs
from hybridrl.config.schema import DataConfig, RolloutConfig
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.chats import ChatCounts
from hybridrl.data.prompt_file import (
    DamagedError,
    MappedPrompts,
    NotHeldError,
    PromptFile,
    write_prompts,
)
from hybridrl.data.prompts import LeftOut, LoadedPrompts, Reading, TextEncoder, in_memory
from hybridrl.data.sets import source_identity
from hybridrl.errors import said

ENDING = ".prompts"
CHECKED = ".checked"  # of the marks of checked_rows.py
KEPT_DAYS = 30
# Of the section `data`, what chooses among prompts that are there.
_CHOOSES = {
    *("prompts", "weights", "shuffle", "validation", "eval_prompts", "eval_share", "eval_limit"),
    "max_response_tokens",  # stands beside the section
}
_READERS = (
    *(
        "prompts",
        "prompt_file",
        "prompt_store",
        "rows",
        "forms",
        "trees",
        "messages",
        "chats",
        "encoding",
        "text_tokens",
        "end_tokens",
    ),
    *("feedback", "sets"),
)

Rows = Iterable[Mapping[str, object]]


def prompts_folder() -> Path:
    """Returns where files of prompts are kept."""
    return cache_folder("prompts")


class PromptStore:
    """Loads prompts on one rank.

    Args:
        tokenizer: of the run.
        folder: where files are kept; None: `prompts_folder()`.
        end_tokens: the end tokens of responses; None: those of the tokenizer and its template.

    Attributes:
        files: of each source that was loaded, in order; None for one that is in memory.
        notes: what the user is to know, a line each.
        found: what was computed of them by `once`, in order; picklable.
    """

    def __init__(
        self,
        tokenizer: TextEncoder,
        folder: Path | None = None,
        end_tokens: Sequence[int] | None = None,
    ) -> None:
        self.files: list[str | None] = []
        self.notes: list[str] = []
        self.found: list[Any] = []
        self._tokenizer, self._folder = tokenizer, folder or prompts_folder()
        self._ends = end_tokens
        self._to_follow: list[str | None] | None = None
        self._to_repeat: list[Any] = []
        self._temporary: Path | None = None

    def follow(self, files: Sequence[str | None], found: Sequence[Any] = ()) -> None:
        """Makes `load` map what the `files` of another rank's store name, and `once` give what that
        has found.
        """
        self._to_follow, self._to_repeat = list(files), list(found)

    def once(self, compute: Callable[[], Any]) -> Any:
        """Returns what `compute` gives, which the rank that is followed has called."""
        is_known = len(self.found) < len(self._to_repeat)
        self.found.append(self._to_repeat[len(self.found)] if is_known else compute())
        return self.found[-1]

    def load(self, reading: Reading) -> LoadedPrompts:
        """Returns prompts, of a file where that is possible.

        Raises:
            DataError: as of `Reading.prompts`.
        """
        if self._to_follow is not None:
            file = self._to_follow[len(self.files)]
        else:
            found = self._file_of(reading)
            file = None if found is None else str(found)
        self.files.append(file)
        if file is None:
            return in_memory(reading, self._tokenizer, self._ends)
        return _mapped(Path(file))

    def close(self) -> None:
        """Removes files that are not kept; all ranks have mapped them."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _file_of(self, reading: Reading) -> Path | None:
        """Returns the file of what is read, which is written if need be; None: it cannot be."""
        key = content_key(reading, self._tokenizer, self._ends) if _has_names(reading) else None
        if not isinstance(reading.source, Sized | None):
            return None  # rows that come once, and would be gone if the file could not hold them
        if key is None and _has_names(reading):
            self._note("prompts are tokenized at each start: what decides their tokens is unknown")
        if key is not None and self._is_whole(path := self._folder / f"{key}{ENDING}"):
            with suppress(OSError):  # of another user, or on a file system that is read only
                os.utime(path)
            return path
        try:
            if key is not None:
                try:
                    return self._write(reading, self._folder, key)
                except OSError as error:
                    self._note(
                        f"prompts are tokenized at each start: {self._folder} cannot be written"
                        f" ({said(error, 160)}); HYBRIDRL_CACHE names another"
                    )
            try:
                self._temporary = self._temporary or Path(tempfile.mkdtemp(prefix="hybridrl-"))
                return self._write(reading, self._temporary, None)
            except OSError as error:
                why = f"no temporary file can be written ({said(error, 160)})"
        except NotHeldError as error:
            why = str(error)
        except _SourceError as error:
            raise error.fault from None
        self._note(f"each rank keeps all prompts in its memory: {why}")
        return None

    def _is_whole(self, path: Path) -> bool:
        """Whether there is such a file and it is whole."""
        try:
            PromptFile(path).verify()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (DamagedError, OSError) as error:
            self._note(f"{path} is written again: {said(error, 160)}")
            return False
        return True

    def _write(self, reading: Reading, folder: Path, key: str | None) -> Path:
        """Tokenizes into a file of this folder and returns it.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_old(folder)
        began, about = time.monotonic(), dict[str, object]()
        handle, name = tempfile.mkstemp(".part", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                write_prompts(file, folder, self._read(reading, about), about)
            # A source that has changed meanwhile gave rows of which the key says nothing.
            if key is None or content_key(reading, self._tokenizer, self._ends) != key:
                key = Path(name).stem
            path = folder / f"{key}{ENDING}"
            os.replace(name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
        mib, seconds = path.stat().st_size / 2**20, time.monotonic() - began
        self._note(f"prompts tokenized into {path}: {mib:.1f} MiB, {seconds:.1f} s")
        return path

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def _read(self, reading: Reading, about: dict[str, object]) -> Iterator[tuple[Prompt, int]]:
        """Yields what is read; then `about` says what was left out."""
        left_out = reading.left_out()
        try:
            yield from reading.prompts(self._tokenizer, left_out, self._ends)
        except OSError as error:
            raise _SourceError(error) from error
        about |= vars(left_out) | {"in_part": sorted(left_out.in_part)}
        about["chats"] = vars(left_out.chats)


class _SourceError(Exception):
    """A source cannot be read; nothing is wrong with the folder."""

    def __init__(self, fault: OSError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def _has_names(reading: Reading) -> bool:
    """Whether the source is files and data sets, not rows from Python."""
    source = reading.config.prompts if reading.source is None else reading.source
    return isinstance(source, Sequence) and all(isinstance(name, str) for name in source)


def _mapped(path: Path) -> LoadedPrompts:
    file = PromptFile(path)
    told: Any = file.about
    places = [(str(place), int(num)) for place, num in told["places"]]
    chats = ChatCounts(**{name: int(count) for name, count in told["chats"].items()})
    known = told | {"places": places, "in_part": set(told["in_part"]), "chats": chats}
    left_out = LeftOut(**known)
    return LoadedPrompts(MappedPrompts(file), array("i", file.sources.tobytes()), left_out)


def remove_old(folder: Path) -> None:
    """Removes files that no run has used for KEPT_DAYS, whole ones and what is left of others."""
    oldest = time.time() - KEPT_DAYS * 86400
    for path in [path for end in (ENDING, CHECKED, ".part") for path in folder.glob(f"*{end}")]:
        with suppress(OSError):  # another run removes it too
            if path.stat().st_mtime < oldest:
                path.unlink()


def content_key(
    reading: Reading, tokenizer: TextEncoder, end_tokens: Sequence[int] | None = None
) -> str | None:
    """Returns a digest of all that decides what is read; None where something of it is unknown."""
    config = reading.config
    given = config.prompts if reading.source is None else reading.source
    encoder = tokenizer_identity(tokenizer)
    read = None if encoder is None else what_is_read(config, list(map(str, given or ())))
    if read is None:
        return None
    limits = [list(reading.required), reading.max_response_tokens, reading.feedback, reading.limit]
    ends = None if end_tokens is None else list(end_tokens)
    decides = [read, encoder, ends, limits, sys.byteorder]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def what_is_read(config: DataConfig, names: Sequence[str]) -> list[object] | None:
    """Returns, for JSON, what decides which rows these sources give, and how they are read; None
    where something of it is unknown.
    """
    sources = list(map(source_identity, names))
    if None in sources:
        return None
    section = config.model_dump(mode="json", exclude=_CHOOSES)
    here = Path(__file__).parent
    code = [hashlib.sha256((here / f"{name}.py").read_bytes()).hexdigest() for name in _READERS]
    return [list(names), sources, section, code]


def tokenizer_identity(tokenizer: Any) -> str | None:
    """Returns a digest of all that decides the tokens of a text and the text of messages; None
    where that is not known: of tokenizers that are not of transformers' own classes and not made of
    data alone, and of templates that say the date.
    """
    kind = type(tokenizer)
    is_known = kind.__module__.startswith("transformers.") and hasattr(tokenizer, "_tokenizer")
    if not is_known:
        return None
    import tokenizers
    import transformers

    template = tokenizer.chat_template  # rows of messages are always rendered
    if "strftime_now" in str(template):
        return None
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):  # every call sets them
        content.pop(name, None)
    decides = [
        kind.__qualname__,
        [transformers.__version__, tokenizers.__version__],
        content,
        template,
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
    """Loads prompts, or `rows` in their place, with the responses that an algorithm needs."""
    return store.load(replace(reading_of(data, rollout, needs), source=rows))


def reading_of(data: DataConfig, rollout: RolloutConfig, needs: Needs) -> Reading:
    """Returns how the rows are read that an algorithm trains on."""
    if needs.rollouts:
        return Reading(data)
    longest = data.longest_response(rollout.max_new_tokens)
    return Reading(data, max_response_tokens=longest, feedback=needs.feedback)
