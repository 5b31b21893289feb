"""SGLang's scheduler inside this process: one turn of its loop at a time, no sockets, no threads.

The loop of SGLang's scheduler process runs for one turn and is left where it would ask for requests
again; what a turn did is read from the requests. Owns what is replaced: sockets, the receiver of
requests, the sender of tokens, the watchdog, checks of idle servers, and what is done with the
token of a request that goes on.
"""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.sglang.penalties import TokenTable
from hybridrl.rollout.sglang.routing import RecordedExperts, make_current


class _TurnIsOverError(Exception):
    """Raised where the loop asks for requests a second time."""


class _Silence:
    """Takes what the scheduler sends to other processes."""

    def send_output(self, output: Any, request: Any = None) -> None:
        """Drops it."""


@contextlib.contextmanager
def without_watchdog() -> Iterator[None]:
    """Makes schedulers start no thread that ends the process when no batch ran for a while."""
    from sglang.srt.managers import scheduler

    with replaced(scheduler, "create_scheduler_watchdog", lambda *args, **kwargs: None):
        yield


def make_scheduler(server_args: Any, tp_rank: int, ep_rank: int, gpu_id: int) -> Any:
    """Returns a new scheduler with its model, cache and graphs; the process has SGLang's groups."""
    from sglang.srt.managers.scheduler import Scheduler

    driven = type("DrivenScheduler", (_Driven, Scheduler), {"said": TokenTable()})
    # Only a port that nobody opens is read of the ports: the process group is there already.
    ports = SimpleNamespace(nccl_port=0)
    others = 0, 0, 0, None  # pipeline, attention's context, experts' data, data parallel
    return driven(server_args, ports, gpu_id, tp_rank, ep_rank, *others)


class _Driven:
    """What a scheduler does otherwise when it is driven by `turn`; before SGLang's class, in which
    the attributes that it does not make itself are.
    """

    running_batch: Any
    recorder: RecordedExperts | None = None
    before_release: Callable[[Any], None]
    said: TokenTable  # of requests that look back
    # Since the owner has looked: requests that ended, in order; names of requests and the token
    # that each drew, where it wants to know; and whether a value is no log-probability.
    ended: list[Any]
    drawn: tuple[list[str], list[int]]
    tells_drawn = False
    has_wrong_logp = False
    _streams: Callable[[], Any]
    _turn_begins: bool
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def init_ipc_channels(self, port_args: Any) -> None:
        silence = _Silence()
        self.idle_sleeper = self.load_snapshot_writer = None
        self.recv_from_tokenizer = self.recv_from_rpc = None
        self.send_to_tokenizer = self.send_to_detokenizer = silence
        self.ipc_channels = SimpleNamespace(  # of newer versions
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=silence,
            send_to_detokenizer=silence,
            send_metrics_from_scheduler=None,
        )

    def init_request_receiver(self) -> None:  # of newer versions
        self.request_receiver = SimpleNamespace(recv_requests=self.recv_requests)

    def init_output_streamer(self) -> None:  # of newer versions
        ignore = self.stream_output
        self.output_streamer = SimpleNamespace(
            stream_output=ignore, _stream_output_generation=ignore
        )

    def recv_requests(self) -> list[Any]:
        """Gives the loop nothing, once; requests are handed over between turns."""
        if not self._turn_begins:
            raise _TurnIsOverError
        self._turn_begins = False
        return []

    def stream_output(self, *args: Any, **kwargs: Any) -> None:
        """Sends no tokens: they are read from the requests."""

    def on_idle(self) -> None:
        """Does nothing: a server without requests would check its pools here."""

    @property
    def result_queue(self) -> Any:
        """Batches under way; the loop begins with a new queue, which here is the old one."""
        return self.__dict__.setdefault("_batches_under_way", deque())

    @result_queue.setter
    def result_queue(self, queue: Any) -> None:
        pass

    @property
    def takes_arrays(self) -> bool:
        """Whether token ids are passed as arrays, as newer versions do."""
        return hasattr(super(), "init_request_receiver")

    def prepare_turns(self) -> None:
        """Makes the streams that SGLang makes where its loop begins."""
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
        """Runs the loop's body once."""
        make_current(self.recorder)
        self._turn_begins = True
        loop = self.event_loop_overlap if self.is_overlapped else self.event_loop_normal
        with self._streams(), contextlib.suppress(_TurnIsOverError):
            loop()

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a batch, of which the sampler knows whose tokens it draws."""
        self.said.look(batch.reqs, not batch.forward_mode.is_decode())
        return super().run_batch(batch, *args, **kwargs)  # type: ignore[misc]

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Keeps the tokens that a batch drew, once they are there, and ends requests.

        While a batch decodes, SGLang is left to end requests. With the token of one that goes on it
        does a dozen things of which none is needed here, one request after another: on the host
        that takes longer than a small model on the GPU.
        """
        if not batch.forward_mode.is_decode():
            with _without_insert(batch, result):
                super().process_batch_result(batch, result)  # type: ignore[misc]
            self._note_ended(batch.reqs)
            begun = [request for request in batch.reqs if request.output_ids]
            self._note(begun, [one.output_ids[-1] for one in begun])
            self.has_wrong_logp |= not all(
                -float("inf") < drawn_logps(one)[-1] <= 0 for one in begun
            )
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
            self.said.remove(request.rid)
        self.ended += ended

    def _note(self, requests: Sequence[Any], tokens: list[int]) -> None:
        if self.tells_drawn:
            self.drawn[0].extend(request.rid for request in requests)
            self.drawn[1].extend(tokens)

    def update_running_batch(self, batch: Any) -> Any:
        """Calls `before_release` with each request whose slots are taken back for others."""
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
        """Queues a request and returns what the scheduler knows of it."""
        self.handle_generate_request(request)
        queued = self.waiting_queue[-1] if self.waiting_queue else None
        if queued is None or queued.rid != request.rid:
            raise RuntimeError(f"SGLang did not queue request {request.rid}")
        # No log-probabilities of what is in the prompt, nor, where a request is taken back and
        # computed again, of what it has drawn already.
        queued.logprob_start_len = -1
        return queued

    def forget_requests(self) -> None:
        """Drops all requests, and the KV cache with the prefixes in it."""
        make_current(None)  # of what is dropped the owner has recorded what it wanted
        with self._streams():
            while self.result_queue:
                batch, result = self.result_queue.popleft()
                super().process_batch_result(batch, result)  # type: ignore[misc]  # nobody reads it
            if self.device != "cpu":
                self.device_module.synchronize()
            self.ended.clear()
            self.drawn = [], []
            self.said.clear()
            self.has_wrong_logp = False
            self.waiting_queue.clear()
            self.chunked_req = self.last_batch = self.cur_batch = None
            self.running_batch = type(self.running_batch)(reqs=[], batch_is_full=False)
            if not self.flush_cache(empty_cache=False):
                raise RuntimeError("SGLang kept its cache, which holds keys of older weights")
        if hasattr(self, "new_token_ratio_tracker"):  # of newer versions
            self.new_token_ratio_tracker.reset()
        else:
            self.new_token_ratio = self.init_new_token_ratio


@contextlib.contextmanager
def _without_insert(batch: Any, result: Any) -> Iterator[None]:
    """Leaves prompts out of the cache that it has but for the last token: most samples of a prompt.

    To look that token up takes a dozen operations of the device, for each request.
    """
    lengths = result.extend_input_len_per_req or ()  # None: of requests without log-probabilities
    found = [request for request, num in zip(batch.reqs, lengths, strict=False) if num == 1]
    for request in found:
        request.skip_radix_cache_insert = True
    try:
        yield
    finally:
        for request in found:
            request.skip_radix_cache_insert = False  # what they go on to say is of use


def keep_tokens(
    requests: Sequence[Any], tokens: Sequence[int], logps: Sequence[float]
) -> list[int]:
    """Gives SGLang's requests the tokens that they drew, but for those that end with them, whose
    places it returns. Requests that ended or were taken back while the batch was under way get
    nothing.
    """
    ending, is_new = [], hasattr(requests[0], "logprob")  # as in `drawn_logps`
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
            holder = request.logprob if is_new else request
            holder.output_token_logprobs_val.append(logps[place])
    return ending


def rows_of(batch: Any, result: Any, places: list[int]) -> tuple[Any, Any]:
    """Returns a batch of decoding with some of its requests alone, and its result, which is on the
    host.
    """
    batch, result = copy.copy(batch), copy.copy(result)
    batch.reqs = [batch.reqs[place] for place in places]
    output = result.logits_output = copy.copy(result.logits_output)
    output.next_token_logprobs = output.next_token_logprobs[places]
    result.next_token_ids = result.next_token_ids[places]
    result.copy_done = None
    return batch, result


def end_soon(request: Any) -> None:
    """Makes a request end with the next token that is drawn for it."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    request.to_finish = FINISH_LENGTH(length=len(request.output_ids))


def drawn_logps(request: Any) -> list[float]:
    """Returns the log-probabilities of a request's tokens so far."""
    holder = getattr(request, "logprob", None)  # of newer versions
    logps: list[float] = (request if holder is None else holder).output_token_logprobs_val
    return logps


def synchronize(device: torch.device) -> None:
    """Waits for a GPU: weights are written on another stream than SGLang's."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def token_ids(tokens: list[int], scheduler: Any) -> Any:
    """Returns token ids as this version of SGLang takes them."""
    return array("q", tokens) if scheduler.takes_arrays else tokens
