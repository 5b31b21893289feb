"""Writes and reads Megatron's sharded tensors with digests, and without unpickling untrusted code.

The files have Megatron's format `torch_dist`. Unlike Megatron, which starts processes and first
copies all that a rank writes to page-locked memory, threads of this process write tensors directly
from their memory. Digests are computed while writing and verified while reading. The index
`.metadata`, a pickle, is read by an unpickler that allows only the classes of an index.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hybridrl.checkpoint import torch_dist_format
from hybridrl.checkpoint.host_copies import HostCopies
from hybridrl.checkpoint.manifest import (
    DigestingFile,
    FileEntry,
    Manifest,
    Piece,
    damaged,
    open_for_reading,
    read_listed,
    read_piece,
    verify_piece,
)
from hybridrl.checkpoint.reading import in_threads
from hybridrl.checkpoint.tensor_files import (
    save_tensor,
    tensor_room,
    without_crc32,
    without_truncating,
)
from hybridrl.errors import CheckpointError
from hybridrl.parallel import progress
from hybridrl.parallel.groups import World

INDEX = ".metadata"
FILES_PER_RANK = 2  # same as in Megatron; each file has a thread
# Classes in the index of a sharded checkpoint, by module. No checkpoint writer produces an index
# with other classes.
INDEX_CLASSES = {
    "torch": {
        "Size",
        *(
            str(t).removeprefix("torch.")
            for t in vars(torch).values()
            if isinstance(t, torch.dtype)
        ),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "collections": {"OrderedDict"},
}

_Bucket = list[tuple[WriteItem, Any]]


def begin_sharded(
    state: ShardedStateDict,
    folder: Path,
    ranks: Sequence[int],
    world: World,
    copies: HostCopies | None = None,
    num_files: int = FILES_PER_RANK,
) -> BegunFiles:
    """Plans the files to which a state is written. Collective over the world.

    Args:
        state: State to write; empty on ranks that have no part of the state.
        ranks: Ranks that have a part of the state, in ascending order.
        copies: Host copies from which the files are written, so that the state may change in the
            meantime. If None, the files are written from the state itself.
        num_files: Maximum number of this rank's files, each with a thread; overwritten in place.
    """
    writer = _FileWriter(folder, copies, num_files)
    planned: list[Any] = []

    def plan(sharded: ShardedStateDict) -> None:
        named, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, True)
        planned[:], *_ = save_state_dict_async_plan(
            torch_dist.mcore_to_pyt_state_dict(named, False),
            writer,
            planner=torch_dist.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )

    own = state if ranks[0] == 0 else _with_plain_values(state, ranks[0], world)
    # Compare plain values only if all ranks have some.
    compares = len(ranks) == world.size
    writer.plain = torch_dist_format.save(own, plan, compares_plain_values=compares)
    if copies is not None:
        copies.finish()
    return BegunFiles(writer, tuple(planned))


class BegunFiles:
    """This rank's files for a state: planned, then written, then added to the index."""

    def __init__(self, writer: _FileWriter, planned: tuple[Any, ...]) -> None:
        self._writer, self._planned = writer, planned

    def write(self) -> None:
        """Writes the files. Not collective; may run in a thread."""
        self._writer.write()

    @property
    def names(self) -> list[str]:
        return self._writer.names

    def written(self) -> tuple[dict[str, FileEntry], Any]:
        """Returns this rank's manifest entries, by file, and data for `make_index`; or raises."""
        results = self._writer.retrieve_write_results()
        if isinstance(results, tuple):  # torch returns errors as tuples
            raise results[0]
        return self._writer.entries, results

    def make_index(self, results: Sequence[Any]) -> None:
        """Writes the index on rank 0 from all ranks' `written`, in place of `finish`."""
        self._writer.finish(self._planned[1], list(results))

    def finish(self) -> dict[str, FileEntry]:
        """Writes the index; returns manifest entries. Collective; may raise CheckpointException."""
        save_state_dict_async_finalize(*self._planned)
        return self._writer.entries


def _with_plain_values(state: ShardedStateDict, first: int, world: World) -> ShardedStateDict:
    """Returns the state; rank 0 without a part writes the plain values of `first`. Collective."""
    own = extract_sharded_base(state)[1] if world.rank == first else None
    plain = world.broadcast_object(own, first)
    return plain if world.rank == 0 else state


class ShardedReader:
    """Reads and verifies a part's tensors. Raises CheckpointError if the index is damaged."""

    def __init__(self, folder: Path, part: str, manifest: Manifest, num_threads: int) -> None:
        index = load_index(folder, part, manifest)
        self.keys = frozenset(index.state_dict_metadata)  # names of the tensors
        self._reader = _FileReader(folder, part, manifest, index, num_threads)

    def load(self, asked: ShardedStateDict) -> StateDict:
        """Loads tensors like Megatron's own reader (0.16.1, 0.19). Raises CheckpointError."""
        tensors = [x for x in nested_values(asked) if isinstance(x, ShardedTensor)]
        for tensor in tensors:
            if tensor.allow_shape_mismatch and self._reader.has_shape_of(tensor):
                # Megatron first zeroes tensors that allow a mismatch, because embeddings that are
                # padded for another layout may have rows that the files lack. Zeroing takes as long
                # as reading and is not needed here, because no rows are missing.
                tensor.allow_shape_mismatch = False
        named, flat, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(asked)
        state: dict[str, Any] = torch_dist.mcore_to_pyt_state_dict(named, True)
        planner = torch_dist.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[x for x in tensors if not x.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                x.key: x for x in tensors if x.allow_shape_mismatch
            },
        )
        checkpoint.load_state_dict(state, self._reader, planner=planner)
        loaded = {k: torch_dist._unwrap_pyt_sharded_tensor(v) for k, v in state.items()}
        loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        torch_dist._restore_dict_types(loaded, asked)
        return loaded


class _FileWriter(FileSystemWriter):
    """Replaces Megatron's FileSystemWriterAsync in a synchronous save."""

    can_run_decentralized_global_plan = True

    def __init__(
        self,
        folder: str | Path,
        copies: HostCopies | None = None,
        num_files: int = FILES_PER_RANK,
    ) -> None:
        super().__init__(folder)
        self.entries: dict[str, FileEntry] = {}
        self.plain: dict[str, bytes] = {}  # content of the files without tensors, by name
        self._copies, self._num_files = copies, num_files
        self._buckets: list[tuple[str, _Bucket]] = []
        self._results: Any = []

    @property
    def checkpoint_id(self) -> str:
        """Folder of the files. A string, because path classes are not allowed in the index."""
        return str(self.path)

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Prefixes the names of this rank's files with the rank."""
        prefix = _StoragePrefix(f"__{torch.distributed.get_rank()}_")
        return replace(local_plan, storage_data=prefix)

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Divides the plan's tensors among this rank's files."""
        for bucket in into_files(plan.items, self._num_files):
            content = [(item, self._resolved(item, planner)) for item in bucket]
            if content:
                name = f"{plan.storage_data.prefix}{len(self._buckets)}{DEFAULT_SUFFIX}"
                self._buckets.append((name, content))

    def _resolved(self, item: WriteItem, planner: SavePlanner) -> Any:
        data = planner.resolve_data(item)
        if self._copies is None or isinstance(data, io.BytesIO):
            return data
        return self._copies.take((self.checkpoint_id.rpartition("/")[2], item.index), data)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._buckets]

    def write(self) -> None:
        """Writes the files. Stores an error for `retrieve_write_results`."""
        with ThreadPoolExecutor(max(len(self._buckets), 1)) as pool:
            written = [pool.submit(self._write_file, *bucket) for bucket in self._buckets]
            written += [pool.submit(self._write_plain, *one) for one in self.plain.items()]
            failures = [error for done in written if (error := done.exception()) is not None]
        if failures:
            self._results = _wrap_exception(failures[0])
            return
        self._results = [result for done in written for result in done.result()]

    def _write_plain(self, name: str, content: bytes) -> list[WriteResult]:
        with open(os.path.join(self.path, name), "wb") as file:
            file.write(content)
        return []

    def _write_file(self, name: str, content: _Bucket) -> list[WriteResult]:
        results = []
        path = os.path.join(self.path, name)
        with without_crc32, open(path, "wb", buffering=0, opener=without_truncating) as stream:
            file = DigestingFile(stream)
            while content:  # pop, to free each tensor after it is written
                item, data = content.pop(0)
                if item.type == WriteItemType.BYTE_IO:
                    file.write(data.getbuffer())
                else:
                    save_tensor(data, file)
                piece = file.end_piece()
                place = _StorageInfo(name, piece.offset, piece.length)
                results.append(WriteResult(item.index, piece.length, place))
                progress.advance()
            stream.truncate()  # an overwritten file may have been longer
            os.fsync(stream.fileno())
        self.entries[name] = file.entry()
        return results

    def retrieve_write_results(self) -> Any:
        """Returns the results, or the error that stopped writing, as torch expects them."""
        return self._results


class _FileReader(FileSystemReader):
    def __init__(
        self, folder: Path, part: str, manifest: Manifest, index: Metadata, num_threads: int
    ) -> None:
        super().__init__(folder / part)
        self._num_threads = num_threads
        self._folder, self._part, self._manifest, self._index = folder, part, manifest, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def has_shape_of(self, tensor: ShardedTensor) -> bool:
        """Whether the files have a tensor with the requested global shape."""
        found = self._index.state_dict_metadata.get(tensor.key)
        return isinstance(found, TensorStorageMetadata) and found.size == tensor.global_shape

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads each requested tensor once, in several threads and in the order of the files."""
        asked: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            place: _StorageInfo = self.storage_data[item.storage_index]
            asked.setdefault((place.relative_path, place.offset), []).append(item)
        reads = [partial(self._read, asked[key], planner) for key in sorted(asked)]
        _wait_for_device()  # waits for this thread's earlier work on its own stream
        in_threads(reads, self._num_threads)
        _wait_for_device()
        found: Future[None] = Future()
        found.set_result(None)
        return found

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        place: _StorageInfo = self.storage_data[items[0].storage_index]
        file = self._folder / self._part / place.relative_path
        entry = self._manifest.files.get(f"{self._part}/{place.relative_path}")
        if entry is None:
            raise damaged(file, f"a file that {INDEX} names", "a file that the manifest lists")
        piece = next((piece for piece in entry.pieces if piece.offset == place.offset), None)
        if self._manifest.has_digests and (piece is None or piece.length != place.length):
            what = f"a tensor of {place.length} bytes at byte {place.offset}, as {INDEX} says"
            raise damaged(file, what, "a byte range that the manifest lists")
        if any(item.type != LoadItemType.TENSOR for item in items):
            raise damaged(file, "an object that is not a tensor", "tensors")
        targets = [planner.resolve_tensor(item).detach() for item in items]
        with open_for_reading(file) as handle, _current(targets[0].device):
            part = self._slice_file(handle, place)
            whole = _read_tensor(file, handle, part, place, piece, targets[0])
        for item, target in zip(items, targets, strict=True):
            bounds = zip(item.storage_offsets, item.lengths, strict=True)
            taken = whole[tuple(slice(start, start + length) for start, length in bounds)]
            if target.shape != taken.shape:
                raise damaged(file, f"a tensor of shape {tuple(taken.shape)}", f"{target.shape}")
            if taken.data_ptr() != target.data_ptr():
                target.copy_(taken)
            planner.commit_tensor(item, target)


def into_files(items: Sequence[WriteItem], num_files: int) -> list[list[WriteItem]]:
    """Divides a plan's items among files: the largest tensors first, each to the smallest file."""
    files: list[list[WriteItem]] = [[] for _ in range(num_files)]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for number, item in enumerate(item for item in items if item.type == WriteItemType.BYTE_IO):
        files[number % num_files].append(item)
    sizes = [0] * num_files
    for item in sorted(tensors, key=_num_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        files[smallest].append(item)
        sizes[smallest] += _num_bytes(item)
    return files


def _num_bytes(item: WriteItem) -> int:
    written = item.tensor_data
    assert written is not None  # only BYTE_IO items have none
    return written.chunk.sizes.numel() * written.properties.dtype.itemsize


def _wait_for_device() -> None:
    """Waits until the GPU has finished the work from all threads, which use separate streams."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Selects a tensor's GPU for this thread, because new threads start with GPU 0 selected."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _read_tensor(
    file: Path,
    handle: BinaryIO,
    part: Any,
    place: _StorageInfo,
    piece: Piece | None,
    target: torch.Tensor,
) -> torch.Tensor:
    """Reads and verifies one tensor of a sharded file.

    If torch reports the offset of the data, they are read only once: directly to a `target` on the
    host, or through a small host buffer to a GPU. Shape and dtype must match. `part` is a view of
    the file with only this tensor; `place` and `piece` are its byte range in torch.save's format,
    and its digest, if any.
    """
    try:
        described = torch.load(part, map_location="meta", weights_only=True)
    except Exception as error:  # damaged bytes make torch.load raise errors of almost any type
        if piece is not None:
            verify_piece(file, handle, piece)
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise damaged(file, f"no tensor at byte {place.offset}: {first}", "a tensor") from None
    begin = getattr(described.untyped_storage(), "_checkpoint_offset", None)  # since torch 2.7
    is_plain = described.is_contiguous() and described.storage_offset() == 0
    if begin is None or not is_plain or not described.numel():
        if piece is not None:
            verify_piece(file, handle, piece)
        part.seek(0)
        found: torch.Tensor = torch.load(part, map_location="cpu", weights_only=True)
        return found
    is_same = (target.shape, target.dtype) == (described.shape, described.dtype)
    is_same = is_same and target.is_contiguous()
    whole = target if is_same else torch.empty_like(described, device="cpu")
    part_bytes = range(begin, begin + whole.nbytes)
    read_piece(file, handle, place.offset, place.length, part_bytes, tensor_room(whole), piece)
    return whole


def load_index(folder: Path, part: str, manifest: Manifest) -> Metadata:
    """Reads and verifies an index without running code in it; CheckpointError if it is damaged."""
    content = read_listed(folder, f"{part}/{INDEX}", manifest)
    file = folder / part / INDEX
    try:
        found = _IndexUnpickler(io.BytesIO(content)).load()
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes make unpickling raise errors of almost any type
        raise damaged(file, f"{type(error).__name__}: {error}", "an index") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise damaged(file, type(found).__name__, "an index")
    if any(
        os.path.basename(p.relative_path) != p.relative_path for p in found.storage_data.values()
    ):
        raise damaged(file, "a path outside the folder", "names of files in the same folder")
    return found


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns a class if an index may contain it. Raises an error for any other name."""
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name not in INDEX_CLASSES.get(module, ()):
            raise CheckpointError(
                INDEX,
                f"a pickle that names {module}.{name}",
                "only classes that an index of sharded tensors needs",
                "Unpickling it could run arbitrary code. Use checkpoints that hybridrl or Megatron "
                "wrote.",
            )
        return super().find_class(module, name)


def enum_member(of: Any, name: str) -> Any:
    """Returns a member of an enum, which Python 3.11.0 to 3.11.3 pickle as a getattr call."""
    return of.__members__[name]


def first_failure(error: CheckpointException) -> BaseException:
    """Returns the lowest rank's error of those that torch collected, CheckpointErrors first."""
    met = [failure for failure, _ in (error.failures[rank] for rank in sorted(error.failures))]
    return next((one for one in met if isinstance(one, CheckpointError)), met[0] if met else error)
