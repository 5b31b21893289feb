"""Every knob of hybridrl, with its type, range, default and the reason for that default. No torch.

Owns the shape of a configuration: sections, fields, and what one value alone may be. Rules between
fields are in rules.py, reading YAML and overrides in load.py. Values are frozen after validation.
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
    """Which run this is and what bounds it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name of the run folder. No default: two runs must not share a folder by accident."""
    dir: str = "runs"
    """Folder that holds run folders. 'runs' is beside the config's caller, ignored by git."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of weights, data order and sampling. 0: runs repeat unless told otherwise."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Longest that a collective may take once all ranks are there; a slow rank is waited for as long as it lives. 600: above any of tensors, far below gloo's own 30 minutes."""
    stall_timeout_s: float | None = Field(None, gt=0)
    """Longest that ranks wait for one that lives: in generation, a reward, files. None: such work has no natural bound; who is waited for is told each minute."""
    grace_s: float = Field(30.0, gt=0)
    """Seconds from SIGINT, SIGTERM, SIGUSR1 or SIGHUP within which a rank has to begin to save; one that is still in a phase then ends unsaved. It does not bound the saving itself. Also the longest that, after an error and when a trainer is closed, ranks wait for each other and for a checkpoint that is still being written. 30: after as long torchrun and Slurm's scancel kill a job; raise it where phases are longer and there is more time, as with `launch --slurm` (120 s)."""
    max_restarts: int = Field(0, ge=0)
    """How often `hybridrl train` and `launch` (by ssh, Ray and in a Slurm job) start ranks again that were lost, killed or silent, from the newest state (`checkpoint.copy_every`): as many, or fewer where they do not come back (in a Slurm job as many). 0: as torchrun, a job that keeps losing ranks must not hold a machine."""
    profile: Steps = ()
    """Steps to trace: 3, 3-5 or a list; RUN_DIR/traces/step_3.json.gz opens in Perfetto. None: such steps are slower, their files large."""


class ModelConfig(Section):
    """Where the policy comes from. Exactly one of `path` and `init`."""

    family: str | None = None
    """A family's name, or 'package.module:FAMILY' for your own. None: found from config.json."""
    path: str | None = None
    """HF directory or hub name, 'organisation/name[@revision]', whose weights are loaded. None: `init` is used."""
    init: str | None = None
    """HF config.json, its directory or a hub name, weights drawn from the seed. None: `path` is used."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of parameters. 'auto': float32 on CPU (exact tests), bfloat16 on CUDA (tensor cores)."""
    tokenizer: str | None = None
    """Tokenizer directory or hub name[@revision]. None: the model's own directory holds it."""


class StepsConfig(Section):
    """The three numbers that set the batch, and how many steps there are."""

    prompts_per_step: int = Field(64, ge=1)
    """Prompts a step. 64: a stable gradient on small tasks."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses a prompt. 1: all that PPO and SFT need; GRPO compares at least 2."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps a step, over equal parts of its samples. 1: strictly on-policy."""
    max_policy_lag: int = Field(0, ge=0)
    """Steps that may lie between the weights that sampled a token and those that learn from it. 0: every step waits for its longest response; 1 lets what is unfinished go on in the next step."""
    num_steps: int = Field(100, ge=0)
    """Steps of the run. 100: short enough to look at before going on."""
    num_epochs: float | None = Field(None, gt=0)
    """Times that the run goes through its rows, in place of num_steps; the last step may go beyond. None: num_steps says."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations. 0: only before and after the run."""
    stop_at_accuracy: float | None = Field(None, gt=0, le=1)
    """End once an evaluation reaches this. None: run all steps."""


class LogConfig(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = True
    """Write metrics, samples and knobs for TensorBoard. True: cheap, and most people look there."""
    wandb: str | None = Field(None, min_length=1)
    """Project of Weights & Biases that gets metrics, samples, knobs and the report. None: nothing leaves the machine unasked."""
    mlflow: str | None = Field(None, min_length=1)
    """Experiment of MLflow that gets the same. None: likewise."""
    rollouts_every: int = Field(10, ge=0)
    """Steps between dumps of samples; 0 is off. 10: enough to see drift, little disk."""
    console: bool = True
    """A line a step and a progress bar. True: silence looks like a hang."""


class CheckpointConfig(Section):
    """When the run is saved and how much is kept."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints. 0: as `every_s` says, at the end, and when the run is stopped by a signal."""
    every_s: float = Field(600.0, ge=0)
    """Seconds of training after which the step under way is the next to be saved; 0: never. 600: what a lost rank costs at most, at a copy to the host every ten minutes."""
    asynchronous: bool = True
    """Training goes on while a checkpoint is written from copies in host memory; not for that of the last step or a signal, and not with `export_hf`. False: hosts lack the memory that `hybridrl plan` names."""
    copy_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Steps between copies of the training state in host memory, each host's also in another's, from which ranks go on that `run.max_restarts` starts again; 0: none. auto: as often as takes 3% of the time."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept, of those that the run went through. 2: one more than needed if the last is damaged."""
    export_hf: bool = False
    """Write an HF directory of each checkpoint too, in RUN_DIR/exports/step_N, with a model card. False: `hybridrl convert` makes one when it is wanted."""

    @property
    def is_written_from_copies(self) -> bool:
        """Whether checkpoints within a run are written from copies in host memory."""
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
        # Part of the values, so that config.yaml, the identity and the algorithm have it alike.
        if self.steps.max_policy_lag and isinstance(self.algorithm, PolicyGradientConfig):
            # The model is frozen for everybody else.
            self.__dict__["algorithm"] = with_default_weight(self.algorithm)
        return self

    _written: dict[Path, str] = PrivateAttr(default_factory=dict)

    @property
    def written(self) -> dict[Path, str]:
        """Values that were written as `${...}`: the text, by where it stands."""
        return self._written

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns the configuration with other values of some dotted keys; checks nothing."""
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
        """Returns the terms of the section `mix` that have a weight."""
        return {name: term for name, term in self.mix.items() if term.weight > 0}

    def longest_request(self) -> int:
        """Returns the most tokens that an engine has of a request, prompt and response: in training
        and in evaluations.
        """
        return self.data.max_prompt_tokens + self.eval.most_new_tokens(self.rollout.max_new_tokens)

    def longest_sequence(self) -> int:
        """Returns the most tokens that a sequence of the run may have, prompt and response: in
        training, in evaluations and in terms of the loss.
        """
        asked = self.rollout.max_new_tokens
        responses = self.eval.most_new_tokens(asked), self.data.longest_response(asked)
        terms = [
            term.data.max_prompt_tokens + term.data.longest_response(asked)
            for term in self.terms().values()
        ]
        return max(self.data.max_prompt_tokens + max(responses), *terms, 0)
