"""Tokens of texts and ends of responses, with tokenizers made as Llama 2's, Llama 3's and Qwen's
are: what a prompt begins with, that a response gains no space, and what ends it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, SPECIAL, byte_tokenizer

from hybridrl.config.data import DataConfig
from hybridrl.config.identity import check_run_folder, write_config
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.contracts.prompts import Prompt
from hybridrl.data.end_tokens import end_tokens, turn_end
from hybridrl.data.prompt_store import content_key
from hybridrl.data.prompts import PromptSource, Reading, load_prompts
from hybridrl.data.text_tokens import TextTokens
from hybridrl.environments.chat import ObservationEncoder, Observed
from hybridrl.errors import DataError, ModelError

SPACED = ["prepend", "first", "always"]


def llama2(kind: str, ends: bool = False) -> Any:
    """Returns a tokenizer as Llama 2's: "▁" in front of a text, bytes for unknown letters, BOS.

    `kind` is "prepend", as in its first files, or a scheme of Metaspace; `ends` appends EOS.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special, show_progress=False)
    made.train_from_iterator(["2+3=5 12+7=19 the answer is 5 and 19 one two three"] * 20, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # tokens of bytes are no special ones
    made = Tokenizer.from_str(json.dumps(content))
    whole = "<s> $A </s>" if ends else "<s> $A"
    named = [("<s>", 1), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing(single=whole, special_tokens=named)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama3() -> Any:
    """Returns a tokenizer of bytes that puts BOS in front."""
    from tokenizers import processors

    made = byte_tokenizer()
    begin = [("<|endoftext|>", 0)]
    single = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=begin)
    made.backend_tokenizer.post_processor = single
    made.bos_token = "<|endoftext|>"
    return made


def gpt2_spaced() -> Any:
    """Returns a tokenizer of bytes that begins texts with a space, as RoBERTa's."""
    from tokenizers import pre_tokenizers

    made = byte_tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def loaded(tokenizer: Any, row: dict[str, Any], **knobs: Any) -> Prompt:
    """Returns a row as a run reads it: with the response to learn from, if it has one."""
    most = 400 if "response" in row else None
    found = load_prompts(DataConfig(**knobs), tokenizer, [row], max_response_tokens=most)
    return found.prompts[0]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", SPACED)
def test_texts_begin_as_the_tokenizer_begins_them(kind: str, ends: bool) -> None:
    tokenizer = llama2(kind, ends)
    whole = tuple(tokenizer("2+3=")["input_ids"])
    assert whole[0] == 1 and (whole[-1] == 2) == ends
    expected = whole[:-1] if ends else whole  # an end token must not follow a prompt
    assert TextTokens(tokenizer).front == (1,)
    for row in ({"prompt": "2+3="}, {"prompt": "2+3=", "response": "5"}):
        assert loaded(tokenizer, row).tokens == expected
        assert loaded(tokenizer, row, add_special_tokens=False).tokens == expected[1:]
        once = loaded(tokenizer, {**row, "prompt": "<s>2+3="}).tokens
        assert once.count(1) == 1, "a text that has BOS gets no second"


def test_texts_begin_with_nothing_where_the_tokenizer_puts_nothing() -> None:
    tokenizer = byte_tokenizer()
    assert TextTokens(tokenizer).front == ()
    assert loaded(tokenizer, {"prompt": "rain"}).tokens == tuple(tokenizer("rain")["input_ids"])
    assert TextTokens(llama3()).front == (0,)


def test_rendered_chats_begin_as_the_template_has_it() -> None:
    tokenizer = llama3()
    chat = [{"role": "user", "content": "rain"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert loaded(tokenizer, {"prompt": chat}).tokens == expected
    assert loaded(tokenizer, {"prompt": "rain"}, chat_template=True).tokens == expected
    assert loaded(tokenizer, {"prompt": chat, "response": "city"}).tokens == expected
    assert loaded(tokenizer, {"prompt": "rain", "messages": "mine"}).tokens[0] == 0


def test_a_text_of_no_tokens_is_refused_also_behind_special_ones() -> None:
    from tokenizers import normalizers

    tokenizer = llama3()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("rain", "")
    with pytest.raises(DataError, match="which has no tokens"):
        loaded(tokenizer, {"prompt": "rain"})


TEXTS = ["5", " 5", "", "  5", "\n5", "19 and 5", "ж", "5</s>", "</s> 5", "5 </s>19", " "]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", SPACED)
def test_a_response_gains_no_space(kind: str, text: str) -> None:
    tokenizer = llama2(kind)
    (tokens,) = TextTokens(tokenizer).continued([text])
    prompt = tokenizer("2+3=")["input_ids"]

    # What these tokenizers say after "</s>" has a space more, in a whole text too.
    whole = tokenizer("2+3=" + text)["input_ids"]
    assert tokenizer.decode([*prompt, *tokens]) == tokenizer.decode(whole)
    if "</s>" not in text:
        said = tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)
        assert said == "2+3=" + text


@pytest.mark.parametrize("kind", SPACED)
def test_rows_are_learned_as_they_are_written(kind: str) -> None:
    tokenizer = llama2(kind)
    row = {"prompt": "2+3=", "response": "5", "chosen": "5", "rejected": "19"}
    found = loaded(tokenizer, row)
    assert found.response_tokens is not None
    assert tokenizer.convert_ids_to_tokens(found.response_tokens) == ["5", "</s>"]
    pairs = load_prompts(
        DataConfig(), tokenizer, [row], max_response_tokens=40, feedback="pairs"
    ).prompts[0]
    for side, text in ((pairs.response_tokens, "5"), (pairs.rejected_tokens, "19")):
        assert side is not None
        said = tokenizer.decode([*pairs.tokens, *side], skip_special_tokens=True)
        assert said == "2+3=" + text
    observed = ObservationEncoder(tokenizer, len(tokenizer), (2,))("19")
    assert isinstance(observed, Observed)
    said = tokenizer.decode([*pairs.tokens, *observed.tokens], skip_special_tokens=True)
    assert said == "2+3=19"


@pytest.mark.parametrize("kind", SPACED)
def test_a_turn_apart_from_its_prompt_gains_no_space(kind: str) -> None:
    tokenizer = llama2(kind)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    whole = tokenizer.convert_ids_to_tokens(tokenizer("two three")["input_ids"])
    assert "hre" in "".join(whole[-1:]), "a token that reaches across the beginning of the turn"
    found = loaded(
        tokenizer, {"prompt": [{"role": "user", "content": "two th"}], "response": "ree"}
    )
    assert found.response_tokens is not None
    said = tokenizer.decode([*found.tokens, *found.response_tokens], skip_special_tokens=True)
    assert said == "two three"


def test_other_tokenizers_give_the_tokens_that_they_gave() -> None:
    for tokenizer in (byte_tokenizer(), llama3()):
        encode = TextTokens(tokenizer).continued
        texts = ["rain", " rain", "\n\nis", "<|im_end|>the", "in <|im_end|>\n"]
        assert encode(texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]
    spaced = gpt2_spaced()
    expected = byte_tokenizer()(["rain", " in"], add_special_tokens=False)["input_ids"]
    assert spaced(["rain"], add_special_tokens=False)["input_ids"] != expected[:1]
    assert TextTokens(spaced).continued(["rain", " in"]) == expected


def test_tokenized_prompts_are_kept_by_what_they_begin_and_end_with(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "rain", "response": "city"}\n')
    reading = Reading(DataConfig(prompts=(str(file),)))
    keys = {content_key(reading, tokenizer) for tokenizer in (byte_tokenizer(), llama3())}
    other = replace(reading, config=DataConfig(prompts=(str(file),), add_special_tokens=False))
    keys |= {content_key(other, llama3()), content_key(reading, llama3(), (2,))}
    assert len(keys) == 4 and None not in keys


def test_a_run_that_began_without_bos_goes_on_without_it(tmp_path: Path) -> None:
    rows = [{"prompt": "rain"}, {"prompt": "city"}]

    def config(*overrides: str) -> Config:
        content: dict[str, Any] = {"run": {"name": "a", "dir": str(tmp_path)}}
        content |= {"model": {"path": "m"}, "algorithm": {"name": "grpo"}}
        return load_config_dict(content, overrides)

    def source(config: Config) -> PromptSource:
        found = load_prompts(config.data, llama3(), rows)
        return PromptSource(found.prompts, seed=0, shuffle=True)

    old, knob = config("data.add_special_tokens=false"), "  add_special_tokens: false\n"
    (tmp_path / "a").mkdir()
    write_config(old)
    file = tmp_path / "a/config.yaml"
    assert knob in file.read_text()
    file.write_text(file.read_text().replace(knob, ""))  # of a version that had no such knob
    state = source(old).state()
    for config_now in (config(), old):
        check_run_folder(config_now)
    with pytest.raises(DataError, match=r"set data.add_special_tokens=false"):
        source(config()).load_state(state)
    source(old).load_state(state)


PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
GPT_OSS = (  # another token ends a turn when another follows
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|im_end|>{% else %}<|endoftext|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWICE = (  # a turn of the assistant ends with two end tokens
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if m.role == 'assistant' %}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
REFUSES = "{{ raise_exception('messages begin with system') }}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((CHATML, 2), (PHI, 2), (LLAMA2, 0), (GPT_OSS, 2), (MARKS_TEXT, 2)),
        *((IN_WORDS, None), (REFUSES, None), (None, None)),
    ],
)
def test_the_template_says_what_ends_a_turn(template: str | None, end: int | None) -> None:
    assert turn_end(base_tokenizer(template)) == end


def base_tokenizer(template: str | None) -> Any:
    """Returns the tokenizer of a base model, whose end token is not that of a turn."""
    made = byte_tokenizer(template)
    made.eos_token = "<|endoftext|>"
    return made


@pytest.mark.parametrize(
    ("declared", "ends"),
    [(None, (0, 2, 7)), (9, (0, 2, 7, 9)), ([9, 11, 7], (0, 2, 7, 9, 11)), ({}, (0, 2, 7))],
)
def test_every_declared_end_token_ends_a_response(
    tmp_path: Path, declared: Any, ends: tuple[int, ...]
) -> None:
    if declared is not None:
        content = {"top_p": 0.5} if declared == {} else {"eos_token_id": declared}
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    model, hf_config = ModelConfig(path=str(tmp_path)), {"eos_token_id": 7, "vocab_size": 12}
    assert end_tokens(model, hf_config, base_tokenizer(CHATML)) == ends
    assert end_tokens(model, hf_config, base_tokenizer(None)) == tuple(
        one for one in ends if one != 2
    )


@pytest.mark.parametrize("declared", ["a", ["a"], -1, [True], 12, 0.5])
def test_end_tokens_that_are_none_are_refused(tmp_path: Path, declared: Any) -> None:
    content = json.dumps({"eos_token_id": declared})
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(
        ModelError, match=r"generation_config.json: eos_token_id: got .*below vocab_size = 12"
    ):
        end_tokens(ModelConfig(path=str(tmp_path)), {"vocab_size": 12}, base_tokenizer(None))


@pytest.mark.parametrize("template", [CHATML, PHI, MARKS_TEXT, GPT_OSS, TWICE])
def test_chats_teach_to_end_where_rollouts_end(template: str) -> None:
    tokenizer = base_tokenizer(template)
    row = {"prompt": [{"role": "user", "content": "rain"}], "response": "the city"}
    found = loaded(tokenizer, row)
    assert found.response_tokens is not None
    assert tokenizer.decode(found.response_tokens) == "the city<|im_end|>"
    messages = [{"role": role, "content": "rain"} for role in ("user", "assistant") * 2]
    if template in (CHATML, MARKS_TEXT, TWICE):
        several = loaded(tokenizer, {"prompt": messages[:1], "response": messages[1:]})
        assert several.response_tokens is not None
        learned = [*several.response_tokens]
        (begin, end) = several.response_gaps
        del learned[begin:end]
        assert tokenizer.decode(learned) == "rain<|im_end|>" * 2


def test_a_response_that_ends_gets_no_second_end() -> None:
    tokenizer = base_tokenizer(CHATML)
    for text, ends in (("city", (0,)), ("city<|im_end|>", (2,)), ("city<|endoftext|>", (0,))):
        found = loaded(tokenizer, {"prompt": "rain", "response": text}).response_tokens
        city = tokenizer("city")["input_ids"]
        assert found == (*city, *ends)
    found = load_prompts(
        DataConfig(),
        tokenizer,
        [{"prompt": "rain", "response": "city<|im_start|>"}],
        max_response_tokens=40,
        end_tokens=(0, 1),  # one that generation_config.json names
    ).prompts[0]
    assert found.response_tokens is not None and found.response_tokens[-2:][1] == SPECIAL.index(
        "<|im_start|>"
    )


def test_an_observation_repeats_no_end_token_that_was_sampled() -> None:
    # A space stands before the end token, as in Llama 2's template.
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} <|im_end|>"
        "{% else %}[{{ m.role }}] {{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = base_tokenizer(template)
    for ends in ((0, 2), (2,)):
        encode = ObservationEncoder(tokenizer, len(tokenizer), ends)
        found = encode([{"role": "tool", "content": "5"}])
        assert isinstance(found, Observed) and tokenizer.decode(found.tokens) == "[tool] 5"
