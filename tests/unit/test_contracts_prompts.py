"""Prompts as lists of parts."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from hybridrl.contracts.prompts import (
    Content,
    Prompt,
    contents_from_bytes,
    contents_to_bytes,
)


def _content(start: int, num_tokens: int, **arrays: np.ndarray) -> Content:
    key = sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()
    return Content("image", start, num_tokens, key, arrays)


def test_parts_are_texts_and_contents_in_order() -> None:
    first, second = _content(1, 2), _content(3, 1)
    prompt = Prompt(0, "", (5, 9, 9, 9, 6, 7), contents=(first, second))
    assert prompt.parts == ((5,), first, second, (6, 7))
    assert Prompt(0, "", (5, 6)).parts == ((5, 6),)


@pytest.mark.parametrize("contents", [((0, 0),), ((3, 2),), ((1, 2), (2, 1))])
def test_contents_outside_of_the_prompt_or_one_another_are_refused(
    contents: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(ValueError, match="prompt 7: content"):
        Prompt(7, "", (1, 2, 3, 4), contents=tuple(_content(*one) for one in contents))


def test_contents_come_back_from_bytes_with_every_array() -> None:
    pixels = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, ::-1]
    given = (_content(0, 3, pixels=pixels, grid=np.array([1, 2, 2])), _content(4, 1))
    found = contents_from_bytes(contents_to_bytes(given))
    assert found == given
    np.testing.assert_array_equal(found[0].arrays["pixels"], pixels)
    assert found[0].arrays["pixels"].dtype == np.float16
    assert found[0].arrays["grid"].tolist() == [1, 2, 2]
    assert contents_from_bytes(contents_to_bytes(())) == ()
