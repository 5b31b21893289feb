"""The section `data`: sources of prompts and their columns. No torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.lists import Paths, Weights
from hybridrl.config.section import Section

# Arguments that the renderer itself passes to a chat template.
_RENDERED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class DataConfig(Section):
    """Sources of prompts and the columns that are used."""

    prompts: Paths = None
    """Source or list of sources to train on: a .jsonl or .parquet file, the folder of a data set, or datasets:NAME[@REVISION][:CONFIG]:SPLIT from the hub. It may be left out only if prompts are passed from Python."""
    weights: Weights = None
    """Relative share of the prompts from each source. By default every row of every source is used once per epoch."""
    chat_template: bool = False
    """Whether plain text prompts are rendered by the tokenizer's chat template; rows of messages always are. Off by default, because base models have no template."""
    system_prompt: str | None = None
    """System message that is put before each chat without one. By default the template decides."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking: false}, for training, rollouts, evaluations and environments. By default the template's own defaults apply."""
    split_turns: bool = True
    """Whether a demonstration is split into several samples if the chat template renders its earlier turns differently once others follow; each sample is as the model sees it, and the number is reported. On by default, because many templates drop earlier reasoning; if off, such rows are refused."""
    add_special_tokens: bool = True
    """Whether prompts that no template rendered start with the tokenizer's leading special tokens (BOS), as tokenizer(text) returns them. On by default, because base models were trained so; turn it off to resume a run that is older than this knob."""
    prompt_key: str = "prompt"
    """Column of the prompt. The default 'prompt' is the common name."""
    response_key: str = "response"
    """Column of the demonstration or labelled response (sft, kto). The default 'response' is the common name."""
    chosen_key: str = "chosen"
    """Column of a pair's better response. The default 'chosen' is the common name."""
    rejected_key: str = "rejected"
    """Column of a pair's worse response. The default 'rejected' is the common name."""
    margin_key: str | None = None
    """Column of the margin by which a pair's better response leads (reward_model). By default all pairs have the same margin."""
    label_key: str = "label"
    """Column that is true for a good response and false for a bad one (kto). The default 'label' is the common name."""
    answer_key: str = "answer"
    """Column that the exact_match reward compares with. The default 'answer' is the common name."""
    tools_key: str = "tools"
    """Column of a chat's tools, which are schemas for its template. The default 'tools' is the common name."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longest prompt in tokens; longer prompts are dropped and counted. The default 512 keeps nearly all prompts of the usual math sets."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response, in tokens, of rows that an algorithm learns from, all turns after the prompt together. The default is rollout.max_new_tokens."""
    long_responses: Literal["leave_out", "cut"] = "leave_out"
    """Treatment of rows with longer responses, 'leave_out' or 'cut'; both are counted and reported. The default is 'leave_out', because a response that is cut teaches the model not to end."""
    on_bad_row: Literal["drop", "stop"] = "drop"
    """Treatment of rows that cannot be used (an empty prompt or response, a missing column, messages of an unknown form): 'drop' leaves them out and reports their number; 'stop' ends the run and names them. A source without any usable row always ends the run. The default is 'drop', because published sets have such rows."""
    shuffle: bool = True
    """Whether each epoch has a new order, drawn from the seed. On by default, because files are often sorted."""
    validation: Paths = None
    """Source or list of sources with held-out responses for the validation loss (algorithms that learn from the data's responses). By default these are the rows that eval_share holds out."""
    eval_prompts: Paths = None
    """Source or list of sources for accuracy, as in data.prompts. By default there is no evaluation during training."""
    eval_share: float = Field(0.0, ge=0, lt=1)
    """Share of data.prompts that is held out for accuracy; equal prompts are always on the same side. The default 0 holds out none."""
    eval_limit: int | None = Field(None, ge=1)
    """Number of first prompts to evaluate. The default is all, so that accuracies are comparable."""

    def longest_response(self, max_new_tokens: int) -> int:
        """Returns the longest response, in tokens, of rows that an algorithm learns from.

        Args:
            max_new_tokens: `rollout.max_new_tokens`, for a section that sets no length.
        """
        return self.max_response_tokens or max_new_tokens

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.prompts or ()):
            num = len(self.prompts or ())
            raise ValueError(f"weights: one for each of {num} sources, not {len(self.weights)}")
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt: no value without chat_template=true")
        if found := sorted(self.template_arguments.keys() & _RENDERED):
            raise ValueError(
                f"template_arguments: any argument but {found[0]}, which hybridrl sets"
            )
        if self.eval_share and self.eval_prompts is not None:
            raise ValueError("eval_share: 0 if eval_prompts is set")
        if self.eval_share and self.validation is not None:
            raise ValueError("eval_share: 0 if validation is set")
        return self
