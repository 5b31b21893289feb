"""Creates the records of samples in `rollouts/`: texts, rewards, and numbers for each token.

Collective: all ranks send tokens to rank 0, which yields records, a few samples at a time. A record
has each token's number of characters instead of the token, and log-probabilities in millinats.
Small copies of images are written to `rollouts/images/`, for the report.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from threading import BoundedSemaphore

import torch

from hybridrl.contracts.batch import ScoredBatch
from hybridrl.contracts.prompts import UNKNOWN_LOGP, Content
from hybridrl.contracts.response_contents import RESPONSE_CONTENTS
from hybridrl.models.vision.images import FILE, IMAGE, decoded
from hybridrl.parallel.exchange import collect
from hybridrl.parallel.groups import World
from hybridrl.rewards.base import Scorer
from hybridrl.training.batches.packing import even_sizes

TOKENS_AT_ONCE = 1 << 20  # maximum number of tokens that rank 0 receives in one exchange
BYTES_AT_ONCE = 32 << 20  # maximum size of files of images that rank 0 receives in one exchange
LETTERS_OF_A_TOKEN = 4  # characters to skip per unmatched token when searching for a token


def sample_records(
    scored: ScoredBatch,
    learned: ScoredBatch | None,
    scorer: Scorer,
    world: World,
    pictures: SamplePictures | None = None,
) -> Iterator[dict[str, object]]:
    """Yields each sample's record on rank 0. Other ranks must iterate too. `learned` are the
    samples with the trainer's log-probabilities (`Roles.learned`), or None.
    """
    row_of = {} if learned is None else _rows_by_key(learned)
    scored = scored.with_blobs(() if pictures is None else [RESPONSE_CONTENTS])
    num_parts = -(-int(scored.lengths_B.sum()) // TOKENS_AT_ONCE)
    if (shown := scored.blobs.get(RESPONSE_CONTENTS)) is not None:
        num_parts = max(num_parts, -(-int(shown.num_rows_B.sum()) // BYTES_AT_ONCE))
    end = 0
    for size in even_sizes(scored.num_samples, num_parts):
        rows, end = range(end, end + size), end + size
        keys = _keys(scored)[end - size : end]
        known = [row_of[key] for key in keys if key in row_of]
        trainer = collect(learned.select(known), world) if learned is not None and known else None
        part = collect(scored.select(rows), world)
        if part is not None:
            yield from _records(part, trainer, scorer, pictures)


Key = tuple[int, int]
"""Number of a sample, and index of the sequence in the sample."""


def _keys(batch: ScoredBatch) -> list[Key]:
    samples = batch.sample_ids_B.tolist()
    sequences = [0] * len(samples) if batch.sequence_B is None else batch.sequence_B.tolist()
    return list(zip(samples, sequences, strict=True))


def _rows_by_key(batch: ScoredBatch) -> dict[Key, int]:
    return {key: row for row, key in enumerate(_keys(batch))}


def _records(
    part: ScoredBatch,
    trainer: ScoredBatch | None,
    scorer: Scorer,
    pictures: SamplePictures | None,
) -> Iterator[dict[str, object]]:
    row_of, keys = {} if trainer is None else _rows_by_key(trainer), _keys(part)
    contexts = [prompt.text for prompt in part.prompts]
    if part.sequence_B is not None:
        contexts = scorer.contexts(part)
    for i, (text, pieces) in enumerate(
        zip(scorer.responses(part), scorer.pieces(part), strict=True)
    ):
        prompt, (sample, sequence) = part.prompts[i], keys[i]
        tokens = _response(part, i)
        observed = [False] * len(pieces)
        if part.observed_T is not None:
            observed = part.observed_T[tokens].tolist()
        versions = [int(part.versions_B[i])] * len(pieces)
        if part.versions_T is not None:
            versions = part.versions_T[tokens].tolist()
        engine_L = part.behaviour_logp_T[tokens]
        record: dict[str, object] = {
            "sample": sample,
            "group": int(part.group_B[i]),
            "prompt": contexts[i],
            "response": text,
            "reward": float(part.reward_B[i]),
            "parts": {name: float(value_B[i]) for name, value_B in part.reward_parts.items()},
            "finished": bool(part.finished_B[i]),
            "versions": runs(versions),
            "chars": character_counts(text, pieces),
            "logp_mnat": _millis(engine_L),
        }
        if isinstance(answer := prompt.columns.get("answer"), str | int | float):
            record["answer"] = answer
        if pictures is not None:
            record |= _images(part, i, pictures)
        if part.sequence_B is not None:
            record["sequence"] = sequence
        if any(observed):
            record["turns"] = runs([int(flag) for flag in observed])
        if trainer is not None and keys[i] in row_of:
            trainer_L = trainer.behaviour_logp_T[_response(trainer, row_of[keys[i]])]
            gaps = _millis(trainer_L - engine_L)
            known = (trainer_L < UNKNOWN_LOGP / 2).tolist()
            record["diff_mnat"] = [
                gap if is_known else None for gap, is_known in zip(gaps, known, strict=True)
            ]
        yield record


def _images(batch: ScoredBatch, row: int, pictures: SamplePictures) -> dict[str, object]:
    """Writes a sample's images. Returns their names, and their places among response tokens."""
    found: dict[str, object] = {}
    images = [one for one in batch.contents_of(row) if one.kind == IMAGE]
    start = int(batch.prompt_lengths_B[row])
    if before := [one for one in images if one.start < start]:
        found["images"] = pictures.write(before)
    if shown := [one for one in images if one.start >= start]:
        found["response_images"] = pictures.write(shown)
        found["response_images_at"] = [one.start - start for one in shown]
    return found


def _response(batch: ScoredBatch, row: int) -> slice:
    """Returns the slice of a sample's response tokens in the columns of a gathered batch."""
    start = int(batch.offsets[row]) + int(batch.prompt_lengths_B[row])
    return slice(start, int(batch.offsets[row + 1]))


def _millis(value_L: torch.Tensor) -> list[int]:
    found: list[int] = (value_L.double() * 1000).round().long().tolist()
    return found


def runs(values: Sequence[int]) -> list[list[int]]:
    return [[value, sum(1 for _ in same)] for value, same in groupby(values)]


def character_counts(text: str, pieces: Sequence[str]) -> list[int]:
    """Returns the number of characters of each token, which add up to the length of the text.

    A token may contain only some bytes of a character, or its text may depend on neighbouring
    tokens. Such tokens have 0 characters, or those of their neighbours, up to the next token that
    is found in the text. `pieces` are the tokens decoded alone; "" for a token that the text omits.
    """
    counts: list[int] = []
    at = num_lost = 0
    for piece in pieces:
        # Some tokenizers drop the leading space when they decode a single token.
        room = at + 1 + LETTERS_OF_A_TOKEN * num_lost + len(piece)
        start = text.find(piece, at, room) if piece else -1
        if start < 0:
            counts.append(0)
            num_lost += bool(piece)
            continue
        before = start - at
        if num_lost and counts:
            counts[-1] += before
            before = 0
        counts.append(before + len(piece))
        at, num_lost = start + len(piece), 0
    if counts:
        counts[-1] += len(text) - at
    return counts


FOLDER = "images"  # in rollouts/
MAX_SIDE = 384  # pixels of a copy, which has about 10 to 40 kB
QUALITY = 80  # JPEG quality
MAX_WAITING = 64  # images whose copies are not written yet, because each may have megabytes
NUM_THREADS = 4  # Pillow releases Python's lock; more would need more memory for large images
NAME_LENGTH = 32  # characters of the image's key


class SamplePictures:
    """Writes a copy of each image once, in other threads, to the run's folder `rollouts`. At exit,
    waits for all copies and raises the first error.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._pool = ThreadPoolExecutor(NUM_THREADS, "pictures")
        self._started: dict[str, Future[None]] = {}
        self._room = BoundedSemaphore(MAX_WAITING)

    def __enter__(self) -> SamplePictures:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for started in self._started.values():
                started.result()

    def write(self, images: Iterable[Content]) -> list[str]:
        """Starts to write copies of images, and returns their names, in order. Waits while many
        copies are not written yet.
        """
        names = []
        for content in images:
            name = content.key[:NAME_LENGTH]
            names.append(name)
            file = self._folder / f"{name}.jpg"
            if name not in self._started and not file.exists():
                self._room.acquire()
                self._started[name] = self._pool.submit(_write, file, content)
                self._started[name].add_done_callback(lambda _: self._room.release())
        return names


def _write(file: Path, content: Content) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(small_copy(content.arrays[FILE].tobytes()))
    partial.replace(file)


def small_copy(data: bytes) -> bytes:
    """Returns an image's file as a JPEG file of at most MAX_SIDE pixels in each direction."""
    image = decoded(data, enough=MAX_SIDE)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    target = io.BytesIO()
    image.save(target, "JPEG", quality=QUALITY)
    return target.getvalue()
