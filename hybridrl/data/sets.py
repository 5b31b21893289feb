"""Sources that are no JSONL files: parquet files, folders of `datasets`, data sets of the hub. No
torch; pyarrow and datasets are imported only where such a source is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import DataError

HUB = "datasets:"
_FOLDER_FILES = ("state.json", "dataset_dict.json")


def is_data_set(name: str) -> bool:
    """Whether a name in `data.prompts` is one of these; else it is a JSONL file."""
    is_folder = any((Path(name) / file).is_file() for file in _FOLDER_FILES)
    is_parquet = name.endswith(".parquet") and Path(name).is_file()
    return is_parquet or name.startswith(HUB) or is_folder


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
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise _not_installed(name, "pyarrow", error) from error
    try:
        with parquet.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        shown = str(error).splitlines()[0][:120]
        raise DataError(name, shown, "a parquet file", "Write it again.") from error


def _set_rows(name: str) -> Iterator[Mapping[str, object]]:
    try:
        import datasets
    except ImportError as error:
        raise _not_installed(name, "datasets", error) from error
    try:
        is_hub = name.startswith(HUB)
        loaded = _of_hub(name, datasets) if is_hub else datasets.load_from_disk(name)
    except DataError:
        raise
    except Exception as error:  # of many kinds, from the hub, the network and the files
        shown = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        allowed = f"a folder of save_to_disk, or {HUB}NAME[:CONFIG]:SPLIT"
        raise DataError(name, shown, allowed, "Check the name.") from error
    if isinstance(loaded, dict):
        allowed = f"one split of it: {', '.join(f'{name}/{split}' for split in loaded)}"
        raise DataError(name, "a data set with splits", allowed, "Name one.")
    yield from loaded


def _of_hub(name: str, datasets: Any) -> Any:
    parts = name.removeprefix(HUB).split(":")
    if not 2 <= len(parts) <= 3 or not all(parts):
        example = f"{HUB}openai/gsm8k:main:train"
        raise DataError("data.prompts", name, f"{HUB}NAME[:CONFIG]:SPLIT", f"As in {example}.")
    config = parts[1] if len(parts) == 3 else None
    return datasets.load_dataset(parts[0], config, split=parts[-1])


def _not_installed(name: str, package: str, error: ImportError) -> DataError:
    remedy = f"Run: pip install 'hybridrl[data]' ({error})."
    return DataError("data.prompts", name, f"such a source only with {package}", remedy)
