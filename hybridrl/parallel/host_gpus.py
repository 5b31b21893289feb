"""Detects the GPUs of this host without importing torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class LocalGpu:
    """A GPU's name, and how many bytes CUDA can allocate on it."""

    name: str
    memory_bytes: int


class Host(NamedTuple):
    """The GPUs of this host: the one with the least memory, and all names; each None if unknown."""

    num_gpus: int = 0
    gpu: LocalGpu | None = None
    names: tuple[str, ...] | None = None


def num_local_gpus() -> int:
    """Returns the number of GPUs that the installed torch can use on this host."""
    if not _torch_has_cuda():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def local_host() -> Host:
    """Returns the GPUs of this host that torch can use, as reported by nvidia-smi."""
    return Host(num_local_gpus(), smallest_local_gpu(), local_gpu_names())


def smallest_local_gpu() -> LocalGpu | None:
    """Returns the GPU with the least memory among those that torch can use; None if unknown."""
    if num_local_gpus() == 0:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else _split(visible)
    found = []
    for index, uuid, name, *mib in _listed():
        is_visible = wanted is None or any(_is(device, index, uuid) for device in wanted)
        if is_visible and all(size.isdecimal() for size in mib):
            total, reserved = map(int, mib)
            found.append(LocalGpu(name, (total - reserved) << 20))
    return min(found, key=lambda gpu: gpu.memory_bytes, default=None)


def local_gpu_names() -> tuple[str, ...] | None:
    """Returns the names of the GPUs that torch can use, in torch's order; None if unknown.

    nvidia-smi numbers GPUs by their PCI bus. CUDA does the same if CUDA_DEVICE_ORDER=PCI_BUS_ID;
    otherwise it numbers the fastest GPU first. Without that setting, if the GPU models differ, the
    order is known only if CUDA_VISIBLE_DEVICES lists UUIDs.
    """
    if num_local_gpus() == 0:
        return None
    listed = [(index, uuid, name) for index, uuid, name, *_ in _listed()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [index for index, _, _ in listed] if visible is None else _split(visible)
    has_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    are_alike = len({name for _, _, name in listed}) == 1
    found: list[str] = []
    for device in wanted:
        names = {name for index, uuid, name in listed if _is(device, index, uuid)}
        if len(names) != 1 or not (has_order or are_alike or device.startswith("GPU-")):
            return None
        found += names
    return tuple(found) or None


def queried(*keys: str) -> list[list[str]]:
    """Returns nvidia-smi's values (--query-gpu) of each GPU on this host; [] if it fails."""
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in output.splitlines()]


def _listed() -> list[list[str]]:
    return queried("index", "uuid", "name", "memory.total", "memory.reserved")


def _split(visible: str) -> list[str]:
    return [device.strip() for device in visible.split(",")]


def _is(device: str, index: str, uuid: str) -> bool:
    return device == index or (device.startswith("GPU-") and uuid.startswith(device))


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    values: dict[str, object] = {}
    if version_file.is_file():
        exec(compile(version_file.read_text(), str(version_file), "exec"), values)
    return values.get("cuda") is not None
