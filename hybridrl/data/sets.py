"""Reads parquet files, folders saved by `datasets`, and data sets on the hub. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.hub import DATASET_FORM, DATASETS, HubName, commit_of, dataset_name
from hybridrl.errors import DataError, error_text, short

_FOLDER_FILES = ("state.json", "dataset_dict.json")


def is_data_set(name: str) -> bool:
    """Whether a name in `data.prompts` is a data set of one of these kinds, not a JSONL file."""
    is_folder = any(os.path.isfile(Path(name) / file) for file in _FOLDER_FILES)
    is_parquet = name.endswith(".parquet") and os.path.isfile(name)
    return is_parquet or name.startswith(DATASETS) or is_folder


def source_identity(name: str) -> str | None:
    """Returns a text that changes whenever a source's rows change, if there is one: a digest of a
    file or of all files in a folder, or the name and commit of a data set.
    """
    found = dataset_name(name)
    if found is not None:
        return str(found) if found.is_commit else None
    path = Path(name.removeprefix(DATASETS).split(":")[0] if name.startswith(DATASETS) else name)
    if os.path.isdir(path) and not is_data_set(name):
        return None  # a user mistake; do not read a folder of unknown size
    digest = hashlib.sha256()
    try:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            with file.open("rb") as content:
                part = hashlib.file_digest(content, "sha256").hexdigest()
            digest.update(f"{file.relative_to(path)}\0{part}\0".encode("utf-8", "surrogateescape"))
    except (OSError, ValueError):  # the user sees the error when the rows are read
        return None
    return digest.hexdigest() if files else None


def data_set_rows(name: str) -> Iterator[Mapping[str, object]]:
    """Yields the rows of a source. Raises DataError if it cannot be read, or is empty."""
    num = 0
    for row in _parquet_rows(name) if name.endswith(".parquet") else _set_rows(name):
        num += 1
        yield row
    if not num:
        raise DataError(name, "no rows", "1 row or more", "Write the prompts first.")


def _parquet_rows(name: str) -> Iterator[Mapping[str, object]]:
    from pyarrow import ArrowException, parquet

    num = 0
    try:
        with parquet.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=1024):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError, LookupError) as error:
                    raise _bad_value(name, num, batch, error) from error
                num += len(rows)
                yield from rows
    except (ArrowException, OSError) as error:
        raise DataError(
            name, error_text(error, 120), "a parquet file", "Write it again."
        ) from error


def _bad_value(name: str, num_before: int, batch: Any, error: Exception) -> DataError:
    place, column = name, ""
    for key, values in zip(batch.schema.names, batch.columns, strict=True):
        for number, value in enumerate(values, num_before + 1):
            try:
                value.as_py()
            except (ValueError, OverflowError) as fault:
                if not column:
                    place, column, error = f"{name}:{number}", f"column {short(key)}: ", fault
                break
    allowed = "texts in UTF-8, and times of whole microseconds from year 1 to 9999"
    return DataError(
        place, column + error_text(error, 160), allowed, "Write that column again with such values."
    )


def _set_rows(name: str) -> Iterator[Mapping[str, object]]:
    try:
        import datasets
    except ImportError as error:
        remedy = f"Run: pip install 'hybridrl[data]' ({error})."
        raise DataError(
            "data.prompts",
            name,
            "a JSONL or parquet file if the package datasets is not installed",
            remedy,
        ) from error
    try:
        is_hub = name.startswith(DATASETS)
        loaded = _hub_set(name, datasets) if is_hub else datasets.load_from_disk(name)
    except DataError:
        raise
    except Exception as error:  # the hub, the network and files raise many classes of exceptions
        allowed = f"a folder written by save_to_disk, or {DATASET_FORM}"
        raise DataError(name, error_text(error, 160), allowed, "Check the name.") from error
    if isinstance(loaded, dict):
        allowed = ", ".join(f"{name}/{split}" for split in loaded)
        raise DataError(name, "a data set with splits", allowed, "Name one split.")
    num = 0
    try:
        for row in _without_decoding(loaded, datasets):
            num += 1
            yield row
    except Exception as error:  # decoding a column may raise any exception
        got = f"{type(error).__name__}: {error_text(error, 160)}"
        allowed = "rows that datasets can decode"
        raise DataError(f"{name}:{num + 1}", got, allowed, "Write the set again.") from error


def _without_decoding(loaded: Any, datasets: Any) -> Any:
    def raw(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(feature, dict):
            return {name: raw(part) for name, part in feature.items()}
        if isinstance(feature, list):
            return [raw(part) for part in feature]
        inner = getattr(feature, "feature", None)  # element type of a list
        return feature if inner is None else type(feature)(raw(inner))

    for name, feature in loaded.features.items():
        if (found := raw(feature)) != feature:
            loaded = loaded.cast_column(name, found)
    return loaded


def _hub_set(name: str, datasets: Any) -> Any:
    found, parts = dataset_name(name), name.removeprefix(DATASETS).split(":")
    is_folder = 2 <= len(parts) <= 3 and all(parts) and Path(parts[0]).exists()
    if found is None and not is_folder:
        example = f"{DATASETS}openai/gsm8k:main:train"
        raise DataError("data.prompts", name, DATASET_FORM, f"Example: {example}.")
    first, *config, split = parts
    if found is None:  # a folder with files in any format that datasets reads
        return datasets.load_dataset(first, *config, split=split)
    commit = commit_of("data.prompts", found)
    builder = datasets.load_dataset_builder(found.repository, *config, revision=commit)
    if builder.hash != commit:
        builder = _cached(found, commit, builder)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _cached(name: HubName, commit: str, other: Any) -> Any:
    """Returns the cached builder for this commit; DataError if there is none. `other` is the
    builder for the newest commit in the cache, which datasets (5.2) uses if it cannot read from the
    hub.
    """
    prepared = Path(other.cache_dir).parents[1]  # contains the folders VERSION/COMMIT
    folder = next(iter(sorted(prepared.glob(f"*/{commit}"))), None)
    if folder is None:
        remedy = "Run where the hub can be reached."
        found = f"no connection to the hub, and a cache ({prepared}) without commit {commit}"
        raise DataError(str(name), found, "the data set at that commit", remedy)
    return type(other)(
        repo_id=name.repository,
        dataset_name=name.repository.split("/")[-1],
        config_name=other.config.name,
        version=folder.parent.name,
        hash=commit,
    )
