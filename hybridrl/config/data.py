"""The section `data`: sources of prompts and their columns. No torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.lists import Paths, Weights
from hybridrl.config.section import Section

# Arguments that hybridrl itself passes to chat templates.
_RENDERED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class DataConfig(Section):
    """Sources of the rows and names of their columns."""

    prompts: Paths = None
    """Source or list of sources to train on: a .jsonl or .parquet file, the folder of a data set, or datasets:NAME[@REVISION][:CONFIG]:SPLIT from the hub. Required unless prompts are passed from Python."""
    weights: Weights = None
    """Relative share of prompts drawn from each source. By default every row of every source is used once per epoch."""
    chat_template: bool = False
    """Whether the tokenizer's chat template is applied to plain-text prompts; rows of messages are always rendered with it. Off by default, because base models have no template."""
    system_prompt: str | None = None
    """System message that is inserted into each chat without a system message. By default none is inserted; the chat template may add its own."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments passed to the chat template, such as {enable_thinking: false}, in training, rollouts, evaluations and environments. By default the template's own defaults apply."""
    split_turns: bool = True
    """Whether a demonstration is split into several samples if the chat template renders a turn differently once later turns follow. Each sample then has the text that the model would see at that turn, and the number of splits is reported. On by default, because many templates drop earlier reasoning; if off, such rows are refused."""
    add_special_tokens: bool = True
    """Whether prompts that no template rendered start with the tokenizer's leading special tokens (BOS), as tokenizer(text) returns them. On by default, because base models were trained this way; turn it off to resume a run that was started before this knob existed."""
    prompt_key: str = "prompt"
    """Column with the prompt. The default, 'prompt', is the most common name."""
    response_key: str = "response"
    """Column with the demonstration or labelled response (sft, kto). The default, 'response', is the most common name."""
    chosen_key: str = "chosen"
    """Column with the better response of a pair. The default, 'chosen', is the most common name."""
    rejected_key: str = "rejected"
    """Column with the worse response of a pair. The default, 'rejected', is the most common name."""
    margin_key: str | None = None
    """Column with the margin between the scores of a pair's better and worse response (reward_model). By default all pairs have the same margin."""
    label_key: str = "label"
    """Column that is true for a good response and false for a bad one (kto). The default, 'label', is the most common name."""
    answer_key: str = "answer"
    """Column with the correct answer, with which rewards such as exact_match compare the response. The default, 'answer', is the most common name."""
    tools_key: str = "tools"
    """Column with the tool schemas that are passed to the chat template. The default, 'tools', is the most common name."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Maximum length of a prompt in tokens; longer prompts are dropped and counted. The default, 512, keeps nearly all prompts of common math data sets."""
    max_image_pixels: int = Field(1 << 20, ge=1)
    """Maximum number of pixels of an image; larger images are scaled down, at most as far as the model's own processor allows. The default, 1048576 (1024 x 1024), is 1,024 tokens in Qwen3-VL. An image's tokens count towards max_prompt_tokens."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Maximum length, in tokens, of a response in the training data, including all turns after the prompt. The default is rollout.max_new_tokens."""
    long_responses: Literal["leave_out", "cut"] = "leave_out"
    """Treatment of rows whose response is longer than max_response_tokens: 'leave_out' drops the row, 'cut' truncates the response; the number of such rows is reported. The default is 'leave_out', because truncated responses teach the model not to stop."""
    on_bad_row: Literal["drop", "stop"] = "drop"
    """Treatment of rows that cannot be used (an empty prompt or response, a missing column, messages of an unknown form, a damaged image): 'drop' skips them and reports their number; 'stop' ends the run and names them. A source without any usable row always ends the run. The default is 'drop', because published data sets contain such rows."""
    shuffle: bool = True
    """Whether the rows are shuffled in each epoch, based on the seed. On by default, because files are often sorted."""
    validation: Paths = None
    """Source or list of sources with held-out responses for the validation loss, for algorithms that learn from responses in the data. By default the rows held out by eval_share are used."""
    eval_prompts: Paths = None
    """Source or list of sources with held-out prompts on which accuracy is measured; same forms as data.prompts. By default there are none."""
    eval_share: float = Field(0.0, ge=0, lt=1)
    """Fraction of the prompts in data.prompts that is held out to measure accuracy; rows with equal prompts are never separated. The default, 0, holds out no prompts."""
    eval_limit: int | None = Field(None, ge=1)
    """If set, only this many prompts are evaluated, starting from the first. By default all are evaluated, so that accuracies are comparable."""

    def longest_response(self, max_new_tokens: int) -> int:
        """Returns the maximum number of tokens of a response in the training data.

        Sections that set no length have that of `rollout.max_new_tokens`.
        """
        return self.max_response_tokens or max_new_tokens

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.prompts or ()):
            num = len(self.prompts or ())
            raise ValueError(
                f"weights: {num} numbers, one per source, instead of {len(self.weights)}"
            )
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt: null unless chat_template is true")
        if found := sorted(self.template_arguments.keys() & _RENDERED):
            raise ValueError(
                f"template_arguments: no {found[0]}, because hybridrl sets this argument"
            )
        if self.eval_share and self.eval_prompts is not None:
            raise ValueError("eval_share: 0 if eval_prompts is set")
        if self.eval_share and self.validation is not None:
            raise ValueError("eval_share: 0 if validation is set")
        return self
