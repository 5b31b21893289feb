"""The section `train`: layout, memory and optimizer of the training engine. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridrl.config.lists import Texts
from hybridrl.config.section import Section


class MoeConfig(Section):
    """Load balancing of experts, in addition to the algorithm's loss. Losses and counts are over
    all tokens of an update.
    """

    aux_loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss (Switch Transformers). The default is 0, because it competes with the rewards; the model's own coefficient is meant for pretraining."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the router's z-loss (ST-MoE). The default is 0, because fine-tuning does not need it."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Amount by which each optimizer step moves each expert's bias towards even use (DeepSeek-V3), in models whose routers have one. With algorithm.router_replay=rollout the engine's choices are counted. The default is 0, because a change of the bias moves tokens to other experts without a gradient, and rollouts would use another router than the update."""


class TrainConfig(Section):
    """Layout, micro-batch budget and optimizer of training with Megatron."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size. The default 1 does not split; raise it if memory is short."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size. The default 1 has no bubbles; raise it if memory is short."""
    vpp: int = Field(1, ge=1)
    """Model chunks per pipeline stage. The default 1 is plain 1F1B, which takes the least memory."""
    cp: int = Field(1, ge=1)
    """Context parallel size. The default 1 is enough unless sequences are long."""
    ep: int = Field(1, ge=1)
    """Expert parallel size: number of rank groups over which the experts of a layer are distributed. The default 1 does not split; raise it if memory is short."""
    etp: int = Field(1, ge=1)
    """Expert tensor parallel size: number of parts into which each expert is cut. The default is 1, because small experts are slower when cut, so distribute them by train.ep; Megatron's own default is tp."""
    moe: MoeConfig = MoeConfig()
    """Losses of mixtures of experts. All of them are off by default; see their knobs."""
    order: str = "auto"
    """Order of the mesh axes over the ranks, the fastest-varying first. 'auto' is Megatron's tp-cp-ep-dp-pp, unless engines receive fewer bytes in another order, which `hybridrl plan` and the start of a run print."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Most tokens in one micro-batch. The default 4096 fills a GPU's matrix units with a few packed samples."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate of the policy. The default 1e-6 is the usual safe value for pretrained models."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning-rate schedule after warm-up. The default is 'constant', because RL runs have no natural end to decay towards."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up. The default is 0, because small learning rates do not need it."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Final learning rate of a decaying schedule. The default 0 decays fully by the last step."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW, except for norms and biases. The default is 0, because in RL fine-tuning the loss, not decay, keeps weights near their start."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """First-moment decay. The default 0.9 is Adam's own."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Second-moment decay. The default 0.95 follows the quickly changing gradients of RL."""
    adam_eps: float = Field(1e-8, gt=0)
    """Term in Adam's denominator. The default 1e-8 is Adam's own."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 disables clipping. The default 1 limits the effect of rare reward spikes."""
    max_skipped_steps: int = Field(3, ge=1)
    """Number of consecutive optimizer steps skipped, because the loss or gradient is not finite, that ends the run. The default 3 tolerates a bad batch but does not continue a broken run."""
    freeze: Texts = ()
    """Parts that keep their weights: embeddings, head, norms, router, experts, layers, layers.N, layers.A-B, or patterns over HF names such as model.layers.*.mlp.*. Frozen parts have no gradients and no optimizer state; a critic's value head is always trained. By default everything is trained."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """Implementation of decoder layers. 'auto' uses transformer-engine's, which are faster, if they work."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes: 'selective' recomputes the SwiGLU's output, 'full' whole layers. The default 'none' takes the least compute."""
    fp8: Literal["none", "hybrid"] = "none"
    """FP8 matrix products of transformer-engine. The default 'none' computes in bf16, as engines do, so that their log-probabilities agree."""
    share_prompts: bool | None = None
    """Whether the samples of one prompt store its tokens once in a micro-batch. By default this is on with transformer-engine's layers and on CPU, where it is faster, unless train.cp cuts sequences."""
    fp32_residual: bool = False
    """Whether the residual stream between layers is fp32. Off by default: it costs memory and bandwidth, and brings bf16 results nearer to fp32."""
    offload_optimizer: bool = False
    """Whether the optimizer state is in pinned host memory during rollout. Off by default, because it usually fits in GPU memory with the KV cache."""
    fuse_param_gather: bool = False
    """Whether engines are written from the optimizer's shards while the parameters are gathered during rollout. Off by default, because it sends more bytes unless rollout.tp exceeds train.tp."""
    release_weights_in_rollout: bool = False
    """Whether bf16 training weights are freed during rollout and rebuilt from the fp32 masters. Off by default: it costs a gather per step, and engines cannot share memory with the trainer."""
    critic_learning_rate: float | None = Field(None, ge=0)
    """Learning rate of the critic next to a policy (PPO); reward_model trains with train.learning_rate. The default is the policy's, so that there is one knob fewer to set."""
