"""Writes the records of a run: its folder, phase times, metrics, samples and summary. Rank 0 writes
them, except phase files. Every rank measures its phases, because the slowest rank determines the
duration of a step.
"""

from __future__ import annotations

import collections
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from hybridrl.config.files import replace_text, shown
from hybridrl.config.identity import changed_knobs, run_folder, saved_config, write_config
from hybridrl.config.schema import CheckpointConfig, Config
from hybridrl.console import say
from hybridrl.contracts.batch import ScoredBatch
from hybridrl.generation.resampling import TRUNCATED
from hybridrl.loop.observers import Observer
from hybridrl.loop.run_starts import FINISHED, RunStarts, exit_of
from hybridrl.loop.sample_records import SamplePictures, sample_records
from hybridrl.loop.trace import StepTraces
from hybridrl.metrics.estimates import Estimate
from hybridrl.metrics.flops import peak_flops_per_s
from hybridrl.metrics.sinks import (
    DAMAGED,
    ConsoleSink,
    JsonlSink,
    LogSink,
    MetricSink,
    RolloutDump,
    SampleSink,
    TensorBoardSink,
    read_records,
)
from hybridrl.metrics.timing import PhaseTimer
from hybridrl.metrics.trackers import Mlflow, Tracker, TrackerSink, Wandb
from hybridrl.metrics.values import (
    GENERATED_TOKENS,
    STDERR,
    VALIDATION,
    largest,
    rank_spread,
    recent_mean,
    step_metrics,
)
from hybridrl.parallel.groups import World
from hybridrl.rewards.base import Scorer

SUMMARY = "summary.json"
ROLLOUTS = "rollouts"  # folder with samples


Evaluations = Mapping[str, Mapping[str, float]]
"""Results of evaluations by step."""


class StepWarning(Protocol):
    """Checks the metrics of each step for a problem that the user should know about."""

    def text(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Returns a warning, or None. Each problem is reported only once."""


class Journal(Observer):
    """Writes the records of a run. `unseen_bytes` returns the bytes on this rank's device that
    torch's allocator does not count, minus those that it counts for tensors whose memory was
    released.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.warnings: Sequence[StepWarning] = ()
        self.folder = run_folder(config)
        is_cpu = world.platform.is_cpu
        self._synchronize = None if is_cpu else world.platform.synchronize
        self._take_peak = None if is_cpu else self._peak_in_use
        self.unseen_bytes: Callable[[], int] = lambda: 0
        self._peak_rate = None if is_cpu else peak_flops_per_s(torch.cuda.get_device_name())
        self.timer = PhaseTimer(None, self._synchronize, self._take_peak)
        self.traces = StepTraces(config.run.profile, self.folder / "traces", world)
        self.is_writer = world.rank == 0
        self.sinks: list[MetricSink] = []
        self.sample_sinks: list[SampleSink] = []
        self.console: ConsoleSink | None = None
        self.log_file: LogSink | None = None
        self.trackers: list[TrackerSink] = []
        self._early_notices: list[str] = []  # messages from before the log file was opened
        world.heartbeat.phase = lambda: self.timer.current
        world.heartbeat.run_folder = self.folder
        self._starts = RunStarts(self.folder)
        self.dump = RolloutDump(self.folder / ROLLOUTS, config.log.rollouts_every)

    def note_start(self, seconds: Mapping[str, float]) -> None:
        """Records how many seconds each part of this start took, including the first step."""
        if self.is_writer:
            self._starts.took(seconds)

    def notify(self, text: str) -> None:
        """Prints and logs a line for the user, on rank 0 only."""
        if not self.is_writer:
            return
        if self.log_file is not None:
            self.log_file.message(text)
        else:
            self._early_notices.append(text)
        if self.config.log.console:
            if self.console is not None:
                self.console.message(text)
            else:
                say(text, sys.stdout)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.timer.phase(name)

    def fit_begins(self, first: int, last: int) -> None:
        self.start(first, last)

    def around_step(self, number: int) -> AbstractContextManager[None]:
        return self.traces.step(number, self.timer)

    def step_recorded(self, number: int, metrics: Mapping[str, float]) -> None:
        self.log(number, metrics)

    def step_is_over(self, number: int, last: int, metrics: Mapping[str, float]) -> None:
        for warning in self.warnings:
            if (text := warning.text(number, metrics)) is not None:
                self.notify(text)

    def start(self, last_step: int, num_steps: int) -> None:
        """Opens the files in the run folder, and removes records of steps after `last_step`."""
        self.close()
        phase_file = self.folder / "logs" / f"rank_{self.world.rank}.phase"
        self.timer = PhaseTimer(phase_file, self._synchronize, self._take_peak)
        if not self.is_writer:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        changes = self._changes() if last_step else ()
        write_config(self.config)
        device = None if self.world.platform.is_cpu else torch.cuda.get_device_name()
        self._starts.begin(last_step, self.world.size, self.world.num_hosts, device)
        lines = JsonlSink(self.folder / "metrics.jsonl", last_step)
        self.log_file = LogSink(self.folder / "logs" / "rank_0.log", num_steps)
        for text in self._early_notices:
            self.log_file.message(text)
        self._early_notices = []
        self.sinks = [lines, self.log_file]
        if self.config.log.tensorboard:
            events = TensorBoardSink(self.folder, last_step)
            self.sinks.append(events)
            self.sample_sinks.append(events)
        self.trackers = [
            TrackerSink(service, self.folder, self.notify) for service in self._services()
        ]
        self.sinks += self.trackers
        self.sample_sinks += self.trackers
        if self.config.log.console:
            self.console = ConsoleSink(num_steps, last_step)
            self.sinks.append(self.console)
        if last_step:
            self.notify(f"continuing {self.folder} after step {last_step}, to step {num_steps}")
        if lines.num_damaged:
            self.notify(
                f"metrics.jsonl: {lines.num_damaged} damaged lines moved to metrics.jsonl{DAMAGED}"
            )
        for change in changes:
            self.notify(f"changed from step {last_step + 1} on: {change}")
        often = when_saved(self.config.checkpoint, num_steps)
        self.notify(f"checkpoints in {self.folder / 'checkpoints'}: {often}")

    def _services(self) -> Iterator[Tracker]:
        section = self.config.log
        if section.wandb is not None:
            yield Wandb(section.wandb, self.folder)
        if section.mlflow is not None:
            yield Mlflow(section.mlflow, self.folder)

    def _changes(self) -> Sequence[str]:
        saved = saved_config(self.config)
        changed = {} if saved is None else changed_knobs(saved, self.config)
        return [f"{key} {shown(before)} -> {shown(now)}" for key, (before, now) in changed.items()]

    def describe(self, batch: ScoredBatch) -> dict[str, float]:
        """Returns metrics of sampled responses: their rewards, and the truncated share."""
        samples = batch.by_sample()
        rewards, parts = samples.reward_B, samples.reward_parts
        names = parts if len(parts) > 1 else ()
        return {
            **{f"reward/{name}/mean": float(parts[name].mean()) for name in names},
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            TRUNCATED: float((~samples.finished_B).float().mean()),
        }

    def summarize(
        self, batch: ScoredBatch, values: Mapping[str, float], flops: Mapping[str, int]
    ) -> dict[str, float]:
        """Adds lengths, times, memory and `flops` (of all ranks, by phase); collective."""
        lengths = batch.by_sample().response_lengths_B.float()
        # Gathering waits for ranks that are still writing files.
        ranks = self.world.gather_objects((self.timer.seconds(), self._peaks()))
        times, memory = zip(*ranks, strict=True)
        seconds, peaks = largest(times), largest(memory)
        return step_metrics(
            {**values, "response_tokens/mean": float(lengths.mean()), **rank_spread(times)},
            seconds,
            int(values.get(GENERATED_TOKENS, batch.lengths_B.sum())),
            self.world.size,
            {phase: int(size) for phase, size in peaks.items()},
            flops,
            self._peak_rate,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.write(step, metrics)

    def dump_samples(
        self, step: int, scored: ScoredBatch, learned: ScoredBatch | None, scorer: Scorer
    ) -> None:
        """Writes the samples of a step to `rollouts/` if this step is due; collective."""
        if not self.dump.is_due(step):
            return
        pictures = SamplePictures(self.folder / ROLLOUTS)
        samples = sample_records(scored, learned, scorer, self.world, pictures)
        with self.world.all_agree("writing samples"), pictures:
            if self.is_writer:
                self.dump.write(step, samples)
                for sink in self.sample_sinks:
                    sink.samples(step, self.dump.file(step))
            else:
                collections.deque(samples, 0)  # sends this rank's tokens and yields nothing

    def finish(
        self, first: int, last: int, evaluations: Evaluations, seconds: float
    ) -> dict[str, float]:
        """Writes `summary.json`, and prints a before/after table and the run folder."""
        summary = self._summary(evaluations, seconds)
        if self.is_writer:
            self._write_summary(summary)
            self._starts.end(FINISHED)
            if self.console is not None and evaluations:
                self.console.compare(self.config.run.name, _compared(summary))
            steps = f"took steps {first + 1} to {last}" if last > first else "took no step"
            self.notify(f"{steps}; run folder: {self.folder}  ({seconds:.0f} s)")
            for tracker in self.trackers:
                tracker.is_done = True
        return summary

    def nothing_to_do(
        self, done: int, last: int, evaluations: Evaluations, seconds: float
    ) -> dict[str, float]:
        """Reports that all steps are finished; writes `summary.json` if it is missing."""
        goal = f"step {done}" if done >= last else f"steps.stop_at_accuracy after step {done}"
        self.notify(
            f"{self.folder} has reached {goal}: nothing is left to train. Raise steps.num_steps to "
            "continue, or choose another run.name to start a new run."
        )
        for change in self._changes() if self.is_writer else ():
            self.notify(f"changed, but without effect: {change}")
        summary = self._summary(evaluations, seconds)
        if self.is_writer and not (self.folder / SUMMARY).exists():
            self._write_summary(summary)
        return summary

    def _write_summary(self, summary: Mapping[str, float]) -> None:
        replace_text(self.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")

    def _summary(self, evaluations: Evaluations, seconds: float) -> dict[str, float]:
        summary = {"seconds": seconds, **before_and_after(evaluations)}
        if self.is_writer:
            file = self.folder / "metrics.jsonl"
            records = read_records(file) if file.exists() else []
            if any("reward/mean" in record for record in records):
                summary["reward_last_10"] = recent_mean(records, "reward/mean")
            losses = [loss for r in records if (loss := r.get("eval/loss")) is not None]
            if losses:
                summary["validation_loss"] = losses[-1]
        return summary

    def close(self) -> None:
        """Closes all files, and records how the start ended, with the current exception if any."""
        self._starts.end(exit_of(sys.exception()))
        for tracker in self.trackers:
            tracker.begin_close()
        for tracker in self.trackers:  # closed first, because sinks record the trackers' messages
            tracker.close()
        for sink in self.sinks:
            sink.close()
        self.sinks, self.sample_sinks, self.trackers = [], [], []
        self.console, self.log_file = None, None
        self.timer.close()

    def note_peak(self) -> None:
        """Records the peak memory before a switch of phases resets it."""
        self.timer.note_peak()

    def _peak_in_use(self) -> int:
        most = torch.cuda.max_memory_allocated() + self.unseen_bytes()
        torch.cuda.reset_peak_memory_stats()
        return most

    def _peaks(self) -> dict[str, float]:
        known = self.timer.peak_bytes() or {"run": self.world.platform.peak_memory_bytes()}
        return {phase: float(size) for phase, size in known.items()}


def when_saved(section: CheckpointConfig, num_steps: int) -> str:
    often = f"every {section.every} steps, " if section.every else ""
    often += f"every {section.every_s:g} s, " if section.every_s else ""
    kept = "the newest is kept" if section.keep == 1 else f"the newest {section.keep} are kept"
    never = "" if often else ", not before (checkpoint.every=0 and checkpoint.every_s=0)"
    return f"{often}after step {num_steps} and on SIGINT or SIGTERM{never}; {kept}"


def before_and_after(evaluations: Evaluations) -> dict[str, float]:
    """Returns the results of the first and last evaluation as `NAME_before` and `NAME_after`."""
    found: dict[str, float] = {}
    for is_validation in (False, True):
        steps = [
            {
                key: value
                for key, value in evaluations[step].items()
                if key.startswith(VALIDATION) == is_validation
            }
            for step in sorted(evaluations, key=int)
        ]
        measured = [step for step in steps if step]
        for when, results in zip(("before", "after"), measured[:1] + measured[-1:], strict=False):
            for key, value in results.items():
                what, stderr = key.removesuffix(STDERR), STDERR * key.endswith(STDERR)
                name = "eval_reward" if what == "reward" else what
                found[f"{name}_{when}{stderr}"] = value
    return found


def _compared(summary: Mapping[str, float]) -> dict[str, tuple[Estimate | None, Estimate | None]]:
    """Returns results before and after training by label; omits a reward equal to another one."""
    endings = ("_before", "_after")
    names = dict.fromkeys(
        key.removesuffix(ending) for ending in endings for key in summary if key.endswith(ending)
    )
    found: dict[str, tuple[Estimate | None, Estimate | None]] = {}
    for name in sorted(names, key=lambda name: (name == "eval_reward", "/" in name)):
        before, after = (
            Estimate(summary[name + ending], summary.get(name + ending + STDERR))
            if name + ending in summary
            else None
            for ending in endings
        )
        if name == "eval_reward" and any(_are_equal(p, (before, after)) for p in found.values()):
            continue
        label = "reward" if name == "eval_reward" else name
        label = label if "/" in label else f"held-out {label}"
        found[label.replace(VALIDATION, "held-out ")] = before, after
    return found


def _are_equal(a: Sequence[Estimate | None], b: Sequence[Estimate | None]) -> bool:
    return all(
        x is y if x is None or y is None else math.isclose(x.value, y.value, rel_tol=1e-6)
        for x, y in zip(a, b, strict=True)
    )
