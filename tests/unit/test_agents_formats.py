"""Tool calls and reasoning of each family: what its published template writes is read back."""

from __future__ import annotations

from typing import Any

import pytest
from agent_templates import FAMILIES, chat_template, images_of, tokenizer_of
from chat_tokenizers import byte_tokenizer

from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.conversation import Conversation, assistant, tool_call
from hybridrl.agents.template_check import template_notes
from hybridrl.agents.tool_formats import FORMATS, TurnReader, named_format
from hybridrl.errors import UserError

SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "code": {"type": "string"},
        "number": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "inner": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
    }
}
ARGUMENTS = {
    "text": 'a "quoted" text\nof two lines, <b>ünïcode</b>',
    "code": "123",
    "number": 7,
    "ratio": 0.5,
    "flag": True,
    "items": [1, "two", None],
    "inner": {"a": {"b": []}},
    "maybe": "null and void",
}
USER = {"role": "user", "content": "-"}
NOTES = {
    "qwen2.5": [],
    "qwen3-vl": ["only at the beginning"],
    "qwen3": ["adds or removes empty <think>", "drops the reasoning"],
    "qwen3.5": ["adds or removes empty <think>", "drops the reasoning", "only at the beginning"],
    "llama3": [],
    "glm4": ["drops the reasoning"],
    "deepseek": ["which tools", "only at the beginning"],
    "kimi": [],
    "gpt-oss": ["ends a turn with another token", "drops the reasoning", "only at the beginning"],
}


def reader_of(name: str) -> TurnReader:
    return TurnReader.for_template(chat_template(name).source)


def rendered(name: str, calls: list[dict[str, Any]]) -> str:
    """Returns what the template writes for calls, as the model would write it."""
    template = chat_template(name)
    conversation = Conversation((USER, assistant("", "", calls)))
    messages = template.prepared(conversation.messages)
    text = template.without_end(template.text(conversation, messages, False).rstrip())
    before = template.text(conversation, messages[:1], True)
    if name == "gpt-oss":
        return text[len(before) :].removesuffix("<|call|>")
    common = len(before) if text.startswith(before) else before.rindex("-")
    return text[common:]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_the_template_writes_are_read_back(name: str) -> None:
    call = tool_call("functions.work:0", "work", ARGUMENTS)
    text = rendered(name, [call])
    is_reasoning = name in ("qwen3.5", "deepseek") and "</think>" in text
    parts = reader_of(name).parts(text, is_reasoning, True, {"work": SCHEMA})
    assert parts.malformed is None
    (found,) = parts.calls
    assert (found.name, found.arguments) == ("work", ARGUMENTS)
    assert found.call_id == ("functions.work:0" if name == "kimi" else "")


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("gpt-oss", "llama3")])
def test_several_calls_with_text_before_them(name: str) -> None:
    family = FAMILIES[name]
    calls = [family.call("add", {"a": n, "b": 2}, n) for n in range(2)]
    text = "I add.\n" + "\n".join(calls)
    parts = reader_of(name).parts(text, False, True)
    assert parts.content == "I add."
    assert [call.arguments for call in parts.calls] == [{"a": 0, "b": 2}, {"a": 1, "b": 2}]
    assert reader_of(name).parts(text, False, False).calls == ()


MALFORMED = {
    "hermes": ["<tool_call>{", "<tool_call>[]</tool_call>", '<tool_call>{"name": 1}</tool_call>'],
    "qwen3_coder": [
        "<tool_call>x</tool_call>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "<tool_call><function=f></function>",
    ],
    "glm45": ["<tool_call></tool_call>", "<tool_call>f<arg_key>a</arg_key></tool_call>"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>x<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        "<|tool_call_argument_begin|>{<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```",
    ],
    "llama3_json": ['{"name": "f", "parameters": {', '{"name": "f", "parameters": 3}'],
    "harmony": [" to=functions.f<|channel|>commentary", " to=functions.f<|message|>{"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_calls_stay_in_the_text(name: str) -> None:
    reader = TurnReader(FORMATS[name])
    for text in MALFORMED[name]:
        parts = reader.parts(text, False, True)
        assert parts.malformed and not parts.calls
        assert parts.content == text


def test_deepseek_v31_llama_lists_and_harmony_channels_are_read() -> None:
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    assert TurnReader(FORMATS["deepseek"]).parts(text, False, True).calls[0].arguments == {"a": 1}
    text = '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": "b"}}'
    parts = TurnReader(FORMATS["llama3_json"]).parts(text, False, True)
    assert [call.name for call in parts.calls] == ["f", "g"]
    plain = TurnReader(FORMATS["llama3_json"]).parts('{"answer": 3}', False, True)
    assert plain.content == '{"answer": 3}' and plain.malformed is None
    text = (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}'
    )
    parts = TurnReader(FORMATS["harmony"]).parts(text, False, True)
    assert (parts.reasoning, parts.content) == ("I add.", "")
    assert parts.calls[0].name == "add"
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>3"
    parts = TurnReader(FORMATS["harmony"]).parts(text, False, False)
    assert (parts.reasoning, parts.content) == ("Hm.", "3")
    text = ' to=functions.add<|channel|>commentary<|message|>{"a": 1}'
    parts = TurnReader(FORMATS["harmony"]).parts(text, False, False)
    assert parts.content == text and not parts.calls


@pytest.mark.parametrize(
    ("text", "is_reasoning", "reasoning", "content"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a\n</think>\n\nb", True, "a", "b"),
        ("a", True, "a", ""),
        ("<think>a", False, "a", ""),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        (" b ", False, "", " b "),
    ],
)
def test_reasoning_is_split_from_the_answer(
    text: str, is_reasoning: bool, reasoning: str, content: str
) -> None:
    parts = TurnReader(None, has_reasoning=True).parts(text, is_reasoning, False)
    assert (parts.reasoning, parts.content) == (reasoning, content)
    assert TurnReader(None).parts(text, is_reasoning, False).content == text


@pytest.mark.parametrize("name", FAMILIES)
def test_users_are_told_how_a_template_treats_earlier_turns(name: str) -> None:
    notes = template_notes(chat_template(name), reader_of(name))
    assert len(notes) == len(NOTES[name])
    for note, expected in zip(notes, NOTES[name], strict=True):
        assert expected in note
    unknown = template_notes(chat_template(name), TurnReader(None))
    assert "no known format of tool calls" in unknown[-1]


def test_users_are_told_of_templates_without_places_for_images() -> None:
    template = ChatTemplate(tokenizer_of("qwen2.5"), (0,), images=images_of("qwen3-vl"))
    notes = template_notes(template, reader_of("qwen2.5"))
    assert [note.partition("images in ")[2][:8] for note in notes] == ["messages", "results "]


def test_a_template_that_only_joins_contents_continues_and_says_what_it_leaves_out() -> None:
    joined = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>"
    joined += "{% endif %}{% endfor %}"
    tokenizer = byte_tokenizer(joined)
    template = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    call = tool_call("c", "look_up", {"x": "y"})
    messages = (USER, assistant("[1*2]", "", [call]), {"role": "tool", "content": "(2)"})
    assert template.text_after(Conversation(messages), 2) == "<|im_end|>(2)"
    notes = template_notes(template, TurnReader.for_template(joined))
    assert len(notes) == 2
    assert "which tools" in notes[0] and "no known format" in notes[1]


def test_a_format_can_be_named_and_unknown_names_are_refused() -> None:
    assert named_format("glm45", "") is FORMATS["glm45"]
    assert named_format("auto", "no tools") is None
    with pytest.raises(UserError, match=r"agent\.tool_format"):
        named_format("xml", "")
