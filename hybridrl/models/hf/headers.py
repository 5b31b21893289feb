"""Reads safetensors headers in an HF directory: names, shapes and types of its tensors.

Reads only headers, so that the command line can reject a bad directory before any rank starts. No
torch.
"""

from __future__ import annotations

import json
import mmap
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from hybridrl.config.files import FETCH_AGAIN, plain, read_json_object, regular_file_bytes, shown
from hybridrl.config.wrapped_models import SHORT_VISUAL, WRAPPED_PREFIX, text_name
from hybridrl.errors import MISSING, CheckpointError
from hybridrl.models.boxes import Shape
from hybridrl.models.hf.directory import CONFIG_FILE
from hybridrl.models.hf.expert_files import StackPlace, expert_stacks, transposed
from hybridrl.models.hf.passed_over import passed_over
from hybridrl.models.hf.stored_slices import stored_shapes
from hybridrl.models.weights import VALUE_HEAD

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Weight formats that hybridrl cannot read; the first one found is reported.
OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth")
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Suffixes of the two tensors that store a tensor in MXFP4 (mxfp4.py), safetensors' type of both,
# and the type in which their numbers are read.
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4_TYPE, MXFP4_READ_AS = "U8", "bfloat16"
BLOCK_SIZE, BLOCK_BYTES = 32, 16  # numbers in a block, and their bytes
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.safetensors")
# Rotary buffers in old checkpoints; and a vocabulary head that is not used, because the embeddings
# are tied or the model has a value head.
NOT_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|^lm_head\.weight$")
LM_HEAD, HF_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPARED_BYTES = 64 << 20  # number of bytes to compare at a time


@contextmanager
def open_shard(file: Path, framework: Literal["pt", "numpy"]) -> Iterator[Any]:
    """Opens a safetensors file in a context; CheckpointError if it is missing or damaged."""
    if file.exists():
        regular_file_bytes(file, CheckpointError, "a safetensors file")
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except FileNotFoundError as error:
        raise CheckpointError(
            str(file), MISSING, "a safetensors file", "Fetch the missing file."
        ) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(file),
            f"a damaged file ({' '.join(str(error).split())[:160]})",
            "a complete safetensors file",
            "Fetch or export the file again.",
        ) from error


class HfHeaders:
    """Names, shapes and types of the tensors in an HF directory.

    Attributes:
        shapes, dtype_names, files: Shape, torch's name of the data type, and file of each tensor,
            by tensor name.
        stored_names: Original names of tensors that have another name in a model's weight table:
            those of a multimodal model's text part, and those that `check` has renamed.
        quantized: Names of tensors that are stored in MXFP4. Their shapes and types are those of
            the dequantized tensors in the layout of files in 16 bits.
        in_stacks: Place of each expert's matrix that the files contain in a stack; set by `check`.

    Raises CheckpointError for missing weights, damaged shards and wrong indexes.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.shapes: dict[str, Shape] = {}
        self.dtype_names: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        self.stored_names: dict[str, str] = {}
        self.quantized: set[str] = set()
        self.in_stacks: dict[str, StackPlace] = {}
        index = self._index()
        for file in sorted(set(index.values())) if index is not None else [SINGLE_FILE]:
            self._read_header(self.directory / file)
        for name, file in (index or {}).items():
            if self.files.get(name) != self.directory / file:
                raise CheckpointError(
                    f"tensor {plain(name, 160)}",
                    f"no entry in {self.directory / file}",
                    f"the tensor, according to {INDEX_FILE}",
                    "Fetch or export the model again.",
                )
        wrapped = [name for name in self.files if name.startswith(WRAPPED_PREFIX)]
        # Without such names, a tower with a short prefix is part of the model (Qwen2.5-VL).
        towers = [] if wrapped else [n for n in self.files if n.startswith(SHORT_VISUAL)]
        for stored in (*wrapped, *towers):
            self._rename(stored, text_name(stored))
        self._join_quantized()

    def _rename(self, stored: str, name: str) -> None:
        if name in self.shapes:
            raise self._error(name, f"two tensors, also {stored}", "one tensor")
        self.stored_names[name] = stored
        self.shapes[name] = self.shapes.pop(stored)
        self.dtype_names[name] = self.dtype_names.pop(stored)
        self.files[name] = self.files.pop(stored)

    def check(self, shapes: Mapping[str, Shape], missing_ok: Collection[str] = ()) -> None:
        """Raises CheckpointError unless the directory contains exactly the tensors in `shapes`.

        Tensors of a weight table that are slices (stored_slices.py) are compared as stored.

        Rotary buffers and the tensors that training passes over (passed_over.py) are ignored.
        `lm_head.weight` is also ignored in value models and with tied embeddings; with tied
        embeddings, it must equal the embedding. If `score.weight` is missing, the only unknown
        tensor with the value head's shape is used as value head, whatever its name.

        The experts of a layer may be one tensor, as in the directories of Qwen3.5 on the hub.
        """
        shapes = stored_shapes(shapes)
        self._divide_stacks(shapes)
        if VALUE_HEAD in shapes and VALUE_HEAD not in self.shapes:
            self._find_value_head(shapes)
        for name, shape in shapes.items():
            if name not in self.shapes and name not in missing_ok:
                raise self._error(name, MISSING, f"a tensor of shape {shape}")
            if name in self.shapes and self.shapes[name] != shape:
                raise self._error(name, f"shape {self.shapes[name]}", f"shape {shape}")
        ignored = set(passed_over(self.shapes, shapes))
        for name in self.shapes:
            if name not in shapes and not NOT_WEIGHTS.search(name) and name not in ignored:
                raise self._error(name, f"shape {self.shapes[name]}", "no tensor with this name")
        is_tied = LM_HEAD not in shapes and VALUE_HEAD not in shapes and HF_EMBEDDING in shapes
        if is_tied and LM_HEAD in self.shapes and not self._are_equal(LM_HEAD, HF_EMBEDDING):
            raise CheckpointError(
                f"{LM_HEAD} in {self.directory}",
                f"numbers that differ from {HF_EMBEDDING}",
                f"equal numbers, or no {LM_HEAD}, if tie_word_embeddings is true",
                f"Set tie_word_embeddings to false in {CONFIG_FILE} to keep this head, as "
                f"transformers does; or remove {LM_HEAD} from the files to use the embedding.",
            )

    def _are_equal(self, one: str, other: str) -> bool:
        if self.shapes[one] != self.shapes[other]:
            return False
        if self.dtype_names[one] != self.dtype_names[other]:
            return False  # no known model stores equal numbers in two data types
        views = [self._bytes_of(name) for name in (one, other)]
        return all(
            # Comparing bytes is fast; memoryviews would be compared element by element.
            bytes(views[0][at : at + COMPARED_BYTES]) == bytes(views[1][at : at + COMPARED_BYTES])
            for at in range(0, len(views[0]), COMPARED_BYTES)
        )

    def _bytes_of(self, name: str) -> memoryview:
        """Returns a tensor's bytes, memory-mapped, because safetensors has no NumPy bfloat16."""
        file = self.files[name]
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            stored = self.stored_names.get(name, name)
            start, end = json.loads(opened.read(size))[stored]["data_offsets"]
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(mapped)[8 + size + start : 8 + size + end]

    def _find_value_head(self, shapes: Mapping[str, Shape]) -> None:
        """Renames the only unknown tensor with the value head's shape to `score.weight`."""
        ignored = set(passed_over(self.shapes, shapes))
        found = [
            name
            for name, shape in self.shapes.items()
            if name not in shapes and name not in ignored and shape == shapes[VALUE_HEAD]
        ]
        if len(found) > 1:
            named = ", ".join(plain(name, 80) for name in found[:8])
            allowed = f"a tensor with this name, because several tensors have its shape: {named}"
            raise self._error(VALUE_HEAD, MISSING, allowed)
        if found:
            self._rename(found[0], VALUE_HEAD)

    def _index(self) -> dict[str, str] | None:
        """Returns the file of each tensor; None if a single file contains all tensors."""
        single = self.directory / SINGLE_FILE
        if single.exists() or single.is_symlink():
            return None
        file = self.directory / INDEX_FILE
        if not (file.exists() or file.is_symlink()):
            found, remedy = _other_weights(self.directory)
            allowed = f"{SINGLE_FILE} or {INDEX_FILE} with its shards"
            raise CheckpointError(str(self.directory), found, allowed, remedy)
        try:
            weight_map = read_json_object(file, CheckpointError).get("weight_map")
        except CheckpointError as error:
            raise CheckpointError(
                error.name, f"unreadable ({error.value})", "JSON with a weight_map", FETCH_AGAIN
            ) from None
        if not isinstance(weight_map, dict) or not weight_map:
            what = MISSING if weight_map is None else shown(weight_map)
            allowed = "JSON with a weight_map of tensors and their files"
            found = f"unreadable (weight_map is {what})"
            raise CheckpointError(str(file), found, allowed, FETCH_AGAIN)
        for name, shard in weight_map.items():
            # The index must not name files outside of the directory. The files themselves may be
            # links, as in the hub's cache.
            if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
                raise CheckpointError(
                    f"{file}: weight_map: {shown(name)}",
                    shown(shard),
                    "the name of a safetensors file in the same directory",
                    FETCH_AGAIN,
                )
        return weight_map

    def _read_header(self, file: Path) -> None:
        with open_shard(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - a safe_open is not iterable
                part = opened.get_slice(name)
                if name in self.files:
                    where = f"both {self.files[name].name} and {file.name}"
                    raise self._error(name, where, "a tensor in one file")
                self.files[name] = file
                self.shapes[name] = tuple(part.get_shape())
                dtype = part.get_dtype()
                if dtype == MXFP4_TYPE and name.endswith((BLOCKS, SCALES)):
                    self.dtype_names[name] = MXFP4_TYPE
                    continue
                if dtype not in TORCH_NAMES:
                    raise self._error(name, dtype, ", ".join(TORCH_NAMES))
                self.dtype_names[name] = TORCH_NAMES[dtype]

    def _divide_stacks(self, shapes: Mapping[str, Shape]) -> None:
        missing = {name: shape for name, shape in shapes.items() if name not in self.shapes}
        places, stacks = expert_stacks(
            missing, lambda stack, plain: self.shapes.get(stack) == transposed(plain) != plain
        )
        for stack, expected in stacks.items():
            if self.shapes.get(stack, expected) != expected:
                raise self._error(stack, f"shape {self.shapes[stack]}", f"shape {expected}")
        for name, place in places.items():
            if place.stack in self.files:
                self.in_stacks[name], self.shapes[name] = place, shapes[name]
                self.dtype_names[name] = self.dtype_names[place.stack]
                self.files[name] = self.files[place.stack]
        for stack in stacks:
            self.shapes.pop(stack, None)

    def _join_quantized(self) -> None:
        """Replaces each pair of blocks and scales by the tensor that they store."""
        packed = [name for name, dtype in self.dtype_names.items() if dtype == MXFP4_TYPE]
        for name in packed:
            stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
            blocks, scales = (self.shapes.get(f"{stem}{end}", ()) for end in (BLOCKS, SCALES))
            if blocks != (*scales, BLOCK_BYTES) or len(scales) != 3:
                allowed = f"(E, rows, n, {BLOCK_BYTES}), with scales (E, rows, n), not {scales}"
                raise self._error(f"{stem}{BLOCKS}", f"shape {blocks}", allowed)
            num_experts, num_rows, num_blocks = scales
            self.shapes[stem] = (num_experts, BLOCK_SIZE * num_blocks, num_rows)
            self.dtype_names[stem] = MXFP4_READ_AS
            self.quantized.add(stem)
        for name in packed:
            del self.shapes[name], self.dtype_names[name]
        for stem in self.quantized:
            self.files[stem] = self.files[f"{stem}{BLOCKS}"]

    def _error(self, name: str, found: str, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {plain(name, 160)} in {self.directory}",
            found,
            allowed,
            "The weights do not match this config.json and family. Check that they belong to the "
            "same model.",
        )


def _other_weights(directory: Path) -> tuple[str, str]:
    files = sorted(file for end in OTHER_WEIGHTS for file in directory.glob(f"*{end}"))
    if not files:
        return "no weights", "Point model.path at an HF directory with safetensors weights."
    begin = f'import transformers as t; d = {shown(str(directory), 999)}; o = d + "-safetensors"; '
    given, dtype, model = "d", ', dtype="auto"', "m"
    if files[0].suffix == ".gguf":
        # transformers cannot save a model that was loaded from GGUF, so its weights are copied to a
        # new model.
        given += f", gguf_file={shown(files[0].name, 999)}"
        model = "n"
    copy = (
        'c = m.config; c.__dict__.pop("quantization_config", None); '
        "n = t.AutoModelForCausalLM.from_config(c, dtype=m.dtype); "
        "n.load_state_dict(m.state_dict()); "
    )
    command = (
        f"{begin}m = t.AutoModelForCausalLM.from_pretrained({given}{dtype}); "
        f"{copy if model == 'n' else ''}{model}.save_pretrained(o); "
        f"t.AutoTokenizer.from_pretrained({given}).save_pretrained(o)"
    )
    return f"weights in {shown(files[0].name)}", f"Convert them: python -c {shlex.quote(command)}"
