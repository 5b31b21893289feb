"""What a user's own script does with hybridrl, told as one JSON object on the last line of stdout.

A plain script on purpose: nothing stands under `if __name__ == "__main__"`, and no Trainer is
closed.

    python api_session.py QUICKSTART_FOLDER EMPTY_FOLDER
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hybridrl import Trainer
from hybridrl.errors import ConfigError, UserError
from hybridrl.hybrid_engine import engine
from hybridrl.hybrid_engine.memory.headroom import Headroom

quickstart, folder = Path(sys.argv[1]), Path(sys.argv[2])
told: dict[str, object] = {}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.policy.model.weights().items()}


def refusal(**changes: object) -> list[str]:
    try:
        run = {"name": "refused", "dir": str(folder)}
        Trainer.from_config(
            {**sections, "run": run, **changes}, prompts=rows, reward=share_of_digits
        )
    except UserError as error:
        return [type(error).__name__, str(error)]
    return []


# A configuration file, with overrides.
overrides = [
    "model.path=null",
    f"model.init={quickstart / 'model'}",
    f"data.prompts={quickstart / 'train.jsonl'}",
    f"data.eval_prompts={quickstart / 'heldout.jsonl'}",
    "data.eval_limit=8",
    "train.tp=1",
    "train.pp=1",
    "steps.prompts_per_step=4",
    "steps.samples_per_prompt=2",
    f"run.dir={folder}",
    "log.console=false",
]
trainer = Trainer.from_config(quickstart / "grpo.yaml", overrides)
told["summary"] = trainer.fit(num_steps=1)
told["step"] = trainer.step

# Objects in place of sections; the model's folder holds no tokenizer.
rows = [{"prompt": f"{a}{b}+11=", "answer": "1", "tag": a} for a in range(3) for b in range(3)]
called: list[list[object]] = []
encoded: list[str] = []


def share_of_digits(prompt: str, response: str, columns: dict[str, object]) -> float:
    called.append([prompt, response, columns["tag"]])
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


class Tokenizer:
    """A tokenizer of the user's own, around another."""

    def __init__(self) -> None:
        self.inner = AutoTokenizer.from_pretrained(str(quickstart / "model"))
        self.eos_token_id = self.inner.eos_token_id

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        encoded.extend(text)
        ids: list[list[int]] = self.inner(text, add_special_tokens=add_special_tokens)["input_ids"]
        return {"input_ids": ids}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens))


(folder / "bare").mkdir()
(folder / "bare" / "config.json").write_text((quickstart / "model" / "config.json").read_text())
sections = {
    "run": {"name": "objects", "dir": str(folder)},
    "model": {"init": str(folder / "bare")},
    "train": {"learning_rate": 1e-3},
    "rollout": {"max_new_tokens": 4},
    "algorithm": {"name": "grpo"},
    "steps": {"prompts_per_step": 4, "samples_per_prompt": 2, "num_steps": 4},
    "checkpoint": {"every": 2, "keep": 9},
    "log": {"console": False},
}
objects = {"reward": share_of_digits, "tokenizer": Tokenizer()}
first = Trainer.from_config(sections, prompts=iter(rows), **objects)
before = weights(first)
told["objects"] = first.fit()
after = weights(first)
told["changed"] = sum(not torch.equal(before[name], after[name]) for name in before)
told["num_weights"] = len(before)
told["called"] = called[:8]
told["num_called"] = len(called)
told["encoded"] = list(encoded)

# The same again from a checkpoint in the middle, in a run folder of its own.
elsewhere = {**sections, "run": {"name": "resumed", "dir": str(folder)}}
second = Trainer.from_config(elsewhere, prompts=rows, **objects)
second.load_checkpoint(folder / "objects" / "checkpoints" / "step_2")
told["loaded_step"] = second.step
second.fit(until=3)
second.fit(num_steps=1)
resumed = weights(second)
told["differing"] = [name for name in after if not torch.equal(after[name], resumed[name])]
second.load_checkpoint(folder / "objects")
told["newest_step"] = second.step

# Mistakes are exceptions, and the next attempt in the same process can be right.
told["layout"] = refusal(train={"tp": 2})
told["samples"] = refusal(steps={"samples_per_prompt": 1})
told["tokenizer"] = refusal(model={"path": str(folder / "bare")})
told["weights"] = refusal(
    model={"path": str(folder / "bare"), "tokenizer": str(quickstart / "model")}
)
assert issubclass(ConfigError, UserError)
last = Trainer.from_config(elsewhere, prompts=rows, **objects)
told["last"] = last.fit(num_steps=0)
last.close()

# A device with room for both phases: once a step was measured, the table has all in both.
engine.Headroom = partial(Headroom, lambda: (90, 100))
roomy = {**sections, "run": {"name": "roomy", "dir": str(folder)}}
trainer = Trainer.from_config(roomy, prompts=rows, **objects)
told["tables"] = [trainer.memory_table()]
trainer.reshard()
trainer.train_step()
told["tables"] += [trainer.memory_table()]
trainer.close()
print(json.dumps(told))
