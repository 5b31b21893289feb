"""Sends heartbeats of every rank to the job's store, and ends the job if a rank is lost.

Who waits for whom: `Heartbeat.wait` waits until other ranks enter the same collective, as long as
all ranks send heartbeats. It raises PeerError if there is a verdict, which means that all ranks
must end.

Each rank has two threads, unless it is the only rank. The first thread writes the rank's `Beat` to
the store every BEAT_S and reads the verdict. On rank 0, it also reads all heartbeats (3 ms for
1,000 ranks) and publishes the verdict that watch.py reaches; rank 1 takes over both tasks while
rank 0 is silent. A `HangObserver` examines the same heartbeats and reports hangs, which do not end
the job. The second thread writes stacks to the log and ends the process after a verdict, or if the
store no longer responds. Rank 0 ends last, because it may serve the store.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist

from hybridrl.console import say
from hybridrl.parallel import failure
from hybridrl.parallel.failure import Failure, PeerError
from hybridrl.parallel.idle_clock import IdleClock
from hybridrl.parallel.stacks import (
    STACKS_SIGNAL,
    host_id,
    position,
    print_stacks,
    why_dead,
    writes_stacks,
)
from hybridrl.parallel.watch import Beat, Verdict, Wait, Watch, hang_observer

# A rank is declared lost 30 s after its last heartbeat. This is 15 intervals, much longer than a
# busy host delays a thread. 1,000 ranks send 500 heartbeats per second to the store.
BEAT_S, SILENT_S = 2.0, 30.0
POLL_S = 0.25  # interval at which a waiting main thread checks for a verdict
# Time that threads have to finish their last requests to a busy store. If a thread returned from
# torch's code while the interpreter shuts down, Python would abort (SIGABRT), and a finished run
# would fail.
LEAVE_S = 10.0
GRACE_S = 1.0  # time that the main thread has to raise the verdict itself
NOTE_CALLS_S = 12.5  # after this time without progress, heartbeats include the rank's calls
DEPUTY = 1  # rank that decides on verdicts while rank 0 is silent
_NUMBERS = itertools.count()  # numbers of `Heartbeat` objects, equal on all ranks
_CURRENT: list[Heartbeat] = []


class Heartbeat:
    """Sends this rank's heartbeats, and tracks what it knows about other ranks.

    Args:
        store: Client for the job's store that nothing else uses; None if there are no other ranks.
        watch: Object that examines the heartbeats. Only its verdict on rank 0 counts.

    Attributes:
        phase: Function that returns the current phase of the step; may be replaced.
        run_folder: Folder for reports of hangs; None if there is none.
        verdict: Reason why all ranks must end; None if there is none.
        stop_signal: Number of the signal that asked some rank to save and stop; 0 if none. Unlike
            `World.stop_signal`, it changes at different times on different ranks.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int, watch: Watch) -> None:
        self._store, self._rank, self._size, self.watch = store, rank, size, watch
        self.group = dist.group.WORLD
        self.phase: Callable[[], str] = lambda: "start"
        self.verdict: Verdict | None = None
        self.stop_signal = 0
        self._stop_epoch = 0  # signals that other ranks report count only in the same epoch
        self._host_peers: dict[int, int] = {}
        self._main, self._pid = threading.get_ident(), os.getpid()
        self._parts: list[str] = []
        self._entered: dict[str, int] = {}
        # Waits by group, because a rank's threads wait in different groups.
        self._waits: dict[str, tuple[str, int, Sequence[int] | None, str, float]] = {}
        self._within_since: float | None = None
        self._count, self._num_answers = 0, 0
        self._is_complete = False  # whether all keys that this rank reads exist
        self._first: Beat | None = None  # rank 0's latest heartbeat
        self._idle = IdleClock(NOTE_CALLS_S, BEAT_S)
        log = failure.rank_file(".log", rank)
        self.run_folder = None if log is None else log.parent.parent
        self._num_asked, self._answered = 0, ""
        self._hangs = hang_observer(self._ask_stacks)
        self._host, self._host_id = socket.gethostname(), host_id()
        self._ending, self._was_raised = threading.Event(), False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads, if there are other ranks."""
        if self._store is None:
            return
        if self._rank == 0:
            self._store.set("verdict", "")
            self._store.set("ask", "")
        self._store.set(f"beat/{self._rank}", self._beat().to_json())
        for work in (self._beat_on, self._guard):
            self._threads.append(threading.Thread(target=work, name=work.__name__, daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        # A forked process does not own the heartbeat.
        if self._ending.is_set() or os.getpid() != self._pid:
            return
        self._ending.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LEAVE_S)  # a thread cannot end if the store does not respond
        if self._store is None or any(thread.is_alive() for thread in self._threads):
            return
        with contextlib.suppress(dist.DistError):  # the store ended with rank 0
            self._store.set(f"beat/{self._rank}", replace(self._beat(), has_left=True).to_json())

    def set_host_peers(self, places: Sequence[tuple[str, int]]) -> None:
        """Finds the other ranks on this host, given every rank's `host_id` and process id."""
        self._host_peers = {
            rank: pid
            for rank, (where, pid) in enumerate(places)
            if where == self._host_id and rank != self._rank
        }

    def dead_host_peers(self) -> list[int]:
        """Returns the other ranks on this host whose processes cannot continue."""
        return [rank for rank, pid in self._host_peers.items() if why_dead(pid) is not None]

    @contextlib.contextmanager
    def part(self, what: str, is_unbounded: bool = False) -> Iterator[None]:
        """Names the work of a `with` block in heartbeats. `is_unbounded`: it has no timeout."""
        self._parts.append(what)
        before = self._within_since
        if is_unbounded:
            self._within_since = time.monotonic()
        try:
            yield
        finally:
            self._within_since = before
            self._parts.pop()

    def wait(
        self,
        work: dist.Work,
        what: str,
        group: str = "world",
        ranks: Sequence[int] | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        """Waits for a gloo collective without a timeout, as long as all ranks are alive.

        Args:
            what: Name of the work that precedes the collective, for messages.
            group: Name of the collective's group. Collectives are counted per group, on members
                only.
            ranks: Ranks of the group; None for all.
            poll: Function that is called repeatedly; may raise.

        Raises PeerError if a rank is lost or does not arrive, RuntimeError if the call failed.
        """
        number = self._entered[group] = self._entered.get(group, 0) + 1
        if is_done_within(work, POLL_S):
            return
        self._waits[group] = (group, number, ranks, what, time.monotonic())
        try:
            while not is_done_within(work, POLL_S):
                self.check()
                if poll is not None:
                    poll()
        finally:
            del self._waits[group]

    def check(self) -> None:
        if (verdict := self.verdict) is not None:
            self._was_raised = True
            raise PeerError(verdict.message, verdict.culprit, is_lost=True)

    def _beat(self) -> Beat:
        self._count += 1
        now, since = time.monotonic(), self._within_since
        waits = min(list(self._waits.values()), key=lambda one: one[4], default=None)
        at, is_in_collective, compiles = position(self._main, __file__)
        parts, phase, entered = list(self._parts), self.phase(), dict(self._entered)
        idle_s, latest = self._idle.look(phase, parts, entered, now if compiles else 0.0)
        return Beat(
            count=self._count,
            host=self._host,
            host_id=self._host_id,
            phase=phase,
            part=parts[-1] if parts else "",
            at=at,
            entered=entered,
            wait=None if waits is None else Wait(*waits[:4], seconds=now - waits[4]),
            within=None if since is None else now - since,
            is_in_collective=is_in_collective,
            idle_s=idle_s,
            latest=latest,
            found={
                m: why for m, pid in self._host_peers.items() if (why := why_dead(pid)) is not None
            },
            stop_signal=self.stop_signal,
            stop_epoch=self._stop_epoch,
        )

    def _beat_on(self) -> None:
        """Sends heartbeats until `stop` or a verdict; runs in the first thread."""
        assert self._store is not None
        while not self._ending.wait(BEAT_S):
            try:
                self._store.set(f"beat/{self._rank}", self._beat().to_json())
                verdict = None
                if self._have_all_begun():
                    verdict = self._judge() if self._rank == 0 else self._read_verdict()
            except dist.DistError:  # the process that serves the store has ended
                return
            self._num_answers += 1
            if verdict is not None:
                self._accept(verdict)
                return

    def _have_all_begun(self) -> bool:
        """Whether all keys that this rank reads exist. Reading a missing key would block."""
        assert self._store is not None
        ranks = range(self._size) if self._rank <= DEPUTY else [0]
        keys = ["verdict", "ask", *(f"beat/{rank}" for rank in ranks)]
        self._is_complete = self._is_complete or self._store.check(keys)
        return self._is_complete

    def forget_stop(self) -> None:
        """Ignores all signals that any rank has received so far, even in later heartbeats."""
        self._stop_epoch += 1
        self.stop_signal = 0

    def _hear_of_stop(self, beats: Sequence[Beat]) -> None:
        epoch = self._stop_epoch
        found = max((beat.stop_signal for beat in beats if beat.stop_epoch == epoch), default=0)
        if found and not self.stop_signal and epoch == self._stop_epoch:
            self.stop_signal = found

    def _read_verdict(self) -> Verdict | None:
        """Returns the verdict that rank 0 has published, if any, and confirms that it was read."""
        assert self._store is not None
        verdict, asked, first = self._store.multi_get(["verdict", "ask", "beat/0"])
        self._first = Beat.from_json(first)
        self._hear_of_stop([self._first])
        if not verdict:
            if asked.decode() != self._answered:
                self._answered = asked.decode()
                self._write_stacks(json.loads(self._answered)[1])
            return self._judge() if self._rank == DEPUTY else None
        self._store.set(f"beat/{self._rank}", replace(self._beat(), knows=True).to_json())
        return Verdict.from_json(verdict)

    def _judge(self) -> Verdict | None:
        """Examines heartbeats, and reports hangs or publishes a verdict; a deputy only records."""
        assert self._store is not None
        keys = [f"beat/{rank}" for rank in range(self._size)]
        beats = [Beat.from_json(text) for text in self._store.multi_get(keys)]
        if self._rank == 0:
            self._hear_of_stop(beats)
        verdict = self.watch.look(beats)
        if self._rank and not self.watch.is_silent(0):
            return None
        silent = [rank for rank in range(self._size) if self.watch.is_silent(rank)]
        for rank in silent:
            idle_s = beats[rank].idle_s + self.watch.silent_for_s(rank)
            beats[rank] = replace(beats[rank], idle_s=idle_s)
        if verdict is None:
            self._report(beats, silent)
            return None
        phase = _phase_file(verdict.culprit)
        if phase is not None and f"'{phase}'" not in verdict.message:
            verdict = replace(verdict, message=f"{verdict.message}; its phase file says {phase!r}")
        if self._hangs is not None:
            suspects = [] if verdict.culprit is None else [verdict.culprit]
            message = self._hangs.explained(
                verdict.message, suspects, beats, silent, self.run_folder
            )
            verdict = replace(verdict, message=message)
        self._publish(verdict)
        return verdict

    def _report(self, beats: Sequence[Beat], silent: Sequence[int]) -> None:
        """Prints which ranks wait for which, and which ranks make no progress."""
        notice = self.watch.notice(beats)
        messages = [] if notice is None else [notice]
        if self._hangs is not None:
            messages += self._hangs.look(beats, silent, self.run_folder)
        for text in messages:
            say(f"hybridrl: {text}")

    def _ask_stacks(self, silent: Sequence[int]) -> None:
        assert self._store is not None
        self._num_asked += 1
        self._answered = json.dumps([f"{self._rank}.{self._num_asked}", list(silent)])
        self._store.set("ask", self._answered)
        self._write_stacks(silent)

    def _write_stacks(self, silent: Sequence[int]) -> None:
        """Writes this rank's stacks, and makes silent ranks of its host, even if blocked, do so."""
        print_stacks()
        if any(rank < self._rank for rank in self._host_peers if rank not in silent):
            return
        for rank, pid in self._host_peers.items():
            if rank in silent and why_dead(pid) is None and writes_stacks(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACKS_SIGNAL)

    def _publish(self, verdict: Verdict) -> None:
        """Publishes the verdict, and waits until all ranks that send heartbeats have read it."""
        assert self._store is not None
        self._store.set("verdict", verdict.to_json())
        others = [rank for rank in range(self._size) if rank != self._rank]
        deadline = time.monotonic() + 3 * BEAT_S
        while time.monotonic() < deadline:
            texts = self._store.multi_get([f"beat/{rank}" for rank in others])
            if all(
                beat.knows or beat.has_left or self.watch.is_silent(rank)
                for rank, beat in zip(others, map(Beat.from_json, texts), strict=True)
            ):
                break
            time.sleep(POLL_S)

    def _accept(self, verdict: Verdict) -> None:
        """Writes this rank's stacks to its log, and then sets `verdict` for the main thread."""
        self._write_stacks([] if verdict.culprit is None else [verdict.culprit])
        self.verdict = verdict

    def _guard(self) -> None:
        """Ends the process after a verdict or if the store is silent; runs in the second thread."""
        every_s = min(1.0, BEAT_S)
        num_answers, silent = 0, 0
        while not self._ending.wait(every_s):
            silent = silent + 1 if num_answers == self._num_answers else 0
            num_answers = self._num_answers
            if self.verdict is None and silent * every_s > SILENT_S + BEAT_S:
                if not self._threads[0].is_alive():
                    return
                verdict = self._without_store()
                self._accept(verdict)
            if self.verdict is not None:
                self._end(self.verdict)
                return

    def _without_store(self) -> Verdict:
        """Returns the verdict for a store that does not respond."""
        silent = f"gave no sign of life for {SILENT_S:g} s"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return Verdict(f"torchrun, which serves the job's store at {where}, {silent}", None)
        why = why_dead(self._host_peers[0]) if 0 in self._host_peers else None
        named, last = "rank 0, which serves the job's store,", ""
        if (first := self._first) is not None:
            named, last = f"rank 0 on host {first.host}", f". Last seen {first.where}"
        return Verdict(f"{named} {silent}: {why or 'its store does not answer'}{last}", 0)

    def _end(self, verdict: Verdict) -> None:
        if verdict.culprit != self._rank:
            self._ending.wait(GRACE_S)
        if self._was_raised or self._ending.is_set():
            return
        failure.report(Failure("lost", verdict.message, verdict.culprit))
        os._exit(1)


def of_job(timeout_s: float, stall_timeout_s: float | None) -> Heartbeat:
    """Returns this process's heartbeat for the default group, started if needed; collective."""
    store = dist.distributed_c10d._get_default_store()
    watch = Watch(BEAT_S, SILENT_S, timeout_s, stall_timeout_s)
    if _CURRENT and _CURRENT[0].group is dist.group.WORLD:
        _CURRENT[0].watch = watch
        return _CURRENT[0]
    leave()
    rank, size = dist.get_rank(), dist.get_world_size()
    own = None
    if size > 1 and dist.get_backend() != "fake":
        # Use a separate client, because a client that waits for a key blocks all other threads that
        # use it.
        own = dist.PrefixStore(
            f"hybridrl/heartbeat/{next(_NUMBERS)}",
            store.clone(),  # type: ignore[attr-defined]  # torch's stubs lack it
        )
    heartbeat = Heartbeat(own, rank, size, watch)
    _CURRENT.append(heartbeat)
    heartbeat.start()
    return heartbeat


@atexit.register
def leave() -> None:
    while _CURRENT:
        _CURRENT.pop().stop()


def is_done_within(work: dist.Work, seconds: float) -> bool:
    """Waits at most `seconds` for a gloo collective. Returns whether it is done; raises if it
    failed.

    An unfinished collective remains usable.
    """
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:  # the collective failed or is unfinished
        if not work.is_completed():
            return False
        work.wait()
    return True


def _phase_file(rank: int | None) -> str | None:
    """Reads a rank's phase from its phase file, which may be newer than its last heartbeat."""
    file = failure.rank_file(".phase", rank)
    try:
        text = "" if rank is None or file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):  # there is no such file
        return None
    return text or None
