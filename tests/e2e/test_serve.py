"""`hybridrl serve` over a small model with random weights, through OpenAI's SDK.

The oracle for tokens and log-probabilities is transformers on the same directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_templates import tokenizer_of
from refusals import TESTS, refuse
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(find_spec("openai") is None, reason="needs openai"),
]
NUM_NEW = 12
# Both sides compute in float32, in another order; the logits are small.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF directory with Qwen3's chat template."""
    folder, tokenizer = tmp_path_factory.mktemp("serve") / "hf", tokenizer_of("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest of vLLM on CPU
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Gives what the command prints, and its process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    limits = ("data.max_prompt_tokens=600", f"rollout.max_new_tokens={NUM_NEW}")
    command = [sys.executable, "-m", "hybridrl.cli.main", "serve", str(directory), *limits]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", *arguments],
        cwd=directory.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield json.loads(line), process
    finally:
        process.kill()
        process.wait()


def check_logps(directory: Path, answer: Any) -> None:
    """Compares an answer's log-probabilities with transformers."""
    choice = answer.choices[0]
    prompt, tokens = answer.prompt_token_ids, choice.token_ids
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
    found = torch.tensor([one.logprob for one in choice.logprobs.content])
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("rollout.engine=hf",), marks=pytest.mark.full),
        pytest.param(("rollout.engine=vllm",), marks=[pytest.mark.full, pytest.mark.engine]),
        pytest.param(
            ("rollout.engine=vllm", "rollout.tp=2", "train.tp=2"),
            marks=[pytest.mark.full, pytest.mark.engine],
        ),
    ],
    ids=["hf", "vllm", "vllm-tp2"],
)
def test_a_model_is_served_with_its_own_tokens_and_log_probabilities(
    directory: Path, arguments: tuple[str, ...]
) -> None:
    import openai

    with serving(directory, *arguments) as (found, process):
        assert found["checkpoint"] is None and len(found["notes"]) == 2
        client = openai.OpenAI(base_url=f"{found['url']}/v1", api_key=found["key"])
        messages: list[Any] = []
        held: list[int] = []
        for number in range(3):
            messages.append({"role": "user", "content": f"Question {number}"})
            extra = {"return_token_ids": True}
            answer = client.chat.completions.create(
                model="m", messages=messages, logprobs=True, extra_body=extra
            )
            check_logps(directory, answer)
            choice = answer.choices[0]
            assert len(choice.token_ids) == answer.usage.completion_tokens <= NUM_NEW
            assert answer.prompt_token_ids[: len(held)] == held
            held = answer.prompt_token_ids + choice.token_ids
            messages.append(choice.message.model_dump(exclude_none=True))
        greedy = [
            client.chat.completions.create(model="m", messages=messages[:1], temperature=0)
            for _ in range(2)
        ]
        assert len({one.choices[0].message.content for one in greedy}) == 1
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{found['url']}/v1", api_key="x").models.list()
        with pytest.raises(openai.BadRequestError, match="maximum context length is 612"):
            long = [{"role": "user", "content": "x y " * 500}]
            client.chat.completions.create(model="m", messages=long)
        with urllib.request.urlopen(f"{found['url']}/health", timeout=10) as health:
            assert json.loads(health.read())["sessions"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (130, -signal.SIGINT)


def test_mistakes_are_refused_before_ranks_start(directory: Path) -> None:
    place = directory.parent
    refuse(place, ["serve", "nothing"], "nothing")
    refuse(place, ["serve", "hf", "--checkpoint", "none"], "--checkpoint", "a checkpoint folder")
