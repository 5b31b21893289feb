"""The section `train`: layout, memory and optimizer of the training engine. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hybridrl.config.lists import OptionalTexts
from hybridrl.config.section import Section


class MoeConfig(Section):
    """Load balancing for experts, in addition to the algorithm's loss. Losses and counts cover all tokens of an update."""

    aux_loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss (Switch Transformers). The default is 0, because this loss competes with the reward; the coefficient in the model's config.json is meant for pretraining."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the router z-loss (ST-MoE). The default is 0, because fine-tuning does not need it."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Amount by which each optimizer step changes each expert's bias to balance the load (DeepSeek-V3), in models whose routers have such a bias. With algorithm.router_replay=rollout the load is counted from the engine's choices. The default is 0, because changing the bias moves tokens to other experts without a gradient, so that rollouts and updates would route differently."""


class TrainConfig(Section):
    """Layout, micro-batch budget and optimizer of training with Megatron."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size. The default, 1, does not split layers; raise it if memory is short."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size. The default, 1, has no pipeline bubbles; raise it if memory is short."""
    vpp: int = Field(1, ge=1)
    """Number of model chunks per pipeline stage (virtual pipeline size). The default, 1, is the plain 1F1B schedule, which needs the least memory."""
    cp: int = Field(1, ge=1)
    """Context parallel size. The default, 1, is enough unless sequences are long."""
    ep: int = Field(1, ge=1)
    """Expert parallel size: number of rank groups over which a layer's experts are distributed. With the default, 1, every group holds all experts; raise it if memory is short."""
    etp: int = Field(1, ge=1)
    """Expert tensor parallel size: number of ranks across which each expert is split. The default is 1 (Megatron's is tp), because splitting small experts makes them slower; use train.ep to distribute whole experts."""
    moe: MoeConfig = MoeConfig()
    """Load balancing for mixtures of experts. Off by default; see the knobs of this subsection."""
    order: str = "auto"
    """Order in which ranks are assigned to the mesh axes, fastest-varying axis first. 'auto' is Megatron's order, tp-cp-ep-dp-pp, unless weights reach the engines with fewer bytes in another order; `hybridrl plan` and the start of a run print the order."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Maximum number of tokens in a micro-batch. The default, 4096, is enough to use a GPU's matrix units well."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate of the policy. The default, 1e-6, is a common, safe value for RL on pretrained models."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning-rate schedule after warm-up. The default is 'constant', because RL runs have no natural end to decay towards."""
    warmup_steps: int = Field(0, ge=0)
    """Number of optimizer steps of linear warm-up. The default is 0, because small learning rates do not need warm-up."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Final learning rate of a decaying schedule. With the default, 0, the learning rate reaches 0 at the last step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer: 'adamw', or 'muon', which orthogonalizes the updates of weight matrices and uses AdamW for embeddings, output layers, norms and biases. The default, 'adamw', is what most models were trained with."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum. The default, 0.95, is its authors' value."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; norms and biases are excluded. The default is 0, because in RL fine-tuning the loss already keeps the weights near their initial values."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment. The default, 0.9, is the Adam paper's value."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Adam's second moment. The default, 0.95, adapts to the quickly changing gradients of RL."""
    adam_eps: float = Field(1e-8, gt=0)
    """Term that is added to Adam's denominator. The default, 1e-8, is the Adam paper's value."""
    clip_grad: float = Field(1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping. The default, 1, limits the effect of rare reward spikes."""
    max_skipped_steps: int = Field(3, ge=1)
    """The run ends after this many consecutive optimizer steps were skipped because the loss or gradient was not finite. The default, 3, tolerates a bad batch but stops a broken run."""
    freeze: OptionalTexts = None
    """Parts of the model that are not trained: vision, embeddings, head, norms, router, experts, layers, layers.N, layers.A-B, or patterns for HF parameter names such as model.layers.*.mlp.*. Frozen parts have no gradients and no optimizer state; a critic's value head is always trained. By default all parts are trained except a vision tower, because RL on images rarely needs to change it; [] trains the tower too."""
    mtp_coef: float = Field(0.0, ge=0)
    """Coefficient of the loss of the model's layer for multi-token prediction. This layer predicts the token after the next one, and engines use it to draft tokens. Only its own parameters get gradients from this loss. Adam's steps hardly depend on the coefficient, but the gradient norm that train.clip_grad limits does; with 0.1, most of it remains for the policy. With the default, 0, the layer is exported unchanged, because training it requires that samples do not share their prompts."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """Implementation of the decoder layers. The default, 'auto', uses transformer-engine if it works, because its layers are faster."""
    delta_rule: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of the recurrence in gated delta nets (Qwen3.5, Qwen3-Next). The default, 'auto', uses hybridrl's Triton kernels on GPUs if their gradients agree with torch's at the start, because they are much faster."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward pass to save memory: 'selective' recomputes the SwiGLU's output, 'full' recomputes whole layers. The default, 'none', needs the least compute."""
    fp8: Literal["none", "blockwise", "hybrid"] = "none"
    """FP8 format of transformer-engine's matrix products. 'blockwise' scales blocks of 128 x 128 weights and of 128 activations by powers of two; weights then have the same bits as in an engine with rollout.quantization=fp8. 'hybrid' scales whole tensors, with another format for gradients. The default, 'none', computes in bf16, as engines do, so that log-probabilities of engines and trainer agree."""
    share_prompts: bool | None = None
    """Whether a prompt's tokens are stored only once per micro-batch if several samples share them. By default this is on where it is known to be faster: on CPU, and with transformer-engine's layers."""
    fp32_residual: bool = False
    """Whether the residual stream between layers is fp32, which brings bf16 results closer to fp32. Off by default, because it costs memory and bandwidth."""
    optimizer_memory: Literal["auto", "device", "low_precision", "host"] = "auto"
    """Where the optimizer state is, and in which precision: 'device' keeps fp32 master weights and fp32 moments on the GPU, 12 bytes per parameter; 'low_precision' keeps masters as bf16 weights with 16-bit remainders, which lose nothing, and bf16 moments, 6 bytes; 'host' keeps the same 6 bytes in pinned host memory and copies them through the GPU in pieces during the optimizer step. The default, 'auto', is the first of these levels with which the run fits into GPU memory, and 'device' on CPU and with a placement; `hybridrl plan` prints the level and its cost."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are accumulated over micro-batches and summed over ranks. The default is float32, because bf16 sums round after each micro-batch; bfloat16 halves the memory of gradients and needs optimizer_memory low_precision or host."""
    fuse_param_gather: bool = False
    """Whether engines receive their weights directly from the optimizer's shards, while the trainer's parameters are gathered during rollout. Off by default, because this sends more bytes unless rollout.tp exceeds train.tp."""
    release_weights_in_rollout: bool = False
    """Whether the bf16 training weights are freed during rollout and rebuilt from the fp32 master weights. Off by default, because it costs a gather per step and engines cannot share weight memory with the trainer."""
    critic_learning_rate: float | None = Field(None, ge=0)
    """Learning rate of the critic in algorithms that also train a policy (PPO); reward_model uses train.learning_rate instead. The default is train.learning_rate, so that there is one knob fewer to set."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_keys(cls, values: Any) -> Any:
        """Drops `offload_optimizer: false`; `load_config` replaces `true` in runs' saved files."""
        if not isinstance(values, dict) or "offload_optimizer" not in values:
            return values
        if values["offload_optimizer"]:
            raise ValueError(
                "offload_optimizer: nothing: use train.optimizer_memory=host, which keeps the "
                "state in host memory all the time, with bf16 moments"
            )
        return {key: value for key, value in values.items() if key != "offload_optimizer"}
