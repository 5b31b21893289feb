"""One rank of the test of unfinished rollouts: unfinished_worker.py save|load ENGINE FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from command_line import FRESH, NO_EVALUATION, QUICKSTART

from hybridrl import Trainer
from hybridrl.parallel.exchange import collect

OVERRIDES = (
    *FRESH,
    "steps.prompts_per_step=4",
    "steps.samples_per_prompt=3",
    *NO_EVALUATION,
    "reward.function=scripted_reward:digits",
    "reward.isolated=false",
    "reward.extract=null",
    "log.tensorboard=false",
)


def main() -> None:
    mode, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    overrides = [*OVERRIDES, f"rollout.engine={kind}", f"run.dir={folder}"]
    trainer = Trainer.from_config(QUICKSTART / "grpo.yaml", overrides)
    engine = trainer.sampler
    if mode == "save":
        trainer.hybrid_engine.to_rollout(0)
        prompts = trainer.prompts.take(4)
        whole = collect(engine.score(engine.generate(prompts, step=0)), trainer.world)
        if whole is not None:
            logp_T = whole.behaviour_logp_T
            torch.save({"tokens": whole.tokens_T, "logp": logp_T}, folder / "whole.pt")
        engine.submit(prompts, 3, 0)
        for _ in range(4):
            engine.advance()
        trainer.save_checkpoint()
        # The run that was saved goes on as well.
        while engine.engine.has_unfinished:
            engine.advance()
        again = collect(engine.score(engine.collect()), trainer.world)
        if whole is not None and again is not None:
            assert torch.equal(again.tokens_T, whole.tokens_T)
    else:
        saved = next((folder / "quickstart-grpo" / "checkpoints").iterdir())
        rollouts = json.loads((saved / "state.json").read_text())["rollouts"]
        assert rollouts["step"] == 0
        assert len(rollouts["requests"]) + len(rollouts["completions"]) == 12
        begun = [len(request["tokens"]) for request in rollouts["requests"]]
        assert begun and min(begun) >= 1
        # Numbers that no model gives show that what was begun is kept, not made again.
        for request in rollouts["requests"]:
            request["logps"] = [-7.0] * len(request["tokens"])
        trainer.load_checkpoint(saved)
        engine.load_state(rollouts)
        trainer.prompts.load_state({**trainer.prompts.state(), "index": 0})
        prompts = trainer.prompts.take(4)
        found = collect(engine.score(engine.generate(prompts, step=0)), trainer.world)
        if found is not None:
            saved_whole = torch.load(folder / "whole.pt")
            assert torch.equal(found.tokens_T, saved_whole["tokens"])
            kept = found.behaviour_logp_T == -7.0
            assert int(kept.sum()) == sum(begun)
            gap = (found.behaviour_logp_T - saved_whole["logp"])[~kept].abs().max()
            assert float(gap) < 1e-5
    trainer.close()


if __name__ == "__main__":
    main()
