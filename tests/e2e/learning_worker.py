"""One rank of the learning test: the quickstart's part 2, each sync compared with transformers.

learning_worker.py FOLDER NUM_STEPS EVERY KEY=VALUE ...

After the first FIRST syncs only each EVERYth is compared.

Rank 0 leaves in FOLDER: `answers.pt`, the greedy responses to all held-out prompts before training;
`syncs.json`, what each comparison found.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from command_line import QUICKSTART
from transformers import AutoModelForCausalLM

from hybridrl import Trainer
from hybridrl.hybrid_engine.export import export_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.exchange import collect
from hybridrl.rollout.engine import Completion, Request, generate

# float32 sums in another order, over four layers.
LOGP_TOLERANCE = 1e-4
FIRST = 4
# Of a held-out prompt's 6 tokens; the shorter ones make texts that training never has.
PROMPT_LENGTHS = (6, 6, 6, 6, 6, 4, 2, 1)


@dataclass(frozen=True)
class Sync:
    """The largest difference in log-probabilities between an engine and transformers, as `gap`.

    `change` is the same with the weights of the sync before, as if this sync had moved nothing.
    """

    version: int
    gap: float
    change: float | None


class ComparedTrainer(Trainer):
    """A trainer that compares its engine with the exported HF checkpoint after every sync."""

    syncs: list[Sync]
    folder: Path
    every: int
    previous: torch.nn.Module | None = None

    def reshard(self, verifies: bool = False) -> dict[str, float]:
        metrics = super().reshard(verifies)
        if self.step < FIRST or self.step % self.every == 0:
            self.compare()
        return metrics

    def check_engine(self) -> None:
        super().check_engine()
        self.compare()

    def compare(self) -> None:
        """Asks every rank's engine and transformers the same; all ranks fail where one does."""
        world, model = self.world, self.policy.model
        requests = self.requests()
        with world.all_agree("greedy generation"):
            done = generate(self.engine, requests)
        everyone = world.gather_objects(done)
        directory = self.folder / f"hf_{len(self.syncs)}"
        shapes = hf_shapes(model.source.family, model.source.shape)
        config = model.source.hf_config
        export_hf(directory, model.whole_weights(), shapes, torch.float32, config, peers=world)
        with world.all_agree("the comparison with transformers"):
            sync = Sync(self.hybrid_engine.version, 0.0, None)
            if world.rank == 0:
                sync = self.judge(directory, requests, everyone)
            self.syncs.append(sync)

    def requests(self) -> list[Request]:
        greedy = replace(self.sampler.sampling, temperature=0.0)
        prompts = [
            prompt.tokens[:length]
            for prompt, length in zip(self.eval_prompts[::16], PROMPT_LENGTHS, strict=False)
        ]
        return [Request(number, prompt, 0, greedy) for number, prompt in enumerate(prompts)]

    def judge(
        self, directory: Path, requests: Sequence[Request], everyone: Sequence[list[Completion]]
    ) -> Sync:
        version = self.hybrid_engine.version
        oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for rank, done in enumerate(everyone):
            assert {completion.version for completion in done} == {version}, rank
            replica = self.sampler.layout.assignment[rank][0]
            first = [place[0] for place in self.sampler.layout.assignment].index(replica)
            assert done == everyone[first], f"ranks {first} and {rank} are one replica"
        asked = [request for _ in everyone for request in requests]
        answers = [completion for done in everyone for completion in done]
        gap = largest_gap(oracle, asked, answers, are_greedy=True)
        assert gap < LOGP_TOLERANCE, f"version {version}: {gap}"
        change = None
        if self.syncs and self.syncs[-1].version != version:
            assert self.previous is not None
            change = largest_gap(self.previous, asked, answers, are_greedy=False)
            assert change > 10 * LOGP_TOLERANCE, "a sync that moved nothing would not be seen"
        shutil.rmtree(directory)
        self.previous = oracle
        return Sync(version, gap, change)


def largest_gap(
    oracle: torch.nn.Module,
    requests: Sequence[Request],
    done: Sequence[Completion],
    are_greedy: bool,
) -> float:
    """Compares log-probabilities with one forward of transformers, and checks greedy tokens."""
    texts = [request.prompt + answer.tokens for request, answer in zip(requests, done, strict=True)]
    padded_BL = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in texts], batch_first=True)
    with torch.no_grad():
        logp_BLV = oracle(padded_BL).logits.log_softmax(-1)
    worst = 0.0
    for request, answer, logp_LV in zip(requests, done, logp_BLV, strict=True):
        start, tokens = len(request.prompt) - 1, list(answer.tokens)
        rows_LV = logp_LV[start : start + len(tokens)]
        if are_greedy:
            assert rows_LV.argmax(-1).tolist() == tokens, request
        gap_L = rows_LV[range(len(tokens)), tokens] - torch.tensor(answer.logps)
        worst = max(worst, float(gap_L.abs().max()))
    return worst


def main() -> None:
    folder, num_steps, every = Path(sys.argv[1]), *map(int, sys.argv[2:4])
    overrides = sys.argv[4:]
    trainer = ComparedTrainer.from_config(
        QUICKSTART / "grpo.yaml", [f"run.dir={folder}", *overrides]
    )
    trainer.syncs, trainer.folder, trainer.every = [], folder, every
    trainer.check_engine()
    greedy = replace(trainer.sampler.sampling, temperature=0.0)
    answers = trainer.sampler.generate(
        trainer.eval_prompts, samples_per_prompt=1, step=0, sampling=greedy
    )
    scored = collect(trainer.sampler.score(answers), trainer.world)
    if scored is not None:
        found = {
            "tokens": scored.tokens_T,
            "lengths": scored.lengths_B,
            "logps": scored.behaviour_logp_T,
        }
        torch.save(found, folder / "answers.pt")
    trainer.fit(num_steps)
    if trainer.world.rank == 0:
        syncs = [asdict(sync) for sync in trainer.syncs]
        (folder / "syncs.json").write_text(json.dumps(syncs), encoding="utf-8")
    trainer.close()


if __name__ == "__main__":
    main()
