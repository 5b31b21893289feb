"""Measures saving and loading of a checkpoint, and what digests cost in it.

One rank saves and loads weights and optimizer state of a model with random weights. Three ways take
turns: `digests`, as hybridrl does it; `no_digests`, which computes and verifies none; `crc32`,
without digests but with torch's CRC32 of each tensor, which is torch.save's default and which
nothing verifies. Before any time counts, a flipped bit must be found.

    python benchmarks/bench_checkpoint.py --hidden 1024 --layers 8

Exit code 1 where digests take more than 3 percent of saving or of loading.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from case_record import commit

from hybridrl.checkpoint import manifest, sharded_files
from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.model_state import load_model
from hybridrl.checkpoint.writing import write_checkpoint
from hybridrl.config.schema import TrainConfig
from hybridrl.errors import CheckpointError
from hybridrl.models.family import resolve_family
from hybridrl.models.init import init_weights
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

LIMIT = 0.03
QWEN2 = Path(__file__).parent / "models" / "qwen2.5-0.5b.json"


class NoDigest:
    """Stands in for XXH3 and computes nothing."""

    def __init__(self, content: Any = b"") -> None: ...

    def update(self, content: Any) -> None:
        """Takes nothing in."""

    def hexdigest(self) -> str:
        """Returns the same for all."""
        return "0" * 16


@contextmanager
def way(name: str) -> Iterator[None]:
    """Saves and loads in one of the three ways."""
    checksums = patch.object(torch.serialization, "set_crc32_options", lambda compute: None)
    if name == "digests":
        yield
        return
    with (
        patch.object(manifest, "xxhash", SimpleNamespace(xxh3_64=NoDigest)),
        patch.object(sharded_files, "verify_piece", lambda *args: None),
        checksums if name == "crc32" else nullcontext(),
    ):
        yield


def make_model(mesh: Mesh, hidden: int, layers: int) -> ParallelModel:
    """Builds a trainable model with an optimizer state."""
    config = json.loads(QWEN2.read_text())
    heads = max(hidden // 64, 2)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    config |= {**sizes, "num_key_value_heads": 2, "intermediate_size": 4 * hidden}
    family = resolve_family(None, config)
    dtype = mesh.platform.default_dtype()
    source = ModelSource(family, config, dtype, family.name, QWEN2.parent)
    model = ParallelModel(mesh, source, "lm", TrainConfig())
    init_weights(model.layout(), hf_shapes(family, source.shape), model.weights(), config, 0)
    model.make_trainable(1e-3)
    return model


def check(model: ParallelModel, mesh: Mesh, folder: Path) -> None:
    """Raises unless a flipped bit is found."""
    write_checkpoint(folder, mesh.world, {"policy": model}, {}, model.source.files)
    file = folder / "policy" / "__0_0.distcp"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    try:
        load_model(Checkpoint.open(folder), "policy", model, mesh.world, lambda text: None)
    except CheckpointError:
        shutil.rmtree(folder)
        return
    raise SystemExit("a flipped bit was not found: digests that verify nothing are not timed")


def measure(model: ParallelModel, mesh: Mesh, root: Path, repeats: int) -> dict[str, Any]:
    """Returns seconds of saving and loading by way, which take turns."""
    times: dict[str, dict[str, list[float]]] = {
        name: {"save": [], "load": []} for name in ("digests", "no_digests", "crc32")
    }
    for number in range(repeats + 1):
        for name, found in times.items():
            folder = root / f"{name}_{number}"
            with way(name):
                began = time.perf_counter()
                write_checkpoint(folder, mesh.world, {"policy": model}, {}, model.source.files)
                saved = time.perf_counter()
                load_model(Checkpoint.open(folder), "policy", model, mesh.world)
                loaded = time.perf_counter()
            shutil.rmtree(folder)
            if number:  # the first of each warms up
                found["save"].append(saved - began)
                found["load"].append(loaded - saved)
            print(f"{name} {number}/{repeats}: {saved - began:.2f} s, {loaded - saved:.2f} s")
    return times


def hash_rates() -> dict[str, float]:
    """Returns GB/s of XXH3 over blocks that a copy has just touched, and over memory."""
    content = memoryview(bytearray(256 << 20))
    rates = {}
    for name, stride in (("in_cache", 0), ("from_memory", 1)):
        began, digest = time.perf_counter(), xxhash.xxh3_64()
        for start in range(0, len(content), manifest.READ_BYTES):
            first = start * stride
            digest.update(content[first : first + manifest.READ_BYTES])
        rates[name] = round(len(content) / 1e9 / (time.perf_counter() - began), 2)
    return rates


def main() -> int:
    """Measures, writes the result, prints it, and judges the share."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    args = parser.parse_args()
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 600)
    mesh = Mesh(World(platform, 600), TrainLayout(1))
    platform.seed(0)
    model = make_model(mesh, args.hidden, args.layers)
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        check(model, mesh, Path(root) / "checked")
        size = sum(entry.nbytes for entry in model.weights().values())
        times = measure(model, mesh, Path(root), args.repeats)
    stop_process_group()
    shares = {}
    for what in ("save", "load"):
        pairs = zip(times["digests"][what], times["no_digests"][what], strict=True)
        costs = [1 - without / with_digests for with_digests, without in pairs]
        shares[what] = round(statistics.median(costs), 4)
    result = {
        "benchmark": "checkpoint",
        "commit": commit(),
        "machine": {
            "processor": host.processor() or host.machine(),
            "device": "cpu" if platform.is_cpu else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "xxhash": xxhash.VERSION,
        },
        "weights_bytes": size,
        "repeats": args.repeats,
        "xxh3_gb_per_s": hash_rates(),
        "seconds": {
            name: {what: round(statistics.median(v), 4) for what, v in found.items()}
            for name, found in times.items()
        },
        "share_of_digests": shares,
        "limit": LIMIT,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(max(shares.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
