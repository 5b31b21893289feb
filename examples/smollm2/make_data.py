"""Creates the prompts of this example, deterministically.

    python examples/smollm2/make_data.py runs/smollm2 [LARGEST]

Word sums are short stories of six kinds with two numbers; the answer is the sum or the difference
of the numbers. All stories differ, and no other file contains a story of `heldout.jsonl`.
`train.jsonl` contains only the answers, `sft.jsonl` worked responses, and `pairs.jsonl` a right
response and a response with a wrong number. `instructions.jsonl` and `instructions_heldout.jsonl`
contain requests with instructions that a rule can check, in IFEval's form.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

NUM_HELD_OUT, NUM_TRAIN, NUM_SFT, NUM_PAIRS = 256, 20_000, 2_000, 2_000
NUM_INSTRUCTIONS, NUM_INSTRUCTIONS_HELD_OUT = 600, 64
LARGEST = 40  # largest number; with 20, the untrained model already solves a quarter
SEED = 0

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack")
THINGS = ("apples", "books", "coins", "marbles", "stickers", "pencils", "cards", "shells")
# The answer to the first three stories is a + b, to the others a - b.
STORIES = (
    "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} are that now?",
    "One box has {a} {things} and another has {b}. How many {things} are there in all?",
    "{name} found {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} find?",
    "{name} had {a} {things} and gave {b} to {other}. How many {things} does {name} have left?",
    "A shop had {a} {things}. It sold {b} of them. How many {things} are left in the shop?",
    "{name} has {a} {things} and {other} has {b}. How many more does {name} have than {other}?",
)
NUM_SUMS = 3
REQUESTS = (
    "Write about {topic}.",
    "Tell me something about {topic}.",
    "Explain what {topic} is to a child.",
    "Describe {topic}.",
)
TOPICS = (
    *("the sea", "a library", "winter", "music", "a train", "the moon", "bread", "a garden"),
    *("a river", "football", "painting", "a bicycle", "the sun", "a forest", "cooking", "a school"),
)


class Story(NamedTuple):
    """A question, the calculation that answers it, and the answer."""

    prompt: str
    calculation: str
    answer: int


def draw_story(draw: random.Random, largest: int = LARGEST) -> Story:
    """Returns a random story with numbers up to `largest`."""
    kind = draw.randrange(len(STORIES))
    name, other = draw.sample(NAMES, 2)
    low, high = sorted((draw.randint(2, largest), draw.randint(2, largest)))
    is_sum = kind < NUM_SUMS
    a, b = draw.sample((low, high), 2) if is_sum else (high, low)
    fill = {"name": name, "other": other, "things": draw.choice(THINGS), "a": a, "b": b}
    answer = a + b if is_sum else a - b
    calculation = f"{a} {'+' if is_sum else '-'} {b} = {answer}"
    return Story(STORIES[kind].format(**fill), calculation, answer)


def draw_instruction(draw: random.Random) -> dict[str, object]:
    """Returns a request with one or two instructions, in IFEval's form."""
    words, bullets = draw.randint(20, 60), draw.randint(2, 5)
    kinds: list[tuple[str, str, dict[str, object]]] = [
        ("Do not use any commas.", "punctuation:no_comma", {}),
        ("Write in small letters only.", "change_case:english_lowercase", {}),
        ("Put your whole answer in double quotation marks.", "startend:quotation", {}),
        (
            f"Use fewer than {words} words.",
            "length_constraints:number_words",
            {"num_words": words, "relation": "less than"},
        ),
        (
            f'Answer with exactly {bullets} bullet points that begin with "* ".',
            "detectable_format:number_bullet_lists",
            {"num_bullets": bullets},
        ),
    ]
    chosen = draw.sample(kinds, draw.randint(1, 2))
    request = draw.choice(REQUESTS).format(topic=draw.choice(TOPICS))
    return {
        "prompt": " ".join([request, *(text for text, _, _ in chosen)]),
        "instruction_id_list": [name for _, name, _ in chosen],
        "kwargs": [arguments for _, _, arguments in chosen],
    }


def distinct(draw_one: Callable[[], Any], prompt_of: Callable[[Any], str], num: int) -> list[Any]:
    """Returns the given number of random items with distinct prompts."""
    found: dict[str, Any] = {}
    while len(found) < num:
        one = draw_one()
        found.setdefault(prompt_of(one), one)
    return list(found.values())


def write_prompts(directory: Path, largest: int = LARGEST) -> None:
    """Writes distinct stories and requests to the files."""
    draw = random.Random(SEED)
    num = NUM_HELD_OUT + NUM_TRAIN + NUM_SFT + NUM_PAIRS
    stories = iter(distinct(lambda: draw_story(draw, largest), lambda one: one.prompt, num))
    for name, count in (("heldout", NUM_HELD_OUT), ("train", NUM_TRAIN)):
        rows = [{"prompt": s.prompt, "answer": str(s.answer)} for s in islice(stories, count)]
        write_jsonl(directory / f"{name}.jsonl", rows)
    rows = [{"prompt": s.prompt, "response": s.calculation} for s in islice(stories, NUM_SFT)]
    write_jsonl(directory / "sft.jsonl", rows)
    pairs = []
    for story in islice(stories, NUM_PAIRS):
        wrong = story.answer + draw.choice((-10, -2, -1, 1, 2, 10))
        rejected = f"{story.calculation.rpartition(' ')[0]} {wrong}"
        pairs.append({"prompt": story.prompt, "chosen": story.calculation, "rejected": rejected})
    write_jsonl(directory / "pairs.jsonl", pairs)
    num = NUM_INSTRUCTIONS + NUM_INSTRUCTIONS_HELD_OUT
    asked = distinct(lambda: draw_instruction(draw), lambda row: str(row["prompt"]), num)
    write_jsonl(directory / "instructions_heldout.jsonl", asked[:NUM_INSTRUCTIONS_HELD_OUT])
    write_jsonl(directory / "instructions.jsonl", asked[NUM_INSTRUCTIONS_HELD_OUT:])


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_prompts(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
