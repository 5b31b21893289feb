"""Decoding on a thread and a stream of its own, beside what the main thread does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.engine import Request
from hybridrl.rollout.vllm import start as vllm_start

HIGH_PRIORITY = -1


class Decoding:
    """Decodes this rank's share of the samples.

    Attributes:
        whole: groups of which all samples here are finished, in order.
        num_left: samples that are not.
        tokens: of finished samples, by number.
        steps: when each step of the engine ended, by `time.perf_counter`.
        ended: when the last token came, by `time.perf_counter`.
        error: what ended the thread, if anything did.
    """

    def __init__(self, engine: Any, requests: Sequence[Request], samples: int) -> None:
        self._engine, self._samples = engine, samples
        self._left = Counter(request.request_id // samples for request in requests)
        self.whole: list[int] = []
        self.num_left, self.ended = len(requests), 0.0
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.steps: list[float] = []
        self.error: BaseException | None = None
        engine.submit(requests)

    def run(self, stream: AbstractContextManager[Any]) -> None:
        """Decodes all of it on a stream."""
        try:
            with stream:
                while self._engine.has_unfinished:
                    self._engine.step()  # returns with the tokens
                    self._take(self._engine.collect())
                    self.steps.append(time.perf_counter())
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended = time.perf_counter()

    def state(self) -> tuple[int, list[int], str]:
        """Returns how many samples are unfinished, the groups that are whole, and what failed."""
        num_left = self.num_left  # first: once it is 0 all groups are whole
        return num_left, list(self.whole), "" if self.error is None else repr(self.error)

    def _take(self, finished: Sequence[Any]) -> None:
        for done in finished:
            self.tokens[done.request_id] = done.tokens
            group = done.request_id // self._samples
            self._left[group] -= 1
            if self._left[group] == 0:
                self.whole.append(group)
            self.num_left -= 1


@contextmanager
def captured_at_high_priority() -> Iterator[list[Any]]:
    """Lets vLLM capture CUDA graphs on a stream of high priority; yields a list that gets it.

    A kernel in a graph has the priority of the stream that it was captured on.
    """
    make, streams = vllm_start._make_engine, list[Any]()

    def make_engine(*arguments: Any) -> Any:
        from vllm.distributed import parallel_state

        context = parallel_state.GraphCaptureContext

        def on_stream(_: Any) -> Any:
            if not streams:
                streams.append(torch.cuda.Stream(priority=HIGH_PRIORITY))
            return context(streams[0])

        with replaced(parallel_state, "GraphCaptureContext", on_stream):
            return make(*arguments)

    with replaced(vllm_start, "_make_engine", make_engine):
        yield streams
