"""Sources that are no JSONL files: parquet files, folders of `datasets`, data sets of the hub. No
torch; datasets is imported only where such a source is named.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.hub import DATASET_FORM, DATASETS, HubName, commit_of, dataset_name
from hybridrl.errors import DataError, said, short

_FOLDER_FILES = ("state.json", "dataset_dict.json")


def is_data_set(name: str) -> bool:
    """Whether a name in `data.prompts` is one of these; else it is a JSONL file."""
    is_folder = any(os.path.isfile(Path(name) / file) for file in _FOLDER_FILES)
    is_parquet = name.endswith(".parquet") and os.path.isfile(name)
    return is_parquet or name.startswith(DATASETS) or is_folder


def source_identity(name: str) -> str | None:
    """Returns what is equal for sources of equal rows: a digest of the bytes of a file, or of all
    files of a data set's folder, or a data set's commit; None where none is known.
    """
    found = dataset_name(name)
    if found is not None:
        return str(found) if found.is_commit else None
    path = Path(name.removeprefix(DATASETS).split(":")[0] if name.startswith(DATASETS) else name)
    if os.path.isdir(path) and not is_data_set(name):
        return None  # a mistake, which may have any number of files below it
    digest = hashlib.sha256()
    try:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            with file.open("rb") as content:
                part = hashlib.file_digest(content, "sha256").hexdigest()
            digest.update(f"{file.relative_to(path)}\0{part}\0".encode("utf-8", "surrogateescape"))
    except (OSError, ValueError):  # whoever reads the rows says what is wrong
        return None
    return digest.hexdigest() if files else None


def data_set_rows(name: str) -> Iterator[Mapping[str, object]]:
    """Yields the rows of a source, in its order.

    Raises:
        DataError: it cannot be read, or is empty.
    """
    num = 0
    for row in _parquet_rows(name) if name.endswith(".parquet") else _set_rows(name):
        num += 1
        yield row
    if not num:
        raise DataError(name, "no rows", "1 row or more", "Write the prompts first.")


def _parquet_rows(name: str) -> Iterator[Mapping[str, object]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(name) as file:
            num = 0
            for batch in file.iter_batches(batch_size=1024):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError, LookupError) as error:
                    raise _no_value(name, num, batch, error) from error
                num += len(rows)
                yield from rows
    except (ArrowException, OSError) as error:
        raise DataError(name, said(error, 120), "a parquet file", "Write it again.") from error


def _no_value(name: str, num_before: int, batch: Any, error: Exception) -> DataError:
    """Returns the error of the first value of a batch that Python cannot hold."""
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
    return DataError(place, column + said(error, 160), allowed, "Write that column again.")


def _set_rows(name: str) -> Iterator[Mapping[str, object]]:
    try:
        import datasets
    except ImportError as error:
        remedy = f"Run: pip install 'hybridrl[data]' ({error})."
        raise DataError("data.prompts", name, "such a source only with datasets", remedy) from error
    try:
        is_hub = name.startswith(DATASETS)
        loaded = _of_hub(name, datasets) if is_hub else datasets.load_from_disk(name)
    except DataError:
        raise
    except Exception as error:  # of many kinds, from the hub, the network and the files
        allowed = f"a folder of save_to_disk, or {DATASET_FORM}"
        raise DataError(name, said(error, 160), allowed, "Check the name.") from error
    if isinstance(loaded, dict):
        allowed = f"one split of it: {', '.join(f'{name}/{split}' for split in loaded)}"
        raise DataError(name, "a data set with splits", allowed, "Name one.")
    rows, num = iter(loaded), 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # whatever a column's decoder raises
            allowed = "rows that datasets can decode"
            got = f"{type(error).__name__}: {said(error, 160)}"
            raise DataError(f"{name}:{num + 1}", got, allowed, "Write the set again.") from error
        if row is None:
            return
        num += 1
        yield row


def _of_hub(name: str, datasets: Any) -> Any:
    found, parts = dataset_name(name), name.removeprefix(DATASETS).split(":")
    is_folder = 2 <= len(parts) <= 3 and all(parts) and Path(parts[0]).exists()
    if found is None and not is_folder:
        example = f"{DATASETS}openai/gsm8k:main:train"
        raise DataError("data.prompts", name, DATASET_FORM, f"As in {example}.")
    first, *config, split = parts
    if found is None:  # a folder of files, in any form that datasets reads
        return datasets.load_dataset(first, *config, split=split)
    commit = commit_of("data.prompts", found)
    builder = datasets.load_dataset_builder(found.repository, *config, revision=commit)
    if builder.hash != commit:
        builder = _cached(found, commit, builder)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _cached(name: HubName, commit: str, other: Any) -> Any:
    """Returns the builder of a data set that was prepared before, of this very commit.

    datasets (5.2) takes the newest that it has prepared, of any commit, when it cannot reach the
    hub or finds any other fault there.

    Args:
        name: of the hub.
        commit: whose rows are wanted.
        other: the builder of what datasets took.

    Raises:
        DataError: this commit was never prepared here.
    """
    prepared = Path(other.cache_dir).parents[1]  # of a configuration, by version and commit
    folder = next(iter(sorted(prepared.glob(f"*/{commit}"))), None)
    if folder is None:
        remedy = "Go on where the hub can be reached."
        found = f"a hub out of reach and a cache ({prepared}) without commit {commit}"
        raise DataError(str(name), found, "the data set at that commit", remedy)
    return type(other)(
        repo_id=name.repository,
        dataset_name=name.repository.split("/")[-1],
        config_name=other.config.name,
        version=folder.parent.name,
        hash=commit,
    )
