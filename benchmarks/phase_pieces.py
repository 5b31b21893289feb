"""Times pieces of a change of phases, and the change with gradients in lent memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridrl.hybrid_engine.memory.lending import LentMemory
from hybridrl.parallel.device_mapping import DeviceMapping
from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS, EngineMemory, blocks_in_use
from hybridrl.rollout.vllm.memory import allocations
from hybridrl.rollout.vllm.start import caches_of, runner_of

GIB = 1 << 30


def milliseconds(run: Callable[[], object]) -> float:
    """Runs something between two moments when the device is idle."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure, the first round left out: it warms up."""
    rest = rounds[1:] or rounds
    names = dict.fromkeys(name for found in rest for name in found)
    return {
        name: round(statistics.median(found.get(name, 0.0) for found in rest), 4) for name in names
    }


class Pieces:
    """Adds up the time of functions while something runs."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._restore: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, name: str, label: str | None = None) -> None:
        """Times a function where its callers look it up."""
        whole, inner = label or name, getattr(owner, name)

        def timed(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **keywords)
            finally:
                self._add(whole, 1e3 * (time.perf_counter() - began))

        self._restore.append((owner, name, inner))
        setattr(owner, name, timed)

    def _add(self, label: str, ms: float) -> None:
        self.ms[label] = self.ms.get(label, 0.0) + ms
        self.ms[f"{label}, calls"] = self.ms.get(f"{label}, calls", 0.0) + 1

    @contextmanager
    def piece(self, label: str) -> Iterator[None]:
        """Times a block, up to the moment when the device is idle."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self._add(label, 1e3 * (time.perf_counter() - began))

    def take(self) -> dict[str, float]:
        """Returns what was found since the last call."""
        found, self.ms = self.ms, {}
        return found

    def stop(self) -> None:
        """Puts the functions back."""
        for owner, name, inner in reversed(self._restore):
            setattr(owner, name, inner)


def watch_adapter(pieces: Pieces) -> None:
    """Times what the adapter's sleep and its waking up are made of."""
    for name in ("create", "map", "allow", "unmap", "release", "wait"):
        pieces.watch(DeviceMapping, name)
    for name in ("sleep", "wake_up", "clear_lent"):
        pieces.watch(EngineMemory, name, f"memory.{name}")
    pieces.watch(torch.cuda, "empty_cache")


def lent_gradients(llm: Any, size: int, repeats: int) -> dict[str, Any]:
    """The same changes by the adapter's own calls, gradients in memory that the engine lends."""
    from vllm import SamplingParams

    runner = runner_of(llm.llm_engine)
    parameters = dict(runner.model.named_parameters())
    mapping = DeviceMapping(torch.device("cuda", torch.cuda.current_device()))
    renewed = [*parameters.values(), *caches_of(runner)]
    memory = EngineMemory(mapping, allocations(), blocks_in_use(), renewed)
    prompts: Any = [{"prompt_token_ids": [*range(10, 10 + 40 * n)]} for n in range(1, 9)]
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy)]

    saved = {name: one.detach().clone() for name, one in parameters.items()}
    expected = tokens()
    memory.sleep()
    lent = LentMemory(mapping, size, memory.lend(size))
    lent.restore()
    gradients = mapping.tensor(lent.address, size).view(torch.float32)

    def to_rollout() -> None:
        lent.release()
        memory.wake_up(WEIGHTS)
        memory.wake_up(KV_CACHE)
        memory.clear_lent()
        llm.reset_prefix_cache()

    def to_train() -> None:
        memory.sleep()
        lent.restore()

    gradients.fill_(float("nan"))
    to_rollout()
    with torch.inference_mode():
        torch._foreach_copy_(list(parameters.values()), list(saved.values()))
    if tokens() != expected:
        raise RuntimeError("the engine draws other tokens after gradients have used its memory")
    to_train()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(100):
        to_rollout()
        to_train()
    lost = free - torch.cuda.mem_get_info()[0]
    if abs(lost) > 0.01 * free:
        raise RuntimeError(f"100 changes of phase took {lost} bytes")
    pieces = Pieces()
    watch_adapter(pieces)
    rounds = []
    for _ in range(repeats + 1):
        with pieces.piece("to_rollout"):
            to_rollout()
        with pieces.piece("to_train"):
            to_train()
        rounds.append(pieces.take())
    pieces.stop()
    return {
        "lent_gib": round(memory.lent_bytes / GIB, 2),
        "own_gib": round((size - lent.num_lent_bytes) / GIB, 2),
        "lost_bytes_in_100_changes": lost,
        "ms": medians(rounds),
    }
