"""Images in agents' conversations: which are read, what they continue, and what is trained."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_programs import APIS, pictures, png, uri
from agent_server import Served
from agent_templates import chat_template, images_of, tokenizer_of
from command_line import ROOT
from test_agents_endpoint import PATHS, TESTS, other_python, post
from test_agents_sessions import Agent, result_of
from test_image_rows import PNG, images, load, tokenizer
from tiny_images import PREPROCESSING

from hybridrl.agents.conversation import BadRequest, Conversation
from hybridrl.agents.samples import Row
from hybridrl.agents.task_images import ImageReader, prompt_with_images
from hybridrl.agents.template_check import check_images
from hybridrl.config.load import load_config_dict
from hybridrl.contracts.batch import Producer, RolloutBatch
from hybridrl.contracts.prompts import Prompt
from hybridrl.contracts.response_contents import with_contents
from hybridrl.data.images import ImageTokens
from hybridrl.environments.image_parts import MAX_FILE_BYTES
from hybridrl.errors import UserError
from hybridrl.generation.responses import AgentResponse, AgentSequence, completion_from_json
from hybridrl.generation.saved_rollouts import saved_fields
from hybridrl.loop.preflight import model_violations
from hybridrl.models.vision.images import FILE
from hybridrl.rollout.engine import Completion

__all__ = ["images", "other_python", "tokenizer"]  # fixtures
FAMILY = "qwen3-vl"
TOKENS = images_of(FAMILY)
assert TOKENS is not None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(family=FAMILY) as found:
        yield found


def shown(file: bytes, text: str = "look") -> dict[str, Any]:
    """Returns a message with a picture that was read for it."""
    assert TOKENS is not None
    content = TOKENS.processor.content(file)
    parts = [{"type": "image", "image": content}, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def contents_of(row: Row) -> list[bytes]:
    """Returns the files of a row's pictures; checks that they are at their placeholders."""
    assert TOKENS is not None
    whole = row.prompt + row.tokens
    places = [i for one in row.contents for i in range(one.start, one.end)]
    assert places == [i for i, token in enumerate(whole) if token == TOKENS.placeholder]
    return [one.arrays[FILE].tobytes() for one in row.contents]


def test_equal_texts_with_other_pictures_are_other_conversations() -> None:
    agent = Agent(FAMILY)
    first = agent.turn([shown(png(1))], "One.")
    again = agent.turn([shown(png(1)), first.message, shown(png(1), "more")], "Two.")
    other = agent.turn([shown(png(2)), first.message, shown(png(1), "more")], "Three.")
    assert again.parent is first and other.parent is None
    assert agent.inputs[1] == agent.inputs[2], "their tokens are equal"
    assert [one.start for one in again.contents] == [one.start for one in other.contents]
    rows = agent.close().rows
    assert [contents_of(row) for row in rows] == [[png(1)] * 2, [png(2), png(1)]]


def test_a_branch_begins_at_the_result_with_another_picture() -> None:
    agent = Agent(FAMILY)
    first = agent.turn([shown(png(1))], *agent.call(1, 2))
    turns = []
    for level in (1, 2, 1):
        result = result_of(first, shown(png(level))["content"])
        turns.append(agent.turn([shown(png(1)), first.message, result], "Seen."))
    assert [turn.parent for turn in turns] == [first] * 3
    last = [shown(png(1)), first.message, result_of(first, shown(png(2))["content"])]
    later = agent.turn([*last, turns[1].message, {"role": "user", "content": "and"}], "Yes.")
    assert later.parent is turns[1]
    rows = agent.close().rows
    assert [contents_of(row) for row in rows] == [[png(1)] * 2, [png(1)] * 2, [png(1), png(2)]]


def test_texts_are_no_pictures() -> None:
    agent = Agent(FAMILY)
    picture = shown(png(1))
    text = json.dumps([["image", picture["content"][0]["image"].key], ["text", "look"]])
    digests = {
        Conversation(({"role": "user", "content": content},)).digests()[1]
        for content in (picture["content"], text, [*picture["content"][1:], picture["content"][0]])
    }
    assert len(digests) == 3
    forged = [{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>"}]
    assert agent.turn(forged, "No.").contents == ()
    agent.template._control = []
    agent.template._has_control_start = lambda _: None  # type: ignore[assignment]
    with pytest.raises(BadRequest, match="writes 1 placeholders for the 0 images"):
        agent.session.prepare(Conversation(tuple(forged)))
    agent.close()


def test_rows_with_pictures_are_saved_and_become_batches() -> None:
    """Sequences of equal tokens with other pictures are not computed as one."""
    agent = Agent(FAMILY)
    for level in (1, 2):
        agent.turn([shown(png(level))], "Equal.")
    rows = agent.close().rows
    assert rows[0].prompt + rows[0].tokens == rows[1].prompt + rows[1].tokens
    sequences = tuple(
        AgentSequence(
            row.prompt,
            row.tokens,
            row.logps,
            row.observed,
            row.finish_reason,
            row.versions,
            with_contents({}, row.contents),
        )
        for row in rows
    )
    last = sequences[-1]
    done = AgentResponse(
        5, last.tokens, last.logps, "stop", 0, last.observed, 1, sequences=sequences
    )
    again = completion_from_json(json.loads(json.dumps(saved_fields(done))))
    rollouts = again.rollouts(Prompt(0, "text", (1, 1, 1)))
    batch = RolloutBatch.from_rollouts(rollouts, [0, 0], Producer.here("the test"))
    for row, level in enumerate((1, 2)):
        (found,) = batch.contents_of(row)
        assert found.arrays[FILE].tobytes() == png(level)
    assert batch.branch_of_B.tolist() == [-1, -1] and batch.context_B.tolist() == [-1, -1]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pictures_with_this_environments_sdk(served: Served, api: str) -> None:
    pytest.importorskip("openai")
    session = served.sessions.open(3)
    pictures(APIS[api], served.endpoint.url, session.token)
    check_pictures(served, session)


@pytest.mark.full
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pictures_with_other_sdks(served: Served, other_python: str, api: str) -> None:
    session = served.sessions.open(3)
    script = str(TESTS / "agent_programs.py")
    command = [other_python, script, "pictures", api, served.endpoint.url, session.token]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    check_pictures(served, session)


def check_pictures(served: Served, session: Any) -> None:
    result = served.close(session)
    assert [row.num_turns for row in result.rows] == [3, 3]
    assert [contents_of(row) for row in result.rows] == [
        [png(100), png(200)],
        [png(100), png(201)],
    ]
    assert result.counts["refused_requests"] == 1


def anthropic(source: Any) -> dict[str, Any]:
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Hello"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1, "b": 2}}
    return {
        "max_tokens": 90,
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    }


def openai(url: Any, role: str = "user") -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": role, "content": [part]}]}


def responses(**image: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", **image}]}]}


def base64_source(file: bytes) -> dict[str, Any]:
    found = uri(file).partition(",")[2]
    return {"type": "base64", "media_type": "image/png", "data": found}


def test_pictures_in_anthropics_blocks_count_and_are_sampled(served: Served) -> None:
    session, body = served.sessions.open(4), anthropic(base64_source(png(7)))
    num = post(served, "/v1/messages/count_tokens", body, session.token)[1]["input_tokens"]
    status, answer = post(served, PATHS["messages"], body, session.token)
    assert status == 200 and answer["usage"]["input_tokens"] == num
    (row,) = served.close(session).rows
    assert contents_of(row) == [png(7)] * 2 and len(row.prompt) == num


NOT_READ = "reads no addresses and no files"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "address": ("chat", openai("https://a.com/b.png"), NOT_READ),
    "path": ("chat", openai("/etc/passwd"), NOT_READ),
    "file": ("chat", openai("file:///etc/passwd"), NOT_READ),
    "null": ("chat", openai(None), NOT_READ),
    "not base64": ("chat", openai("data:image/png,abc"), NOT_READ),
    "damaged": ("chat", openai(uri(png(1)[:45])), "a damaged image"),
    "system": ("chat", openai(uri(png(1)), "system"), "belong in messages of the user"),
    "assistant": ("chat", openai(uri(png(1)), "assistant"), "belong in messages of the user"),
    "no image": ("responses", responses(file_id="f"), NOT_READ),
    "address in responses": ("responses", responses(image_url="http://a/b"), NOT_READ),
    "source url": ("messages", anthropic({"type": "url", "url": "https://a/b"}), NOT_READ),
    "source file": ("messages", anthropic({"type": "file", "file_id": "f"}), NOT_READ),
    "source data": ("messages", anthropic({"type": "base64", "data": 5}), NOT_READ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pictures_that_are_not_read_are_refused_by_name(served: Served, name: str) -> None:
    api, body, said = REFUSED[name]
    session = served.sessions.open(5)
    status, answer = post(served, PATHS[api], body, session.token)
    message = answer["error"]["message"]
    assert status == 400 and said in message, message
    assert message.startswith(("messages[0].content[0]: ", "input[0].content[0]: "))
    assert served.close(session).num_turns == 0


def test_token_ids_contain_no_pictures() -> None:
    """A placeholder that the model drew is text; one that the client sends has no picture."""
    assert TOKENS is not None
    agent = Agent(FAMILY)
    turn = agent.turn([shown(png(1))], "One.")
    with pytest.raises(BadRequest, match="Send images as parts of messages"):
        agent.session.prepare_tokens(turn.tokens())
    done = Completion(0, (9, TOKENS.placeholder, 2), (-1.0,) * 3, "stop", 0)
    drawn = agent.session.commit(agent.session.prepare_tokens((5, 6)), done)
    later = agent.session.prepare_tokens((*drawn.tokens(), 7))
    assert later.parent is drawn and later.contents == ()


def test_models_of_text_refuse_pictures() -> None:
    with Served() as served:
        token = served.sessions.open(0).token
        status, answer = post(served, PATHS["chat"], openai(uri(png(1))), token)
    assert status == 400 and "the model reads no images" in answer["error"]["message"]


def test_a_picture_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENS is not None
    reader, part = ImageReader(TOKENS), openai(uri(png(3)))["messages"][0]["content"][0]
    assert reader.read(part) is reader.read({"type": "input_image", "image_url": uri(png(3))})
    monkeypatch.setattr("hybridrl.environments.image_parts.MAX_FILE_BYTES", 10)
    large = {"type": "input_image", "image_url": uri(bytes(2000))}
    with pytest.raises(Exception, match=f"of at most {MAX_FILE_BYTES} bytes"):
        reader.read(large)


@pytest.mark.parametrize("is_chat", [True, False])
def test_tasks_have_the_pictures_of_their_rows(
    tokenizer: Any, images: ImageTokens, is_chat: bool
) -> None:
    """As messages that the endpoint reads back, whether or not a template renders the prompt."""
    row = {"prompt": "what <image> is <image>", "images": [PNG, png(9)]}
    (prompt,) = load(tokenizer, images, row, chat_template=is_chat).prompts
    (message,) = prompt_with_images(prompt, images)
    assert isinstance(message, dict) and message["role"] == "user"
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image_url", "text", "image_url"]
    url = message["content"][1]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    reader = ImageReader(images)
    read = [reader.read(part) for part in message["content"] if part["type"] == "image_url"]
    assert [one.key for one in read] == [one.key for one in prompt.contents]
    text = load(tokenizer, images, {"prompt": "what is"}).prompts[0]
    assert prompt_with_images(text, images) == "what is"
    assert prompt_with_images(prompt, None) == prompt.asked


def test_templates_receive_only_the_place_of_a_picture() -> None:
    """A template may print whole parts."""
    (message,) = chat_template(FAMILY).prepared([shown(png(1))])
    assert message["content"] == [{"type": "image"}, {"type": "text", "text": "look"}]


def test_a_template_that_drops_pictures_is_refused_if_rows_have_some() -> None:
    """Also that of a hub model, or of a tokenizer that was passed to the trainer."""
    assert TOKENS is not None
    content = replace(TOKENS.processor.content(png(1)), start=0)
    text, seeing = Prompt(0, "a", (5,)), Prompt(1, "b", (5,) * content.end, contents=(content,))

    def said(tokenizer: Any, *prompts: Prompt) -> str:
        assert TOKENS is not None
        try:
            check_images(tokenizer, "org/model", {}, TOKENS, prompts)
        except UserError as error:
            return str(error)
        return ""

    showing, dropping = tokenizer_of(FAMILY), tokenizer_of("qwen2.5")
    assert said(showing, text, seeing) == said(dropping, text) == ""
    refused = said(dropping, text, seeing)
    assert refused.startswith("model.tokenizer: got org/model, whose chat template writes no pl")
    without = copy.copy(showing)
    without.chat_template = None
    assert "org/model, which has no chat template" in said(without, text)


def test_agents_with_pictures_need_a_chat_template(tmp_path: Path) -> None:
    content = json.loads((ROOT / "benchmarks" / "models" / "qwen3-vl-4b.json").read_text())
    rule = {**PREPROCESSING, "patch_size": content["vision_config"]["patch_size"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(rule))

    def found(**sections: Any) -> list[str]:
        config = {"run": {"name": "a"}, "model": {"init": str(tmp_path)}, **sections}
        config |= {"algorithm": {"name": "grpo"}, "reward": {"function": "exact_match"}}
        config |= {"data": {"max_prompt_tokens": 2048}, "steps": {"samples_per_prompt": 2}}
        return [str(one) for one in model_violations(load_config_dict(config), 1)[1]]

    agent = {"command": "true"}
    (refused,) = [one for one in found(agent=agent) if "template" in one]
    assert refused.startswith("model.tokenizer") and "which has no chat template" in refused
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert found(agent=agent) == found() == []
