"""Divides the episodes of a replica among several processes that serve agents, because one process
answers only about 1,000 turns per second. Does not import torch.

Invariant: all turns of an episode are in one process. The number of the episode determines it, and
the number of a turn is congruent to the number of its process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hybridrl.agents.backend import Arrivals
from hybridrl.agents.host import Assignment, Finished
from hybridrl.agents.host_process import HostProcess, wait_for
from hybridrl.agents.host_settings import HostSettings
from hybridrl.config.agent import AgentConfig
from hybridrl.rollout.engine import Completion

# If this many programs request a turn at the same time, the last waits about 60 ms for one process.
PROGRAMS_PER_PROCESS = 64
MAX_PROCESSES = 4
CORES_PER_PROCESS = 4  # the other cores are for the rank and for the programs


class HostPool:
    """Implements the interface of `AgentHost` for hosts in several processes.

    `hosts` have the settings that `settings_of_parts` returned, in order; `notes` are
    `make_host`'s.
    """

    def __init__(self, hosts: Sequence[HostProcess]) -> None:
        self._hosts = tuple(hosts)
        self.notes = self._hosts[0].notes

    @classmethod
    def start(cls, settings: HostSettings, num_processes: int) -> HostPool:
        """Starts the processes together. Raises the errors of `HostProcess`."""
        parts = settings_of_parts(settings, num_processes)
        with ThreadPoolExecutor(num_processes) as threads:
            starting = [threads.submit(HostProcess, part) for part in parts]
        if (error := next((one.exception() for one in starting if one.exception()), None)) is None:
            return cls([one.result() for one in starting])
        for one in starting:
            if one.exception() is None:
                one.result().close()
        raise error

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(host.process_id for host in self._hosts)

    def begin(self, assignment: Assignment) -> None:
        self._of(assignment.key).begin(assignment)

    def end(self, key: int) -> None:
        self._of(key).end(key)

    def take(self) -> Arrivals:
        if not self._has_news() and not wait_for([host.connection for host in self._hosts]):
            return Arrivals()
        found = [host.take() for host in self._hosts]
        return Arrivals(
            tuple(turn for one in found for turn in one.requests),
            tuple(number for one in found for number in one.aborted),
        )

    def take_finished(self) -> list[Finished]:
        return [one for host in self._hosts for one in host.take_finished()]

    def finish(self, completions: Sequence[Completion]) -> None:
        for number, host in enumerate(self._hosts):
            own = [one for one in completions if one.request_id % len(self._hosts) == number]
            if own:
                host.finish(own)

    def abort(self, request_id: int) -> None:
        self._of(request_id).abort(request_id)

    def wait(self, timeout_s: float) -> None:
        if not self._has_news():
            wait_for([host.connection for host in self._hosts], timeout_s)

    def sleep(self) -> None:
        self._each(HostProcess.sleep)

    def wake(self, is_evaluation: bool) -> None:
        self._each(lambda host: host.wake(is_evaluation))

    def versions(self, keys: Collection[int]) -> dict[int, Counter[int]]:
        found: dict[int, Counter[int]] = {}
        for host in self._hosts:
            own = [key for key in keys if self._of(key) is host]
            found |= host.versions(own)
        return found

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._hosts)) as threads:
            for closing in [threads.submit(host.close) for host in self._hosts]:
                closing.result()

    def _of(self, number: int) -> HostProcess:
        return self._hosts[number % len(self._hosts)]

    def _has_news(self) -> bool:
        return any(host.has_news for host in self._hosts)

    def _each(self, call: Callable[[HostProcess], None]) -> None:
        for host in self._hosts:
            call(host)


def num_processes(agent: AgentConfig, num_cores: int) -> int:
    """Returns the number of processes that serve a replica's agents; `num_cores` are the rank's."""
    if agent.server or agent.port:  # one address for each replica
        return 1
    most = min(MAX_PROCESSES, num_cores // CORES_PER_PROCESS)
    if agent.function is not None:
        most = min(most, agent.workers)
    return max(1, min(most, -(-agent.concurrency // PROGRAMS_PER_PROCESS)))


def settings_of_parts(settings: HostSettings, num_parts: int) -> list[HostSettings]:
    agent = settings.agent

    def share(number: int, part: int) -> int:
        return number // num_parts + (part < number % num_parts)

    return [
        replace(
            settings,
            agent=agent.model_copy(
                update={
                    "concurrency": share(agent.concurrency, part),
                    "workers": max(1, share(agent.workers, part)),
                }
            ),
            part=part,
            num_parts=num_parts,
        )
        for part in range(num_parts)
    ]
