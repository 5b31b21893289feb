"""What a dump keeps of a sample beside its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import file_of

from hybridrl.contracts.batch import Producer, Prompt, Rollout, RolloutBatch, ScoredBatch
from hybridrl.contracts.prompts import Content
from hybridrl.contracts.response_contents import with_contents
from hybridrl.loop import sample_records as module
from hybridrl.loop.sample_records import SamplePictures, character_counts, sample_records
from hybridrl.models.vision.images import FILE, IMAGE
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

    def contexts(self, batch: RolloutBatch) -> list[str]:
        return ["context"] * batch.num_samples


def records(
    scored: ScoredBatch, learned: ScoredBatch | None, pictures: SamplePictures | None = None
) -> list[dict[str, Any]]:
    world: Any = SimpleNamespace(rank=0)
    scorer: Any = Letters()
    return list(sample_records(scored, learned, scorer, world, pictures))


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


def image(shade: int, start: int, num_tokens: int) -> Content:
    data = file_of(Image.new("RGB", (8, 8), (shade, 0, 0)))
    arrays = {FILE: np.frombuffer(data, np.uint8)}
    return Content(IMAGE, start, num_tokens, f"{shade:032}" * 2, arrays)


def with_images(rollouts: Sequence[Rollout]) -> ScoredBatch:
    batch = RolloutBatch.from_rollouts(rollouts, [0] * len(rollouts), HERE)
    return batch.scored(torch.zeros(len(rollouts)), {}, HERE)


def name(shade: int) -> str:
    return f"{shade:032}"


def test_images_of_later_turns_have_their_places_in_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(0, "p", (1, 2, 2), contents=(image(1, 1, 2),))
    tokens = (5, 2, 2, 3, 4, 2, 6), (-0.5, 0.0, 0.0, 0.0, -1.0, 0.0, -1.0)
    shown = with_contents({}, [image(2, 4, 2), image(1, 8, 1)])
    observed = (False, True, True, True, False, True, False)
    seeing = Rollout(1, prompt, *tokens, "stop", 0, observed=observed, blobs=shown)
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 1)
    scored = with_images([Rollout(0, prompt, (5,), (-1.0,), "stop", 0), seeing])
    with SamplePictures(tmp_path) as pictures:
        plain, found = records(scored, None, pictures)
    assert plain["images"] == found["images"] == [name(1)] and "response_images" not in plain
    assert found["response_images"] == [name(2), name(1)]
    assert found["response_images_at"] == [1, 5]
    files = {one.stem for one in (tmp_path / "images").iterdir()}
    assert files == {name(1), name(2)}
    assert "response_images" not in records(scored, None)[1]


def test_sequences_of_agents_have_their_own_images(tmp_path: Path) -> None:
    """Not those of the row, which an agent may leave out."""
    row = Prompt(0, "p", (1, 2), contents=(image(1, 1, 1),))
    context = replace(row, tokens=(1, 2, 2, 1))
    blobs = with_contents({}, [image(3, 1, 2), image(4, 5, 1)])
    observed, logps = (False, True, False), (-1.0, 0.0, -1.0)
    seeing, blind = (
        Rollout(7, one, (5, 2, 5), logps, "stop", 0, observed, more, sequence=number)
        for number, (one, more) in enumerate([(context, blobs), (row, {})])
    )
    with SamplePictures(tmp_path) as pictures:
        first, second = records(with_images([seeing, blind]), None, pictures)
    assert first["images"] == [name(3)]
    assert (first["response_images"], first["response_images_at"]) == ([name(4)], [1])
    assert "images" not in second and "response_images" not in second


def test_copies_of_many_images_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of images in responses may be much larger than all prompts."""
    write, waiting, most = module._write, 0, 0

    def counted(*given: Any) -> None:
        nonlocal waiting
        write(*given)
        waiting -= 1

    monkeypatch.setattr(module, "MAX_WAITING", 3)
    monkeypatch.setattr(module, "_write", counted)
    with SamplePictures(tmp_path) as pictures:
        for shade in range(20):
            waiting += 1
            pictures.write([image(shade, 0, 1)])
            most = max(most, waiting)
    assert most <= 4 and len(list((tmp_path / "images").iterdir())) == 20


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
