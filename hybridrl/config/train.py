"""The section `train`: layout, memory and optimizer of the training engine. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hybridrl.config.lists import Texts
from hybridrl.config.section import Section


class MoeConfig(Section):
    """What keeps experts in use beside the algorithm's loss; losses are means over all tokens of an
    update, and counts are of them.
    """

    aux_loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss (Switch Transformers). 0: it pulls the policy away from what rewards ask for; the model's own coefficient is for pretraining."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the router's z-loss (ST-MoE). 0: fine-tuning does not need it."""
    bias_update_rate: float = Field(0.0, ge=0)
    """By how much an optimizer step moves the bias of each expert towards even use (DeepSeek-V3), in models whose routers have one. 0: it changes which experts compute without a gradient, and rollouts would be of another router than the update's. With algorithm.router_replay=rollout the engine's choices are counted."""


class TrainConfig(Section):
    """How Megatron trains: the layout, the micro-batch budget and the optimizer."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size. 1: no splitting unless memory asks for it."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size. 1: no bubbles unless memory asks for it."""
    vpp: int = Field(1, ge=1)
    """Model chunks a pipeline stage. 1: plain 1F1B, the least memory."""
    cp: int = Field(1, ge=1)
    """Context parallel size. 1: only long sequences need more."""
    ep: int = Field(1, ge=1)
    """Expert parallel size: into how many parts the experts of a layer are dealt. 1: no splitting unless memory asks for it."""
    etp: int = Field(1, ge=1)
    """Expert tensor parallel size: into how many parts each expert is cut. 1: small experts lose speed when cut, so deal them by train.ep; Megatron's own default is tp."""
    moe: MoeConfig = MoeConfig()
    """Losses of mixtures of experts. All of them are off; see there."""
    order: str = "auto"
    """Axes over the ranks, the fastest-varying first. 'auto': tp-cp-ep-dp-pp as Megatron, unless engines receive fewer bytes in another order, which `hybridrl plan` and the start of a run name."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Most tokens in one micro-batch. 4096: fills a GPU's matrix units with a few samples packed."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate of the policy. 1e-6: the usual safe value for pretrained models."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course after warm-up. 'constant': RL runs have no natural end to decay towards."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up. 0: small learning rates do not need it."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Where a decaying schedule ends. 0: decays fully by the last step."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decay; norms and biases have none. 0: RL fine-tuning stays near its start by the loss, not by decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """First-moment decay. 0.9: Adam's own default."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Second-moment decay. 0.95: follows the quickly changing RL gradients."""
    adam_eps: float = Field(1e-8, gt=0)
    """Adam's denominator floor. 1e-8: Adam's own default."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off. 1: stops rare reward spikes."""
    max_skipped_steps: int = Field(3, ge=1)
    """Optimizer steps skipped in a row, for a loss or gradient not finite, that end the run. 3: one bad batch passes; what is broken is not trained past."""
    freeze: Texts = ()
    """Parts that keep their weights: embeddings, head, norms, router, experts, layers, layers.N, layers.A-B, or patterns over HF names such as model.layers.*.mlp.*. None: everything is trained. They have no gradients and no optimizer state; a critic's value head is always trained."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """What decoder layers are made of. 'auto': transformer-engine's where they work, which are faster."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward. 'none': the least compute; 'selective' makes the SwiGLU's output again, 'full' whole layers."""
    fp8: Literal["none", "hybrid"] = "none"
    """FP8 matrix products of transformer-engine. 'none': bf16, which the engine's log-probabilities are compared with."""
    share_prompts: bool | None = None
    """Samples of one prompt hold its tokens once in a micro-batch. None: with transformer-engine's layers and on CPU, where it is faster, unless train.cp cuts sequences."""
    fp32_residual: bool = False
    """Stream between the layers in fp32. False: true costs memory and traffic, brings bf16 nearer fp32."""
    offload_optimizer: bool = False
    """Optimizer state in pinned host memory during rollout. False: it usually fits beside the KV cache."""
    fuse_param_gather: bool = False
    """Engines are written from the optimizer's shards, the parameters gathered during rollout. False: sends more bytes unless rollout.tp exceeds train.tp."""
    release_weights_in_rollout: bool = False
    """Free bf16 training weights during rollout, rebuild them from the fp32 masters. False: costs a gather a step, and engines cannot share memory with the trainer."""
    critic_learning_rate: float | None = Field(None, ge=0)
    """Learning rate of the critic beside a policy (PPO); reward_model trains with train.learning_rate. None: the policy's, one knob fewer to set."""
