"""Creates the quickstart's model directory and prompts, deterministically.

    python examples/quickstart/make_data.py

The task is to add two two-digit numbers and to show the work: the response to `47+38=` is
`15,08,85`: the sum of the units, the sum of the tens with the carry, and the answer. Each of the
10,000 pairs of numbers is used once: 512 are held out to measure accuracy, a third is in
`sft.jsonl` with worked responses, and the rest in `train.jsonl` with only the answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
SPECIAL_TOKENS = ("<pad>", "<eos>")
CHARACTERS = "0123456789+=,"
NUM_HELD_OUT = 512
SEED = 0


def prompt(a: int, b: int) -> str:
    """Returns the question, with operands padded to two digits."""
    return f"{a:02d}+{b:02d}="


def worked_response(a: int, b: int) -> str:
    """Returns the demonstration: units, tens with carry, answer."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{units:02d},{tens:02d},{a + b}"


def write_model(directory: Path) -> None:
    """Writes the config.json of a Qwen3 with 0.8 M parameters, and a character-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocab),
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
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
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer_config.json", tokenizer_config)


def write_prompts(directory: Path) -> None:
    """Distributes all pairs of numbers over sft.jsonl, train.jsonl and heldout.jsonl."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(SEED).shuffle(pairs)
    num_sft = len(pairs) // 3
    held_out, rest = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
    sft, train = rest[:num_sft], rest[num_sft:]
    write_jsonl(
        directory / "sft.jsonl",
        ({"prompt": prompt(a, b), "response": worked_response(a, b)} for a, b in sft),
    )
    for name, part in (("train", train), ("heldout", held_out)):
        rows = ({"prompt": prompt(a, b), "answer": str(a + b)} for a, b in part)
        write_jsonl(directory / f"{name}.jsonl", rows)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_model(HERE / "model")
    write_prompts(HERE)
