"""Rows of twelve published data sets load by their keys alone, and what is learned of each is what
transformers marks, or, without marks in the template, what bytes say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import BARE, CHATML, FORGETS, MARKED, byte_tokenizer
from command_line import ROOT

from hybridrl.config.schema import DataConfig
from hybridrl.contracts.prompts import Prompt, in_gaps
from hybridrl.data.forms import validate_file
from hybridrl.data.prompt_files import digests, read_prompts, write_prompts
from hybridrl.data.prompts import LoadedPrompts, PromptSource, load_prompts
from hybridrl.data.supervised import supervised_batch
from hybridrl.errors import DataError

ROWS = ROOT / "tests" / "data"
KINDS = {
    "ultrachat": "demonstrations",
    "sharegpt": "demonstrations",
    "openassistant_guanaco": "demonstrations",
    "gsm8k": "demonstrations",
    "alpaca": "demonstrations",
    "function_calling": "demonstrations",
    "numina_math": "demonstrations",
    "ultrafeedback_binarized": "pairs",
    "hh_rlhf": "pairs",
    "dpo_mix": "pairs",
    "openassistant_trees": "demonstrations",
    "openassistant_messages": "demonstrations",
}
LIMIT = 10_000
STOPS = DataConfig(on_bad_row="stop")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {"marked": byte_tokenizer(MARKED), "plain": byte_tokenizer(CHATML)}


def load(path: Path, tokenizer: Any, kind: str, **changes: Any) -> LoadedPrompts:
    config = DataConfig.model_validate(
        {"prompts": str(path), "max_prompt_tokens": LIMIT, **changes}
    )
    responses = None if kind == "prompts" else LIMIT
    feedback = kind if kind in ("pairs", "labels") else None
    return load_prompts(config, tokenizer, max_response_tokens=responses, feedback=feedback)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said_by_assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# Of the trees' conversations, to the assistant's last message.
BEST_REPLIES = (
    (
        *("Why is the sky blue?", "Air scatters blue light most.", "And red at dusk?"),
        "The light's path is longer then.",
    ),
    ("Name a colour.", "Blue.", "Another.", "Green."),
    ("Dime un color.", "Azul."),
)
WEATHER = {"name": "get_weather"}


def calls(city: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**WEATHER, "arguments": {"city": city}}}]


def expected_chats(name: str) -> Iterator[tuple[list[list[dict[str, Any]]], Any]]:
    """Each row's messages (both sides of pairs) and tools, written for each set by hand."""
    if name.startswith("openassistant_") and "guanaco" not in name:
        for texts in BEST_REPLIES:
            yield [[(user, said_by_assistant)[i % 2](text) for i, text in enumerate(texts)]], None
        return
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    for number, row in enumerate(rows(name)):
        tools = None
        if name in ("ultrachat", "numina_math"):
            sides = [row["messages"]]
        elif name == "sharegpt":
            system = [{"role": "system", "content": row["system"]}] if "system" in row else []
            turns = [
                {"role": names[t["from"]], "content": t["value"]} for t in row["conversations"]
            ]
            sides = [[*system, *turns]]
        elif name == "gsm8k":
            sides = [[user(row["question"]), said_by_assistant(row["answer"])]]
        elif name == "alpaca":
            asked = "Translate into German.\n\nGood morning" if number == 0 else row["instruction"]
            sides = [[user(asked), said_by_assistant(row["output"])]]
        elif name == "openassistant_guanaco":
            texts = re.split(r"### (?:Human|Assistant): ", row["text"])[1:]
            sides = [[(user, said_by_assistant)[i % 2](text) for i, text in enumerate(texts)]]
        elif name == "hh_rlhf":
            sides = []
            for side in (row["chosen"], row["rejected"]):
                texts = re.split(r"\n\n(?:Human|Assistant): ", side)[1:]
                sides.append([(user, said_by_assistant)[i % 2](t) for i, t in enumerate(texts)])
        elif name == "function_calling":
            tools = row["tools"] if number == 0 else json.loads(row["tools"])
            if number == 0:
                sides = [row["messages"]]
                call = {"role": "assistant", "content": "", "tool_calls": calls("Oslo")}
                sides[0][2] = call
            elif number == 1:
                call = {"role": "assistant", "content": "", "tool_calls": calls("Rome")}
                told = {"role": "observation", "content": '{"celsius": 24}'}
                sides = [[user("Weather in Rome?"), call, told, said_by_assistant("24 degrees.")]]
            else:
                call = {"role": "assistant", "content": "", "tool_calls": calls("Lima")}
                sides = [[user("Weather in Lima?"), call]]
        else:
            sides = [row["chosen"], row["rejected"]]
        yield sides, tools


def marked_by_transformers(tokenizer: Any, messages: Any, tools: Any) -> tuple[list, list[bool]]:
    found = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return found["input_ids"], [bool(one) for one in found["assistant_masks"]]


def marked_by_bytes(tokenizer: Any, messages: Any, tools: Any) -> tuple[list, list[bool]]:
    """The tokens from "<|im_start|>assistant" to "<|im_end|>"; the text before ends a token."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    pieces = re.split(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", text, flags=re.DOTALL)
    ids, mask = [], []
    for number, piece in enumerate(pieces):
        found = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
        ids += found
        mask += [number % 2 == 1] * len(found)
    return ids, mask


def side_of(prompt: Prompt, is_rejected: bool) -> tuple[list[int], list[bool]]:
    response = prompt.rejected_tokens if is_rejected else prompt.response_tokens
    gaps = prompt.rejected_gaps if is_rejected else prompt.response_gaps
    assert response is not None
    learned = [not one for one in in_gaps(len(response), gaps)]
    return [*prompt.tokens, *response], [*[False] * len(prompt.tokens), *learned]


@pytest.mark.parametrize("template", ["marked", "plain"])
@pytest.mark.parametrize("name", KINDS)
def test_published_forms_are_learned_as_transformers_marks_them(
    tokenizers: dict[str, Any], name: str, template: str
) -> None:
    tokenizer = tokenizers[template]
    mark = marked_by_transformers if template == "marked" else marked_by_bytes
    found = load(ROWS / f"{name}.jsonl", tokenizer, KINDS[name], chat_template=True)
    expected = list(expected_chats(name))
    assert len(found.prompts) == len(expected) >= 2
    for prompt, (sides, tools) in zip(found.prompts, expected, strict=True):
        for is_rejected, messages in enumerate(sides):
            ids, mask = mark(tokenizer, messages, tools)
            tokens, learned = side_of(prompt, bool(is_rejected))
            shared = len(sides) == 2  # what both sides begin with is their prompt
            mask = [one and not (shared and i < len(prompt.tokens)) for i, one in enumerate(mask)]
            last = len(mask) - mask[::-1].index(True)
            assert tokens == list(ids[:last]), name
            assert learned == mask[:last], name
        if len(sides) == 2:
            a, b = (side_of(prompt, side)[0] for side in (False, True))
            start = len(prompt.tokens)
            assert a[:start] == b[:start]


TREES = ("openassistant_trees", "openassistant_messages")


@pytest.mark.parametrize("name", TREES)
def test_trees_give_a_pair_for_each_message_whose_replies_were_ranked_apart(
    tokenizers: dict[str, Any], name: str
) -> None:
    """The best against the worst reply to the same messages, without unranked and deleted ones."""
    tokenizer = tokenizers["plain"]
    found = load(ROWS / f"{name}.jsonl", tokenizer, "pairs").prompts
    (sky, blue, dusk, longer), _, (colour, azul) = BEST_REPLIES
    expected = [
        ([user(sky)], blue, "It mirrors the sea."),
        (
            [user(sky), said_by_assistant(blue), user(dusk)],
            longer,
            "It is the sun's colour.",
        ),
        ([user(colour)], azul, "No."),
    ]
    assert len(found) == 3
    for prompt, (messages, better, worse) in zip(found, expected, strict=True):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt.text == text
        sides = prompt.response_tokens, prompt.rejected_tokens
        assert [tokenizer.decode(one) for one in sides] == [
            f"{better}<|im_end|>",
            f"{worse}<|im_end|>",
        ]
        assert not prompt.response_gaps and not prompt.rejected_gaps
    asked = load(ROWS / f"{name}.jsonl", tokenizer, "prompts").prompts
    assert [one.columns["messages"] for one in asked] == [[user(t[0])] for t in BEST_REPLIES]
    assert all(one.columns["lang"] == "en" and one.columns["message_tree_id"] for one in asked)


def damaged(**change: Any) -> list[dict[str, Any]]:
    """The flat rows, the fourth of which (a reply in the first tree) has other columns."""
    given = rows("openassistant_messages")
    given[3] |= change
    return given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (damaged(parent_id="nobody"), r"prompts\[3\]: got parent_id = 'nobody'; allowed: the mess"),
        (damaged(parent_id=None), r"prompts\[3\]: got parent_id = None"),
        (damaged(parent_id=7), r"prompts\[3\]: got parent_id = 7"),
        (damaged(message_id=None), r"prompts\[3\]: got message_id = None"),
        (damaged(rank="best"), r"prompts\[3\]: got rank = 'best'; allowed: a number, or null"),
        (damaged(role="judge"), r"prompts\[3\]: got text has the role 'judge'"),
        (damaged(text=None), r"prompts\[3\]: got text has"),
        (damaged(message_tree_id="other"), r"prompts\[3\]: got parent_id ="),
        ([*rows("openassistant_messages")[:2]] * 2, r"prompts\[2\]: got message_id = .*unique"),
        (rows("openassistant_messages")[1:3], r"prompts\[0\]: got parent_id ="),
        (
            [{"prompt": {"text": "a", "role": "prompter", "replies": "none"}}],
            r"prompts\[0\]: got replies = 'none'; allowed: a list of messages",
        ),
        (
            [{"prompt": {"text": "a", "role": "prompter", "replies": []}}],
            r"prompts\[0\]: got messages has no message of the assistant",
        ),
    ],
)
def test_rows_that_are_no_tree_are_refused_by_place(
    tokenizers: dict[str, Any], given: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        load_prompts(STOPS, tokenizers["plain"], given, max_response_tokens=LIMIT)


def test_messages_that_reply_to_each_other_are_no_tree(tokenizers: dict[str, Any]) -> None:
    given = rows("openassistant_messages")[:4]
    given[2]["parent_id"], given[3]["parent_id"] = given[3]["message_id"], given[2]["message_id"]
    with pytest.raises(DataError, match=r"prompts\[2\]: got parent_id = "):
        load_prompts(STOPS, tokenizers["plain"], given, max_response_tokens=LIMIT)


def test_trees_without_a_pair_are_told_once(tokenizers: dict[str, Any]) -> None:
    unranked = rows("openassistant_trees")[1:2]
    with pytest.raises(
        DataError, match=r"trees from which no pairs can be made; allowed: at least"
    ):
        load_prompts(
            DataConfig(), tokenizers["plain"], unranked, max_response_tokens=9, feedback="pairs"
        )
    both = [*unranked, *rows("openassistant_trees")]
    found = load_prompts(
        DataConfig(), tokenizers["plain"], both, max_response_tokens=LIMIT, feedback="pairs"
    )
    assert len(found.prompts) == 3
    deleted = [{"prompt": {**unranked[0]["prompt"], "deleted": True}}]
    with pytest.raises(DataError, match="which no prompts can be made; allowed: a first message"):
        load_prompts(DataConfig(), tokenizers["plain"], deleted)


def test_columns_of_ones_own_are_no_trees(tokenizers: dict[str, Any]) -> None:
    """Nor are rows that have a label each."""
    given = [{**row, "a": "b"} for row in rows("openassistant_messages")]
    config = DataConfig(prompt_key="text", response_key="a")
    found = load_prompts(config, tokenizers["plain"], given, max_response_tokens=LIMIT)
    assert len(found.prompts) == len(given)
    with pytest.raises(DataError, match="no column 'prompt'"):
        load_prompts(
            DataConfig(), tokenizers["plain"], given, max_response_tokens=9, feedback="labels"
        )


def test_turns_before_a_pair_parts_are_not_learned(tokenizers: dict[str, Any]) -> None:
    for tokenizer in tokenizers.values():
        first, second = load(ROWS / "dpo_mix.jsonl", tokenizer, "pairs").prompts
        assert first.text.endswith("<|im_start|>user\nJoke?<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.decode(first.response_tokens) == "No.<|im_end|>"
        assert not first.response_gaps and not first.rejected_gaps
        # The second pair parts at once, and is learned in both turns of both sides.
        assert second.response_gaps and second.rejected_gaps


def test_the_schemas_of_tools_reach_the_template(tokenizers: dict[str, Any]) -> None:
    for kind in ("demonstrations", "prompts"):
        path = ROWS / "function_calling.jsonl"
        # The third row has no form of a prompt.
        given = rows("function_calling")[: 2 if kind == "prompts" else 3]
        config = DataConfig(prompts=(str(path),), max_prompt_tokens=LIMIT)
        most = None if kind == "prompts" else LIMIT
        found = load_prompts(config, tokenizers["plain"], given, max_response_tokens=most)
        assert all('"city": {"type": "string"}' in prompt.text for prompt in found.prompts)
    untold = byte_tokenizer(FORGETS)
    with pytest.raises(DataError, match="chat template does not render them"):
        load(ROWS / "function_calling.jsonl", untold, "demonstrations")


def test_texts_stay_texts_without_a_chat_template(tokenizers: dict[str, Any]) -> None:
    plain = byte_tokenizer(None)
    expected = {
        "gsm8k": (rows("gsm8k")[1]["question"], rows("gsm8k")[1]["answer"]),
        "alpaca": ("Give three primary colours.", "Red, yellow and blue."),
        "hh_rlhf": (
            rows("hh_rlhf")[1]["chosen"].removesuffix(" Have you looked in your coat?"),
            " Have you looked in your coat?",
        ),
        "openassistant_guanaco": ("### Human: Dime un color.### Assistant:", " Azul."),
    }
    for name, (text, response) in expected.items():
        prompt = load(ROWS / f"{name}.jsonl", plain, KINDS[name]).prompts[1]
        assert prompt.text == text
        assert prompt.response_tokens is not None
        assert plain.decode(prompt.response_tokens) == response + "<|im_end|>"
    with pytest.raises(DataError, match="ultrachat.jsonl:1: got messages, with a tokenizer"):
        load(ROWS / "ultrachat.jsonl", plain, "demonstrations")


def test_prompts_of_the_same_forms_are_asked_without_their_responses(tokenizers: Any) -> None:
    tokenizer, begins = tokenizers["plain"], "<|im_start|>assistant\n"
    for name in ("ultrachat", "sharegpt", "gsm8k", "alpaca", "numina_math"):
        found = load(ROWS / f"{name}.jsonl", tokenizer, "prompts", chat_template=True).prompts
        assert all(p.text.endswith(begins) and p.response_tokens is None for p in found)
        assert all(p.columns["messages"][-1]["role"] == "user" for p in found)  # type: ignore[index]
    assert found[0].columns["solution"] == rows("numina_math")[0]["solution"]
    (asked,) = {p.text.count("<|im_start|>") for p in found}
    assert asked == 2
    three = load(ROWS / "sharegpt.jsonl", tokenizer, "prompts").prompts[0].text
    assert "56." in three and "60." not in three  # earlier turns are part of the prompt


def test_answers_beside_the_rule_that_judges_them_are_found(tokenizers: dict[str, Any]) -> None:
    """As in DAPO-Math and other sets that were made for verl."""
    rule = {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}
    row = {"data_source": "math_dapo", "prompt": [user("3 * 4 + 22?")], "reward_model": rule}
    given = [row, {**row, "answer": "own"}, {**row, "answer": None}]
    asked = DataConfig(), tokenizers["plain"]
    found = load_prompts(*asked, given, required=["answer"]).prompts
    assert [prompt.columns["answer"] for prompt in found] == ["34", "own", "34"]
    for other in ({**row, "reward_model": "rule"}, {**row, "reward_model": {"style": "rule"}}):
        with pytest.raises(DataError, match="no column 'answer'"):
            load_prompts(*asked, [other], required=["answer"])
    with pytest.raises(DataError, match="no column 'solution'"):
        named = DataConfig(answer_key="solution")
        load_prompts(named, tokenizers["plain"], given, required=["solution"])


def test_keys_of_the_config_go_before_forms(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"messages": [user("a"), said_by_assistant("b")], "q": "ask", "r": "tell"}
    chat = [user("x"), said_by_assistant("y"), user("z"), said_by_assistant("w")]
    path.write_text(json.dumps({**row, "dialogue": chat}) + "\n")
    keys = {"prompt_key": "q", "response_key": "r"}
    (found,) = load(path, tokenizers["plain"], "demonstrations", **keys).prompts
    assert found.text == "ask"
    (found,) = load(path, tokenizers["plain"], "demonstrations", prompt_key="dialogue").prompts
    assert tokenizers["plain"].decode(found.response_tokens).startswith("y<|im_end|>")
    with pytest.raises(DataError, match="no column 's'"):
        load(path, tokenizers["plain"], "demonstrations", prompt_key="q", response_key="s")


def test_a_turn_without_an_end_gets_the_end_token() -> None:
    bare = byte_tokenizer(BARE)
    first, second = load(ROWS / "numina_math.jsonl", bare, "demonstrations").prompts
    assert bare.decode(second.response_tokens) == "$2^{10} = \\boxed{1024}$.\n<|im_end|>"
    assert first.text == "[user] Solve $x + 2 = 5$.\n[assistant] "


def test_what_is_learned_survives_the_file_and_makes_the_batch(
    tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("ultrachat", "dpo_mix"):
        found = load(ROWS / f"{name}.jsonl", tokenizers["plain"], KINDS[name]).prompts
        path = tmp_path / name
        write_prompts(path, ((prompt, 0) for prompt in found), lambda: b"")
        mapped, _ = read_prompts(path)
        assert list(mapped) == list(found)
        assert digests(mapped).tolist() == digests(found).tolist()
        pairs = KINDS[name] == "pairs"
        batch = supervised_batch(mapped, "pairs" if pairs else None)
        sides = [side_of(p, r) for r in ((False, True) if pairs else (False,)) for p in found]
        assert batch.tokens_T.tolist() == [token for tokens, _ in sides for token in tokens]
        assert batch.response_mask_T.tolist() == [one for _, mask in sides for one in mask]


def test_prompts_of_other_gaps_are_other_prompts(tokenizers: dict[str, Any]) -> None:
    found = list(load(ROWS / "ultrachat.jsonl", tokenizers["plain"], "demonstrations").prompts)
    other = [Prompt(**{**vars(prompt), "response_gaps": ()}) for prompt in found]
    states = [PromptSource(some, seed=0, shuffle=False).state() for some in (found, other)]
    assert states[0] != states[1]


def test_long_responses_are_left_out_or_cut_and_counted(tokenizers: dict[str, Any]) -> None:
    path = ROWS / "ultrachat.jsonl"
    whole = load(path, tokenizers["plain"], "demonstrations").prompts
    longest = [len(prompt.response_tokens or ()) for prompt in whole]
    most = max(longest) - 1
    for how in ("leave_out", "cut"):
        config = DataConfig(prompts=(str(path),), max_prompt_tokens=LIMIT, long_responses=how)
        found = load_prompts(config, tokenizers["plain"], max_response_tokens=most)
        if how == "leave_out":
            assert len(found.prompts) == 2 and "1 left out" in found.report()
        else:
            assert len(found.prompts) == 3
            assert "3 prompts, 1 with responses cut (data.long_responses=cut)" in found.report()
            cut = found.prompts[longest.index(max(longest))]
            assert cut.response_tokens == whole[cut.prompt_id].response_tokens[:most]  # type: ignore[index]
    # A cut within a turn of the user's leaves none of it.
    (begin, end) = whole[0].response_gaps
    found = load_prompts(config, tokenizers["plain"], max_response_tokens=end - 1)
    assert len(found.prompts[0].response_tokens or ()) == begin
    assert found.prompts[0].response_gaps == ()


def test_labelled_chats_are_learned_in_their_last_turn(tokenizers: Any, tmp_path: Path) -> None:
    path = tmp_path / "kto.jsonl"
    chat = [user("a"), said_by_assistant("b"), user("c"), said_by_assistant("d")]
    given = [{"messages": chat, "label": True}, {"prompt": "p", "completion": "q", "label": False}]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    for tokenizer in tokenizers.values():
        first, second = load(path, tokenizer, "labels", chat_template=True).prompts
        assert tokenizer.decode(first.response_tokens) == "d<|im_end|>"
        assert first.columns["label"] is True and first.response_gaps == ()
        assert tokenizer.decode(second.response_tokens) == "q<|im_end|>"


def test_the_forms_that_are_known_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"frage": "a", "antwort": "b"}\n')
    with pytest.raises(DataError) as caught:
        validate_file(str(path), DataConfig(), "demonstrations")
    for part in (
        f"{path}:1: got no column 'prompt' among ['antwort', 'frage']",
        "messages (a list of role and content)",
        "conversations (ShareGPT",
        "instruction and output (Alpaca)",
        "or set its data.*_key",
    ):
        assert part in str(caught.value)


def test_only_nulls_that_arrow_added_vanish(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """JSON's nulls reach the template; those of struct columns may be Arrow's."""
    import pyarrow
    from pyarrow import parquet

    schema = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    as_text = {**call, "arguments": json.dumps(call["arguments"])}
    given = [
        {
            "messages": [user("?"), {"role": "assistant", "content": None, "tool_calls": [one]}],
            "tools": tools,
        }
        for one, tools in ((call, [schema]), (as_text, json.dumps([schema])))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    tables = []
    for number, row in enumerate(given):
        tables.append(tmp_path / f"{number}.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([row]), tables[-1])
    structs, texts = (load(one, tokenizers["plain"], "demonstrations").prompts[0] for one in tables)
    lines = load(path, tokenizers["plain"], "demonstrations").prompts
    for prompt in (*lines, texts):
        assert '"parameters": {"default": null}' in prompt.text
        said = tokenizers["plain"].decode(prompt.response_tokens)
        assert '"arguments": {"a": 1, "b": null}' in said
    assert '"parameters": {}' in structs.text
    assert '"arguments": {"a": 1}}' in tokenizers["plain"].decode(structs.response_tokens)
