"""Model families: read an HF config into sizes, Megatron arguments and a weight table.

Defines the types `ModelShape`, `Row` and `Family`, and selects the family of a model. Builds
nothing: build.py creates the Megatron model, and weights.py converts rows into the rectangles that
a rank holds. Pure data, no torch. Invariant: families use only HF names and shapes as coordinates,
and never mention ranks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.files import plain, shown
from hybridrl.config.own_code import imported
from hybridrl.errors import MISSING, ModelError, UserError
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.families import FAMILIES
from hybridrl.models.hf.config_keys import DECODER_KEYS, QUANTIZATION, check_keys, check_values
from hybridrl.models.mixers import MixerShape
from hybridrl.models.vision.shape import VisionShape

HfConfig = Mapping[str, Any]
RowKind = Literal[
    "vocab",
    "replicated",
    "column",
    "heads",
    "kv_heads",
    "row",
    "qkv",
    "gate_up",
    "sections",
    "grouped",
]
Stage = Literal["first", "layer", "last"]

VOCAB_MULTIPLE = 128
# Suffixes of most architecture names.
CAUSAL, WITH_IMAGES = "ForCausalLM", "ForConditionalGeneration"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
# Suffixes of HF tensors that stay float32 in models of any data type, as in engines: 16 bits cannot
# represent a small update of a router's bias, or of a decay's logarithm.
KEPT_IN_FP32 = ("e_score_correction_bias", ".A_log")


@dataclass(frozen=True)
class MoeShape:
    """Dimensions of a decoder's mixtures of experts.

    Args:
        shared_ffn_size: Width of the shared experts, which process every token; 0 if there are
            none.
        dense_layers: Indices of layers that have a dense feed-forward layer, of width
            `ModelShape.ffn_size`.
        has_bias: Whether the router adds a bias that affects which experts are selected, but not
            their weights.
        has_shared_gate: Whether a gate, the sigmoid of a linear layer with one output, multiplies
            the output of the shared experts.
    """

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    shared_ffn_size: int = 0
    dense_layers: tuple[int, ...] = ()
    has_bias: bool = False
    has_shared_gate: bool = False


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention.

    Args:
        query_rank: Size of the latent for queries; 0 if queries are computed directly from the
            input.
        plain_dim: Size of the part of each query and key that carries no position.
        rotary_dim: Size of the rotary part of each query and key; all heads share the rotary part
            of the key.
    """

    query_rank: int
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Number of elements that an engine caches per token and layer, for any number of heads."""
        return self.key_value_rank + self.rotary_dim


@dataclass(frozen=True)
class Rotary:
    """Parameters of a model's rotary positions (see rotary_positions.py for the formulas).

    Args:
        kind: Scaling of the frequencies: default (none), linear, llama3, yarn or longrope.
        factor: Ratio of the new to the original context length.
        original_length: Original context length; for llama3, yarn and longrope.
        low, high: Limits on the number of rotations over the original length. Frequencies with
            fewer than `low` rotations are divided by the factor; frequencies with more than `high`
            rotations are kept.
        divisors: Divisors of the pairs' frequencies; for longrope.
        mscale, mscale_all_dim: Coefficients of YaRN's magnitude; if `mscale_all_dim` is 0, it has
            no effect.
        local: Rotary positions in windowed layers (Gemma 3); None if all layers use the same
            positions.
        has_whole_bounds: Whether YaRN rounds the dimensions at which it begins and ends to
            interpolate to whole numbers.
        sections: Number of frequencies that belong to time, height and width, for models in which
            each token has three positions. Empty for other models.
        has_alternating_sections: Whether these frequencies alternate; otherwise those of time come
            first, then those of height.
    """

    base: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_length: int = 0
    low: float = 1.0
    high: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    share: float = 1.0
    divisors: tuple[float, ...] = ()
    local: Rotary | None = None
    has_whole_bounds: bool = True
    sections: tuple[int, ...] = ()
    has_alternating_sections: bool = True

    @property
    def magnitude(self) -> float:
        if self.kind == "longrope":  # Ding et al. 2024, "LongRoPE", as implemented in Phi-3
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        if self.kind != "yarn":
            return 1.0
        return self._yarn_magnitude(self.mscale) / self.magnitude_of_all

    @property
    def magnitude_of_all(self) -> float:
        """Additional factor for queries and keys in latent attention."""
        return self._yarn_magnitude(self.mscale_all_dim) if self.kind == "yarn" else 1.0

    def _yarn_magnitude(self, mscale: float) -> float:
        """Peng et al. 2023, "YaRN", eq. 22, with DeepSeek's coefficient."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Scales:
    """Constant factors in a model.

    Args:
        residual: Factor of the outputs of attention and feed-forward layers, applied before they
            are added to the residual stream.
        logits: Divisor of the logits.
        is_rounded: Whether the embeddings' factor is first rounded to their data type (Gemma).
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    is_rounded: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and options of a decoder, from its HF config.

    Args:
        head_dim: Size of one attention head, not necessarily `hidden_size / num_heads`; with latent
            attention, the size of its query and key.
        tied_embeddings: Whether the output layer uses the embedding's weight (HF stores no
            `lm_head.weight`).
        linear_bias: Whether every linear layer of a decoder layer has a bias.
        window: Number of positions that a query in a windowed layer attends to, including its own;
            None if no layer is windowed.
        num_whole_layers: Number of layers without a window, if other layers have one.
        norms_after: Whether norms follow attention and the feed-forward layer: "no", "only"
            (instead of norms before them) or "also".
        whole_qk_norm: Whether queries and keys are normalized over all heads together.
        centered_norms: Whether norms multiply by 1 + their weight.
        activation: Activation of the gated feed-forward layer; gelu_tanh approximates GELU by tanh.
            clamped_swiglu clamps gate and up, whose rows alternate in the weights
            (models/megatron/clamped_experts.py).
        attention_sinks: Whether each head has a sink: a learned logit in the softmax of its
            products of queries and keys, for which there is no key and no value.
        attention_cap: Soft cap c for scaled products of queries and keys, which become c
            tanh(product / c); 0 for no cap.
        logits_cap: Soft cap for logits, applied before division by the temperature.
        gated_attention: Whether attention's output is multiplied by the sigmoid of a gate. The
            query projection then contains, for each head, its query and its gate.
        mixer: Recurrent module that replaces attention in some layers; None if there is none.
        has_mtp: Whether the weight table contains the layer for multi-token prediction, because it
            is trained (models/mtp.py).
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    linear_bias: bool = False
    moe: MoeShape | None = None
    latent: LatentShape | None = None
    window: int | None = None
    norms_after: Literal["no", "only", "also"] = "no"
    whole_qk_norm: bool = False
    centered_norms: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    attention_sinks: bool = False
    attention_cap: float = 0.0
    logits_cap: float = 0.0
    num_whole_layers: int = 0
    gated_attention: bool = False
    mixer: MixerShape | None = None
    vision: VisionShape | None = None
    has_mtp: bool = False

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention: all layers, if there is no mixer."""
        recurrent = () if self.mixer is None else self.mixer.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent)

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - (0 if self.mixer is None else len(self.mixer.layers))

    @property
    def query_size(self) -> int:
        """Number of rows of the query projection, including the gates."""
        return self.num_heads * self.head_dim * (2 if self.gated_attention else 1)

    @property
    def torch_only(self) -> str:
        """Describes a feature that only torch's layers support; empty if there is none."""
        if self.attention_sinks:
            return "the model's attention has sinks"
        if self.mixer is not None:
            return f"the model has {self.mixer.name}"
        if self.attention_cap:
            return "the model has a soft cap of products of queries and keys"
        if self.centered_norms or self.activation != "silu":
            return "the model's norms multiply by 1 + a weight, or its gate is GELU"
        if self.norms_after != "no":
            return "the model has norms after attention and the feed-forward layer"
        if self.whole_qk_norm:
            return "the model normalizes queries and keys over all heads together"
        return "" if self.window is None else f"the model attends within {self.window} positions"

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def latent_dim(self) -> int | None:
        """Elements that latent attention caches per token and layer; None for other attention."""
        return None if self.latent is None else self.latent.cached_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    def cached_elements(self, tp: int) -> int:
        """Returns how many elements an engine's rank caches per token and layer with attention."""
        if self.latent is not None:
            return self.latent.cached_dim  # every rank caches the same latent
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim  # heads are copied if tp > heads

    def token_bytes(self, tp: int, itemsize: int) -> int:
        """Returns how many bytes an engine's rank caches per token: keys and values, or latents."""
        return self.num_attention_layers * self.cached_elements(tp) * itemsize

    def state_bytes(self, tp: int, itemsize: int) -> int:
        """Returns the bytes of a request's recurrent states on an engine's rank."""
        if self.mixer is None:
            return 0
        return len(self.mixer.layers) * self.mixer.state_bytes(tp, itemsize)

    def padded_vocab(self, tp: int) -> int:
        """Returns the number of rows of Megatron's embedding at tensor-parallel size `tp`.

        The number is a multiple of 128, and is the same for every `tp` that divides 128, so that
        checkpoints can be loaded in other layouts.
        """
        multiple = math.lcm(VOCAB_MULTIPLE, tp)
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Row:
    """One row of a weight table: a Megatron parameter and its HF tensors.

    Args:
        megatron: Name of the Megatron parameter; `{L}` is the layer's index within its chunk, `{E}`
            the expert's index among the experts of its rank.
        parts: Names of the HF tensors in Megatron's order; `{L}` is the global layer index, `{E}`
            the global expert index. A repeated name denotes one HF tensor that concatenates these
            parts.
        kind: How tensor parallelism (for experts, expert tensor parallelism) shards the parameter.
            `replicated`: every rank holds the whole parameter; several parts are concatenated.
            `column`: dim 0 is split evenly. `sections`: like `gate_up`, with other parts. `heads`,
            `kv_heads`: like `column`, but query heads or key heads are never split. `row`: dim 1 is
            split evenly. `vocab`: dim 0 is padded (`ModelShape.padded_vocab`), then split evenly.
            `gate_up`: each part is split evenly along dim 0; a rank concatenates its slices. `qkv`:
            the rows of the three parts are interleaved per key-value head (its query heads, its
            key, its value), then split evenly, possibly within a head's group. `grouped`: the HF
            tensor's rows are divided into groups of `group` rows; each rank has whole groups, and
            concatenates the first sections of its groups, then the second ones, and so on.
        stage: Pipeline stage that holds the parameter: the first, the last, or the stage of its
            layer.
        num_experts: Number of experts that each have this parameter; 0 if it does not belong to an
            expert.
        layers: Global indices of the layers that have the parameter; None if all layers have it.
        stored: Indices of the parts that the parameter contains; None if it contains all. The other
            parts only determine how the parameter is sharded.
        group: Numbers of rows of the sections of a group, for kind `grouped`.
    """

    megatron: str
    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kind: RowKind
    stage: Stage = "layer"
    num_experts: int = 0
    layers: tuple[int, ...] | None = None
    stored: tuple[int, ...] | None = None
    group: tuple[int, ...] = ()

    @property
    def stored_parts(self) -> Sequence[int]:
        return range(len(self.parts)) if self.stored is None else self.stored

    def layers_of(self, shape: ModelShape) -> Sequence[int]:
        """Returns the layers that have the parameter; [0] if it is outside of the layers."""
        if self.layers is not None:
            return self.layers
        return range(shape.num_layers if self.stage == "layer" else 1)


@dataclass(frozen=True)
class Family:
    """Everything that hybridrl knows about one model family.

    Args:
        name: Short name, as used in `model.family`; for HF models, this is their `model_type`.
        other_types: Other values of `model_type` with the same architecture.
        architectures: Entries in HF `architectures` that this family describes.
        shape: Function that reads the sizes from an HF config; raises ModelError if they are not
            supported.
        transformer_config: Function that returns arguments of Megatron's TransformerConfig, except
            `activation_func`, a torch function that build.py sets according to
            `ModelShape.activation`.
        model_keywords: Function that returns arguments of Megatron's GPTModel for rotary embedding
            and maximum length, and, for build.py, `rotary` (Rotary) and `scales` (Scales).
        layer_spec: Function that returns a layer's Megatron ModuleSpec, for families that are not
            llama-shaped.
        config_keys: Keys of config.json that the functions above obey, or reject with ModelError.
            Default: the keys that families/decoder.py handles. Other keys are rejected unless
            config_keys.py lists them as having no effect on results.
        stated: Keys that engines need in config.json, with the architecture's defaults.
        extra_inputs: Function that returns the model's inputs other than tokens (models/inputs.py,
            `ExtraInputs`), from the HF config and the directory of the model's tokenizer and
            processor; None if there are none.
        is_served_fused: Whether engines with fused parameters implement the model natively;
            otherwise they run transformers' code, whose parameters are different.
        lora: LoRA adapters whose parameters `rows` contains in addition to the model's; None if
            there are none.
        mtp_key: Key of config.json with the number of MTP layers, for families whose MTP layer can
            be trained (models/mtp.py).
    """

    name: str
    architectures: tuple[str, ...]
    shape: Callable[[HfConfig], ModelShape]
    transformer_config: Callable[[HfConfig], dict[str, Any]]
    model_keywords: Callable[[HfConfig], dict[str, Any]]
    rows: Callable[[ModelShape], tuple[Row, ...]]
    layer_spec: Callable[..., Any] | None = None
    config_keys: Collection[str] = DECODER_KEYS
    stated: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_served_fused: bool = True
    extra_inputs: Callable[[HfConfig, Path | None], Any] | None = None
    lora: Lora | None = None
    mtp_key: str = ""
    other_types: tuple[str, ...] = ()

    def for_engines(self, hf_config: HfConfig) -> dict[str, Any]:
        """Returns a config.json with the architecture's defaults for absent or null keys.

        `model_type` is the family's name, because transformers does not know the other types.
        `quantization_config` describes the files of the model; engines receive dequantized weights.
        """
        config = {key: value for key, value in hf_config.items() if key != QUANTIZATION}
        given = {key: value for key, value in config.items() if value is not None}
        if given.get("model_type") in self.other_types:
            given["model_type"] = self.name
        return {**config, **self.stated, **given}


def bias_rule(rate: float, family: Family, shape: ModelShape) -> Iterator[UserError]:
    """Yields an error if bias balancing is enabled but the model's routers have no bias."""
    if rate and shape.moe is not None and not shape.moe.has_bias:
        allowed = f"0 with family {family.name}, whose routers have no bias"
        yield UserError("train.moe.bias_update_rate", rate, allowed, "Set it to 0.")


def is_kept_in_fp32(hf_name: str) -> bool:
    """Returns whether a one-dimensional HF tensor is float32 in models of any data type."""
    return hf_name.endswith(KEPT_IN_FP32)


def read_model(name: str | None, hf_config: HfConfig) -> tuple[Family, ModelShape]:
    """Returns a model's family and sizes, after checking that the family fully describes it.

    `hybridrl plan`, the launcher of a run and its ranks all check models with this function, so
    they report the same errors.

    Raises ModelError if no family describes the model, or its family lacks some value.
    """
    family = resolve_family(name, hf_config)
    model_type = hf_config.get("model_type")
    types = (family.name, *family.other_types)
    if model_type is None or (family.name in FAMILIES and model_type not in types):
        # Engines choose the model's code by model_type, the trainer by architectures.
        named = " or ".join(map(repr, types))
        allowed = f"{named}, from architectures" if model_type else "the model's type"
        raise ModelError(
            "config.json: model_type",
            MISSING if model_type is None else shown(model_type),
            allowed,
            "Engines would run a different model: download config.json again, or correct the key.",
        )
    check_keys(family.name, family.config_keys, hf_config)
    check_values(hf_config)
    shape = family.shape(hf_config)
    family.transformer_config(hf_config)
    family.model_keywords(hf_config)
    return family, shape


def resolve_family(name: str | None, hf_config: HfConfig) -> Family:
    """Returns the family called `name`, or, if None, the family that describes `hf_config`.

    Args:
        name: A key of FAMILIES, a dotted path `package.module:ATTRIBUTE` to a Family, or None.

    Raises ModelError if there is no such family, or it does not describe the architecture.
    """
    architectures = _architectures(hf_config)
    if name is None:
        return _family_of(hf_config, architectures)
    if ":" in name:
        family = _load(name)
    elif name in FAMILIES:
        family = _load(FAMILIES[name])
    else:
        close = difflib.get_close_matches(name, FAMILIES, n=1)
        remedy = "Leave model.family out to select the family by the model's config.json."
        raise ModelError(
            "model.family",
            name,
            f"{', '.join(FAMILIES)} or a dotted path package.module:FAMILY",
            f"Did you mean {close[0]!r}?" if close else remedy,
        )
    if architectures and not _bodies(architectures) & set(family.architectures):
        raise ModelError(
            "model.family",
            name,
            f"a family that describes {_listed(architectures)}",
            f"Family {family.name} describes {', '.join(family.architectures)}; leave model.family "
            "out to choose by the model's config.json.",
        )
    return family


def _family_of(hf_config: HfConfig, architectures: tuple[str, ...]) -> Family:
    known = {key: _load(path) for key, path in FAMILIES.items()}
    for family in known.values():
        if _bodies(architectures) & set(family.architectures):
            return family
    model_type = hf_config.get("model_type")
    if not architectures:
        for name, family in known.items():
            if model_type in (name, *family.other_types):
                return family
    names = [name for family in known.values() for name in family.architectures]
    allowed = "; ".join(
        f"...{suffix} of {', '.join(n.removesuffix(suffix) for n in names if n.endswith(suffix))}"
        for suffix in (CAUSAL, WITH_IMAGES)
    )
    found = _listed(architectures) or f"none (model_type {shown(model_type)})"
    raise ModelError(
        "config.json: architectures",
        found,
        allowed,
        "Choose a supported model, or set model.family to your own: package.module:FAMILY.",
    )


def _architectures(hf_config: HfConfig) -> tuple[str, ...]:
    found = hf_config.get("architectures") or []
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise ModelError(
            "config.json: architectures",
            shown(found),
            "a list of names",
            "Download the model's config.json again.",
        )
    return tuple(found)


def _bodies(architectures: tuple[str, ...]) -> set[str]:
    """Returns the architectures; classifiers (exported reward models) count as causal LMs."""
    return {name.replace("ForSequenceClassification", "ForCausalLM") for name in architectures}


def _listed(architectures: tuple[str, ...]) -> str:
    return plain(", ".join(architectures))


def _load(path: str) -> Family:
    try:
        family = imported(path)
    except ImportError as error:
        allowed = "package.module:ATTRIBUTE of an importable Family"
        remedy = f"Importing it failed: {error}"
        raise ModelError("model.family", path, allowed, remedy) from error
    if not isinstance(family, Family):
        allowed, remedy = "a hybridrl.models.family.Family", f"It is a {type(family).__name__}."
        raise ModelError("model.family", path, allowed, remedy)
    return family
