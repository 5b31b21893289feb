"""Creates the calculator example's model directory and prompts, deterministically.

    python examples/calculator/make_data.py

The task is to multiply two two-digit numbers. The model may answer `37*48=` directly with `1776`,
or call the calculator with `[37*48]`, read the result `(1776)`, and then answer. Three of ten
demonstrations in `sft.jsonl` call it; the others guess a wrong number from 1000 to 1999, so that
greedy responses are guesses after SFT. `train.jsonl` and `heldout.jsonl` contain only the answers:
RL has to discover that calling the calculator increases the reward.
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
# For agents (examples/agents): the conversation in the form of the demonstrations.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}<eos>"
    "{% elif message.role == 'tool' %}({{ message.content }})"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


def demonstration(a: int, b: int, rng: random.Random) -> str:
    """Returns a response without its last end token: a call with its result and the answer, or a
    guess.
    """
    if rng.random() < SHARE_OF_CALLS:
        return f"[{a}*{b}]<eos>({a * b}){a * b}"
    return str(rng.choice([x for x in range(1000, 2000) if x != a * b]))


def write_model(directory: Path) -> None:
    """Writes the config.json of a Qwen3 with 0.2 M parameters, and a character-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    config = json.loads((HERE.parent / "quickstart" / "model" / "config.json").read_text()) | {
        "vocab_size": len(vocab),
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "pad_token_id": vocab["<pad>"],
        "eos_token_id": vocab["<eos>"],
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))  # for error messages
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
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer_config.json", tokenizer_config)


def write_prompts(directory: Path) -> None:
    """Writes distinct pairs of numbers to sft.jsonl, train.jsonl and heldout.jsonl."""
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
