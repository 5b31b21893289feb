"""Plays tasks of a run that has `agent.server`, on this or another host:

    python -m hybridrl.agents.outside RUN_FOLDER package.module:function [--concurrency N]
    HYBRIDRL_TASK_TOKEN=... python -m hybridrl.agents.outside http://HOST:PORT ...

Fetches tasks from all replicas of the run, calls the async function for each as `agent.function`
would, and reports the rewards. Ends when the run has ended. Imports only the standard library and
modules of hybridrl that need nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridrl.agents.tasks import AgentTask
from hybridrl.config.own_code import imported, make_working_folder_importable
from hybridrl.console import say

WAIT_S = 10.0  # longest wait for a task in one request
RETRY_S = 2.0
GIVE_UP_S = 60.0  # how long an address may not answer before it counts as gone
TOKEN_VARIABLE = "HYBRIDRL_TASK_TOKEN"
Play = Callable[..., Any]


class Gone(Exception):
    """The server refused a request for good; the text says why."""


class Replica:
    """Plays the tasks of one replica.

    Args:
        url: Address of the replica's endpoint.
        token: Token for its tasks.
        play: Async function that plays a task and returns the reward or None.
        options: Its keyword arguments.
        concurrency: Maximum number of tasks at the same time.
    """

    def __init__(
        self, url: str, token: str, play: Play, options: Mapping[str, Any], concurrency: int
    ) -> None:
        self._url, self._token, self._play, self._options = url, token, play, dict(options)
        self._room = asyncio.Semaphore(concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lease_s = 0.0
        self._has_lease = asyncio.Event()
        self._keys = itertools.count()

    async def run(self) -> int:
        """Plays tasks until the server is gone. Returns the number of tasks that were played."""
        alive, num, failing_s = asyncio.create_task(self._report_alive()), 0, 0.0
        try:
            while True:
                await self._room.acquire()
                self._room.release()
                try:
                    found = await self._post("take", {"max": 1, "wait_s": WAIT_S})
                except OSError:
                    if (failing_s := failing_s + RETRY_S) > GIVE_UP_S or not self._running:
                        return num
                    await asyncio.sleep(RETRY_S)
                    continue
                failing_s = 0.0
                for one in found["tasks"]:
                    await self._room.acquire()
                    self._lease_s, num = one["lease_s"], num + 1
                    self._has_lease.set()
                    self._running[one["id"]] = asyncio.create_task(self._played(one))
        finally:
            alive.cancel()
            for task in self._running.values():
                task.cancel()

    async def _played(self, one: Mapping[str, Any]) -> None:
        task = AgentTask(
            key=next(self._keys),
            step=one["step"],
            sample=one["sample"],
            prompt=one["prompt"],
            columns=one["columns"],
            base_url=one["base_url"],
            api_key=one["api_key"],
            model=one["model"],
        )
        try:
            reward = await self._play(task, **self._options)
            report = {"reward": reward.item() if hasattr(reward, "item") else reward}
            json.dumps(report)
        except asyncio.CancelledError:
            report = None
        except BaseException as error:  # the user's code may raise anything
            traceback.print_exc()
            lines = str(error).splitlines()
            report = {"error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}
        finally:
            self._running.pop(one["id"], None)
            self._room.release()
        if report is not None:
            try:
                await self._post(f"{one['id']}/report", report)
            except (OSError, Gone) as error:
                say(f"sample {task.sample}: the result was not taken: {error}", sys.stderr)

    async def _report_alive(self) -> None:
        await self._has_lease.wait()
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if not self._running:
                continue
            try:
                answer = await self._post("alive", {"ids": list(self._running)})
            except OSError:
                continue
            for number in answer["stopped"]:
                if (task := self._running.get(number)) is not None:
                    task.cancel()

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
            OSError: The server does not answer.
            Gone: The server refused the request.
        """
        request = urllib.request.Request(
            f"{self._url}/agent/tasks/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
        )

        def send() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(request, timeout=2 * WAIT_S) as answer:
                    found: dict[str, Any] = json.load(answer)
                    return found
            except urllib.error.HTTPError as error:
                raise Gone(f"{error.code}: {error.read().decode(errors='replace')}") from error

        return await asyncio.to_thread(send)


async def play_all(
    run: str, play: Play, options: Mapping[str, Any] | None = None, concurrency: int = 16
) -> int:
    """Plays the tasks of all replicas of a run until it ends. Returns the number of tasks.

    Args:
        run: Folder of the run, or the address of one replica, whose token is in the environment
            variable HYBRIDRL_TASK_TOKEN.
        play: See `Replica`.
        options: See `Replica`.
        concurrency: Maximum number of tasks of each replica at the same time.

    Raises:
        Gone: The token is wrong.
        FileNotFoundError: The folder contains no address.
    """
    places = addresses(run)
    replicas = [Replica(url, token, play, options or {}, concurrency) for url, token in places]
    return sum(await asyncio.gather(*(one.run() for one in replicas)))


def addresses(run: str) -> list[tuple[str, str]]:
    """Returns address and token of each replica."""
    if run.startswith(("http://", "https://")):
        return [(run.rstrip("/"), os.environ.get(TOKEN_VARIABLE, ""))]
    files = sorted((Path(run) / "agents").glob("replica_*.json"))
    if not files:
        raise FileNotFoundError(f"{run}/agents: no address; allowed: a run with agent.server=true")
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [(one["url"], one["token"]) for one in found]


def main() -> int:
    """Plays tasks as the command line says."""
    parser = argparse.ArgumentParser(description="Plays tasks of a run that has agent.server.")
    parser.add_argument("run", help="folder of the run, or http://HOST:PORT of one replica")
    parser.add_argument("function", help="async function package.module:name")
    parser.add_argument("--concurrency", type=int, default=16, help="tasks at the same time")
    parser.add_argument("--options", type=json.loads, default={}, help="keyword arguments, JSON")
    given = parser.parse_args()
    make_working_folder_importable()
    try:
        play = imported(given.function)
        num = asyncio.run(play_all(given.run, play, given.options, given.concurrency))
    except (ImportError, FileNotFoundError, Gone) as error:
        sys.exit(str(error))
    say(f"{num} tasks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
