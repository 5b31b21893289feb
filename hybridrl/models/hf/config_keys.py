"""Rejects keys in a config.json that may affect results, but that no code handles.

A key is rejected unless the family handles it or the tables below say that it has no effect. A
model that is computed differently than it was trained has wrong log-probabilities, without any
other symptom. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hybridrl.config.files import plain, shown
from hybridrl.errors import ModelError

# Describes quantized weights in the files of a model. A family whose quantized files can be read
# (mxfp4.py) handles the key.
QUANTIZATION = "quantization_config"

# Keys that `decoder_shape` and `decoder_config` (families/decoder.py) and `rope_keywords`
# (families/rotary.py) read or refuse.
# fmt: off
DECODER_KEYS = frozenset({
    "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "layer_types", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "partial_rotary_factor", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "tie_word_embeddings", "use_sliding_window", "vocab_size",
})

# Names, labels, storage, options of transformers, generation defaults, and lengths that only limit
# requests. Keys that start with "_" belong to transformers and have no effect either.
NEUTRAL_KEYS = frozenset({
    "architectures", "model_type", "transformers_version", "name_or_path", "torch_dtype",
    "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "unk_token_id", "decoder_start_token_id", "tokenizer_class", "prefix",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "classifier_dropout", "classifier_bias", "use_cache",
    "cache_implementation", "attn_implementation", "use_bfloat16", "torchscript",
    "tf_legacy_loss", "return_dict", "return_dict_in_generate", "output_attentions",
    "output_hidden_states", "output_scores", "output_router_logits",
    "keys_to_ignore_at_inference", "chunk_size_feed_forward", "pretraining_tp",
    "is_decoder", "max_length", "min_length", "max_new_tokens", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "length_penalty", "repetition_penalty", "temperature", "top_k",
    "top_p", "typical_p", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "max_sequence_length", "model_max_length", "seq_length", "tokenizer_model_max_length",
    "is_llama_config", "transformers.js_config", "unsloth_fixed", "unsloth_version",
    "hybridrl_score_token",
})

# Values for which these keys do not affect results. For every key, transformers treats null as
# "not set".
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys((
        "add_cross_attention", "attention_bias", "is_encoder_decoder", "mlp_bias",
        "qk_layer_norms", "qk_layernorm", "qk_norm", "rope_interleaved", "tie_encoder_decoder",
        "use_mrope", "use_qk_norm",
    ), (False,)),
    **dict.fromkeys((
        "attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "hidden_dropout_prob",
        "n_routed_experts", "neftune_noise_alpha", "num_experts", "num_local_experts",
        "resid_pdrop",
    ), (0,)),
    **dict.fromkeys(
        ("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"), (1,)
    ),
    **dict.fromkeys((
        "attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "auto_map",
        "clip_qkv", "final_logit_softcapping", "max_window_layers", "query_pre_attn_scalar",
        "sliding_window",
    ), ()),
    "pruned_heads": ({},),
    QUANTIZATION: ({},),
}
# fmt: on
# Keys that have no effect if `use_sliding_window` is false.
WINDOW_KEYS = ("max_window_layers", "sliding_window")
MOST_NAMED = 5
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


def check_keys(family: str, handled: Collection[str], hf_config: Mapping[str, Any]) -> None:
    """Raises ModelError for keys, with values, that may affect results and are not `handled`."""
    found = [key for key in hf_config if not _is_known(key, handled, hf_config)]
    if not found:
        return
    known = [key for key in found if key in NEUTRAL_VALUES]
    chosen = known or found  # keys that are known to change results come first
    named = ", ".join(plain(key, 40) for key in chosen[:MOST_NAMED])
    if len(chosen) > MOST_NAMED:
        named += f" and {len(chosen) - MOST_NAMED} more"
    values = ", ".join(shown(hf_config[key], 40) for key in chosen[:MOST_NAMED])
    if known:
        allowed = "; ".join(
            " or ".join(shown(value) for value in (*NEUTRAL_VALUES[key], None))
            for key in known[:MOST_NAMED]
        )
        remedy = f"Family {family} ignores this key and would compute different numbers. Choose"
    else:
        allowed = f"keys that family {family} handles, or keys that do not affect results"
        remedy = "If the key does not affect results, remove it from config.json. Otherwise choose"
    raise ModelError(
        f"config.json: {named}",
        values,
        allowed,
        f"{remedy} another model, or write a family that lists the key in Family.config_keys.",
    )


def _is_known(key: str, handled: Collection[str], hf_config: Mapping[str, Any]) -> bool:
    value = hf_config[key]
    is_neutral = key in NEUTRAL_KEYS or str(key).startswith("_")
    if key in handled or is_neutral or value is None or value in NEUTRAL_VALUES.get(key, ()):
        return True
    return key in WINDOW_KEYS and hf_config.get("use_sliding_window") is False


def check_values(hf_config: Mapping[str, Any]) -> None:
    """Checks the data type, layer kinds and end tokens that a config.json names.

    Engines and exports read these for every family. Raises ModelError, which names the key.
    """
    for key in ("dtype", "torch_dtype"):
        value = hf_config.get(key)
        if value is not None and value not in DTYPES:
            raise _refusal(key, value, ", ".join(DTYPES))
    kinds, num_layers = hf_config.get("layer_types"), hf_config.get("num_hidden_layers")
    if isinstance(kinds, list) and isinstance(num_layers, int) and len(kinds) != num_layers:
        allowed = f"one for each of the num_hidden_layers = {num_layers} layers"
        raise _refusal("layer_types", f"{len(kinds)} kinds", allowed)
    end, num_tokens = hf_config.get("eos_token_id"), hf_config.get("vocab_size")
    if not isinstance(num_tokens, int):
        return  # the family reports this error
    for token in end_tokens_of(hf_config):
        is_number = isinstance(token, int) and not isinstance(token, bool)
        if not (is_number and 0 <= token < num_tokens):
            raise _refusal("eos_token_id", end, f"tokens below vocab_size = {num_tokens}, or null")


def end_tokens_of(hf_config: Mapping[str, Any]) -> list[Any]:
    named = hf_config.get("eos_token_id")
    return [one for one in (named if isinstance(named, list) else [named]) if one is not None]


def _refusal(key: str, value: object, allowed: str) -> ModelError:
    return ModelError(f"config.json: {key}", plain(value), allowed, "Fix the model's config.json.")
