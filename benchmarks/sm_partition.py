"""Streams whose kernels use a part of the GPU's multiprocessors only (CUDA's green contexts)."""

from __future__ import annotations

from typing import Any

import torch

# Green contexts that streams belong to: they must outlive them.
_KEPT: list[Any] = []


def stream_without(num_sms: int, device: torch.device) -> tuple[torch.cuda.Stream, int]:
    """Returns a stream that leaves multiprocessors to others, and how many it uses.

    Kernels that are launched into it use no more, whatever context is current; what is on other
    streams may use all. So may collectives, which have streams of their own.

    Args:
        num_sms: to leave; the driver rounds up, on Hopper to a multiple of 8.
        device: a GPU, in use already.

    Raises:
        RuntimeError: the driver refuses.
    """
    from cuda.bindings import driver

    def checked(found: tuple[Any, ...]) -> Any:
        error, *values = found
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a stream without {num_sms} multiprocessors: {error}")
        return values[0] if len(values) == 1 else values

    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    handle = checked(driver.cuDeviceGet(device.index or 0))
    whole = checked(driver.cuDeviceGetDevResource(handle, kind))
    *_, rest = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, num_sms))
    described = checked(driver.cuDevResourceGenerateDesc([rest], 1))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = checked(driver.cuGreenCtxCreate(described, handle, flag))
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = checked(driver.cuGreenCtxStreamCreate(context, non_blocking, 0))
    _KEPT.append((context, stream))
    return torch.cuda.ExternalStream(int(stream), device=device), int(rest.sm.smCount)
