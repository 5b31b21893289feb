"""Compares what is written here with the library that could stand in its place (docs/adr/0008).

* An HF directory: `HfWriter`, one tensor in hand, beside safetensors' `save_file`, a shard in hand.
* A remote scorer: `Remote`, a thread and a connection an attempt, beside an aiohttp session in an
  event loop of its own, which keeps connections.

Each repeat is a process of its own, the two ways in turn; what is written is read back, and every
answer looked at, before a time counts.

    python benchmarks/bench_libraries.py --folder /dev/shm --out /tmp/libraries.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from case_record import commit

NUM_TENSORS, SIDE = 32, 2048  # 8 MiB each in bfloat16
SHARD_BYTES = 128 << 20
REQUESTS, THREADS = 1000, 32
SAMPLE: tuple[str, str, dict[str, Any]] = "prompt " * 20, "response " * 100, {}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def write(way: str, folder: str) -> dict[str, float]:
    """Writes an HF directory of random weights; returns seconds and the most that it took."""
    import torch
    from safetensors.torch import load_file, save_file

    from hybridrl.models.hf.shards import HfWriter

    drawn = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).bfloat16()
    shapes = {f"model.layers.{i}.weight": tuple(drawn.shape) for i in range(NUM_TENSORS)}
    out = Path(tempfile.mkdtemp(dir=folder)) / "hf"

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, drawn + i) for i, name in enumerate(shapes))

    def with_library() -> None:
        out.mkdir()
        shard: dict[str, torch.Tensor] = {}
        for name, tensor in gathered():
            shard[name] = tensor
            if len(shard) * drawn.nbytes == SHARD_BYTES:
                save_file(shard, out / f"{name}.safetensors", {"format": "pt"})
                shard = {}
        for file in out.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())

    def with_headers() -> None:
        options = {"max_shard_bytes": SHARD_BYTES}
        with HfWriter(out, shapes, torch.bfloat16, {"model_type": "llama"}, **options) as writer:
            for name, tensor in gathered():
                writer.write(name, tensor)

    before, start = peak_bytes(), time.perf_counter()
    {"ours": with_headers, "library": with_library}[way]()
    seconds, more = time.perf_counter() - start, peak_bytes() - before
    found = {k: t for file in out.glob("*.safetensors") for k, t in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in gathered())
    shutil.rmtree(out.parent)
    return {"seconds": seconds, "peak_mib": more / 2**20}


class _Scorer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"reward": len(asked["response"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def asker(way: str, url: str) -> Callable[[int], float]:
    if way == "ours":
        from hybridrl.rewards.remote import Remote

        remote = Remote(url)
        return lambda _: remote(*SAMPLE)
    import aiohttp

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def opened() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0))

    session = asyncio.run_coroutine_threadsafe(opened(), loop).result()
    names = "prompt", "response", "columns"

    async def post() -> float:
        async with session.post(url, json=dict(zip(names, SAMPLE, strict=True))) as answer:
            return float((await answer.json(content_type=None))["reward"])

    return lambda _: asyncio.run_coroutine_threadsafe(post(), loop).result()


def ask(way: str, url: str) -> dict[str, float]:
    """Asks for many scores, some at a time; returns seconds and the processor's."""
    began = time.perf_counter()
    one = asker(way, url)
    start, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(one, range(REQUESTS)))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    assert found == [float(len(SAMPLE[1]))] * REQUESTS
    return {"seconds": seconds, "processor_s": used, "start_s": start - began}


def repeated(part: str, where: str, repeats: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {"ours": {}, "library": {}}
    for number in range(repeats + 1):
        for way, of_way in found.items():
            command = [sys.executable, __file__, "--one", part, way, where]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for key, value in json.loads(output.splitlines()[-1]).items():
                if number:  # the first warms up
                    of_way.setdefault(key, []).append(value)
    return found


def summary(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("/dev/stdout"))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        part, way, where = given.one
        print(json.dumps({"write": write, "ask": ask}[part](way, where)), flush=True)
        os._exit(0)  # with connections open
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Scorer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parts = {"write": given.folder, "ask": f"http://127.0.0.1:{server.server_port}/"}
    result = {
        "commit": commit(),
        "machine": {"processors": os.cpu_count(), "python": platform.python_version()},
        "repeats": given.repeats,
        "write_mib": NUM_TENSORS * SIDE * SIDE * 2 >> 20,
        "shard_mib": SHARD_BYTES >> 20,
        "requests": REQUESTS,
        **{
            part: {
                way: {key: summary(values) for key, values in of_way.items()}
                for way, of_way in repeated(part, where, given.repeats).items()
            }
            for part, where in parts.items()
        },
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
