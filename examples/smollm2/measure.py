"""Measures a model's greedy accuracy on word sums with transformers, without hybridrl.

    python examples/smollm2/measure.py DIR PROMPTS.jsonl OUT.json [--limit N] [--new-tokens N]

Loads DIR with AutoModelForCausalLM and applies its tokenizer's chat template. The last number in a
response counts as its answer.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from decimal import Decimal
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 64
NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def is_right(response: str, answer: str) -> bool:
    """Whether the last number in a response equals the answer."""
    found = NUMBER.findall(response)
    return bool(found) and Decimal(found[-1].replace(",", "").replace("$", "")) == Decimal(answer)


def main() -> None:
    """Writes the accuracy and the responses to OUT.json, and prints the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--new-tokens", type=int, default=48)
    given, started = parser.parse_args(), time.monotonic()
    is_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if is_gpu else ("cpu", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    if tokenizer.pad_token is None:  # any token works, because padding is masked
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device).eval()
    rows = [json.loads(line) for line in given.prompts.read_text().splitlines()][: given.limit]
    responses: list[str] = []
    for start in range(0, len(rows), BATCH):
        chats = [[{"role": "user", "content": r["prompt"]}] for r in rows[start : start + BATCH]]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = inputs.to(device)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=given.new_tokens, do_sample=False)
        new = tokens[:, inputs["input_ids"].shape[1] :]
        responses += tokenizer.batch_decode(new, skip_special_tokens=True)
    right = [is_right(text, row["answer"]) for text, row in zip(responses, rows, strict=True)]
    result = {
        "accuracy": sum(right) / len(right),
        "num_prompts": len(right),
        "architecture": type(model).__name__,
        "seconds": time.monotonic() - started,
        "responses": responses,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"transformers: accuracy {result['accuracy']:.4f} on {len(right)} prompts")


if __name__ == "__main__":
    main()
