"""Chat templates of families that agents use, and texts that their models write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from chat_tokenizers import byte_tokenizer, published_template

from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.data.images import ImageTokens
from hybridrl.models.vision.images import ImageProcessor, Preprocessing
from hybridrl.models.vision.shape import VisionShape

# What Kimi-K2-Instruct's template writes, for messages with text and tool calls.
KIMI = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}"
    "{%- if message.role == 'system' -%}<|im_system|>system<|im_middle|>"
    "{%- elif message.role == 'user' -%}<|im_user|>user<|im_middle|>"
    "{%- elif message.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- elif message.role == 'tool' -%}<|im_system|>tool<|im_middle|>"
    "## Return of {{ message.tool_call_id }}{{ '\n' }}{%- endif -%}"
    "{{ message.content }}"
    "{%- if message.tool_calls -%}<|tool_calls_section_begin|>"
    "{%- for call in message.tool_calls -%}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{% if call.function.arguments is string %}"
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    "<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}"
    "<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def _hermes(name: str, arguments: Mapping[str, Any], place: int) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _xml(name: str, arguments: Mapping[str, Any], place: int) -> str:
    parts = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def _glm(name: str, arguments: Mapping[str, Any], place: int) -> str:
    parts = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
    )
    return f"\n<tool_call>{name}\n{parts}</tool_call>"


def _llama(name: str, arguments: Mapping[str, Any], place: int) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def _deepseek(name: str, arguments: Mapping[str, Any], place: int) -> str:
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def _kimi(name: str, arguments: Mapping[str, Any], place: int) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{place}"
        f"<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def _harmony(name: str, arguments: Mapping[str, Any], place: int) -> str:
    body = json.dumps(arguments)
    return f" to=functions.{name}<|channel|>commentary json<|message|>{body}"


@dataclass(frozen=True)
class Family:
    """A chat template, and how its model writes.

    `call` writes a tool call with its name, arguments and number; turns without and with calls end
    with `end` and `call_end`, or a token in `others`; the model writes `before` before an answer.
    """

    template: str
    call: Callable[[str, Mapping[str, Any], int], str]
    end: str = "<|im_end|>"
    call_end: str = ""
    others: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    before: str = ""
    thinks: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[str, ...]:
        """All tokens that end turns."""
        return tuple(dict.fromkeys([self.end, self.call_end or self.end, *self.others]))


IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
FAMILIES = {
    "qwen2.5": Family("qwen2_5", _hermes, others=("<|endoftext|>",)),
    "qwen3-vl": Family("qwen3_vl", _hermes, others=("<|endoftext|>",), special=IMAGE),
    "qwen3": Family("qwen3", _hermes, others=("<|endoftext|>",), thinks=True),
    "qwen3.5": Family("qwen3_5_think", _xml, others=("<|endoftext|>",), thinks=True),
    "llama3": Family(
        "llama3_1",
        _llama,
        end="<|eot_id|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    ),
    "glm4": Family(
        "glm4moe",
        _glm,
        end="<|user|>",
        call_end="<|observation|>",
        others=("<|endoftext|>",),
        special=("<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
        before="\n<think></think>\n",
        thinks=True,
    ),
    "deepseek": Family(
        "deepseekv3",
        _deepseek,
        end="<｜end▁of▁sentence｜>",
        special=("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),
        thinks=True,
    ),
    "kimi": Family(
        KIMI, _kimi, special=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>")
    ),
    "gpt-oss": Family(
        "gptoss",
        _harmony,
        end="<|return|>",
        call_end="<|call|>",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        before="<|channel|>final<|message|>",
    ),
}


@cache
def tokenizer_of(name: str) -> Any:
    """Returns a tokenizer with the template and special tokens of a family."""
    family = FAMILIES[name]
    template = family.template if "{" in family.template else published_template(family.template)
    added = [one for one in (*family.ends, *family.special) if not one.startswith("<|im_e")]
    added = [one for one in added if one not in ("<|endoftext|>", "<|im_end|>")]
    bos = {"llama3": "<|begin_of_text|>", "deepseek": "<｜begin▁of▁sentence｜>"}.get(name)
    tokenizer = byte_tokenizer(template, more_special=added, bos_token=bos or "<|endoftext|>")
    if name == "qwen3":  # as in the published tokenizer, not special
        marks = ("think", "tool_call", "tool_response")
        tokenizer.add_tokens([f"<{end}{mark}>" for mark in marks for end in ("", "/")])
    return tokenizer


def end_ids(name: str) -> tuple[int, ...]:
    """Returns the tokens that end a family's turns."""
    return tuple(tokenizer_of(name).convert_tokens_to_ids(end) for end in FAMILIES[name].ends)


@cache
def images_of(name: str) -> ImageTokens | None:
    """Returns how prompts of a family contain images, of which 8 x 8 pixels are one token."""
    if not set(IMAGE) <= set(FAMILIES[name].special):
        return None
    start, token, end = tokenizer_of(name).convert_tokens_to_ids(list(IMAGE))
    vision = VisionShape(
        "qwen3_vl",
        {},
        image_token=token,
        start_token=start,
        end_token=end,
        patch_size=4,
        merge_size=2,
    )
    processor = ImageProcessor(vision, Preprocessing(64, 1024, (0.5,) * 3, (0.5,) * 3))
    return ImageTokens(processor, name, "".join(IMAGE), token)


def chat_template(name: str) -> ChatTemplate:
    """Returns the renderer of a family."""
    return ChatTemplate(tokenizer_of(name), end_ids(name), images=images_of(name))


def sampled(name: str, text: str, end: str | None) -> tuple[int, ...]:
    """Returns the tokens of a turn with a text and an end token."""
    tokenizer = tokenizer_of(name)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (*tokens, *([tokenizer.convert_tokens_to_ids(end)] if end else []))
