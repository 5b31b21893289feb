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
    """Inference engine. 'hf': needs no GPU and no extra package, so it works everywhere."""
    tp: int = Field(1, ge=1)
    """Tensor parallel size of one engine replica. 1: most replicas, no generation traffic."""
    ep: int = Field(1, ge=1)
    """Expert parallel size of one engine replica: 1, every rank has a part of each expert, or rollout.tp, whole experts by rank. 1: ranks have equal work however tokens are routed."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy. 1: samples come from the policy that is trained."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass. 1: off, truncation would bias the policy gradient."""
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens kept. 0: off, for the same reason as top_p."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response. 256: enough for short answers, raise it for worked reasoning."""
    stop_strings: Texts = ()
    """Texts after which a response ends, what has them included. Empty: end tokens alone."""
    min_new_tokens: int = Field(0, ge=0)
    """Tokens before which no end token is drawn; not in training. 0: off, it changes the distribution."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides positive and multiplies negative logits of tokens in prompt and response; not in training. 1: off, it changes the distribution."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Is taken from logits of tokens in the response; not in training. 0: off, it changes the distribution."""
    generation_config: bool = False
    """Take what this section does not set from the model's generation_config.json; the end tokens that it names count in any case. False: such files are made for chats, with truncation that biases the policy gradient."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Most of a GPU's memory that an engine's weights and KV cache may take (vllm, sglang). None: what requests can fill, as far as the trainer leaves it."""
    staging_mib: int = Field(248, ge=1)
    """Memory of the reshard's staging buffers a rank. 248: saturates NVLink, and with tables, 4 MiB for 7B, is below 256."""
    transport: Literal["auto", "peer", "packed"] = "auto"
    """How weights travel. 'peer': ranks read each other's memory; 'packed': messages. 'auto': peer where the GPUs can, it is faster and needs no staging."""
    verify: int = Field(0, ge=0)
    """Check engine weights against the trainer every N steps. 0: off, the plan is proved already."""
    max_batch: int = Field(256, ge=1)
    """Requests an engine replica decodes together. 256: amortises a step's overhead, bounds the KV cache."""
    in_flight: int | None = Field(None, ge=1)
    """Prompts that are under way while a step generates, with steps.max_policy_lag above 0. None: 1.5 times steps.prompts_per_step, which keeps engines full while a step's last responses decode."""
    at_lag_bound: Literal["finish", "drop"] = "finish"
    """Samples that no later step may learn from: generation waits for them, or they are thrown away and counted (lag/dropped). 'finish': to drop them favours short responses."""
    unfinished_at_update: float | None = Field(None, ge=0, lt=1)
    """Share of a step's samples at which engines on ranks of their own pause for the next weights, with steps.max_policy_lag above 0. None: 0 with a lag of 1, whose samples are all needed in the next step; 0.2 with more, so that long responses go on with the new weights."""
    eager: bool = False
    """Run vLLM and SGLang without CUDA graphs, vLLM without torch.compile too, as on CPU always. False: both make GPUs decode faster."""
