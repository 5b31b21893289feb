"""Forty malformed rows: each is refused before ranks start, with the file's and the row's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import FRESH, NO_EVALUATION, QUICKSTART

from hybridrl.cli import main, train
from hybridrl.errors import UserError

U, A = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD: dict[str, dict[str, Any]] = {
    "sft": {"messages": [U, A]},
    "dpo": {"prompt": "p", "chosen": "c", "rejected": "r"},
    "kto": {"prompt": "p", "completion": "c", "label": True},
    "grpo": {"prompt": "p", "answer": "a"},
}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def call(value: Any) -> dict[str, Any]:
    return chat(U, {"role": "assistant", "tool_calls": value})


def pair(chosen: Any, rejected: Any, **more: Any) -> dict[str, Any]:
    return {"chosen": chosen, "rejected": rejected, **more}


# The algorithm, the second row of its file, and what the message says.
ROWS: dict[str, tuple[str, Any, str]] = {
    "no known form": ("sft", {"frage": "a", "antwort": "b"}, "messages (a list of role"),
    "a misspelt key": ("sft", {"mesages": [U, A]}, "among ['mesages']"),
    "a form of other things": ("sft", {"text": "just text"}, "no column 'prompt' among ['text']"),
    "messages null": ("sft", {"messages": None}, "no column 'prompt' among ['messages']"),
    "messages empty": ("sft", chat(), "messages = []"),
    "messages a text": ("sft", {"messages": "hi"}, "messages = 'hi'"),
    "messages an object": ("sft", {"messages": {"role": "user"}}, "messages = {'role'"),
    "a message that is a text": ("sft", chat(U, "b"), "messages has 'b'"),
    "a message without role": ("sft", chat(U, {"content": "b"}), "messages has {'content'"),
    "a message without content": ("sft", chat(U, {"role": "assistant"}), "messages has {'role'"),
    "a role that is a number": ("sft", chat(U, {"role": 3, "content": "b"}), "messages has"),
    "a role that is unknown": ("sft", chat(U, {**A, "role": "asistant"}), "the role 'asistant'"),
    "an assistant of no words": (
        "sft",
        chat(U, {**A, "content": ""}),
        "message of the assistant without text",
    ),
    "content a number": ("sft", chat(U, {**A, "content": 5}), "messages has {'content': 5"),
    "content an image": (
        "sft",
        chat({"role": "user", "content": [{"type": "image", "url": "x"}]}, A),
        "got an image part = 'x', which is no file in ",
    ),
    "content of no parts": ("sft", chat(U, {**A, "content": []}), "messages has the content []"),
    "a weight": ("sft", chat(U, {**A, "weight": 0}), "a message of weight 0"),
    "half a surrogate pair": ("sft", '{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
    "no assistant": ("sft", chat(U, U), "messages has no message of the assistant"),
    "the assistant first": ("sft", chat(A, U, A), "messages has the assistant's message first"),
    "ShareGPT without value": ("sft", {"conversations": [{"from": "human"}]}, "conversations has"),
    "ShareGPT of strangers": (
        "sft",
        {"conversations": [{"from": "martian", "value": "a"}]},
        "conversations has the role 'martian'",
    ),
    "a call without a name": ("sft", call([{"function": {}}]), "messages has the call"),
    "a call that is a number": ("sft", call([7]), "messages has the call 7"),
    "calls that are no JSON": ("sft", call("{get"), "messages has '{get'"),
    "arguments that are no JSON": (
        "sft",
        call([{"function": {"name": "f", "arguments": "{x"}}]),
        "messages has '{x'",
    ),
    "arguments that are a list": (
        "sft",
        call([{"function": {"name": "f", "arguments": [1]}}]),
        "messages has the call",
    ),
    "tools that are no JSON": ("sft", chat(U, A, tools="[{"), "tools has '[{'"),
    "tools that are a number": ("sft", chat(U, A, tools=3), "tools = 3"),
    "tools that are names": ("sft", chat(U, A, tools=["f"]), "tools = ['f']"),
    "instruction without output": ("sft", {"instruction": "a"}, "instruction and output (Alpaca)"),
    "an output that is empty": ("sft", {"instruction": "a", "output": ""}, "response = ''"),
    "an answer that is a number": ("sft", {"question": "a", "answer": 3}, "response = 3"),
    "pairs without the worse": ("dpo", {"prompt": "p", "chosen": "c"}, "no column 'rejected'"),
    "pairs of one response": ("dpo", pair("c", "c", prompt="p"), "equal responses in 'chosen' and"),
    "pairs of one chat": ("dpo", pair([U, A], [U, A]), "equal responses in 'chosen' and"),
    "pairs of other prompts": (
        "dpo",
        pair([U, A], [{**U, "content": "z"}, A]),
        "two responses whose first difference is not in a message of the assistant",
    ),
    "pairs that are not the prompt's": (
        "dpo",
        pair([{**U, "content": "z"}, A], [{**U, "content": "z"}, U, A], prompt=[U]),
        "chosen does not begin with the messages of prompt",
    ),
    "dialogues that part early": (
        "dpo",
        pair("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: c\n\nAssistant: d"),
        "chosen and rejected that differ before the last turn",
    ),
    "a tree of messages without a reply": (
        "sft",
        {"prompt": {"role": "prompter", "text": "a", "replies": []}},
        "messages has no message of the assistant",
    ),
    "a tree whose replies are a text": (
        "sft",
        {"prompt": {"role": "prompter", "text": "a", "replies": "b"}},
        "replies = 'b'; allowed: a list of messages",
    ),
    "a message of a tree whose parent is elsewhere": (
        "sft",
        {
            "message_id": "b",
            "parent_id": "a",
            "message_tree_id": "a",
            "role": "assistant",
            "text": "x",
        },
        "parent_id = 'a'; allowed: the message_id of another row of its tree",
    ),
    "a label that is a word": ("kto", {**GOOD["kto"], "label": "yes"}, "label = 'yes'"),
    "labels without": ("kto", {"prompt": "p", "completion": "c"}, "no column 'label'"),
    "prompts of the assistant alone": ("grpo", chat(A, answer="a"), "messages of the assistant"),
    "a null answer": (
        "grpo",
        {"prompt": "p", "answer": None},
        "got null; allowed: the column 'answer' in every row. Add the column, or",
    ),
    "an answer that is an object": (
        "grpo",
        {"prompt": "p", "answer": {}},
        "the answer {}; allowed",
    ),
    "an empty list of answers": ("grpo", {"prompt": "p", "answer": []}, "a list of these"),
    "prompts of no user's text": ("grpo", {"prompt": [], "answer": "a"}, "prompt = []"),
}
SMALL = (
    *FRESH,
    *NO_EVALUATION,
    "steps.stop_at_accuracy=null",
)


def test_forty_malformed_rows_are_refused_by_file_and_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "launch_run", lambda *_: 0)
    path, wrong = tmp_path / "rows.jsonl", {}
    for name, (algorithm, row, expected) in ROWS.items():
        second = row if isinstance(row, str) else json.dumps(row)
        path.write_text(f"{json.dumps(GOOD[algorithm])}\n{second}\n")
        config = "grpo.yaml" if algorithm == "grpo" else "sft.yaml"
        more = () if algorithm == "grpo" else (f"algorithm.name={algorithm}",)
        knobs = [*SMALL, *more, f"data.prompts={path}", f"run.dir={tmp_path}"]
        knobs.append("data.on_bad_row=stop")
        try:
            main.app(["train", str(QUICKSTART / config), *knobs], standalone_mode=False)
            told = "nothing"
        except UserError as error:
            told = str(error)
        is_plain = "\n" not in told and len(told) < 1200
        if not told.startswith(f"{path}:2: got ") or expected not in told or not is_plain:
            wrong[name] = told
    assert wrong == {}
    assert len(ROWS) >= 40


def test_rows_that_the_reward_cannot_score_are_found_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "launch_run", lambda *_: 0)
    rows = {
        "gsm8k": ({"answer": "#### 5"}, {"answer": "five"}),
        "math": ({"answer": r"\$18.90"}, {"answer": r"\$"}),
        "choice": ({"answer": ["A", "B"]}, {"answer": ["A", "B or C"]}),
        "instructions": (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
            {"instruction_id_list": ["punctuation:none"], "kwargs": [{}]},
        ),
    }
    path = tmp_path / "rows.jsonl"
    for function, (good, bad) in rows.items():
        path.write_text("".join(json.dumps({"prompt": "p", **row}) + "\n" for row in (good, bad)))
        knobs = [*SMALL, "reward.extract=null", f"reward.function={function}"]
        knobs += [f"data.prompts={path}", f"run.dir={tmp_path}"]
        command = ["train", str(QUICKSTART / "grpo.yaml"), *knobs]
        with pytest.raises(UserError, match=rf"{path}:2: got "):
            main.app(command, standalone_mode=False)
        main.app([*command, "reward.on_error=value"], standalone_mode=False)  # which says it all
