"""Imports what an engine needs before it is made, which on a machine just started takes longest,
and waits with it for a case's turn.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from bench_reshard_gpu import POLL_S


def import_engine(engine: str, tp: int = 1) -> None:
    """Imports an engine's package as its adapter does; touches no GPU. Raises UserError."""
    is_cpu = not torch.cuda.is_available()
    if engine == "vllm":
        from hybridrl.rollout.vllm import start as vllm_start
        from hybridrl.rollout.vllm import version as vllm_version

        vllm_start._import_vllm(vllm_version.installed_version(is_cpu), is_cpu)
        importlib.import_module("vllm.v1.engine.llm_engine")
        importlib.import_module("vllm.v1.worker.gpu_worker")
    elif engine == "sglang":
        from hybridrl.rollout.sglang import start as sglang_start
        from hybridrl.rollout.sglang import version as sglang_version

        sglang_start._import_sglang(sglang_version.installed_version(is_cpu), is_cpu, tp)


def after_turn(job: Mapping[str, Any]) -> dict[str, Any]:
    """Imports a case's needs without touching a GPU, and waits for its turn; returns the job."""
    import_engine("vllm")
    turn = Path(job["turn"])
    while not turn.exists():
        if not turn.parent.exists():
            sys.exit("nobody gives turns any more")
        time.sleep(POLL_S)
    return {**job, "launched_at": time.time()}
