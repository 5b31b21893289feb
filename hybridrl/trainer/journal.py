"""The record of a run: its folder, its phase times, its metrics and samples, its summary.

Rank 0 writes; every rank keeps time, because a step is as slow as its slowest rank, and writes its
own phase file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

import torch

from hybridrl.batch import ScoredBatch
from hybridrl.config.identity import run_folder
from hybridrl.config.load import to_yaml
from hybridrl.config.schema import Config
from hybridrl.metrics.sinks import (
    ConsoleSink,
    JsonlSink,
    MetricSink,
    RolloutDump,
    TensorBoardSink,
    read_records,
)
from hybridrl.metrics.timing import PhaseTimer
from hybridrl.metrics.values import recent_mean, step_metrics
from hybridrl.parallel.groups import World

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
        self._synchronize = None if world.platform.is_cpu else world.platform.synchronize
        self.timer = PhaseTimer(synchronize=self._synchronize)
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
        self.timer = PhaseTimer(phase_file, self._synchronize)
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
        rewards = batch.reward_B
        return {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            "response_tokens/truncated": float((~batch.finished_B).float().mean()),
        }

    def summarize(self, batch: ScoredBatch, values: Mapping[str, float]) -> dict[str, float]:
        """Adds to a step's values what the batch, the clock and the memory say; the same on all
        ranks.
        """
        lengths = batch.response_lengths_B.float()
        return step_metrics(
            {**values, "response_tokens/mean": float(lengths.mean())},
            self._slowest(self.timer.seconds()),
            batch.num_tokens,
            self.world.size,
            int(self._largest(float(self.world.platform.peak_memory_bytes()))),
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

    def _slowest(self, seconds: Mapping[str, float]) -> dict[str, float]:
        names = list(seconds)
        largest = self.world.max_over_world(torch.tensor([seconds[name] for name in names]))
        return dict(zip(names, largest.tolist(), strict=True))

    def _largest(self, value: float) -> float:
        return float(self.world.max_over_world(torch.tensor([value], dtype=torch.float64)))
