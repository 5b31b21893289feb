"""Serves agents over HTTP in a separate thread. Does not import torch.

Offers the APIs of OpenAI and Anthropic and vLLM's token form to programs that know the token of an
open session. Invariants: it listens on loopback unless told otherwise; it answers only requests
whose Host is an address or a name that it knows, so that no web page reaches it through a domain
name; a request sees only the session whose token it sends.

Who waits for whom: the thread waits for the backend with futures, and nobody waits for the thread,
except that `start` waits until it listens and `close` until it ends.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from hybridrl.agents.anthropic_messages import Messages
from hybridrl.agents.asked import Asked, Dialect
from hybridrl.agents.backend import TurnBackend
from hybridrl.agents.conversation import BadRequest, body_digest
from hybridrl.agents.http_requests import bearer_token, host_name, json_body
from hybridrl.agents.openai_chat import ChatCompletions
from hybridrl.agents.openai_responses import Responses
from hybridrl.agents.sessions import Session, Sessions
from hybridrl.agents.task_images import ImageReader
from hybridrl.agents.token_form import TokenForm
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.agents.turns import Keys, Running, Turns
from hybridrl.errors import UserError

LOOPBACK = "127.0.0.1"
TOKEN_HEADER = "x-session-token"  # for programs that set their own Authorization header
MAX_BODY_BYTES, MAX_BODY_BYTES_WITH_IMAGES = 64 << 20, 256 << 20
KEEP_ALIVE_S = 15.0
GRACE_S = 10.0
START_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 1.0  # how long `close` waits for answers that are being sent


class Endpoint:
    """Serves sessions over HTTP.

    Args:
        tokenizer: Tokenizer of the model; the endpoint uses a copy.
        port: Port; 0 for any free port.
        reader: Reads reasoning and tool calls; by default the reader for the chat template.
        allowed_hosts: Further names that clients may use for this host.
        more_routes: Further routes, which check their own tokens.
        max_body_bytes: Maximum size of a request; by default larger if the model reads images.
        keep_alive_s: Seconds between signs of life in a stream that waits.
        grace_s: Seconds after which a turn is aborted if no client waits for it.

    Raises:
        UserError: The endpoint cannot listen on `host` and `port`.
    """

    def __init__(
        self,
        sessions: Sessions,
        backend: TurnBackend,
        tokenizer: Any,
        *,
        vocab_size: int,
        host: str = LOOPBACK,
        port: int = 0,
        reader: TurnReader | None = None,
        model: str = "policy",
        allowed_hosts: Sequence[str] = (),
        more_routes: Sequence[web.RouteDef] = (),
        max_body_bytes: int | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        if reader is None:
            source = sessions.template.source if sessions.template else ""
            reader = TurnReader.for_template(source)
        self._sessions, self._backend, self._model = sessions, backend, model
        self._host, self._keep_alive_s = host, keep_alive_s
        images = None if sessions.template is None else sessions.template.images
        image_reader = None if images is None else ImageReader(images)
        usual = MAX_BODY_BYTES if images is None else MAX_BODY_BYTES_WITH_IMAGES
        self._max_body_bytes = usual if max_body_bytes is None else max_body_bytes
        self._more_routes = more_routes
        own = (host, socket.gethostname(), socket.getfqdn(), "localhost")
        self._names = {name.lower() for name in (*own, *allowed_hosts)}
        own_tokenizer = copy.deepcopy(tokenizer)
        self._turns = Turns(sessions, backend, own_tokenizer, reader, grace_s)
        self._messages = Messages(image_reader)
        self._dialects: dict[str, Dialect] = {
            "/v1/chat/completions": ChatCompletions(image_reader),
            "/v1/responses": Responses(image_reader),
            "/v1/messages": self._messages,
            "/inference/v1/generate": TokenForm(vocab_size),
        }
        self._has_template = sessions.template is not None
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._failure: OSError | OverflowError | None = None
        self._stop = asyncio.Event()
        self._port = port
        self._thread = threading.Thread(
            target=self._serve, name="agents-endpoint", args=(port,), daemon=True
        )

    def start(self) -> Endpoint:
        self._sessions.on_close(self._session_closed)
        self._thread.start()
        if not self._listening.wait(START_TIMEOUT_S):
            raise TimeoutError(f"the endpoint did not start within {START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise UserError(
                "the endpoint's address",
                f"{self._host}:{self._port} ({self._failure})",
                "an address of this host with a free port",
                "Choose another port, or 0 for any free port.",
            ) from self._failure
        return self

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """Address for clients, without `/v1`."""
        is_any = self._host in ("0.0.0.0", "::", "")
        host = socket.gethostname() if is_any else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def close(self) -> None:
        """Stops listening, and waits for the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)

    def _serve(self, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run(port))
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _run(self, port: int) -> None:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_routes(self._more_routes)
        for path in self._dialects:
            app.router.add_post(path, self._turn)
        # With cancellation, a handler learns that its client went away.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        try:
            await runner.setup()
            site = web.TCPSite(runner, self._host, port, reuse_address=True, backlog=2048)
            await site.start()
            self._port = runner.addresses[0][1]
        except (OSError, OverflowError) as error:
            self._failure = error
            self._listening.set()
            await runner.cleanup()
            return
        self._listening.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answers errors in the form of the API that the client uses."""
        try:
            self._check_host(request)
            return await handler(request)
        except BadRequest as error:
            return self._error(request, error)
        except RecursionError:
            return self._error(request, BadRequest("The body is nested too deeply."))
        except web.HTTPRequestEntityTooLarge:
            message = f"The request is larger than {self._max_body_bytes} bytes."
            return self._error(request, BadRequest(message, code="request_too_large", status=413))
        except web.HTTPException as error:
            message = f"{request.method} {request.path[:200]}: {error.reason}"
            if error.status == 404:
                message += f". This endpoint has {', '.join(self._dialects)}."
            return self._error(request, BadRequest(message, status=error.status))

    def _error(self, request: web.Request, error: BadRequest) -> web.Response:
        headers = {"Retry-After": "1"} if error.status == 503 else {"x-should-retry": "false"}
        body = self._dialect(request).error(error)
        return web.json_response(body, status=error.status, headers=headers)

    def _dialect(self, request: web.Request) -> Dialect:
        if request.path.startswith("/v1/messages"):
            return self._messages
        return self._dialects.get(request.path, self._dialects["/v1/chat/completions"])

    def _check_host(self, request: web.Request) -> None:
        """Refuses unknown names: a web page reaches another host's endpoint only by name."""
        name = host_name(request.headers.get("Host", ""))
        if name in self._names:
            return
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return
        known = ", ".join(sorted(self._names))
        raise BadRequest(
            f"Host: got {name[:80]!r}; allowed: an IP address, or one of {known}.",
            "Host",
            "unknown_host",
            403,
        )

    def _session(self, request: web.Request) -> Session:
        token = request.headers.get(TOKEN_HEADER) or bearer_token(request)
        token = token or request.headers.get("x-api-key") or ""
        return self._sessions.find(token.strip())

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "status": "ok",
                "sessions": len(self._sessions),
                "turns": self._turns.num_running,
                "is_asleep": self._backend.is_asleep,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {
            "id": self._model,
            "object": "model",
            "type": "model",
            "display_name": self._model,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "hybridrl",
            "max_model_len": self._backend.terms.max_context,
        }
        return web.json_response(
            {
                "object": "list",
                "data": [model],
                "has_more": False,
                "first_id": self._model,
                "last_id": self._model,
            }
        )

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        self._check_template()
        body, _ = await json_body(request)
        num = session.num_tokens(self._messages.conversation(body))
        return web.json_response({"input_tokens": num})

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        session, dialect = self._session(request), self._dialects[request.path]
        body, raw = await json_body(request)
        try:
            asked = dialect.asked(body, self._backend.terms)
            if asked.conversation is not None:
                self._check_template()
            running = self._turns.begin(session, asked, *_names_of(request, raw))
        except BadRequest:
            session.count("refused_requests")
            raise
        if asked.streams:
            return await self._streamed(request, dialect, asked, running)
        answer = await self._turns.wait(running, self._keep_alive_s, None)
        return web.json_response(dialect.answer(asked, answer))

    async def _streamed(
        self, request: web.Request, dialect: Dialect, asked: Asked, running: Running
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)

        async def wait_on() -> None:
            await stream.write(dialect.keep_alive.encode())

        with suppress(ConnectionResetError):  # the client went away
            try:
                answer = await self._turns.wait(running, self._keep_alive_s, wait_on)
            except BadRequest as error:
                await stream.write(dialect.error_event(error).encode())
            else:
                await stream.write("".join(dialect.events(asked, answer)).encode())
            await stream.write_eof()
        return stream

    def _check_template(self) -> None:
        if not self._has_template:
            raise BadRequest(
                "This model has no chat template, so only /inference/v1/generate is available.",
                status=404,
            )

    def _session_closed(self, session: Session) -> None:
        with suppress(RuntimeError):  # the endpoint was closed
            self._loop.call_soon_threadsafe(self._turns.forget, session)


def _names_of(request: web.Request, raw: bytes) -> tuple[Keys, bool]:
    """Returns the names under which a turn can be found again, and whether the client repeats an
    earlier request: it sends the same Idempotency-Key, or counts its attempts.
    """
    if key := request.headers.get("Idempotency-Key"):
        return (body_digest(request.path, b"key " + key.encode()),), True
    count = request.headers.get("x-stainless-retry-count", "0")
    return (body_digest(request.path, raw),), count not in ("", "0")
