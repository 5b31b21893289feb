"""The record of a run: its folder, its phase times, its metrics and samples, its summary.

Rank 0 writes; every rank keeps time, because a step is as slow as its slowest rank, and writes its
own phase file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from hybridrl.batch import ScoredBatch
from hybridrl.config.identity import run_folder
from hybridrl.config.load import to_yaml
from hybridrl.config.schema import Config
from hybridrl.metrics.flops import peak_flops_per_s
from hybridrl.metrics.sinks import (
    ConsoleSink,
    JsonlSink,
    MetricSink,
    RolloutDump,
    TensorBoardSink,
    read_records,
)
from hybridrl.metrics.timing import PhaseTimer
from hybridrl.metrics.values import GENERATED_TOKENS, recent_mean, step_metrics
from hybridrl.parallel.groups import World
from hybridrl.trainer.trace import StepTraces

logger = logging.getLogger(__name__)


class Journal:
    """Writes what a run leaves behind.

    Args:
        config: names the run folder and what is logged.
        world: rank 0 writes; times and memory are the largest of all ranks.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.folder = run_folder(config)
        is_cpu = world.platform.is_cpu
        self._synchronize = None if is_cpu else world.platform.synchronize
        self._take_peak = None if is_cpu else _take_peak_bytes
        self._peak_rate = None if is_cpu else peak_flops_per_s(torch.cuda.get_device_name())
        self.timer = PhaseTimer(None, self._synchronize, self._take_peak)
        self.traces = StepTraces(config.run.profile, self.folder / "traces", world)
        self.is_writer = world.rank == 0
        self.sinks: list[MetricSink] = []
        self.console: ConsoleSink | None = None
        self.dump = RolloutDump(self.folder / "rollouts", config.log.rollouts_every)

    def say(self, text: str) -> None:
        """Prints a line for the user, once."""
        if self.is_writer and self.config.log.console:
            if self.console is not None:
                self.console.message(text)
            else:
                print(text, flush=True)

    def start(self, last_step: int, num_steps: int) -> None:
        """Opens the run folder's files; what they say beyond `last_step` is forgotten.

        Before, nothing is written there: who only evaluates leaves the run as it is.
        """
        self.close()
        phase_file = self.folder / "logs" / f"rank_{self.world.rank}.phase"
        self.timer = PhaseTimer(phase_file, self._synchronize, self._take_peak)
        if not self.is_writer:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(to_yaml(self.config), encoding="utf-8")
        self.sinks = [JsonlSink(self.folder / "metrics.jsonl", last_step)]
        if self.config.log.tensorboard:
            self.sinks.append(TensorBoardSink(self.folder / "tensorboard", last_step))
        if self.config.log.console:
            self.console = ConsoleSink(num_steps, last_step)
            self.sinks.append(self.console)
        if last_step:
            self.say(f"continuing {self.folder} after step {last_step}")

    def describe(self, batch: ScoredBatch) -> dict[str, float]:
        """Returns what there is to say of sampled responses: rewards, and how many were cut off."""
        rewards, parts = batch.reward_B, batch.reward_parts
        names = parts if len(parts) > 1 else ()
        return {
            **{f"reward/{name}/mean": float(parts[name].mean()) for name in names},
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            "response_tokens/truncated": float((~batch.finished_B).float().mean()),
        }

    def traced(self, step: int) -> AbstractContextManager[None]:
        """Writes a trace of the step in the block, if `run.profile` names it."""
        return self.traces.step(step, self.timer)

    def summarize(
        self, batch: ScoredBatch, values: Mapping[str, float], flops: Mapping[str, int]
    ) -> dict[str, float]:
        """Adds to a step's values what the batch, the clock and the memory say, and what follows
        from the model FLOPs of its phases; the same on all ranks.
        """
        lengths = batch.response_lengths_B.float()
        return step_metrics(
            {**values, "response_tokens/mean": float(lengths.mean())},
            self._largest(self.timer.seconds()),
            int(values.get(GENERATED_TOKENS, batch.num_tokens)),
            self.world.size,
            {phase: int(size) for phase, size in self._largest(self._peaks()).items()},
            flops,
            self._peak_rate,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records a step in every sink."""
        for sink in self.sinks:
            sink.write(step, metrics)

    def dump_samples(self, step: int, batch: ScoredBatch, responses: Sequence[str]) -> None:
        """Writes the samples of a step to `rollouts/`, when it is due."""
        if not self.is_writer:
            return
        samples = [
            {
                "sample": int(batch.sample_ids_B[i]),
                "prompt": batch.prompts[i].text,
                "response": response,
                "reward": float(batch.reward_B[i]),
                "finished": bool(batch.finished_B[i]),
            }
            for i, response in enumerate(responses)
        ]
        self.dump.write(step, samples)

    def finish(self, evaluations: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Writes `summary.json`, prints the table of before and after and where the run lies."""
        summary = {"seconds": seconds}
        if evaluations:
            steps = sorted(evaluations, key=int)
            summary["accuracy_before"] = evaluations[steps[0]]
            summary["accuracy_after"] = evaluations[steps[-1]]
        if self.is_writer:
            records = read_records(self.folder / "metrics.jsonl")
            if any("reward/mean" in record for record in records):
                summary["reward_last_10"] = recent_mean(records, "reward/mean")
            text = json.dumps(summary, indent=1)
            (self.folder / "summary.json").write_text(text + "\n", encoding="utf-8")
            if self.console is not None and evaluations:
                accuracy = (summary["accuracy_before"], summary["accuracy_after"])
                self.console.compare(self.config.run.name, {"held-out accuracy": accuracy})
            self.say(f"run folder: {self.folder}  ({seconds:.0f} s)")
        return summary

    def close(self) -> None:
        """Closes all files; the phase file keeps its last line."""
        for sink in self.sinks:
            sink.close()
        self.sinks, self.console = [], None
        self.timer.close()

    def _peaks(self) -> dict[str, float]:
        """Returns this rank's most bytes in use, of the run, and by phase where that is known."""
        known = self.timer.peak_bytes() or {"run": self.world.platform.peak_memory_bytes()}
        return {phase: float(size) for phase, size in known.items()}

    def _largest(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the largest of each value over the ranks."""
        names = list(values)
        mine = torch.tensor([values[name] for name in names], dtype=torch.float64)
        return dict(zip(names, self.world.max_over_world(mine).tolist(), strict=True))


def _take_peak_bytes() -> int:
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most
