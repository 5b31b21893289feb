"""Addresses of a run's tasks, requests to one of them, and the thread that notes tasks as alive.

Imports only the standard library and modules of hybridrl that need nothing else.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.console import say

ANSWER_S = 20.0  # longest wait for an answer; a request for tasks waits for up to half of it
NUM_THREADS = 8  # for requests to one replica
Result = TypeVar("Result")


class Gone(Exception):
    """The server refused a request permanently, or never answered; the text says why."""


@dataclass(frozen=True)
class Address:
    """Where the tasks of one replica are.

    Args:
        file: File that contains address and token while the run lasts; None if the user named them.
    """

    url: str
    token: str = field(repr=False)
    file: Path | None = None
    replicas: int = 1

    def has_ended(self) -> bool:
        """Whether the run removed or replaced the file."""
        return self.file is not None and _read(self.file) != self


class Connection:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tasks of a run")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self.in_thread(self.send, path, body)

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def send(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an answer. Raises OSError without one, and Gone if the server refused."""
        request = urllib.request.Request(
            f"{self._address.url}/agent/tasks/{path}",
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._address.token}",
            },
        )
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise
            raise Gone(f"{error.code}: {error.read().decode(errors='replace')}") from error
        except (http.client.HTTPException, ValueError) as error:  # half an answer
            raise OSError(f"the answer cannot be read: {error!r}") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Heartbeat:
    """Reports in a separate thread that tasks are alive.

    Attributes:
        lease_s: Seconds without a report after which the server gives a task to others, as stated
            in tasks.
    """

    def __init__(
        self, connection: Connection, ids: Callable[[], list[str]], stop: Callable[[str], None]
    ) -> None:
        self._connection, self._ids, self._stop = connection, ids, stop
        self._closed, self.lease_s = threading.Event(), 1.0
        threading.Thread(target=self._run, name="alive", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self.lease_s / 4):
            if not (ids := self._ids()):
                continue
            try:
                for number in self._connection.send("alive", {"ids": ids})["stopped"]:
                    self._stop(number)
            except Exception as error:  # the next heartbeat may succeed
                if not self._closed.is_set():
                    say(f"{len(ids)} tasks could not be noted as alive: {error!r}")


def addresses(run: str) -> list[Address]:
    """Returns the addresses in the folder of a run. Raises FileNotFoundError if there is none."""
    if not (found := present_addresses(run)):
        raise FileNotFoundError(f"{run}/agents: no address; allowed: a run with agent.server=true")
    return found


def present_addresses(run: str) -> list[Address]:
    files = sorted((Path(run) / "agents").glob("replica_*.json"))
    return [one for one in map(_read, files) if one is not None]


def _read(file: Path) -> Address | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Address(found["url"], found["token"], file, found["replicas"])
