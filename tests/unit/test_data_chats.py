"""Chats with the templates of common models: the prompt is what a rollout gives, and what is
learned is what the model is to produce there.

The templates are the published ones. What is expected is written out here, for each template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chat_tokenizers import CHATML, byte_tokenizer, published_template

from hybridrl.config.schema import DataConfig
from hybridrl.contracts.prompts import Prompt, in_gaps
from hybridrl.data.mixture import hold_out
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import LoadedPrompts, Reading, load_prompts
from hybridrl.environments.chat import ObservationEncoder, Observed
from hybridrl.errors import DataError

LIMIT = 10_000


class Family(NamedTuple):
    """A template with its tokens, and what is learned of turns that say "two" and "four"."""

    specials: Sequence[str]
    eos: str
    learned: tuple[str, str]
    is_split: bool


QWEN = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
OSS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>")
EMPTY = "<think>\n\n</think>\n\n{}<|im_end|>"
R1 = ("two<｜end▁of▁sentence｜>", "four<｜end▁of▁sentence｜>")
FAMILIES = {
    "deepseekv3": Family(DEEPSEEK, DEEPSEEK[2], R1, True),
    "deepseek_r1_distill": Family(DEEPSEEK, DEEPSEEK[2], R1, True),
    "nemotron_3_nano": Family(
        QWEN, QWEN[1], ("</think>two<|im_end|>", "</think>four<|im_end|>"), True
    ),
    "qwen3": Family(QWEN, QWEN[1], (EMPTY.format("two"), EMPTY.format("four")), True),
    "qwen3_5_think": Family(
        QWEN, QWEN[1], ("\n</think>\n\ntwo<|im_end|>", "\n</think>\n\nfour<|im_end|>"), True
    ),
    "qwen3_6": Family(
        QWEN, QWEN[1], ("\n</think>\n\ntwo<|im_end|>", "\n</think>\n\nfour<|im_end|>"), True
    ),
    "qwen3_instruct_2507": Family(QWEN, QWEN[1], ("two<|im_end|>", "four<|im_end|>"), False),
    "qwen2_5": Family(QWEN, QWEN[1], ("two<|im_end|>", "four<|im_end|>"), False),
    "gptoss": Family(
        OSS,
        "<|return|>",
        (
            "<|channel|>final<|message|>two<|return|>",
            "<|channel|>final<|message|>four<|return|>",
        ),
        True,
    ),
    "phi3": Family(PHI, "<|endoftext|>", ("two<|end|>", "four<|end|>"), False),
    "phi3_5": Family(PHI, "<|endoftext|>", ("two<|end|>", "four<|end|>"), False),
    "llama3": Family(LLAMA, "<|eot_id|>", ("two<|eot_id|>", "four<|eot_id|>"), False),
    "gemma": Family(GEMMA, "<eos>", ("two<end_of_turn>", "four<end_of_turn>"), False),
    "gemma3": Family(GEMMA, "<eos>", ("two<end_of_turn>", "four<end_of_turn>"), False),
    "glm4moe": Family(
        ("<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        ("\n<think></think>\ntwo<|endoftext|>", "\n<think></think>\nfour<|endoftext|>"),
        False,
    ),
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


ONE, TWO, THREE, FOUR = user("one"), assistant("two"), user("three"), assistant("four")


def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    special = [token for token in family.specials if token not in QWEN]
    bos = {"bos_token": family.specials[0]} if name in ("llama3", "gemma", "gemma3") else {}
    return byte_tokenizer(published_template(name), special, eos_token=family.eos, **bos)


def load(tokenizer: Any, *rows: Mapping[str, Any], **changes: Any) -> LoadedPrompts:
    feedback = changes.pop("feedback", None)
    config = DataConfig(max_prompt_tokens=LIMIT, **changes)
    responses = None if feedback == "prompts" else LIMIT
    feedback = None if feedback == "prompts" else feedback
    return load_prompts(config, tokenizer, rows, max_response_tokens=responses, feedback=feedback)


def learned(tokenizer: Any, prompt: Prompt) -> list[str]:
    """The runs that are learned, each as text."""
    flags = in_gaps(len(prompt.response_tokens or ()), prompt.response_gaps)
    runs: list[list[int]] = [[]]
    for token, is_gap in zip(prompt.response_tokens or (), flags, strict=True):
        runs += [[]] if is_gap and runs[-1] else []
        runs[-1] += [] if is_gap else [token]
    return [tokenizer.decode(run) for run in runs]


def check_prompt(tokenizer: Any, prompt: Prompt, asked: Sequence[Mapping[str, Any]]) -> None:
    """The prompt has the text and the tokens that a rollout is given."""
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt.text == text
    assert list(prompt.tokens) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_are_learned_as_each_template_has_the_model_produce_them(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    (single,) = load(tokenizer, {"messages": [ONE, TWO]}).prompts
    check_prompt(tokenizer, single, [ONE])
    assert learned(tokenizer, single) == [family.learned[0]]
    found = load(tokenizer, {"messages": [ONE, TWO, THREE, FOUR]})
    assert len(found.prompts) == 1 + family.is_split
    for prompt, asked in zip(found.prompts, ([ONE], [ONE, TWO, THREE]), strict=False):
        check_prompt(tokenizer, prompt, asked)
        assert prompt.prompt_id == 0
    texts = [text for prompt in found.prompts for text in learned(tokenizer, prompt)]
    if name == "glm4moe":  # its turns end where the next begins: only the last gets an end token
        assert texts == [family.learned[0].removesuffix("<|endoftext|>"), family.learned[1]]
    else:
        assert texts == list(family.learned)
    assert ("1 chats became 2 samples" in found.report()) == family.is_split
    # A rollout is given the same.
    (asked_only,) = load(tokenizer, {"messages": [ONE]}, feedback="prompts").prompts
    assert asked_only.tokens == single.tokens and asked_only.text == single.text


THOUGHT = {"reasoning_content": "r", "thinking": "r"}


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("qwen3", assistant("two", **THOUGHT), "<think>\nr\n</think>\n\ntwo<|im_end|>"),
        (
            "qwen3",
            assistant("<think>\nr\n</think>\n\ntwo"),
            "<think>\nr\n</think>\n\ntwo<|im_end|>",
        ),
        ("qwen3_5_think", assistant("two", **THOUGHT), "r\n</think>\n\ntwo<|im_end|>"),
        ("nemotron_3_nano", assistant("two", **THOUGHT), "r\n</think>\ntwo<|im_end|>"),
        ("nemotron_3_nano", assistant("<think>r</think>two"), "r</think>two<|im_end|>"),
        (
            "gptoss",
            assistant("two", **THOUGHT),
            "<|channel|>analysis<|message|>r<|end|><|start|>assistant"
            "<|channel|>final<|message|>two<|return|>",
        ),
        # These cut off what is before </think>, in the last turn too: the message has it.
        (
            "deepseek_r1_distill",
            assistant("<think>\nr\n</think>\n\ntwo"),
            "r\n</think>\n\ntwo<｜end▁of▁sentence｜>",
        ),
        ("deepseekv3", assistant("r</think>two"), "r</think>two<｜end▁of▁sentence｜>"),
    ],
)
def test_reasoning_is_learned_once_after_what_the_generation_prompt_opens(
    name: str, message: dict[str, Any], expected: str
) -> None:
    tokenizer = tokenizer_of(name)
    found = load(tokenizer, {"messages": [ONE, message]}, {"messages": [ONE, message, THREE, FOUR]})
    first, again, last = found.prompts
    for prompt in (first, again):
        check_prompt(tokenizer, prompt, [ONE])
        assert learned(tokenizer, prompt) == [expected]
    check_prompt(tokenizer, last, [ONE, message, THREE])
    assert found.left_out.chats.num_unclosed == found.left_out.chats.num_unread == 0 or (
        # The last turn has no reasoning, and nothing of these templates closes it.
        name.startswith("deepseek") and found.left_out.chats.num_unclosed == 1
    )


def test_what_nobody_would_expect_is_counted_and_said() -> None:
    """Reasoning that is never closed, reasoning that a template does not read."""
    found = load(tokenizer_of("deepseek_r1_distill"), {"messages": [ONE, TWO]})
    assert "1 responses do not close the reasoning" in found.report()
    found = load(tokenizer_of("llama3"), {"messages": [ONE, assistant("two", **THOUGHT)]})
    assert "1 turns have reasoning that the chat template leaves out" in found.report()
    found = load(tokenizer_of("qwen2_5"), {"messages": [ONE, TWO, THREE, FOUR]})
    assert found.report() == "1 prompts"


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"a": {}}}}


def call(**more: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    return assistant("", tool_calls=[{"type": "function", "function": function}], **more)


def test_turns_that_the_template_keeps_stay_in_one_sample() -> None:
    """Qwen3 keeps the reasoning of calls until the user speaks again."""
    tokenizer, told = tokenizer_of("qwen3"), {"role": "tool", "content": "9"}
    turn = [call(reasoning_content="r"), told, assistant("cold", reasoning_content="s")]
    row = {"messages": [ONE, *turn, THREE, *turn], "tools": [WEATHER]}
    first, second = load(tokenizer, row).prompts
    texts = learned(tokenizer, first)
    assert [text[:10] for text in texts] == ["<think>\nr\n", "<think>\ns\n"]
    assert '"city": "Oslo"' in texts[0] and texts[1].endswith("</think>\n\ncold<|im_end|>")
    assert learned(tokenizer, second) == texts
    assert "<think>" not in second.text and second.text.count("<tool_call>\n{") == 2


def test_a_call_that_the_template_leaves_out_is_refused() -> None:
    """As DeepSeek-R1-Distill's does, where a message has content too."""
    row = {"messages": [ONE, call()]}
    with pytest.raises(DataError, match="a call to 'get_weather', which the chat template leaves"):
        load(tokenizer_of("deepseek_r1_distill"), row)


def test_turns_are_not_split_if_the_user_says_so() -> None:
    tokenizer, row = tokenizer_of("qwen3"), {"messages": [ONE, TWO, THREE, FOUR]}
    with pytest.raises(DataError, match="Set data.split_turns=true"):
        load(tokenizer, row, split_turns=False)
    assert len(load(tokenizer, {"messages": [ONE, TWO]}, split_turns=False).prompts) == 1


def test_pairs_and_labels_take_such_templates_with_one_turn_and_are_refused_with_more() -> None:
    tokenizer = tokenizer_of("qwen3")
    pair = {"chosen": [ONE, TWO, THREE, FOUR], "rejected": [ONE, TWO, THREE, assistant("five")]}
    (prompt,) = load(tokenizer, pair, feedback="pairs").prompts
    check_prompt(tokenizer, prompt, [ONE, TWO, THREE])
    assert tokenizer.decode(prompt.response_tokens) == EMPTY.format("four")
    assert tokenizer.decode(prompt.rejected_tokens) == EMPTY.format("five")
    labelled = [{"messages": pair["chosen"], "label": one} for one in (True, False)]
    prompt = load(tokenizer, *labelled, feedback="labels").prompts[0]
    check_prompt(tokenizer, prompt, [ONE, TWO, THREE])
    apart = {"chosen": [ONE, TWO, THREE, FOUR], "rejected": [ONE, FOUR]}
    with pytest.raises(DataError, match="one turn in each response of a pair"):
        load(tokenizer, apart, feedback="pairs")


def test_a_template_that_renders_what_was_asked_differently_is_refused_with_what_differs() -> None:
    changes = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ messages | length }}")
    with pytest.raises(DataError) as caught:
        load(byte_tokenizer(changes), {"messages": [ONE, TWO]})
    assert "message 2 of a chat, before which the template's generation prompt renders " in str(
        caught
    )
    assert "one1<|im_end|>" in str(caught.value) and "one2<|im_end|>" in str(caught.value)


def test_template_arguments_reach_every_rendering() -> None:
    tokenizer, arguments = tokenizer_of("qwen3"), {"enable_thinking": False}
    (asked,) = load(
        tokenizer, {"messages": [ONE]}, feedback="prompts", template_arguments=arguments
    ).prompts
    text = tokenizer.apply_chat_template(
        [ONE], tokenize=False, add_generation_prompt=True, **arguments
    )
    assert asked.text == text and text.endswith("</think>\n\n")
    (shown,) = load(tokenizer, {"messages": [ONE, TWO]}, template_arguments=arguments).prompts
    assert shown.text == text and learned(tokenizer, shown) == ["two<|im_end|>"]
    encode = ObservationEncoder(tokenizer, len(tokenizer), [tokenizer.eos_token_id], arguments)
    observed = encode([{"role": "tool", "content": "9"}])
    assert isinstance(observed, Observed)
    assert tokenizer.decode(observed.tokens).endswith("</think>\n\n")
    with pytest.raises(DataError, match="template_arguments.enable_thinkin: .*'enable_thinking'"):
        load(tokenizer, {"messages": [ONE, TWO]}, template_arguments={"enable_thinkin": False})
    with pytest.raises(ValueError, match="no tools, because hybridrl"):
        DataConfig(template_arguments={"tools": []})


def test_samples_of_one_chat_are_held_out_together_and_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    chats = [[user(f"{i}"), TWO, THREE, FOUR] for i in range(40)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer, config = tokenizer_of("qwen3"), DataConfig(prompts=(str(path),))
    reading = Reading(config, max_response_tokens=LIMIT)
    store = PromptStore(tokenizer, tmp_path / "cache")
    mapped = store.load(reading)
    expected = load_prompts(config, tokenizer, max_response_tokens=LIMIT)
    assert list(mapped.prompts) == list(expected.prompts) and mapped.report() == expected.report()
    assert "40 chats became 80 samples" in mapped.report()
    for loaded in (mapped, expected):
        kept, held = hold_out(loaded, 0.4)
        numbers = {p.prompt_id for p in kept.prompts}, {p.prompt_id for p in held}
        assert not numbers[0] & numbers[1] and len(held) == 2 * len(numbers[1]) > 0


def test_rewards_and_environments_get_what_the_row_has(tmp_path: Path) -> None:
    """Not what the template made of it; from the file too."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "one"}, {"messages": [ONE]}, {"messages": [ONE, TWO, THREE, FOUR]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer_of("qwen3")
    config = DataConfig(prompts=(str(path),), chat_template=True, system_prompt="s")
    mapped = PromptStore(tokenizer, tmp_path / "cache").load(Reading(config)).prompts
    found = load_prompts(config, tokenizer).prompts
    assert list(mapped) == list(found)
    assert [prompt.asked for prompt in mapped] == ["one", [ONE], [ONE, TWO, THREE]]
    for prompt in mapped:
        assert prompt.columns_with_text["rendered_prompt"] == prompt.text
        assert prompt.text.startswith("<|im_start|>system\ns<|im_end|>")
    (shown,) = load(tokenizer, {"messages": [ONE, TWO]}).prompts
    assert shown.asked == [ONE]
    (plain,) = load_prompts(DataConfig(), tokenizer, [{"prompt": "one"}]).prompts
    assert plain.asked == plain.text == "one"
