"""The section `rollout`: the inference engine, its layout, and how responses are sampled. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from hybridrl.config.lists import Texts
from hybridrl.config.section import Section
from hybridrl.rollout.registry import known_engine, offered_engines


class RolloutConfig(Section):
    """How responses are generated, and how weights are sent to the engine."""

    engine: Annotated[
        str,
        PlainValidator(known_engine),
        WithJsonSchema({"enum": offered_engines(), "type": "string"}),
    ] = "hf"
    """Inference engine. The default, 'hf', works everywhere because it needs neither a GPU nor an extra package."""
    tp: int = Field(1, ge=1)
    """Tensor parallel size of each engine replica. The default, 1, results in as many replicas as possible, which generate without communication."""
    ep: int = Field(1, ge=1)
    """Expert parallel size of each engine replica. If it is 1, every expert is split across the ranks; if it equals rollout.tp, each rank holds whole experts. The default, 1, gives all ranks the same amount of work, regardless of how tokens are routed."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy. With the default, 1, responses are sampled from the policy's own distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass for nucleus sampling. The default, 1, turns it off, because truncation would bias the policy gradient."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens that sampling may choose from. The default, 0, turns the limit off, because truncation would bias the policy gradient."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum length of a response in tokens. The default, 256, is enough for short answers; raise it for responses with reasoning."""
    stop_strings: Texts = ()
    """Texts after which a response ends; the text stays part of the response. By default a response ends only with an end token."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum number of tokens before an end token can be sampled; not allowed in training. The default, 0, turns it off, because it changes the sampling distribution."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Penalty on tokens that already occur in the prompt or response: positive logits are divided by it and negative ones multiplied by it. Not allowed in training. The default, 1, turns it off, because it changes the sampling distribution."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Amount that is subtracted from the logits of tokens that already occur in the response; not allowed in training. The default, 0, turns it off, because it changes the sampling distribution."""
    generation_config: bool = False
    """Whether sampling knobs that are not set in this section are read from the model's generation_config.json; the end tokens in that file always apply. Off by default, because such files are made for chats and often set top_p or top_k, which would bias the policy gradient."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Maximum fraction of a GPU's memory for an engine's weights and KV cache (vllm, sglang). By default the KV cache is as large as the requests can need, within the memory that the trainer leaves free."""
    staging_mib: int = Field(248, ge=1)
    """Size of the staging buffers for sending weights to engines, in MiB per rank. The default, 248, saturates NVLink; together with the transfer tables (4 MiB for a 7B model) it stays below 256 MiB."""
    transport: Literal["auto", "peer", "packed"] = "auto"
    """How weights are sent: with 'peer' ranks read each other's GPU memory, with 'packed' they exchange messages. The default, 'auto', selects peer if the GPUs support it, because it is faster and needs no staging buffers."""
    verify: int = Field(0, ge=0)
    """Number of steps between checks that compare the engine's weights with the trainer's. The default, 0, turns the checks off, because the transfer plan is always proved to be complete."""
    max_batch: int = Field(256, ge=1)
    """Maximum number of requests that an engine replica decodes concurrently. The default, 256, amortises the overhead of each decoding step and limits the size of the KV cache."""
    in_flight: int | None = Field(None, ge=1)
    """Number of prompts in flight during a step; requires steps.max_policy_lag above 0. The default is 1.5 times steps.prompts_per_step, so that engines stay busy while the last responses of a step finish."""
    at_lag_bound: Literal["finish", "drop"] = "finish"
    """Treatment of unfinished samples that would exceed steps.max_policy_lag in the next step: 'finish' waits until they are finished, 'drop' discards them and counts them (lag/dropped). The default is 'finish', because dropping favours short responses."""
    unfinished_at_update: float | None = Field(None, ge=0, lt=1)
    """Maximum fraction of a step's samples that may be unfinished when engines pause to receive new weights. It requires steps.max_policy_lag above 0 and engines on ranks without a model. The default is 0 if max_policy_lag is 1, because the next step needs all samples; otherwise it is 0.2, so that long responses continue with the new weights."""
    quantization: Literal["none", "fp8"] = "none"
    """Whether vLLM on GPUs holds weights in FP8: the projections and experts of all layers as float8_e4m3fn, with a power of two as the scale of each block of 128 x 128. Every update quantizes them while it sends them, and engines quantize activations. Off by default, because it pays only where reading weights takes most of a decoding step, and needs memory for a second copy of the weights. It turns algorithm.correction.weight on."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache in vLLM on GPUs. The default, 'auto', is the model's type; 'fp8' is float8_e4m3fn without scales, which halves the cache but saturates at 448. It turns algorithm.correction.weight on."""
    eager: bool = False
    """Whether CUDA graphs (vLLM, SGLang) and torch.compile (vLLM) are turned off; on CPU they always are. Off by default, because both make decoding on GPUs faster."""

    @property
    def uses_fp8(self) -> bool:
        """Whether engines compute with FP8 weights or an FP8 KV cache."""
        return self.quantization == "fp8" or self.kv_cache_dtype == "fp8"
