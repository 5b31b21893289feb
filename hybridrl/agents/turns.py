"""Samples turns for the endpoint: prepares inputs, waits for the engine, and reads the text. Does
not import torch.

Runs in the event loop of the endpoint's thread. A turn is a task that does not depend on its
client's connection: a client that asks again joins the task, or receives the finished turn. If no
client waits for `grace_s` seconds, the turn is aborted.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hybridrl.agents.asked import LENGTH, STOP, TOOL_CALLS, Answer, Asked
from hybridrl.agents.backend import BackendClosed, TurnAborted, TurnBackend, TurnRequest
from hybridrl.agents.conversation import BadRequest, Conversation, assistant, tool_call
from hybridrl.agents.forest import Prepared
from hybridrl.agents.sessions import Session, Sessions
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.environments.chat import text_of_turn
from hybridrl.rollout.engine import Completion

MAX_REPLAYED = 64  # requests of a session whose answers can be sent again

Keys = tuple[bytes, ...]


class TurnFailed(BadRequest):
    """A turn that was not sampled; the client may ask again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="turn_failed", status=503)


@dataclass(eq=False)
class Running:
    """A turn that is being sampled, or its result."""

    task: asyncio.Task[Answer]
    num_waiting: int = 0


@dataclass
class _Known:
    by_key: OrderedDict[bytes, Running] = field(default_factory=OrderedDict)
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set)


class Turns:
    """Samples turns; one is aborted if no client waits for it for `grace_s` seconds."""

    def __init__(
        self,
        sessions: Sessions,
        backend: TurnBackend,
        tokenizer: Any,
        reader: TurnReader,
        grace_s: float,
    ) -> None:
        self._sessions, self._backend, self._tokenizer = sessions, backend, tokenizer
        self._reader, self._grace_s = reader, grace_s
        self._known: dict[Session, _Known] = {}

    def begin(self, session: Session, asked: Asked, keys: Keys, is_retry: bool) -> Running:
        """Starts to sample a turn, or finds the turn of an earlier request that the client repeats
        (`is_retry`) under its `keys`. Raises BadRequest if the request is refused.
        """
        if is_retry and (known := self._known.get(session)) is not None:
            for key in keys:
                running = known.by_key.get(key)
                if running is not None and not _has_failed(running.task):
                    session.count("replayed_requests")
                    return running
        if asked.conversation is None:
            prepared = session.prepare_tokens(asked.tokens, asked.max_tokens)
        else:
            prepared = session.prepare(asked.conversation, asked.max_tokens)
        # Added only after the checks, because an entry for a session that has ended would stay
        # forever.
        known = self._known.setdefault(session, _Known())
        task = asyncio.get_running_loop().create_task(self._sampled(session, asked, prepared))
        known.tasks.add(task)
        task.add_done_callback(known.tasks.discard)
        task.add_done_callback(_take_exception)
        running = Running(task)
        for key in keys:
            known.by_key[key] = running
            known.by_key.move_to_end(key)
        while len(known.by_key) > MAX_REPLAYED:
            known.by_key.popitem(last=False)
        return running

    async def wait(
        self, running: Running, every_s: float, while_waiting: Callable[[], Awaitable[None]] | None
    ) -> Answer:
        """Returns the answer; calls `while_waiting` every `every_s` seconds. Raises BadRequest."""
        running.num_waiting += 1
        try:
            while True:
                timeout = every_s if while_waiting is not None else None
                done, _ = await asyncio.wait({running.task}, timeout=timeout)
                if done:
                    break
                assert while_waiting is not None
                await while_waiting()
            try:
                answer = running.task.result()
            except asyncio.CancelledError as error:
                raise TurnFailed("The turn was aborted, because its session ended.") from error
            answer.turn.is_delivered = True
            return answer
        finally:
            running.num_waiting -= 1
            if not running.num_waiting and not running.task.done():
                loop = asyncio.get_running_loop()
                loop.call_later(self._grace_s, _cancel_if_alone, running)

    def forget(self, session: Session) -> None:
        known = self._known.pop(session, _Known())
        for task in list(known.tasks):
            task.cancel()

    @property
    def num_running(self) -> int:
        return sum(len(known.tasks) for known in self._known.values())

    async def _sampled(self, session: Session, asked: Asked, prepared: Prepared) -> Answer:
        request = TurnRequest(
            request_id=self._sessions.next_request_id(),
            session_id=session.session_id,
            sample_key=session.sample_key,
            turn=prepared.turn,
            tokens=prepared.tokens,
            max_new_tokens=prepared.max_new_tokens,
            stop_token_ids=asked.stop_token_ids,
            stop_strings=asked.stop_strings,
            temperature=asked.sampling.temperature,
            top_p=asked.sampling.top_p,
            blobs=prepared.blobs,
            contents=prepared.contents,
        )
        try:
            done = await _arrival(self._backend.submit(request))
        except asyncio.CancelledError:
            self._backend.abort(request.request_id)
            session.abandon()
            raise
        except (TurnAborted, BackendClosed) as error:
            session.abandon()
            raise TurnFailed(str(error)) from error
        return self._answer(session, asked, prepared, done)

    def _answer(
        self, session: Session, asked: Asked, prepared: Prepared, done: Completion
    ) -> Answer:
        number, created_s = secrets.token_hex(12), int(time.time())
        texts = [self._tokenizer.decode([t]) for t in done.tokens] if asked.wants_logprobs else ()
        finish = STOP if done.finish_reason == "stop" else LENGTH
        if asked.conversation is None:
            turn = session.commit(prepared, done)
            return Answer(number, created_s, turn, finish=finish, token_texts=texts)
        text = text_of_turn(self._tokenizer, done.tokens)
        seen, stop_string = _cut(text, asked.stop_strings)
        parts = self._reader.parts(
            seen, prepared.opens_reasoning, asked.reads_calls, _schemas(asked.conversation)
        )
        if parts.malformed is not None:
            session.count("malformed_calls")
        calls = tuple(
            tool_call(call.call_id or f"call_{secrets.token_hex(12)}", call.name, call.arguments)
            for call in parts.calls
        )
        message = assistant(parts.content, parts.reasoning, calls)
        turn = session.commit(prepared, done, message, text)
        return Answer(
            number=number,
            created_s=created_s,
            turn=turn,
            content=parts.content,
            reasoning=parts.reasoning,
            calls=calls,
            finish=TOOL_CALLS if calls and finish == STOP else finish,
            stop_string=stop_string,
            token_texts=texts,
        )


async def _arrival(future: Future[Completion]) -> Completion:
    """Returns a future's result. Cancelling the caller must not cancel it: a thread sets it."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def told(_: Future[Completion]) -> None:
        with suppress(RuntimeError):  # the endpoint was closed
            loop.call_soon_threadsafe(tell)

    future.add_done_callback(told)
    await arrived
    return future.result()


def _cancel_if_alone(running: Running) -> None:
    if not running.num_waiting:
        running.task.cancel()


def _has_failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _take_exception(task: asyncio.Task[Answer]) -> None:
    """Marks the exception of a task as seen, because there may be no client left to receive it."""
    if not task.cancelled():
        task.exception()


def _cut(text: str, stop_strings: tuple[str, ...]) -> tuple[str, str | None]:
    found = [(text.find(stop), stop) for stop in stop_strings if stop in text]
    place, stop = min(found, default=(len(text), None))
    return text[:place], stop


def _schemas(conversation: Conversation) -> dict[str, Any]:
    functions = [tool["function"] for tool in conversation.tools]
    return {one["name"]: one["parameters"] for one in functions}
