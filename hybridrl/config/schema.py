"""Every knob of hybridrl, with its type, range, default and the reason for that default. No torch.

Owns the shape of a configuration: sections, fields, and what one value alone may be. Rules between
fields are in rules.py, reading YAML and overrides in load.py. Values are frozen after validation.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, PrivateAttr, WithJsonSchema, model_validator

from hybridrl.config.algorithm import (
    AlgorithmConfig,
    CustomAlgorithmConfig,
    GrpoConfig,
    PolicyGradientConfig,
    PpoConfig,
    with_default_weight,
)
from hybridrl.config.data import DataConfig
from hybridrl.config.engines import ENGINES, known_engine
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.evaluation import EvalConfig, EvalSetConfig
from hybridrl.config.interpolation import Path
from hybridrl.config.lists import Steps, Texts
from hybridrl.config.mix import TermConfig
from hybridrl.config.placement import PlacementConfig
from hybridrl.config.reward import RewardConfig, ScorerConfig
from hybridrl.config.section import Section
from hybridrl.config.supervised import (
    DpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CustomAlgorithmConfig",
    "DataConfig",
    "DpoConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSetConfig",
    "GrpoConfig",
    "KtoConfig",
    "LogConfig",
    "ModelConfig",
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

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.-]*$",
        description="Name of the run folder. No default: two runs must not share a folder by accident.",
    )
    dir: str = Field(
        "runs",
        description="Folder that holds run folders. 'runs' is beside the config's caller, ignored by git.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Seed of weights, data order and sampling. 0: runs repeat unless told otherwise.",
    )
    collective_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest that a collective may take once all ranks are there; a slow rank is waited for as long as it lives. 600: above any of tensors, far below gloo's own 30 minutes.",
    )
    stall_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Longest that ranks wait for one that lives: in generation, a reward, files. None: such work has no natural bound; who is waited for is told each minute.",
    )
    profile: Steps = Field(
        (),
        description="Steps to trace: 3, 3-5 or a list; RUN_DIR/traces/step_3.json.gz opens in Perfetto. None: such steps are slower, their files large.",
    )


class ModelConfig(Section):
    """Where the policy comes from. Exactly one of `path` and `init`."""

    family: str | None = Field(
        None,
        description="A family's name, or 'package.module:FAMILY' for your own. None: found from config.json.",
    )
    path: str | None = Field(
        None,
        description="HF directory or hub name, 'organisation/name[@revision]', whose weights are loaded. None: `init` is used.",
    )
    init: str | None = Field(
        None,
        description="HF config.json, its directory or a hub name, weights drawn from the seed. None: `path` is used.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of parameters. 'auto': float32 on CPU (exact tests), bfloat16 on CUDA (tensor cores).",
    )
    tokenizer: str | None = Field(
        None,
        description="Tokenizer directory or hub name[@revision]. None: the model's own directory holds it.",
    )


class MoeConfig(Section):
    """What keeps experts in use beside the algorithm's loss; losses are means over all tokens of an
    update, and counts are of them.
    """

    aux_loss: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the load-balancing loss (Switch Transformers). 0: it pulls the policy away from what rewards ask for; the model's own coefficient is for pretraining.",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the router's z-loss (ST-MoE). 0: fine-tuning does not need it.",
    )
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="By how much an optimizer step moves the bias of each expert towards even use (DeepSeek-V3), in models whose routers have one. 0: it changes which experts compute without a gradient, and rollouts would be of another router than the update's. With algorithm.router_replay=rollout the engine's choices are counted.",
    )


class TrainConfig(Section):
    """How Megatron trains: the layout, the micro-batch budget and the optimizer."""

    tp: int = Field(
        1, ge=1, description="Tensor parallel size. 1: no splitting unless memory asks for it."
    )
    pp: int = Field(
        1, ge=1, description="Pipeline parallel size. 1: no bubbles unless memory asks for it."
    )
    vpp: int = Field(
        1, ge=1, description="Model chunks a pipeline stage. 1: plain 1F1B, the least memory."
    )
    cp: int = Field(1, ge=1, description="Context parallel size. 1: only long sequences need more.")
    ep: int = Field(
        1,
        ge=1,
        description="Expert parallel size: into how many parts the experts of a layer are dealt. 1: no splitting unless memory asks for it.",
    )
    etp: int = Field(
        1,
        ge=1,
        description="Expert tensor parallel size: into how many parts each expert is cut. 1: small experts lose speed when cut, so deal them by train.ep; Megatron's own default is tp.",
    )
    moe: MoeConfig = Field(
        MoeConfig(), description="Losses of mixtures of experts. All of them are off; see there."
    )
    order: str = Field(
        "auto",
        description="Axes over the ranks, the fastest-varying first. 'auto': tp-cp-ep-dp-pp as Megatron, unless engines receive fewer bytes in another order, which `hybridrl plan` and the start of a run name.",
    )
    micro_batch_tokens: int = Field(
        4096,
        ge=1,
        description="Most tokens in one micro-batch. 4096: fills a GPU's matrix units with a few samples packed.",
    )
    learning_rate: float = Field(
        1e-6,
        ge=0,
        description="Peak learning rate of the policy. 1e-6: the usual safe value for pretrained models.",
    )
    lr_schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant",
        description="Course after warm-up. 'constant': RL runs have no natural end to decay towards.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Optimizer steps of linear warm-up. 0: small learning rates do not need it.",
    )
    min_learning_rate: float = Field(
        0.0, ge=0, description="Where a decaying schedule ends. 0: decays fully by the last step."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="AdamW decay; norms and biases have none. 0: RL fine-tuning stays near its start by the loss, not by decay.",
    )
    adam_beta1: float = Field(
        0.9, ge=0, lt=1, description="First-moment decay. 0.9: Adam's own default."
    )
    adam_beta2: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="Second-moment decay. 0.95: follows the quickly changing RL gradients.",
    )
    adam_eps: float = Field(
        1e-8, gt=0, description="Adam's denominator floor. 1e-8: Adam's own default."
    )
    clip_grad: float = Field(
        1.0,
        ge=0,
        description="Largest global gradient norm; 0 switches clipping off. 1: stops rare reward spikes.",
    )
    max_skipped_steps: int = Field(
        3,
        ge=1,
        description="Optimizer steps skipped in a row, for a loss or gradient not finite, that end the run. 3: one bad batch passes; what is broken is not trained past.",
    )
    layers: Literal["auto", "torch", "transformer_engine"] = Field(
        "auto",
        description="What decoder layers are made of. 'auto': transformer-engine's where they work, which are faster.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations recomputed in backward. 'none': the least compute; 'selective' makes the SwiGLU's output again, 'full' whole layers.",
    )
    fp8: Literal["none", "hybrid"] = Field(
        "none",
        description="FP8 matrix products of transformer-engine. 'none': bf16, which the engine's log-probabilities are compared with.",
    )
    share_prompts: bool | None = Field(
        None,
        description="Samples of one prompt hold its tokens once in a micro-batch. None: with transformer-engine's layers and on CPU, where it is faster, unless train.cp cuts sequences.",
    )
    fp32_residual: bool = Field(
        False,
        description="Stream between the layers in fp32. False: true costs memory and traffic, brings bf16 nearer fp32.",
    )
    offload_optimizer: bool = Field(
        False,
        description="Optimizer state in pinned host memory during rollout. False: it usually fits beside the KV cache.",
    )
    fuse_param_gather: bool = Field(
        False,
        description="Engines are written from the optimizer's shards, the parameters gathered during rollout. False: sends more bytes unless rollout.tp exceeds train.tp.",
    )
    release_weights_in_rollout: bool = Field(
        False,
        description="Free bf16 training weights during rollout, rebuild them from the fp32 masters. False: costs a gather a step, and engines cannot share memory with the trainer.",
    )
    critic_learning_rate: float | None = Field(
        None,
        ge=0,
        description="Learning rate of the critic beside a policy (PPO); reward_model trains with train.learning_rate. None: the policy's, one knob fewer to set.",
    )


class RolloutConfig(Section):
    """How responses are generated and how weights reach the engine."""

    engine: Annotated[
        str,
        PlainValidator(known_engine),
        WithJsonSchema({"enum": list(ENGINES), "type": "string"}),
    ] = Field(
        "hf",
        description="Inference engine. 'hf': needs no GPU and no extra package, so it works everywhere.",
    )
    tp: int = Field(
        1,
        ge=1,
        description="Tensor parallel size of one engine replica. 1: most replicas, no generation traffic.",
    )
    ep: int = Field(
        1,
        ge=1,
        description="Expert parallel size of one engine replica: 1, every rank has a part of each expert, or rollout.tp, whole experts by rank. 1: ranks have equal work however tokens are routed.",
    )
    temperature: float = Field(
        1.0,
        ge=0,
        description="Sampling temperature; 0 is greedy. 1: samples come from the policy that is trained.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus mass. 1: off, truncation would bias the policy gradient.",
    )
    top_k: int = Field(
        0,
        ge=0,
        description="Number of likeliest tokens kept. 0: off, for the same reason as top_p.",
    )
    max_new_tokens: int = Field(
        256,
        ge=1,
        description="Longest response. 256: enough for short answers, raise it for worked reasoning.",
    )
    stop_strings: Texts = Field(
        (),
        description="Texts after which a response ends, what has them included. Empty: end tokens alone.",
    )
    min_new_tokens: int = Field(
        0,
        ge=0,
        description="Tokens before which no end token is drawn; not in training. 0: off, it changes the distribution.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Divides positive and multiplies negative logits of tokens in prompt and response; not in training. 1: off, it changes the distribution.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Is taken from logits of tokens in the response; not in training. 0: off, it changes the distribution.",
    )
    generation_config: bool = Field(
        False,
        description="Take what this section does not set, and further end tokens, from the model's generation_config.json. False: such files are made for chats, with truncation that biases the policy gradient.",
    )
    gpu_memory_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Most of a GPU's memory that an engine's weights and KV cache may take (vllm, sglang). None: what requests can fill, as far as the trainer leaves it.",
    )
    staging_mib: int = Field(
        248,
        ge=1,
        description="Memory of the reshard's staging buffers a rank. 248: saturates NVLink, and with tables, 4 MiB for 7B, is below 256.",
    )
    transport: Literal["auto", "peer", "packed"] = Field(
        "auto",
        description="How weights travel. 'peer': ranks read each other's memory; 'packed': messages. 'auto': peer where the GPUs can, it is faster and needs no staging.",
    )
    verify: int = Field(
        0,
        ge=0,
        description="Check engine weights against the trainer every N steps. 0: off, the plan is proved already.",
    )
    max_batch: int = Field(
        256,
        ge=1,
        description="Requests an engine replica decodes together. 256: amortises a step's overhead, bounds the KV cache.",
    )
    in_flight: int | None = Field(
        None,
        ge=1,
        description="Prompts that are under way while a step generates, with steps.max_policy_lag above 0. None: 1.5 times steps.prompts_per_step, which keeps engines full while a step's last responses decode.",
    )
    at_lag_bound: Literal["finish", "drop"] = Field(
        "finish",
        description="Samples that no later step may learn from: generation waits for them, or they are thrown away and counted (lag/dropped). 'finish': to drop them favours short responses.",
    )
    unfinished_at_update: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of a step's samples at which engines on ranks of their own pause for the next weights, with steps.max_policy_lag above 0. None: 0 with a lag of 1, whose samples are all needed in the next step; 0.2 with more, so that long responses go on with the new weights.",
    )
    eager: bool = Field(
        False,
        description="Run vLLM without torch.compile and CUDA graphs. False: both make GPUs decode faster.",
    )


class StepsConfig(Section):
    """The three numbers that set the batch, and how many steps there are."""

    prompts_per_step: int = Field(
        64, ge=1, description="Prompts a step. 64: a stable gradient on small tasks."
    )
    samples_per_prompt: int = Field(
        1,
        ge=1,
        description="Responses a prompt. 1: all that PPO and SFT need; GRPO compares at least 2.",
    )
    updates_per_step: int = Field(
        1,
        ge=1,
        description="Optimizer steps a step, over equal parts of its samples. 1: strictly on-policy.",
    )
    max_policy_lag: int = Field(
        0,
        ge=0,
        description="Steps that may lie between the weights that sampled a token and those that learn from it. 0: every step waits for its longest response; 1 lets what is unfinished go on in the next step.",
    )
    num_steps: int = Field(
        100, ge=0, description="Steps of the run. 100: short enough to look at before going on."
    )
    num_epochs: float | None = Field(
        None,
        gt=0,
        description="Times that the run goes through its rows, in place of num_steps; the last step may go beyond. None: num_steps says.",
    )
    eval_every: int = Field(
        0, ge=0, description="Steps between evaluations. 0: only before and after the run."
    )
    stop_at_accuracy: float | None = Field(
        None, gt=0, le=1, description="End once an evaluation reaches this. None: run all steps."
    )


class LogConfig(Section):
    """What is written beside metrics.jsonl."""

    tensorboard: bool = Field(
        True, description="Write TensorBoard events. True: cheap, and most people look there."
    )
    wandb: str | None = Field(
        None,
        min_length=1,
        description="Project of Weights & Biases that gets metrics, samples, knobs and the report. None: nothing leaves the machine unasked.",
    )
    mlflow: str | None = Field(
        None, min_length=1, description="Experiment of MLflow that gets the same. None: likewise."
    )
    rollouts_every: int = Field(
        10,
        ge=0,
        description="Steps between dumps of samples; 0 is off. 10: enough to see drift, little disk.",
    )
    console: bool = Field(
        True, description="A line a step and a progress bar. True: silence looks like a hang."
    )


class CheckpointConfig(Section):
    """When the run is saved and how much is kept."""

    every: int = Field(
        0,
        ge=0,
        description="Steps between checkpoints. 0: only at the end and when the run is stopped by a signal, small runs need no more.",
    )
    keep: int = Field(
        2,
        ge=1,
        description="Newest checkpoints kept, of those that the run went through. 2: one more than needed if the last is damaged.",
    )
    export_hf: bool = Field(
        False,
        description="Write an HF directory of each checkpoint too, in RUN_DIR/exports/step_N, with a model card. False: `hybridrl convert` makes one when it is wanted.",
    )


class Config(Section):
    """A whole configuration: one file, fourteen sections."""

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

    def terms(self) -> dict[str, TermConfig]:
        """Returns the terms of the section `mix` that have a weight."""
        return {name: term for name, term in self.mix.items() if term.weight > 0}
