"""Makes the calculator example's model directory and prompts; deterministic.

    python examples/calculator/make_data.py

The task is to multiply two numbers of two digits, which the model cannot, but a calculator can: it
may answer `37*48=` by `1776` at once, or call the calculator by `[37*48]`, read `(1776)`, and then
answer. Of the demonstrations in `sft.jsonl` three in ten call it; the others guess some number from
1000 to 1999, which is wrong, and greedy responses are then all like that.
`train.jsonl` and `heldout.jsonl` have answers only: that the call pays is for RL to find out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789*=[]()"
NUM_SFT, NUM_TRAIN, NUM_HELD_OUT = 2000, 2000, 200
SHARE_OF_CALLS = 0.3
SEED = 0


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """Returns a response: a call with what follows it, or a guess. The end token of the last turn
    is not part of it.
    """
    if rng.random() < SHARE_OF_CALLS:
        return f"[{a}*{b}]<eos>({a * b}){a * b}"
    return str(rng.choice([x for x in range(1000, 2000) if x != a * b]))


def write_model(directory: Path) -> None:
    """Writes the config.json of a Qwen3 of 0.2 M parameters and a tokenizer of characters."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocab),
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "pad_token_id": vocab["<pad>"],
        "eos_token_id": vocab["<eos>"],
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))  # for messages of errors
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer_config.json", tokenizer_config)


def write_prompts(directory: Path) -> None:
    """Deals pairs to sft.jsonl, train.jsonl and heldout.jsonl; no pair is in two of them."""
    rng = random.Random(SEED)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    ends = [NUM_SFT, NUM_SFT + NUM_TRAIN, NUM_SFT + NUM_TRAIN + NUM_HELD_OUT]
    sft = (
        {"prompt": f"{a}*{b}=", "response": demonstration(a, b, rng)} for a, b in pairs[: ends[0]]
    )
    write_jsonl(directory / "sft.jsonl", sft)
    for name, part in (("train", pairs[ends[0] : ends[1]]), ("heldout", pairs[ends[1] : ends[2]])):
        rows = ({"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in part)
        write_jsonl(directory / f"{name}.jsonl", rows)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_model(HERE / "model")
    write_prompts(HERE)
