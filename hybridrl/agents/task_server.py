"""Gives tasks of agents to programs that ask for them over HTTP, and receives their results. Does
not import torch.

A program that asks is a *taker*; outside.py is one. The routes belong to the endpoint's server and
need a separate token, sent as `Authorization: Bearer TOKEN`. Tasks of evaluations are given first.
A taker may ask for one kind only; it must keep room for tasks of evaluations, because tasks of
training get no turn during an evaluation.

Handlers run in the endpoint's thread and wait only for tasks, at most MAX_WAIT_S; results are
passed on in other threads, because they may call the user's code. Another thread ends late tasks.
Invariant: each task is either waiting or taken by one taker, under an id that only this taker
knows, until its report. If the taker is not heard of for `lease_s` seconds, or gives the task back,
the episode begins again.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from hybridrl.agents.command import POLL_S, checked_report
from hybridrl.agents.conversation import BadRequest
from hybridrl.agents.http_requests import bearer_token, json_body
from hybridrl.agents.tasks import TOKEN_VARIABLE, AgentClocks, AgentTask, Report
from hybridrl.console import say
from hybridrl.errors import UserError, short
from hybridrl.rewards.outcome import WHERE

MIN_TOKEN = 16
MAX_LOST = 3  # times that a task may be lost before its episode fails
MAX_TAKEN, MAX_WAIT_S = 1024, 60.0
WAIT_STEP_S = 0.05
UNHEARD_S = 60.0  # time without a taker, while tasks wait, after which a message says so
TAKER = "a program that takes tasks and reports their results"
Done = Callable[[Report], None]


@dataclass
class _Taken:
    task: AgentTask
    done: Done = field(repr=False)
    deadline: float
    heard_at: float


class TaskServer:
    """Implements `Runner` for programs that ask for tasks. Raises UserError if the token is too
    short.

    Args:
        timeout_s: Time limit of one task, in seconds of `clocks`, which stand still while agents
            cannot get answers.
        lease_s: Seconds without news of a taker after which its tasks are given to others.
        address_file: File for the address and the token, which only this user can read. It exists
            while tasks can be fetched.
        token: Token of the tasks, from HYBRIDRL_TASK_TOKEN; by default a random one.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        lease_s: float,
        clocks: AgentClocks,
        address_file: Path,
        replicas: int = 1,
        token: str | None = None,
    ) -> None:
        self._timeout_s, self._lease_s, self._address_file = timeout_s, lease_s, address_file
        self._replicas = replicas
        self._token = token or secrets.token_urlsafe(32)
        if len(self._token) < MIN_TOKEN:
            raise UserError(
                TOKEN_VARIABLE,
                f"{len(self._token)} characters",
                f"at least {MIN_TOKEN} random characters",
                "Choose a longer token, or unset the variable.",
            )
        self._clocks, self._lock = clocks, threading.Lock()
        # The key says whether they belong to evaluations, which go first.
        self._waiting: dict[bool, deque[tuple[AgentTask, Done]]] = {True: deque(), False: deque()}
        self._taken: dict[str, _Taken] = {}
        self._num_lost = Counter[int]()  # times, by episode
        self._closed = threading.Event()
        self._heard_at = time.monotonic()  # last news of a taker, or no task waited
        self._has_said = False
        threading.Thread(target=self._watch, name="tasks of agents", daemon=True).start()

    def publish(self, url: str) -> None:
        """Writes the address of the endpoint and the token to the file."""
        self._address_file.parent.mkdir(parents=True, exist_ok=True)
        # Replaced in one operation, because a program may read the file of an earlier run
        # meanwhile.
        new = self._address_file.with_name(f".{self._address_file.name}")
        new.unlink(missing_ok=True)
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as content:
            json.dump({"url": url, "token": self._token, "replicas": self._replicas}, content)
        new.replace(self._address_file)

    def start(self, task: AgentTask, done: Done) -> None:
        with self._lock:
            self._waiting[task.is_evaluation].append((task, done))

    def stop(self, key: int) -> None:
        with self._lock:
            for kind, waiting in self._waiting.items():
                self._waiting[kind] = deque(one for one in waiting if one[0].key != key)
            for number in [n for n, one in self._taken.items() if one.task.key == key]:
                del self._taken[number]
            self._num_lost.pop(key, None)

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._address_file.unlink(missing_ok=True)
        with self._lock:
            for waiting in self._waiting.values():
                waiting.clear()
            self._taken.clear()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/agent/tasks/take", self._take),
            web.post("/agent/tasks/alive", self._alive),
            web.post("/agent/tasks/{id}/report", self._report),
            web.post("/agent/tasks/{id}/give_back", self._give_back),
        ]

    async def _take(self, request: web.Request) -> web.Response:
        """Answers with up to `max` tasks, after waiting up to `wait_s` seconds for the first. With
        `is_evaluation`, all are of evaluations (true) or of training (false).
        """
        body = await self._body(request)
        most = _number(body, "max", 1, MAX_TAKEN)
        until = time.monotonic() + _number(body, "wait_s", 0, MAX_WAIT_S)
        kind = body.get("is_evaluation")
        if kind is not None and not isinstance(kind, bool):
            raise BadRequest(
                f"is_evaluation: got {short(kind)}; allowed: true, false or null.", "is_evaluation"
            )
        while not (found := self._pop(int(most), kind)):
            if time.monotonic() >= until or self._closed.is_set():
                break
            await asyncio.sleep(WAIT_STEP_S)
        return web.json_response({"tasks": found}, dumps=partial(json.dumps, default=str))

    async def _alive(self, request: web.Request) -> web.Response:
        """Notes that a taker works on the tasks `ids`. Answers with those that it must stop."""
        ids = (await self._body(request)).get("ids")
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise BadRequest(f"ids: got {short(ids)}; allowed: a list of texts.", "ids")
        with self._lock:
            for one in ids:
                if one in self._taken:
                    self._taken[one].heard_at = time.monotonic()
            return web.json_response({"stopped": [one for one in ids if one not in self._taken]})

    async def _report(self, request: web.Request) -> web.Response:
        """Ends a task with a `reward`, which may be null, or an `error`."""
        body = await self._body(request)
        if (error := body.get("error")) is None:
            report = checked_report(body.get("reward"))
        else:
            report = Report(failure=(f"reported the error {short(error)} for {WHERE}", TAKER))
        await self._passed_on(self._end(request), report)
        return web.json_response({})

    async def _give_back(self, request: web.Request) -> web.Response:
        """Gives a task to the next taker. Counts as a loss, so that an unplayable episode fails."""
        await self._body(request)
        taken = self._end(request)
        with self._lock:
            report = self._lost(taken.task)
        await self._passed_on(taken, report)
        return web.json_response({})

    async def _passed_on(self, taken: _Taken, report: Report) -> None:
        """Passes a report on in another thread, even if the client goes away meanwhile."""
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(None, self._finish, taken, report))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        token = (bearer_token(request) or "").encode("utf-8", errors="replace")
        if not hmac.compare_digest(token, self._token.encode()):
            message = "The token is not that of this run's tasks; see agent.server."
            raise BadRequest(message, code="invalid_api_key", status=401)
        return (await json_body(request))[0]

    def _pop(self, most: int, kind: bool | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with self._lock:
            queues = list(self._waiting.values()) if kind is None else [self._waiting[kind]]
            self._heard_at, self._has_said = time.monotonic(), False
            while len(found) < most:
                waiting = next(filter(None, queues), None)
                if waiting is None:
                    break
                task, done = waiting.popleft()
                number = secrets.token_urlsafe(16)
                deadline = self._clocks.of(task.is_evaluation).now() + self._timeout_s
                self._taken[number] = _Taken(task, done, deadline, time.monotonic())
                found.append(
                    {
                        "id": number,
                        **task.row,
                        "base_url": task.base_url,
                        "api_key": task.api_key,
                        "model": task.model,
                        "lease_s": self._lease_s,
                    }
                )
        return found

    def _end(self, request: web.Request) -> _Taken:
        with self._lock:
            taken = self._taken.pop(request.match_info["id"], None)
        if taken is None:
            message = "This task was stopped, ended, or given to another program."
            raise BadRequest(message, "id", "unknown_task", 410)
        return taken

    def _finish(self, taken: _Taken, report: Report) -> None:
        if not report.begins_again:
            with self._lock:
                self._num_lost.pop(taken.task.key, None)
        taken.done(report)

    def _lost(self, task: AgentTask) -> Report:
        """Returns the report for a task without its program; the caller holds the lock."""
        self._num_lost[task.key] += 1
        if self._num_lost[task.key] < MAX_LOST:
            return Report(begins_again=True)
        got = f"was lost with its program, or given back, {MAX_LOST} times for {WHERE}"
        return Report(failure=(got, TAKER))

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            for taken, report in self._overdue():
                self._finish(taken, report)
            self._say_unheard()

    def _say_unheard(self) -> None:
        now = time.monotonic()
        with self._lock:
            num = sum(map(len, self._waiting.values()))
            if not num or self._taken:  # a program that has tasks may have no room
                self._heard_at = now
            if self._has_said or now < self._heard_at + UNHEARD_S:
                return
            self._has_said = True
        say(
            f"{num} tasks of agents wait, and no program has asked for tasks for {UNHEARD_S:g} s; "
            f"the address is in {self._address_file}",
            sys.stderr,
        )

    def _overdue(self) -> list[tuple[_Taken, Report]]:
        found = []
        with self._lock:
            for number, one in list(self._taken.items()):
                is_late = self._clocks.of(one.task.is_evaluation).now() >= one.deadline
                is_lost = time.monotonic() >= one.heard_at + self._lease_s
                if not is_late and not is_lost:
                    continue
                del self._taken[number]
                if is_late:
                    got = f"took longer than {self._timeout_s:g} s for {WHERE}"
                    report = Report(failure=(got, "at most agent.timeout_s"))
                else:
                    report = self._lost(one.task)
                found.append((one, report))
        return found


def _number(body: dict[str, Any], name: str, default: float, most: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadRequest(f"{name}: got {short(value)}; allowed: 0 to {most:g}.", name)
    return value
