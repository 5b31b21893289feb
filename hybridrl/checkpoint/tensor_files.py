"""How a tensor is written into a file of sharded tensors: by torch.save, without its checksums."""

from __future__ import annotations

import os
import threading

import torch

from hybridrl.checkpoint.manifest import DigestingFile


class _WithoutCrc32:
    """Leaves out the checksums of torch.save, which nothing verifies: digests stand in for them,
    and saving takes a fifth less time than with the checksums alone.

    To be entered by each thread that writes. The option is a thread's own (torch 2.13) or the
    process's: there it is as before once all threads that write have ended.
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
    """Opens a file whose memory stays, for what is written over it."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def save_tensor(tensor: torch.Tensor, file: DigestingFile) -> None:
    """Writes a tensor of any device; raises what stopped the file."""
    try:
        torch.save(on_host(tensor), file)  # type: ignore[arg-type]  # has what it asks for
    except RuntimeError as error:  # torch's, in place of the error that writing raised
        raise file.failure or error from None


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the host that is all of its storage, since torch.save writes storages:
    itself if it is one, else a copy.
    """
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.to("cpu", copy=True)
