"""What a dump keeps of a sample beside its texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.contracts.batch import Producer, Prompt, Rollout, RolloutBatch, ScoredBatch
from hybridrl.loop.sample_records import character_counts, sample_records
from hybridrl.roles.roles import Roles

HERE = Producer.here("the test")


def scored_batch() -> ScoredBatch:
    """Two prompts of 2 and 1 tokens; the second response has a turn of an environment."""
    prompts = [Prompt(0, "pq", (1, 2), {"answer": "7"}), Prompt(1, "r", (3,), {"answer": ["no"]})]
    rollouts = [
        Rollout(4, prompts[0], (5, 6), (-0.5, -1.0), "stop", 2),
        Rollout(
            *(9, prompts[1], (7, 8, 5), (-0.25, 0.0, -2.0), "length", 1),
            observed=(False, True, False),
            versions=((1, 2), (2, 1)),
        ),
    ]
    batch = RolloutBatch.from_rollouts(rollouts, [0, 1], HERE)
    return batch.scored(torch.tensor([1.0, 0.0]), {"right": torch.tensor([0.5, 0.0])}, HERE)


class Letters:
    """A scorer whose tokens are letters."""

    def pieces(self, batch: RolloutBatch) -> list[list[str]]:
        ends = batch.offsets.tolist()
        starts = [a + n for a, n in zip(ends, batch.prompt_lengths_B.tolist(), strict=False)]
        tokens = batch.tokens_T.tolist()
        spans = zip(starts, ends[1:], strict=True)
        return [["abcdefghijk"[token] for token in tokens[a:b]] for a, b in spans]

    def responses(self, batch: RolloutBatch) -> list[str]:
        return ["".join(pieces) for pieces in self.pieces(batch)]


def records(scored: ScoredBatch, learned: ScoredBatch | None) -> list[dict[str, Any]]:
    world: Any = SimpleNamespace(rank=0)
    scorer: Any = Letters()
    return list(sample_records(scored, learned, scorer, world))


def learned_by(batch: ScoredBatch, logp_T: torch.Tensor | None) -> ScoredBatch | None:
    """What a policy whose update found these log-probabilities leaves of a batch."""
    roles: Any = SimpleNamespace(policy=SimpleNamespace(take_start_logps=lambda: logp_T))
    return Roles.learned(roles, batch.to_train(HERE))


def test_record_has_what_the_report_shows() -> None:
    one, other = records(scored_batch(), None)
    assert one == {
        **{"sample": 4, "group": 0, "prompt": "pq", "response": "fg", "reward": 1.0},
        **{"parts": {"right": 0.5}, "finished": True, "versions": [[2, 2]], "answer": "7"},
        **{"chars": [1, 1], "logp_mnat": [-500, -1000]},
    }
    assert other["turns"] == [[0, 1], [1, 1], [0, 1]] and other["versions"] == [[1, 2], [2, 1]]
    assert other["logp_mnat"] == [-250, 0, -2000] and other["finished"] is False
    assert "answer" not in other and "diff_mnat" not in other


def test_difference_is_the_trainers_minus_the_engines_of_the_same_token() -> None:
    scored = scored_batch()
    # In another order than the dump's; what stands at tokens of prompts has no meaning.
    trained = scored.select([1, 0])
    logp_T = torch.tensor([3.0, -0.125, 5.0, -2.5, 3.0, 3.0, -0.75, float("nan")])
    one, other = records(scored, learned_by(trained, logp_T))
    assert one["diff_mnat"] == [-250, None]
    assert other["diff_mnat"] == [125, 0, -500]


def test_samples_that_were_not_learned_from_have_no_difference() -> None:
    scored = scored_batch()
    logp_T = torch.tensor([0.0, -0.125, 0.0, -2.5])
    one, other = records(scored, learned_by(scored.select([1]), logp_T))
    assert "diff_mnat" not in one and other["diff_mnat"] == [125, 0, -500]
    assert learned_by(scored, None) is None


@pytest.mark.parametrize(
    ("text", "pieces", "counts"),
    [
        ("12,18", ["1", "2", ",", "18", ""], [1, 1, 1, 2, 0]),  # the end token is left out
        ("a b c", ["a", "b", "c"], [1, 2, 2]),  # a tokenizer that drops a lone token's space
        ("é!", ["\ufffd", "\ufffd", "!"], [0, 1, 1]),  # two bytes of one character
        ("x日本 y", ["x", "\ufffd", "\ufffd", "本", " y"], [1, 0, 1, 1, 2]),
        ("other", ["what", "ever"], [0, 5]),  # no token is found: all is the last one's
        ("\ufffdz", ["\ufffd", "z"], [1, 1]),  # a response that has such a character
        ("", ["", ""], [0, 0]),
        ("", [], []),
    ],
)
def test_characters_are_counted_by_token(text: str, pieces: list[str], counts: list[int]) -> None:
    found = character_counts(text, pieces)
    assert found == counts
    assert sum(found) == len(text) if pieces else True
