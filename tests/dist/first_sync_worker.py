"""One rank of the first-sync test: faults planted between trainer and engine, found at the start.

first_sync_worker.py ENGINE MODEL FOLDER
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.transports.packed import PackedTransport
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.loop import rollout_setup
from hybridrl.loop.engine_phases import EngineDiffersError
from hybridrl.loop.trainer import Trainer
from hybridrl.models.weights import RankLayout, fused_layout
from hybridrl.rollout.common import packaged_engine

Tensors = Mapping[str, torch.Tensor]


def swap_halves(name: str) -> Callable[[Tensors], None]:
    def plant(tensors: Tensors) -> None:
        first, second = tensors[name].chunk(2)
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    return plant


def keys_before_queries(tensors: Tensors) -> None:
    fused = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    fused.copy_(fused.roll(32, dims=0))


def stale_layer(tensors: Tensors) -> None:
    """A layer as it would be after an update that was not sent: nearly the same weights."""
    for name, tensor in tensors.items():
        if name.startswith("model.layers.2."):
            tensor.mul_(1.0 + 1e-4)


def missing_bias(tensors: Tensors) -> None:
    tensors["model.layers.3.self_attn.qkv_proj.bias"].zero_()


def forget_biases(*arguments: Any) -> RankLayout:
    layout = fused_layout(*arguments)
    return RankLayout(
        tuple(region for region in layout.regions if "bias" not in region.local),
        {name: shape for name, shape in layout.shapes.items() if "bias" not in name},
        layout.padding,
    )


# What goes wrong behind the transport's back, and the parameter that must be named.
SENT_WRONG = {
    "model.layers.0.mlp.gate_up_proj.weight": swap_halves("model.layers.0.mlp.gate_up_proj.weight"),
    "model.layers.1.self_attn.qkv_proj.weight": keys_before_queries,
    "model.layers.2.": stale_layer,
    "model.layers.3.self_attn.qkv_proj.bias": missing_bias,
}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def refused(trainer: Trainer, kind: type[Exception]) -> str:
    """Starts training, which must fail in this way before the first step; returns the message."""
    try:
        trainer.fit()
    except kind as error:
        assert trainer.step == 0
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def make_trainer(engine: str, model: str, folder: Path, name: str) -> Trainer:
    config = {
        "run": {"name": name, "dir": str(folder)},
        "model": {"path": model, "tokenizer": "examples/quickstart/model"},
        "train": {"tp": 2, "micro_batch_tokens": 256},
        # Not cut as the trainer's: the engine would share its memory, and no copy could go wrong.
        "rollout": {"engine": engine, "tp": 1, "max_new_tokens": 6, "max_batch": 8},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "examples/quickstart/train.jsonl", "max_prompt_tokens": 6},
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 2, "num_steps": 1},
        "log": {"console": False},
    }
    return Trainer.from_config(config)


def main() -> None:
    engine, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    run_transport, build_engine = PackedTransport.run, rollout_setup.build_engine
    trainer = make_trainer(engine, model, folder, "sent-wrong")
    for parameter, plant in SENT_WRONG.items():

        def run_and_plant(self: PackedTransport, plant: Any = plant) -> Any:
            traffic = run_transport(self)
            if trainer.world.rank == 1:
                plant(trainer.engine.tensors())
            return traffic

        with replaced(PackedTransport, "run", run_and_plant):
            message = refused(trainer, VerifyError)
        assert message.startswith(parameter) and "on rank 1" in message, message
    trainer.fit()
    assert trainer.step == 1
    trainer.engine.close()

    def with_other_positions(config: Any, model: Any, *arguments: Any) -> Any:
        positions = {"rope_theta": 77.0, "rope_type": "default"}
        other = copy.copy(model)
        other.source = replace(
            model.source, hf_config={**model.source.hf_config, "rope_parameters": positions}
        )
        return build_engine(config, other, *arguments)

    with replaced(rollout_setup, "build_engine", with_other_positions):
        trainer = make_trainer(engine, model, folder, "read-otherwise")
    message = refused(trainer, EngineDiffersError)
    assert "replica 0" in message and "position" in message, message
    trainer.engine.close()

    with replaced(packaged_engine, "fused_layout", forget_biases):
        try:
            make_trainer(engine, model, folder, "table-wrong")
        except ModelError as error:
            assert "model.layers.0.self_attn.qkv_proj.bias" in str(error), error
        else:
            raise AssertionError("a table without biases was not refused")


if __name__ == "__main__":
    main()
