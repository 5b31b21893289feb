"""Runs SGLang's scheduler inside this process, one turn of its loop at a time.

The loop is interrupted when it tries to receive requests again. Results are read from SGLang's
request objects. This module replaces SGLang's sockets, its receiver of requests, its sender of
tokens, its watchdog, its checks of idle servers, and its processing of tokens that do not end a
request.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.sglang.penalties import TokenTable
from hybridrl.rollout.sglang.process_config import Activate, construct
from hybridrl.rollout.sglang.routing import RecordedExperts, make_current


class _TurnIsOverError(Exception):
    """Raised when the loop asks for requests a second time, to end the turn."""


class _Silence:
    def send_output(self, output: Any, request: Any = None) -> None:
        """Drops a message to another process."""


@contextlib.contextmanager
def without_watchdog() -> Iterator[None]:
    """Disables SGLang's watchdog, which ends the process if no batch runs for a while."""
    from sglang.srt.managers import scheduler

    with replaced(scheduler, "create_scheduler_watchdog", lambda *args, **kwargs: None):
        yield


def make_scheduler(
    server_args: Any, tp_rank: int, ep_rank: int, gpu_id: int, active: Activate
) -> Any:
    """Returns a new scheduler with its model, KV cache and CUDA graphs."""
    from sglang.srt.managers.scheduler import Scheduler

    own = {"token_table": TokenTable(), "active": staticmethod(active)}
    driven = type("DrivenScheduler", (_Driven, Scheduler), own)
    return construct(driven, server_args, tp_rank, ep_rank, gpu_id, active)


class _Driven:
    """Overrides of SGLang's scheduler that let the caller run its loop with `turn`."""

    running_batch: Any
    recorder: RecordedExperts | None = None
    before_release: Callable[[Any], None]
    token_table: TokenTable
    active: Activate  # activates the engine's configuration, in which SGLang's functions run
    # Results that the owner reads and resets. `ended`: requests that ended, in order. `drawn`:
    # names of requests and the token drawn for each, if `reports_drawn`. `has_wrong_logp`: whether
    # any log-probability was invalid.
    ended: list[Any]
    drawn: tuple[list[str], list[int]]
    reports_drawn = False
    has_wrong_logp = False
    _streams: Callable[[], Any]
    _turn_begins: bool
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def init_ipc_channels(self, port_args: Any) -> None:
        silence = _Silence()
        self.idle_sleeper = self.load_snapshot_writer = None
        self.ipc_channels = SimpleNamespace(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=silence,
            send_to_detokenizer=silence,
            send_metrics_from_scheduler=None,
        )

    def init_request_receiver(self) -> None:
        self.request_receiver = SimpleNamespace(recv_requests=self.recv_requests)

    def init_output_streamer(self) -> None:
        ignore = self.stream_output
        self.output_streamer = SimpleNamespace(
            stream_output=ignore, _stream_output_generation=ignore
        )

    def recv_requests(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        """Returns [] once per turn; ignores newer versions' `local_reqs`, which end requests."""
        if not self._turn_begins:
            raise _TurnIsOverError
        self._turn_begins = False
        return []

    def stream_output(self, *args: Any, **kwargs: Any) -> None:
        """Sends nothing: tokens are read from the requests."""

    def on_idle(self) -> None:
        """Does nothing. SGLang's version checks memory pools while a server has no requests."""

    @property
    def result_queue(self) -> Any:
        """Batches in flight. The setter ignores the queue that the loop assigns at its start."""
        return self.__dict__.setdefault("_batches_under_way", deque())

    @result_queue.setter
    def result_queue(self, queue: Any) -> None:
        pass

    def prepare_turns(self) -> None:
        """Creates the streams that SGLang itself would create at the start of its loop."""
        self.ended, self.drawn = [], ([], [])
        self.is_overlapped = self.enable_overlap
        self._streams = contextlib.nullcontext
        if self.device == "cpu":
            return
        module = self.device_module
        stream = module.Stream(priority=0)
        while stream.cuda_stream == self.forward_stream.cuda_stream:
            stream = module.Stream(priority=0)
        self.schedule_stream = stream
        self._war_barrier_enabled = True
        self._streams = lambda: module.StreamContext(stream)

    def turn(self) -> None:
        make_current(self.recorder)
        self._turn_begins = True
        loop = self.event_loop_overlap if self.is_overlapped else self.event_loop_normal
        with self.active(), self._streams(), contextlib.suppress(_TurnIsOverError):
            loop()

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.token_table.prepare(batch.reqs, not batch.forward_mode.is_decode())
        return super().run_batch(batch, *args, **kwargs)  # type: ignore[misc]

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Stores the tokens that a batch drew, and ends requests.

        From a decode batch, only requests that end are passed to SGLang's `process_batch_result`.
        For all other requests, that method would execute a dozen unneeded steps, which take the
        host longer than a small model's forward pass takes the GPU.
        """
        if not batch.forward_mode.is_decode():
            with _without_insert(batch, result):
                super().process_batch_result(batch, result)  # type: ignore[misc]
            self._note_ended(batch.reqs)
            begun = [request for request in batch.reqs if request.output_ids]
            self._note(begun, [request.output_ids[-1] for request in begun])
            last_logps = [drawn_logps(request)[-1] for request in begun]
            self.has_wrong_logp |= not all(-float("inf") < logp <= 0 for logp in last_logps)
            return
        if result.copy_done is not None:
            result.copy_done.synchronize()
        logp_B = result.logits_output.next_token_logprobs
        self.has_wrong_logp |= not bool(((logp_B <= 0) & (logp_B > -torch.inf)).all())
        tokens = result.next_token_ids.tolist()
        ending = keep_tokens(batch.reqs, tokens, logp_B.tolist())
        self._note(batch.reqs, tokens)
        if ending:
            part = rows_of(batch, result, ending)
            super().process_batch_result(*part)  # type: ignore[misc]
            self._note_ended(part[0].reqs)

    def _note_ended(self, requests: Sequence[Any]) -> None:
        ended = [request for request in requests if request.finished()]
        for request in ended:
            self.token_table.remove(request.rid)
        self.ended += ended

    def _note(self, requests: Sequence[Any], tokens: list[int]) -> None:
        if self.reports_drawn:
            self.drawn[0].extend(request.rid for request in requests)
            self.drawn[1].extend(tokens)

    def update_running_batch(self, batch: Any) -> Any:
        """Calls `before_release` before SGLang retracts a request to free its slots."""
        if self.recorder is None:
            return super().update_running_batch(batch)  # type: ignore[misc]
        release = batch.release_req

        def tell_and_release(index: int, *args: Any, **kwargs: Any) -> Any:
            self.before_release(batch.reqs[index])
            return release(index, *args, **kwargs)

        batch.release_req = tell_and_release
        try:
            return super().update_running_batch(batch)  # type: ignore[misc]
        finally:
            del batch.release_req

    def add(self, request: Any) -> Any:
        with self.active():
            self.handle_generate_request(request)
        queued = self.waiting_queue[-1] if self.waiting_queue else None
        if queued is None or queued.rid != request.rid:
            raise RuntimeError(f"SGLang did not queue request {request.rid}")
        # Disables log-probabilities for the prompt, which contains earlier tokens of a retracted
        # request.
        queued.logprob_start_len = -1
        return queued

    def forget_requests(self) -> None:
        """Drops all requests and clears the KV cache, including cached prefixes."""
        make_current(None)  # the caller has already recorded the experts that it needs
        with self.active(), self._streams():
            while self.result_queue:
                batch, result = self.result_queue.popleft()
                super().process_batch_result(batch, result)  # type: ignore[misc]
            if self.device != "cpu":
                self.device_module.synchronize()
            self.ended.clear()
            self.drawn = [], []
            self.token_table.clear()
            self.has_wrong_logp = False
            self.waiting_queue.clear()
            self.chunked_req = self.last_batch = self.cur_batch = None
            self.running_batch = type(self.running_batch)(reqs=[], batch_is_full=False)
            if not self.flush_cache(empty_cache=False):
                raise RuntimeError(
                    "SGLang did not clear its cache, which contains keys from older weights"
                )
        self.new_token_ratio_tracker.reset()


@contextlib.contextmanager
def _without_insert(batch: Any, result: Any) -> Iterator[None]:
    """Keeps SGLang from inserting a prompt into the cache if all its tokens but the last are cached
    already, as for most samples. Inserting it would take a dozen device operations.
    """
    lengths = result.extend_input_len_per_req or ()  # None if no log-probabilities are computed
    found = [request for request, num in zip(batch.reqs, lengths, strict=False) if num == 1]
    for request in found:
        request.skip_radix_cache_insert = True
    try:
        yield
    finally:
        for request in found:
            request.skip_radix_cache_insert = False  # so that their responses are inserted later


def keep_tokens(
    requests: Sequence[Any], tokens: Sequence[int], logps: Sequence[float]
) -> list[int]:
    """Appends each drawn token to its request, unless the token ends the request. Returns the
    positions of those that end. Ignores requests that ended or were retracted while in flight.
    """
    ending = []
    for place, request in enumerate(requests):
        if request.finished_reason is not None or request.is_retracted:
            continue
        token, sampling, kept = tokens[place], request.sampling_params, request.output_ids
        stops = sampling.stop_token_ids
        if (
            len(kept) + 1 >= sampling.max_new_tokens
            or (stops is not None and token in stops)
            or request.to_finish is not None
        ):
            ending.append(place)
        else:
            kept.append(token)
            drawn_logps(request).append(logps[place])
    return ending


def rows_of(batch: Any, result: Any, places: list[int]) -> tuple[Any, Any]:
    """Returns a decode batch and its result, on the host, reduced to the requests at `places`."""
    batch, result = copy.copy(batch), copy.copy(result)
    batch.reqs = [batch.reqs[place] for place in places]
    output = result.logits_output = copy.copy(result.logits_output)
    output.next_token_logprobs = output.next_token_logprobs[places]
    result.next_token_ids = result.next_token_ids[places]
    result.copy_done = None
    return batch, result


def end_soon(request: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    request.to_finish = FINISH_LENGTH(length=len(request.output_ids))


def drawn_logps(request: Any) -> list[float]:
    logps: list[float] = request.logprob.output_token_logprobs_val
    return logps
