"""Requests scores over HTTP from another process or host. Does not import torch.

Sends one POST request per sample with `{"prompt", "response", "columns"}` as JSON; the prompt of a
chat is a list of messages. The response body must be a JSON object with a finite number as
"reward". Invariant: no attempt exceeds its wall-clock limit, regardless of what takes the time
(name resolution, connecting, the TLS handshake or a slow server).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from hybridrl.errors import UserError

MAX_BYTES = 1 << 20
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class RemoteError(Exception):
    """Raised if the server returned no score."""


class Remote:
    """Requests the score of each response from a server.

    Args:
        attempt_s: Wall-clock limit for one attempt, in seconds.
        wait_s: Delay before the second attempt, in seconds; doubled before each later attempt.
    """

    runs = "thread"

    def __init__(
        self,
        url: str,
        attempt_s: float = 30.0,
        retries: int = 3,
        wait_s: float = 0.5,
        headers: Mapping[str, str] | None = None,
        reward_key: str = "reward",
    ) -> None:
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            allowed = "http://HOST[:PORT]/PATH or https"
            raise UserError("reward.options.url", repr(url), allowed, "Set the scorer's address.")
        for name, value, least in (
            ("attempt_s", attempt_s, 1e-3),
            ("retries", retries, 0),
            ("wait_s", wait_s, 0),
        ):
            if not isinstance(value, int | float) or not value >= least:
                raise UserError(
                    f"reward.options.{name}", repr(value), f"{least:g} or more", f"Change {name}."
                )
        self._attempt_s, self._retries, self._wait_s = attempt_s, retries, wait_s
        self._headers = {**(headers or {}), "Content-Type": "application/json"}
        self._key = reward_key
        self._context = ssl.create_default_context() if self._url.scheme == "https" else None

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns the score. Raises RemoteError if all attempts fail or the answer is wrong."""
        body = {"prompt": prompt, "response": response, "columns": dict(columns)}
        data = json.dumps(body, default=str).encode()
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._wait_s * 2 ** (attempt - 1))
            try:
                status, answer = self._post(data)
            except (OSError, http.client.HTTPException) as error:
                last = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return self._score(answer)
            last = f"status {status}: {answer[:80].decode('utf-8', 'replace')}"
            if status not in RETRIED:
                raise RemoteError(last)
        raise RemoteError(f"no score in {self._retries + 1} attempts, the last: {last}")

    def _post(self, data: bytes) -> tuple[int, bytes]:
        """Sends one request within the time limit. Returns the status and the body.

        The attempt runs in another thread, because neither name resolution nor the TLS handshake
        has a wall-clock limit. A late attempt is abandoned and its socket is shut down. Its thread
        ends at the latest when the resolver stops trying.
        """
        attempt = _Attempt(self._url, self._context, data, self._headers, self._attempt_s)
        thread = threading.Thread(target=attempt.run, name="reward remote", daemon=True)
        thread.start()
        thread.join(self._attempt_s)
        if thread.is_alive():
            attempt.stop()
            raise TimeoutError(f"no complete answer in {self._attempt_s:g} s")
        if attempt.error is not None:
            raise attempt.error
        assert attempt.answer is not None
        return attempt.answer

    def _score(self, answer: bytes) -> float:
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise RemoteError(f"answer is not JSON: {answer[:60]!r}") from error
        value = found.get(self._key) if isinstance(found, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RemoteError(f"answer {str(found)[:60]} has no number as {self._key!r}")
        if not math.isfinite(value):
            raise RemoteError(f"answer has {self._key} = {value}, which is not finite")
        return float(value)


class _Attempt:
    def __init__(
        self,
        url: SplitResult,
        context: ssl.SSLContext | None,
        data: bytes,
        headers: Mapping[str, str],
        limit_s: float,
    ) -> None:
        self._url, self._context, self._data = url, context, data
        self._headers, self._limit_s = headers, limit_s
        self.answer: tuple[int, bytes] | None = None
        self.error: Exception | None = None
        # A second handle of the connection. TLS takes over the first handle, and http.client drops
        # it after reading the headers if the response ends when the connection closes.
        self._handle: socket.socket | None = None
        self._is_stopped = False

    def run(self) -> None:
        try:
            self.answer = self._request()
        except Exception as error:  # the waiting thread raises it
            self.error = error
        finally:
            if self._handle is not None:
                self._handle.close()

    def stop(self) -> None:
        """Wakes the thread if it waits for the server; a request not yet sent is never sent."""
        self._is_stopped = True
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)

    def _request(self) -> tuple[int, bytes]:
        url, context, host = self._url, self._context, str(self._url.hostname)
        connection = (
            http.client.HTTPConnection(host, url.port)
            if context is None
            else http.client.HTTPSConnection(host, url.port, context=context)
        )
        connection.sock = socket.create_connection((host, connection.port), self._limit_s)
        try:
            self._handle = connection.sock.dup()
            if self._is_stopped:
                raise TimeoutError
            if context is not None:
                connection.sock = context.wrap_socket(connection.sock, server_hostname=host)
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("POST", path, self._data, dict(self._headers))
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_BYTES + 1)
        finally:
            connection.close()
