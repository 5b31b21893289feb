"""Schema of a configuration: the sections and their knobs, with types, ranges, defaults and the
reason for each default. No torch.

Owns what one value alone may be. Rules between knobs are in rules.py; load.py reads YAML and
overrides. Values are frozen after validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from hybridrl.config.algorithm import (
    AlgorithmConfig,
    CustomAlgorithmConfig,
    GrpoConfig,
    PolicyGradientConfig,
    PpoConfig,
    with_default_weight,
)
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.evaluation import EvalConfig, EvalSetConfig
from hybridrl.config.interpolation import Path
from hybridrl.config.layout import Layout, LayoutConfig
from hybridrl.config.lists import Steps
from hybridrl.config.mix import TermConfig
from hybridrl.config.placement import PlacementConfig
from hybridrl.config.reward import RewardConfig, ScorerConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.section import Section
from hybridrl.config.supervised import (
    DpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)
from hybridrl.config.train import MoeConfig, TrainConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CustomAlgorithmConfig",
    "DataConfig",
    "DpoConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSetConfig",
    "GrpoConfig",
    "KtoConfig",
    "LayoutConfig",
    "LogConfig",
    "ModelConfig",
    "MoeConfig",
    "OnlineDpoConfig",
    "PlacementConfig",
    "PpoConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "ScorerConfig",
    "Section",
    "SftConfig",
    "StepsConfig",
    "SupervisedConfig",
    "TermConfig",
    "TrainConfig",
]


class RunConfig(Section):
    """Name, folder, seed and time limits of the run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name of the run folder. It has no default, so that two runs never share a folder by accident."""
    dir: str = "runs"
    """Folder that holds the run folders, relative to the working directory. The default 'runs' is ignored by git."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of weights, data order and sampling. It is fixed by default (0), so that a run can be repeated."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Longest time in seconds that a collective may take after all ranks have reached it; ranks wait for a slow rank as long as it is alive. The default 600 is more than any tensor needs and far below gloo's own 30 minutes."""
    stall_timeout_s: float | None = Field(None, gt=0)
    """Longest time in seconds that ranks wait for a live rank that is busy with generation, rewards or files. There is no limit by default, because such work has no natural bound; a message each minute names the ranks that the others wait for."""
    grace_s: float = Field(30.0, gt=0)
    """Seconds after SIGINT, SIGTERM, SIGUSR1 or SIGHUP within which each rank must start to save; if a rank is still inside a phase then, the run ends without saving. It does not limit the save itself. It also limits how long ranks wait for each other, and for a checkpoint that is still being written, after an error and when a trainer is closed. The default 30 is the time after which torchrun and Slurm's scancel kill a job; raise it if phases take longer and the job gets more time, as with `launch --slurm` (120 s)."""
    max_restarts: int = Field(0, ge=0)
    """How often `hybridrl train` and `launch` (over ssh, Ray or in a Slurm job) restart ranks that failed, were killed or stopped responding, from the newest state (`checkpoint.copy_every`). A restart uses the same number of ranks, or fewer if some do not come back; a Slurm job always uses the same number. The default 0 is torchrun's: a job whose ranks keep failing must not hold a machine."""
    profile: Steps = ()
    """Steps to trace, such as 3, 3-5 or a list; RUN_DIR/traces/step_3.json.gz opens in Perfetto. No step is traced by default, because traced steps are slower and their files are large."""


class ModelConfig(Section):
    """Source of the policy. Set exactly one of `path` and `init`."""

    family: str | None = None
    """Name of a model family, or 'package.module:FAMILY' for your own. By default config.json determines it."""
    path: str | None = None
    """HF directory or hub name, 'organisation/name[@revision]', whose weights are loaded. If it is null, `init` is used."""
    init: str | None = None
    """HF config.json, its directory or a hub name; the weights are random and depend on the seed. If it is null, `path` is used."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters. 'auto' is float32 on CPU, for exact tests, and bfloat16 on CUDA, for the tensor cores."""
    tokenizer: str | None = None
    """Tokenizer directory or hub name[@revision]. By default the tokenizer is in the model's own directory."""


class StepsConfig(Section):
    """Size of a step's batch, the number of steps, and how often the model is evaluated."""

    prompts_per_step: int = Field(64, ge=1)
    """Prompts per step. The default 64 gives a stable gradient on small tasks."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses per prompt. The default 1 is enough for PPO and SFT; GRPO compares at least 2."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per step, over equal parts of its samples. The default 1 is strictly on-policy."""
    max_policy_lag: int = Field(0, ge=0)
    """Largest number of steps between the weights that sampled a token and the weights that learn from it. With the default 0 every step waits for its longest response; with 1 an unfinished response continues in the next step."""
    num_steps: int = Field(100, ge=0)
    """Number of steps. The default 100 is short enough for a first look."""
    num_epochs: float | None = Field(None, gt=0)
    """Number of passes over the training rows, in place of num_steps; the last step may read beyond them. By default num_steps applies."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations. With the default 0 the model is evaluated only before and after the run."""
    stop_at_accuracy: float | None = Field(None, gt=0, le=1)
    """Accuracy at which the run ends, once an evaluation reaches it. By default all steps run."""


class LogConfig(Section):
    """Outputs in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Whether to write metrics, samples and knobs for TensorBoard. On by default: it is cheap, and most people look there."""
    wandb: str | None = Field(None, min_length=1)
    """Weights & Biases project that receives metrics, samples, knobs and the report. Off by default: nothing leaves the machine unless you ask."""
    mlflow: str | None = Field(None, min_length=1)
    """MLflow experiment that receives metrics, samples, knobs and the report. Off by default: nothing leaves the machine unless you ask."""
    rollouts_every: int = Field(10, ge=0)
    """Steps between dumps of samples; 0 writes none. The default 10 shows drift and takes little disk space."""
    console: bool = True
    """Whether to print a line per step and a progress bar. On by default, because a silent run looks like a hang."""


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints. With the default 0, checkpoints are written after `every_s` seconds, at the end, and when a signal stops the run."""
    every_s: float = Field(600.0, ge=0)
    """Seconds of training after which the current step is saved; 0 disables it. With the default 600 a failure costs at most ten minutes of training."""
    asynchronous: bool = True
    """Whether training continues while a checkpoint is written from copies in host memory. Checkpoints of the last step, of a stopping signal and with `export_hf` are always written synchronously. On by default; turn it off if hosts lack the memory that `hybridrl plan` reports."""
    copy_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Steps between copies of the training state in host memory; 0 makes none. Each host's copy is also stored on another host, and `run.max_restarts` restarts ranks from these copies. The default 'auto' copies as often as takes 3% of the time."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, among those that this run wrote or resumed from. The default 2 leaves one more if the newest is damaged."""
    export_hf: bool = False
    """Whether each checkpoint is also written as an HF directory with a model card, in RUN_DIR/exports/step_N. Off by default, because `hybridrl convert` can write one later."""

    @property
    def is_written_from_copies(self) -> bool:
        """Whether checkpoints during training are written from copies in host memory."""
        is_saved = bool(self.every or self.every_s)
        return is_saved and self.asynchronous and not self.export_hf


class Config(Section):
    """A whole configuration: one file, sixteen sections."""

    run: RunConfig
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig
    mix: dict[str, TermConfig] = Field(default_factory=dict)
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    eval: EvalConfig = EvalConfig()
    steps: StepsConfig = StepsConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    placement: PlacementConfig = PlacementConfig()
    layout: Layout = LayoutConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _correct_for_lag(self) -> Self:
        # Stored in the values, so that config.yaml, the identity and the algorithm agree.
        if self.steps.max_policy_lag and isinstance(self.algorithm, PolicyGradientConfig):
            # pydantic refuses assignments, because the model is frozen.
            self.__dict__["algorithm"] = with_default_weight(self.algorithm)
        return self

    _written: dict[Path, str] = PrivateAttr(default_factory=dict)

    @property
    def written(self) -> dict[Path, str]:
        """Text of each value that was written as `${...}`, by its place."""
        return self._written

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns a copy with other values for some dotted keys. The values are not validated."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        return self.model_copy(
            update={
                section: getattr(self, section).model_copy(update=changes)
                for section, changes in sections.items()
            }
        )

    def terms(self) -> dict[str, TermConfig]:
        """Returns the terms of the section `mix` whose weight is above 0."""
        return {name: term for name, term in self.mix.items() if term.weight > 0}

    def longest_request(self) -> int:
        """Returns the largest number of prompt and response tokens of an engine request, in
        training and evaluations.
        """
        return self.data.max_prompt_tokens + self.eval.most_new_tokens(self.rollout.max_new_tokens)

    def longest_sequence(self) -> int:
        """Returns the largest number of prompt and response tokens of a sequence, in training,
        evaluations and terms of the loss.
        """
        most = self.rollout.max_new_tokens
        responses = self.eval.most_new_tokens(most), self.data.longest_response(most)
        terms = [
            term.data.max_prompt_tokens + term.data.longest_response(most)
            for term in self.terms().values()
        ]
        return max(self.data.max_prompt_tokens + max(responses), *terms, 0)
