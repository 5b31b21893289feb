"""Creates the model directories and the prompts of this example, deterministically.

    python examples/arithmetic_gpu/make_data.py runs/arithmetic

The task is to add four numbers and to show the work: the response to `047+038+019+073=` is
`150814100717=177`. Each step has four digits: the sum of the units (7 + 8 = 15), and the partial
sum without its last digit (4 + 3 + 1 = 08), so every digit depends on only a few earlier ones. The
response ends with the answer. Numbers have a leading zero, so that the digits to add are always at
the same distance. All sums differ: 512 are held out, 60,000 are in `sft.jsonl` with worked
responses, and 120,000 in `train.jsonl` with only the answers.

`model` is a dense Qwen3 of 76 M parameters. `moe_model` is a Qwen3-MoE of the same width and depth
with 104 M parameters, of which 40 M are active per token. --hidden-size and --layers create smaller
models, to try the example without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

QUICKSTART = Path(__file__).parents[1] / "quickstart" / "model" / "config.json"
SPECIAL_TOKENS = ("<pad>", "<eos>")
CHARACTERS = "0123456789+="
NUM_STEPS = 3
NUM_HELD_OUT, NUM_SFT, NUM_TRAIN = 512, 60_000, 120_000
HIDDEN_SIZE, NUM_LAYERS, HEAD_DIM = 768, 12, 64
NUM_EXPERTS, EXPERTS_PER_TOKEN = 16, 4
SEED = 0


class Sum(NamedTuple):
    """A question, its worked response and its answer."""

    prompt: str
    response: str
    answer: str


def draw_sum(draw: random.Random) -> Sum:
    """Returns a random sum."""
    numbers = [draw.randrange(100) for _ in range(1 + NUM_STEPS)]
    result, work = numbers[0], ""
    for number in numbers[1:]:
        units = result % 10 + number % 10
        result += number
        work += f"{units:02d}{result // 10:02d}"
    prompt = "+".join(f"{number:03d}" for number in numbers)
    return Sum(f"{prompt}=", f"{work}={result:03d}", f"{result:03d}")


def write_prompts(directory: Path) -> None:
    """Writes distinct sums to heldout.jsonl, sft.jsonl and train.jsonl."""
    draw, sums = random.Random(SEED), dict[str, Sum]()
    while len(sums) < NUM_HELD_OUT + NUM_SFT + NUM_TRAIN:
        drawn = draw_sum(draw)
        sums.setdefault(drawn.prompt, drawn)
    dealt = iter(sums.values())

    def take(count: int) -> list[Sum]:
        return [next(dealt) for _ in range(count)]

    held_out, sft, train = take(NUM_HELD_OUT), take(NUM_SFT), take(NUM_TRAIN)
    rows = ({"prompt": s.prompt, "response": s.response} for s in sft)
    write_jsonl(directory / "sft.jsonl", rows)
    for name, part in (("heldout", held_out), ("train", train)):
        rows = ({"prompt": s.prompt, "answer": s.answer} for s in part)
        write_jsonl(directory / f"{name}.jsonl", rows)


def write_model(
    directory: Path, hidden_size: int, num_layers: int, has_experts: bool = False
) -> None:
    """Writes the config.json of a Qwen3 or Qwen3-MoE, and a character-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    num_heads = hidden_size // HEAD_DIM
    config = json.loads(QUICKSTART.read_text()) | {
        "vocab_size": len(vocab),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 3 if num_heads % 3 == 0 else num_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": hidden_size * 8 // 3,
        "max_position_embeddings": 128,
        "pad_token_id": vocab["<pad>"],
        "eos_token_id": vocab["<eos>"],
    }
    if has_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": hidden_size // 4,
            "norm_topk_prob": True,
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


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the model directory and the prompts.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    chosen = parser.parse_args()
    write_model(chosen.out / "model", chosen.hidden_size, chosen.layers)
    write_model(chosen.out / "moe_model", chosen.hidden_size, chosen.layers, has_experts=True)
    write_prompts(chosen.out)
