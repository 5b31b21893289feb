"""A scorer behind HTTP: another process or host gives the score. No torch.

One POST a sample, `{"prompt", "response", "columns"}` as JSON; the answer is a JSON object whose
"reward" is a finite number. Invariant: no attempt outlasts its wall-clock limit, however slowly the
server sends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from hybridrl.errors import UserError

MOST_BYTES = 1 << 20
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class RemoteError(Exception):
    """The server gave no score."""


class Remote:
    """Asks a server for the score of each response.

    Args:
        url: of the scorer, http or https.
        attempt_s: wall-clock limit of one attempt.
        retries: further attempts after no answer, or one that says to try later.
        wait_s: before the first of them; twice as long before each next.
        headers: sent along, for a key say.
        reward_key: the answer's field.

    Raises:
        UserError: the options are wrong.
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

    def __call__(self, prompt: str, response: str, columns: Mapping[str, object]) -> float:
        """Returns the score.

        Raises:
            RemoteError: there was none after all attempts, or the answer is not as it must be.
        """
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
        url = self._url
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(url.hostname), url.port, timeout=self._attempt_s)
        connection.connect()
        # Kept: http.client forgets it when it has the head of an answer.
        connected, late = connection.sock, threading.Event()

        def stop() -> None:
            late.set()
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)  # wakes whoever reads

        timer = threading.Timer(self._attempt_s, stop)
        timer.daemon = True
        timer.start()
        try:
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("POST", path, data, self._headers)
            answer = connection.getresponse()
            found = answer.read(MOST_BYTES + 1)
            if late.is_set():
                raise TimeoutError(f"no whole answer in {self._attempt_s:g} s")
            return answer.status, found
        except (OSError, http.client.HTTPException) as error:
            if late.is_set():
                raise TimeoutError(f"no whole answer in {self._attempt_s:g} s") from error
            raise
        finally:
            timer.cancel()
            connection.close()

    def _score(self, answer: bytes) -> float:
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise RemoteError(f"answered no JSON: {answer[:60]!r}") from error
        value = found.get(self._key) if isinstance(found, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RemoteError(f"answered {str(found)[:60]}, without a number as {self._key!r}")
        if not math.isfinite(value):
            raise RemoteError(f"answered {self._key} = {value}, which is not finite")
        return float(value)
