"""The section `data`: where prompts come from and which of their columns are used. No torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.lists import Paths, Weights
from hybridrl.config.section import Section

# Arguments of a chat template that are set for each rendering.
_RENDERED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class DataConfig(Section):
    """Where prompts come from and which of their columns are used."""

    prompts: Paths = None
    """Source or list of sources to train on: a .jsonl or .parquet file, a data set's folder, or datasets:NAME[@REVISION][:CONFIG]:SPLIT of the hub. None: only where prompts are passed from Python."""
    weights: Weights = None
    """Share of the prompts from each source, in any unit. None: all rows of all sources, once an epoch."""
    chat_template: bool = False
    """Make texts too a chat by the tokenizer's template, as rows of messages are always. False: base models have none."""
    system_prompt: str | None = None
    """System message before each chat without one. None: as the template has it."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking: false}, wherever it renders: training, rollouts, evaluations, environments. Empty: the template's own defaults."""
    split_turns: bool = True
    """Make several samples of a demonstration whose earlier turns the chat template renders differently when others follow, each as the model sees it; counted and reported. True: many templates drop earlier reasoning. False: refuse such rows."""
    add_special_tokens: bool = True
    """Begin prompts that no template rendered with the special tokens that the tokenizer puts in front (BOS), as tokenizer(text) does. True: base models were trained so. False: for runs that began before this knob existed."""
    prompt_key: str = "prompt"
    """Column of the prompt text. 'prompt': the common name."""
    response_key: str = "response"
    """Column of the demonstration or labelled response (sft, kto). 'response': the common name."""
    chosen_key: str = "chosen"
    """Column of a pair's better response. 'chosen': the common name."""
    rejected_key: str = "rejected"
    """Column of a pair's worse response. 'rejected': the common name."""
    margin_key: str | None = None
    """Column that says by how much a pair's better response is better (reward_model). None: alike for all."""
    label_key: str = "label"
    """Column that says if a response is good, true or false (kto). 'label': the common name."""
    answer_key: str = "answer"
    """Column the exact_match reward compares with. 'answer': the common name."""
    tools_key: str = "tools"
    """Column of a chat's tools, schemas that its template is given. 'tools': the common name."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are dropped and counted. 512: keeps nearly all of the usual math sets."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response of rows that an algorithm learns from, all turns after the prompt together. None: rollout.max_new_tokens."""
    long_responses: Literal["leave_out", "cut"] = "leave_out"
    """What is done with rows of longer responses; both are counted and told. 'leave_out': a response that is cut teaches not to end."""
    on_bad_row: Literal["drop", "stop"] = "drop"
    """What is done with rows that cannot be used (an empty prompt or response, a missing column, messages of no known form): 'drop' leaves them out, counted and reported; 'stop' names them. A source without any other row stops either way. 'drop': published sets have such rows."""
    shuffle: bool = True
    """New order each epoch, from the seed. True: files are often sorted."""
    validation: Paths = None
    """Source or list of held-out rows with responses, for the loss on them (algorithms that learn from the data's responses). None: what eval_share holds out of such rows."""
    eval_prompts: Paths = None
    """Source or list of sources for accuracy, as in data.prompts. None: no evaluation during training."""
    eval_share: float = Field(0.0, ge=0, lt=1)
    """Share of data.prompts that is held out for accuracy; the same prompt is never on both sides. 0: none."""
    eval_limit: int | None = Field(None, ge=1)
    """Evaluate the first N prompts only. None: all, so that accuracies compare."""

    def longest_response(self, max_new_tokens: int) -> int:
        """Returns the longest response of rows that an algorithm learns from, in tokens.

        Args:
            max_new_tokens: of `rollout`, where the section says none.
        """
        return self.max_response_tokens or max_new_tokens

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.prompts or ()):
            num = len(self.prompts or ())
            raise ValueError(f"weights: one for each of {num} sources, not {len(self.weights)}")
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt: nothing without chat_template=true")
        if found := sorted(self.template_arguments.keys() & _RENDERED):
            raise ValueError(f"template_arguments: {found[0]} is not the user's to set")
        if self.eval_share and self.eval_prompts is not None:
            raise ValueError("eval_share: 0 beside eval_prompts")
        if self.eval_share and self.validation is not None:
            raise ValueError("eval_share: 0 beside validation")
        return self
