"""Keeps a configuration of SGLang's process for each engine, and constructs the scheduler with it.

All code that depends on how a version of SGLang configures a process is in this module. Up to
0.5.16, SGLang has one record of arguments, and the scheduler takes its ranks. From 0.5.22 on,
SGLang reads arguments, ranks and groups from a context, of which each engine has its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

# Returns a context manager, inside which SGLang reads an engine's configuration.
Activate = Callable[[], AbstractContextManager[Any]]


def configure(server_args: Any, tp_rank: int, gpu_id: int, others: Sequence[Any]) -> Activate:
    """Returns a function that activates the configuration of a new engine.

    `tp_rank` is the engine's place in its replica. `others` are the schedulers of this process's
    open engines, whose process groups the new engine uses.
    """
    try:
        from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(server_args)
        return contextlib.nullcontext
    from sglang.srt.distributed.bootstrap import reset_parallel_initialised

    reset_parallel_initialised()  # SGLang would refuse a second engine in the process
    ranks = SpawnRanks(world_rank=tp_rank, dp_rank=None, gpu_id=gpu_id)
    context = create_context(server_args, role="scheduler", ranks=ranks)
    if others:
        with others[0].active():
            from sglang.srt.runtime_context import get_parallel

            stamped = get_parallel()._stamp
        groups = {name: value for name, value in stamped.items() if name.endswith("_group")}
        context.parallel.override_permanently(**groups)
    return lambda: use_context(context)


def construct(
    kind: type, server_args: Any, tp_rank: int, ep_rank: int, gpu_id: int, active: Activate
) -> Any:
    """Returns a new scheduler. It reads only `nccl_port` from its ports, and opens no port."""
    ports = SimpleNamespace(nccl_port=0)
    # 0.5.16 also takes the ranks of pipeline, attention context, MoE data and data parallel groups.
    takes_ranks = active is contextlib.nullcontext
    ranks = (gpu_id, tp_rank, ep_rank, 0, 0, 0, None) if takes_ranks else ()
    with active():
        return kind(server_args, ports, *ranks)
