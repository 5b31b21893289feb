"""Writes tensors into files of sharded tensors with torch.save, without its checksums."""

from __future__ import annotations

import os
import threading

import torch

from hybridrl.checkpoint.manifest import DigestingFile


class _WithoutCrc32:
    """Turns off the checksums of torch.save, for a fifth of its time, because digests suffice. Each
    thread that writes must enter this context. The option is of the thread (torch 2.13) or of the
    process (other versions), where the last thread that leaves restores it.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                torch.serialization.set_crc32_options(self._before)


without_crc32 = _WithoutCrc32()


def without_truncating(path: str, flags: int) -> int:
    """Opens a file without O_TRUNC, so that overwriting the file reuses its memory."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def save_tensor(tensor: torch.Tensor, file: DigestingFile) -> None:
    """Writes a tensor from any device. If writing failed, raises the error from the file."""
    try:
        torch.save(on_host(tensor), file)  # type: ignore[arg-type]  # has what torch needs
    except RuntimeError as error:  # torch hides the error from the file
        raise file.failure or error from None


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the host, with a storage of its size, which torch.save writes."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.to("cpu", copy=True)
