"""The section `rollout`: the engine, its layout, and how responses are drawn. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from hybridrl.config.lists import Texts
from hybridrl.config.section import Section
from hybridrl.rollout.registry import known_engine, offered_engines


class RolloutConfig(Section):
    """How responses are generated and how weights reach the engine."""

    engine: Annotated[
        str,
        PlainValidator(known_engine),
        WithJsonSchema({"enum": offered_engines(), "type": "string"}),
    ] = "hf"
    """Inference engine. The default 'hf' needs no GPU and no extra package, so it works everywhere."""
    tp: int = Field(1, ge=1)
    """Tensor parallel size of one engine replica. The default 1 gives the most replicas and no communication in generation."""
    ep: int = Field(1, ge=1)
    """Expert parallel size of one engine replica: 1, where every rank has a part of each expert, or rollout.tp, where each rank has whole experts. The default 1 gives ranks equal work for any routing."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy. The default 1 samples from the policy that is trained."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass of nucleus sampling. The default 1 turns it off, because truncation would bias the policy gradient."""
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens to sample from. The default 0 turns it off, because truncation would bias the policy gradient."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response, in tokens. The default 256 is enough for short answers; raise it for worked reasoning."""
    stop_strings: Texts = ()
    """Texts that end a response, which includes them. By default only end tokens end a response."""
    min_new_tokens: int = Field(0, ge=0)
    """Number of tokens before an end token can be sampled; not in training. The default 0 turns it off, because it changes the distribution."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Factor that divides positive and multiplies negative logits of tokens in prompt and response; not in training. The default 1 turns it off, because it changes the distribution."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Amount that is subtracted from the logits of tokens in the response; not in training. The default 0 turns it off, because it changes the distribution."""
    generation_config: bool = False
    """Whether knobs that this section does not set come from the model's generation_config.json; its end tokens always apply. Off by default, because such files are made for chats, with truncation that biases the policy gradient."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Largest share of a GPU's memory for an engine's weights and KV cache (vllm, sglang). By default the engine takes as much as its requests can fill, up to what the trainer leaves."""
    staging_mib: int = Field(248, ge=1)
    """Staging buffers of a reshard, in MiB per rank. The default 248 saturates NVLink and, with its tables (4 MiB for 7B), stays below 256."""
    transport: Literal["auto", "peer", "packed"] = "auto"
    """How weights are sent: with 'peer' ranks read each other's memory, with 'packed' they exchange messages. 'auto' is peer where the GPUs support it, which is faster and needs no staging."""
    verify: int = Field(0, ge=0)
    """Steps between checks of the engine's weights against the trainer's. The default 0 turns it off, because the transfer plan is already proved complete."""
    max_batch: int = Field(256, ge=1)
    """Most requests that an engine replica decodes together. The default 256 amortises the overhead of a step and bounds the KV cache."""
    in_flight: int | None = Field(None, ge=1)
    """Prompts in generation during a step, only with steps.max_policy_lag above 0. The default is 1.5 times steps.prompts_per_step, which keeps engines busy while the last responses of a step finish."""
    at_lag_bound: Literal["finish", "drop"] = "finish"
    """Treatment of samples that would be too old for the next step: 'finish' makes generation wait for them, 'drop' discards and counts them (lag/dropped). The default is 'finish', because dropping favours short responses."""
    unfinished_at_update: float | None = Field(None, ge=0, lt=1)
    """Share of a step's samples still unfinished when engines on ranks of their own pause for new weights, only with steps.max_policy_lag above 0. The default is 0 with a lag of 1, where the next step needs all samples; with more it is 0.2, so that long responses continue with the new weights."""
    eager: bool = False
    """Whether vLLM and SGLang run without CUDA graphs, and vLLM without torch.compile, as they always do on CPU. Off by default, because both make decoding on GPUs faster."""
