"""Plays tasks of a run that has `agent.server`, on this or another host:

    python -m hybridrl.agents.outside RUN_FOLDER package.module:function [--concurrency N]
    HYBRIDRL_TASK_TOKEN=... python -m hybridrl.agents.outside http://HOST:PORT ...

Calls the async function for each task as `agent.function` would, and reports the rewards. With a
folder, it ends when this contains no address any more; with an address, when it has not answered
for GIVE_UP_S. Imports only the standard library and modules of hybridrl that need nothing else.

Tasks of evaluations have separate room, because tasks of training get no turn during an evaluation.
Requests use separate threads, so that the user's code cannot delay reports that tasks are alive.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hybridrl.agents.task_connection import (
    ANSWER_S,
    Address,
    Connection,
    Gone,
    Heartbeat,
    addresses,
    present_addresses,
)
from hybridrl.agents.tasks import AgentTask, take_token
from hybridrl.config.own_code import imported, make_working_folder_importable
from hybridrl.console import say

WAIT_S = ANSWER_S / 2  # longest wait for a task in one request
RETRY_S = 2.0
GIVE_UP_S = 60.0  # how long an address may not answer before it counts as gone
LEAVE_S = 5.0  # longest time for giving tasks back
TASK_ENDED = 410
Play = Callable[..., Any]


class Replica:
    """Plays the tasks of one replica with `play(task, **options)`, an async function that returns
    the reward or None.

    Args:
        concurrency: Maximum number of training tasks at the same time, and also of evaluation
            tasks.
    """

    def __init__(
        self, address: Address, play: Play, options: Mapping[str, Any], concurrency: int
    ) -> None:
        self._address, self._play, self._options = address, play, dict(options)
        self._concurrency = concurrency
        self._connection = Connection(address)
        # Tasks whose result was not taken yet: all, and those whose function was called.
        self._held: dict[str, None] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._keys = itertools.count()
        self._num_played, self._has_answered, self._has_left = 0, False, False
        self._say_at = 0.0

    async def run(self) -> int:
        """Plays tasks until the server is gone; returns their number. Raises Gone if refused."""
        loop = asyncio.get_running_loop()

        def stop(number: str) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._cancel, number)

        heartbeat = Heartbeat(self._connection, lambda: list(self._held), stop)
        takers = [asyncio.create_task(self._take_all(kind, heartbeat)) for kind in (True, False)]
        try:
            done, _ = await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)
            for taker in done:
                taker.result()
            return self._num_played
        finally:
            for taker in takers:
                taker.cancel()
            await self._leave()
            heartbeat.close()
            self._connection.close()

    async def _take_all(self, is_evaluation: bool, heartbeat: Heartbeat) -> None:
        room = asyncio.Semaphore(self._concurrency)
        failing_since: float | None = None
        while True:
            await room.acquire()
            room.release()
            try:
                found = await self._connection.in_thread(self._take, is_evaluation, heartbeat)
            except Gone:
                if self._address.has_ended():
                    return
                raise
            except OSError as error:
                failing_since = failing_since or time.monotonic()
                if self._is_gone(time.monotonic() - failing_since, error):
                    return
                await asyncio.sleep(RETRY_S)
                continue
            failing_since, self._has_answered = None, True
            if not found and self._address.has_ended():
                return
            for one in found:
                await room.acquire()
                self._num_played += 1
                self._running[one["id"]] = asyncio.create_task(self._played(one, room))

    def _take(self, is_evaluation: bool, heartbeat: Heartbeat) -> list[dict[str, Any]]:
        """Returns at most one task. Runs in a thread: the user's code may block the loop."""
        asked = {"max": 1, "wait_s": WAIT_S, "is_evaluation": is_evaluation}
        found: list[dict[str, Any]] = self._connection.send("take", asked)["tasks"]
        for one in found:
            self._held[one["id"]], heartbeat.lease_s = None, one["lease_s"]
            if self._has_left:
                self._connection.send(f"{one['id']}/give_back", {})
        return found

    def _is_gone(self, failing_s: float, error: OSError) -> bool:
        """Whether an address that has not answered is gone. Raises Gone if it never answered."""
        if self._address.has_ended():
            return True
        if failing_s <= GIVE_UP_S:
            return False
        text = f"{self._address.url} has not answered for {failing_s:.0f} s: {error}"
        if self._address.file is None and not self._has_answered:
            raise Gone(text)
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + GIVE_UP_S
            say(text)
        return self._address.file is None

    async def _played(self, one: Mapping[str, Any], room: asyncio.Semaphore) -> None:
        try:
            await self._report(one, await self._result(one))
        finally:
            self._running.pop(one["id"], None)
            self._held.pop(one["id"], None)
            room.release()

    async def _result(self, one: Mapping[str, Any]) -> dict[str, Any]:
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
            return report
        except BaseException as error:  # the user's code may raise anything
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise
            traceback.print_exc()
            lines = str(error).splitlines()
            return {"error": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"}

    async def _report(self, one: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        give_up_at = time.monotonic() + GIVE_UP_S
        while True:
            try:
                await self._connection.post(f"{one['id']}/report", report)
                return
            except Gone as error:  # 410: an earlier attempt arrived, or the task was stopped
                if not str(error).startswith(str(TASK_ENDED)):
                    say(f"sample {one['sample']}: the result was not taken: {error}")
                return
            except OSError as error:
                if time.monotonic() >= give_up_at or self._address.has_ended():
                    say(f"sample {one['sample']}: the result could not be reported: {error}")
                    return
            await asyncio.sleep(RETRY_S)

    def _cancel(self, number: str) -> None:
        if (task := self._running.get(number)) is not None:
            task.cancel()

    async def _leave(self) -> None:
        self._has_left, running = True, dict(self._running)
        for task in running.values():
            task.cancel()
        if self._address.has_ended():
            return
        posts = [self._connection.post(f"{number}/give_back", {}) for number in running]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*posts, return_exceptions=True), LEAVE_S)


async def play_all(
    run: str,
    play: Play,
    options: Mapping[str, Any] | None = None,
    concurrency: int = 16,
    token: str | None = None,
) -> int:
    """Plays the tasks of all replicas of a run until it ends. Returns the number of tasks.

    Args:
        run: Folder of the run, or the address of one replica.
        token: Token for an address; by default HYBRIDRL_TASK_TOKEN, which is removed.

    Raises:
        Gone: The token is wrong, or the address never answered.
        FileNotFoundError: The folder contains no address.
    """
    if run.startswith(("http://", "https://")):
        address = Address(run.rstrip("/"), token or take_token() or "")
        return await Replica(address, play, options or {}, concurrency).run()
    playing: dict[Address, asyncio.Task[int]] = {}
    found, began, has_said = addresses(run), time.monotonic(), False
    try:
        while found or any(not task.done() for task in playing.values()):
            for one in found:
                if one not in playing:
                    replica = Replica(one, play, options or {}, concurrency)
                    playing[one] = asyncio.create_task(replica.run())
            if not has_said and time.monotonic() > began + GIVE_UP_S:
                has_said = _say_missing(found)
            await asyncio.wait(playing.values(), timeout=RETRY_S, return_when="FIRST_EXCEPTION")
            for task in playing.values():
                if task.done():
                    task.result()
            found = present_addresses(run)
        return sum(task.result() for task in playing.values())
    finally:
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


def _say_missing(found: list[Address]) -> bool:
    num = max((one.replicas for one in found), default=0)
    has = {one.file.name for one in found if one.file is not None}
    if missing := [one for one in range(num) if f"replica_{one}.json" not in has]:
        say(f"replicas {missing} of {num} have no address yet; their tasks are not played")
    return True


async def _until_terminated(playing: Any) -> int:
    """Plays tasks, and gives them back if the process gets SIGTERM."""
    task = asyncio.ensure_future(playing)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    num: int = await task
    return num


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays tasks of a run that has agent.server.")
    parser.add_argument("run", help="folder of the run, or http://HOST:PORT of one replica")
    parser.add_argument("function", help="async function package.module:name")
    parser.add_argument(
        "--concurrency", type=int, default=16, help="tasks of each kind at the same time"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="keyword arguments, JSON")
    given, token = parser.parse_args(), take_token()
    make_working_folder_importable()
    try:
        play = imported(given.function)
        playing = play_all(given.run, play, given.options, given.concurrency, token)
        num = asyncio.run(_until_terminated(playing))
    except (ImportError, FileNotFoundError, Gone) as error:
        sys.exit(str(error))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    say(f"{num} tasks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
