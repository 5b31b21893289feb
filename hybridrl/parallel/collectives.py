"""Reads from torch's flight recorder which torch.distributed calls this process has made.

The recorder stores the last 2,000 calls over NCCL and gloo, whether made by hybridrl, Megatron or
an engine. Its cost is negligible, and any thread can read it, even while a collective hangs. It
does not record sends and receives over gloo. If the user has turned the recorder off
(TORCH_FR_BUFFER_SIZE=0, TORCH_NCCL_TRACE_BUFFER_SIZE=0), no calls are known.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel.watch import Call, even

PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")


def num_called() -> int:
    """Returns the total number of calls that this process has made in all groups. This is cheap."""
    total = 0
    for group in _groups():
        with contextlib.suppress(RuntimeError):  # this backend does not count calls
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def latest_calls() -> list[Call]:
    """Returns the unfinished calls and the last call of each group with peers, oldest first."""
    ranks: dict[str, Sequence[int]] = {
        str(group.group_name): even(dist.get_process_group_ranks(group))
        for group in _groups()
        if group.size() > 1
    }
    latest: list[Call] = []
    for dump in _dumps():
        # An empty recorder omits the key of its entries.
        latest += calls_of(json.loads(dump(True, False)).get("entries", ()), ranks)
    return latest


def calls_of(entries: Iterable[dict[str, Any]], ranks: dict[str, Sequence[int]]) -> list[Call]:
    """Returns the unfinished calls and the last call in each group.

    `entries` are the recorder's JSON, oldest first; `ranks` those of each group by torch's name.
    """
    found: dict[tuple[str, bool, int], Call] = {}
    last: dict[str, int] = {}  # sequence number of each group's last collective
    for entry in entries:
        name, description = entry["process_group"]
        if name not in ranks:  # the group was destroyed
            continue
        is_p2p = bool(entry["is_p2p"])
        number = int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])
        is_over = bool(entry["retired"]) or entry["state"] == "completed"
        before = last.get(name)
        if before is not None and not is_p2p and found[name, False, before].is_over:
            del found[name, False, before]
        if is_p2p and is_over:
            continue
        if not is_p2p:
            last[name] = number
        peer = PEER.search(entry["profiling_name"]) if is_p2p else None
        found[name, is_p2p, number] = Call(
            group=name if description in ("", "undefined") else f"{name} {description}",
            number=number,
            what=_text(entry),
            ranks=ranks[name],
            is_over=is_over,
            is_p2p=is_p2p,
            peer=None if peer is None else ranks[name][int(peer[1])],
        )
    return list(found.values())


def _text(entry: dict[str, Any]) -> str:
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    tensors = [
        f"{kind.lower()} {size}"
        for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ]
    more = f" and {len(tensors) - 2} more" if len(tensors) > 2 else ""
    return f"{name} of {', '.join(tensors[:2])}{more}" if tensors else str(name)


def _groups() -> list[dist.ProcessGroup]:
    """Returns a copy of torch's groups, because another thread may be creating one."""
    return list(dist.distributed_c10d._world.pg_map)


def _dumps() -> list[Callable[[bool, bool], str]]:
    """Returns the dump functions of all recorders in this torch; NCCL has a separate one."""
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    library = vars(torch._C._distributed_c10d)
    return [library[name] for name in names if name in library]
