"""The configuration schema: knobs with types, ranges, defaults and their reasons. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from hybridrl.config.agent import REWARD as REPORTED
from hybridrl.config.agent import AgentConfig
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
from hybridrl.config.lora import LoraConfig
from hybridrl.config.mix import TermConfig
from hybridrl.config.numerics import NumericsConfig
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
from hybridrl.errors import UserError


class RunConfig(Section):
    """Name, folder, seed and time limits of the run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name of the run folder. Required, so that two runs never share a folder by accident."""
    dir: str = "runs"
    """Folder that contains the run folders, relative to the working directory. The default, 'runs', is ignored by git."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed for weights, data order and sampling. The default is constant (0), so that a run can be repeated."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Maximum time in seconds for a collective, counted from when all ranks have reached it; before that, ranks wait for a slow rank as long as it is alive. The default, 600, is more than any transfer needs and far less than gloo's own limit of 30 minutes."""
    stall_timeout_s: float | None = Field(None, gt=0)
    """Maximum time in seconds that ranks wait for a live rank that is busy with generation, rewards or files. By default there is no limit, because such work has no natural bound; every minute a message names the ranks for which the others are waiting."""
    grace_s: float = Field(30.0, gt=0)
    """Seconds after SIGINT, SIGTERM, SIGUSR1 or SIGHUP within which every rank must start to save; if a rank is still busy with a phase by then, the run ends without saving. The duration of the save itself is not limited. The knob also limits how long ranks wait for each other, and for a checkpoint that is still being written, after an error and when a trainer is closed. The default, 30, is the time after which torchrun and Slurm's scancel kill a job; raise it if phases take longer and the job is given more time, as with `launch --slurm` (120 s)."""
    max_restarts: int = Field(0, ge=0)
    """Maximum number of times that `hybridrl train` and `launch` (over ssh, Ray or in a Slurm job) restart ranks that failed, were killed or stopped responding. A restart continues from the newest state (`checkpoint.copy_every`). A restart uses the same number of ranks, or fewer if some ranks do not come back; a Slurm job always uses the same number. The default, 0, is the same as torchrun's, so that a job whose ranks keep failing does not occupy a machine."""
    profile: Steps = ()
    """Steps to trace, such as 3, 3-5 or a list of these; open RUN_DIR/traces/step_3.json.gz in Perfetto. By default no step is traced, because tracing slows a step down and writes a large file."""


class ModelConfig(Section):
    """The policy model. Set exactly one of `path` and `init`."""

    family: str | None = None
    """Name of a model family, or 'package.module:FAMILY' for your own. By default config.json determines it. 'qwen3_5' and 'qwen3_5_moe' train Qwen3.5 with images; by default it is trained as a text model."""
    path: str | None = None
    """HF directory or hub name, 'organisation/name[@revision]', whose weights are loaded. If it is null, `init` is used."""
    init: str | None = None
    """HF config.json, its directory or a hub name; the weights are initialised randomly from the seed. If it is null, `path` is used."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the parameters. The default, 'auto', is bfloat16 on CUDA, to use the tensor cores, and float32 on CPU, for exact tests."""
    tokenizer: str | None = None
    """Tokenizer directory or hub name[@revision]. By default the tokenizer is in the model's own directory."""


class StepsConfig(Section):
    """The number of steps, the batch size of a step, and how often the model is evaluated."""

    prompts_per_step: int = Field(64, ge=1)
    """Number of prompts per step. The default, 64, gives a stable gradient on small tasks."""
    samples_per_prompt: int = Field(1, ge=1)
    """Number of responses per prompt. The default, 1, is enough for PPO and SFT; GRPO needs at least 2."""
    updates_per_step: int = Field(1, ge=1)
    """Number of optimizer steps per step; each uses an equal part of the step's samples. The default, 1, is strictly on-policy."""
    max_policy_lag: int = Field(0, ge=0)
    """Maximum number of steps by which the weights that sampled a token may be older than the weights that learn from it. With the default, 0, every step waits for its longest response; with 1 an unfinished response continues in the next step."""
    num_steps: int = Field(100, ge=0)
    """Number of steps. The default, 100, is short enough for a first trial."""
    num_epochs: float | None = Field(None, gt=0)
    """Number of passes over the training rows; replaces num_steps. The last step may include rows of one more pass. By default num_steps applies."""
    eval_every: int = Field(0, ge=0)
    """Number of steps between evaluations. With the default, 0, the model is evaluated only before and after the run."""
    stop_at_accuracy: float | None = Field(None, gt=0, le=1)
    """Accuracy that ends the run once an evaluation reaches it. By default all steps are run."""


class LogConfig(Section):
    """Outputs in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Whether to write metrics, samples and knobs for TensorBoard. On by default, because it is cheap and TensorBoard is widely used."""
    wandb: str | None = Field(None, min_length=1)
    """Weights & Biases project that receives metrics, samples, knobs and the report. Off by default, so that no data leaves the machine unless you ask for it."""
    mlflow: str | None = Field(None, min_length=1)
    """MLflow experiment that receives metrics, samples, knobs and the report. Off by default, so that no data leaves the machine unless you ask for it."""
    rollouts_every: int = Field(10, ge=0)
    """Number of steps between dumps of samples; 0 writes none. The default, 10, is often enough to notice drift and uses little disk space."""
    console: bool = True
    """Whether to print a line per step and a progress bar. On by default, because a silent run looks like a hang."""


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every: int = Field(0, ge=0)
    """Number of steps between checkpoints. With the default, 0, checkpoints are written every `every_s` seconds, at the end, and when a signal stops the run."""
    every_s: float = Field(600.0, ge=0)
    """Seconds of training after which a checkpoint is written at the end of the current step; 0 disables this. With the default, 600, a failure costs about ten minutes of training at most."""
    asynchronous: bool = True
    """Whether training continues while a checkpoint is written from copies in host memory. Checkpoints are always written synchronously at the last step, after a stopping signal, with `export_hf`, and with train.optimizer_memory=host. On by default; turn it off if the hosts have less memory than `hybridrl plan` reports."""
    copy_every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Number of steps between copies of the training state to host memory; 0 makes no copies. Each host's copy is also stored on another host, and restarts (`run.max_restarts`) continue from these copies. With the default, 'auto', copying takes about 3% of the training time."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, among those that this run wrote or resumed from. With the default, 2, an older checkpoint remains if the newest is damaged."""
    export_hf: bool | Literal["peft"] = False
    """Whether each checkpoint is also written as an HF directory with a model card, in RUN_DIR/exports/step_N. LoRA adapters are merged into the weights; with 'peft', they are written alone as a PEFT directory. Off by default, because `hybridrl convert` can write the directory later."""


class Config(Section):
    """A whole configuration, which consists of nineteen sections."""

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    numerics: NumericsConfig = NumericsConfig()
    algorithm: AlgorithmConfig
    mix: dict[str, TermConfig] = Field(default_factory=dict)
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    eval: EvalConfig = EvalConfig()
    steps: StepsConfig = StepsConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    placement: PlacementConfig = PlacementConfig()
    layout: Layout = LayoutConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _fill_derived(self) -> Self:
        # Stored in the configuration itself, so that config.yaml, the identity and the run agree.
        is_off_policy = self.steps.max_policy_lag or self.rollout.uses_fp8
        if is_off_policy and isinstance(self.algorithm, PolicyGradientConfig):
            # Write through __dict__, because the model is frozen and pydantic refuses assignments.
            self.__dict__["algorithm"] = with_default_weight(self.algorithm)
        # Only torch's layers have operations that engines can also use. On GPUs, their exact
        # attention needs no mask, so that shared prompts are faster.
        if self.numerics.is_exact:
            chosen: dict[str, Any] = {}
            if self.train.layers == "auto":
                chosen["layers"] = "torch"
            if self.train.share_prompts is None:
                chosen["share_prompts"] = True
            self.__dict__["train"] = self.train.model_copy(update=chosen)
        # By default, an agent's reward is the one that it reports.
        given = self.reward.model_fields_set
        if self.agent.is_on and not {"function", "functions"} & given:
            reward = self.reward.model_copy(update={"function": REPORTED})
            self.__dict__["reward"] = reward
        return self

    _written: dict[Path, str] = PrivateAttr(default_factory=dict)

    @property
    def written(self) -> dict[Path, str]:
        """Text of each value that was written as `${...}`, by place."""
        return self._written

    def with_eval_prompts(self, files: Sequence[str]) -> Self:
        """Returns this configuration with other evaluation prompts, without `data.eval_share`."""
        found = {"eval_prompts": tuple(files), "eval_share": 0.0}
        return self.model_copy(update={"data": self.data.model_copy(update=found)})

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns a copy in which some dotted keys have other values, which are not validated."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        changed = {name: self.value(name).model_copy(update=c) for name, c in sections.items()}
        return self.model_copy(update=changed)

    def refused(self, key: str, allowed: str, remedy: str) -> UserError:
        """Returns the error for a knob (dotted key) whose value is not allowed."""
        return UserError(key, self.value(key), allowed, remedy)

    def value(self, key: str) -> Any:
        """Returns the value of a knob by its dotted key."""
        found: Any = self
        for name in key.split("."):
            found = getattr(found, name)
        return found

    def terms(self) -> dict[str, TermConfig]:
        """Returns the terms of the section `mix` whose weight is above 0."""
        return {name: term for name, term in self.mix.items() if term.weight > 0}

    def longest_request(self) -> int:
        """Returns the maximum number of tokens of a prompt and its response in a request."""
        return self.data.max_prompt_tokens + self.eval.most_new_tokens(self.rollout.max_new_tokens)

    @property
    def old_is_sampled(self) -> bool:
        """Whether the sampler's log-probabilities serve as old ones; not those of older weights."""
        return self.numerics.is_exact and self.steps.max_policy_lag == 0

    def longest_sequence(self) -> int:
        """Returns the maximum length of a sequence in training, evaluations and loss terms."""
        most = self.rollout.max_new_tokens
        responses = self.eval.most_new_tokens(most), self.data.longest_response(most)
        terms = [
            term.data.max_prompt_tokens + term.data.longest_response(most)
            for term in self.terms().values()
        ]
        return max(self.data.max_prompt_tokens + max(responses), *terms, 0)
