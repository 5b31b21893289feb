"""Cases of the copies' kernels, a script: on CPU under TRITON_INTERPRET=1, on a GPU as it is."""

from __future__ import annotations

import random

import torch
from hybridrl.kernels import copy_engine, rectangles
from hybridrl.kernels.rectangles import RectangleCopies

from hybridrl import ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def check(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    all_dests: list[torch.Tensor],
    lanes: list[int] | None = None,
) -> None:
    """Runs the copies twice, with sources changed in between; compares whole destinations."""
    copies = RectangleCopies(pairs, DEVICE, lanes, programs=len(pairs))
    for _ in range(2):
        untouched = [dest.clone() for dest in all_dests]
        copies.run()
        found = [dest.clone() for dest in all_dests]
        for dest, before in zip(all_dests, untouched, strict=True):
            dest.copy_(before)
        for source, dest in pairs:
            dest.copy_(source)
        for (source, _), dest, seen in zip(pairs, all_dests, found, strict=True):
            # The interpreter cuts bits off where GPUs round to the nearest bfloat16.
            cuts = DEVICE.type == "cpu" and source.dtype != dest.dtype == torch.bfloat16
            bound = 2**-7 if cuts else 0.0
            assert torch.allclose(dest, seen, rtol=bound, atol=0.0), (source.dtype, dest.dtype)
        for source, _ in pairs:
            source.mul_(-2)


def stacked_case() -> None:
    """Three dims, as experts have, cut in the last or in the middle; through two lanes."""
    source, dest = numbered((3, 5, 16), torch.bfloat16), numbered((4, 8, 16), torch.bfloat16)
    one, other = numbered((3, 4, 8), torch.bfloat16), numbered((3, 4, 24), torch.bfloat16)
    pairs = [(source[:, 1:4], dest[1:, 2:5]), (one, other[..., 8:16])]
    check(pairs, [dest, other], lanes=[1, 0])


def random_case(rng: random.Random) -> None:
    pairs, dests = [], []
    for _ in range(rng.randint(1, 6)):
        source_type, dest_type = rng.choice(DTYPES), rng.choice(DTYPES)
        if rng.random() < 0.6:
            source_type = dest_type
        if rng.random() < 0.3:
            size = rng.randint(1, 300)
            source, dest = numbered((size + 9,), source_type), numbered((size + 7,), dest_type)
            a, b = rng.randint(0, 9), rng.randint(0, 7)
            pairs.append((source[a : a + size], dest[b : b + size]))
        else:
            rows, columns = rng.randint(1, 20), rng.choice([1, 3, 8, 64, 129])
            source = numbered((rows + 3, columns + rng.choice([0, 1, 8])), source_type)
            dest = numbered((rows + 2, columns + rng.choice([0, 5, 8])), dest_type)
            a, b = rng.randint(0, 3), rng.randint(0, 2)
            c = rng.randint(0, source.size(1) - columns)
            d = rng.randint(0, dest.size(1) - columns)
            part = source[a : a + rows, c : c + columns]
            pairs.append((part, dest[b : b + rows, d : d + columns]))
        dests.append(dest)
    check(pairs, dests, [rng.randint(0, 2) for _ in pairs])


def blocks_by_copy_engines(rng: random.Random) -> int:
    """Blocks by each way that this host has, between work that waits for them; returns the ways.

    The source is written right before, and the destination read right after, on another stream.
    """
    if DEVICE.type == "cpu" or not copy_engine.has_copy_engine():
        return 0
    sizes = [rng.choice([1, 100, 1 << 16, 1 << 22]) for _ in range(200)]
    source = torch.empty(sum(sizes), dtype=torch.int32, device=DEVICE)
    around = torch.empty(sum(sizes) + 2, dtype=torch.int32, device=DEVICE)
    pairs = list(zip(source.split(sizes), around[1:-1].split(sizes), strict=True))
    rng.shuffle(pairs)
    ways: list[ops.Blocks] = [copy_engine.BlockCopies(pairs)]
    compiled = ops.compiled_operations()
    if compiled is not None:
        ways.append(copy_engine.CompiledBlockCopies(pairs, compiled.queue_blocks))
    engines, current = torch.cuda.Stream(), torch.cuda.current_stream()
    for way in ways:
        for turn in range(3):
            around.fill_(-1)
            torch.arange(turn, turn + source.numel(), out=source)
            way.run(engines, [(engines, current)], [(current, engines)])
            found = around.clone()
            assert torch.equal(found[1:-1], source)
            assert found[0] == found[-1] == -1
    return len(ways)


def main() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    num_cases = 60 if DEVICE.type == "cuda" else 20  # the interpreter is slow
    rectangles.TILE = 64  # so that small cases have many tiles
    rectangles.STEPS = 2
    for _ in range(num_cases):
        random_case(rng)
    stacked_case()
    empty = numbered((0, 4), torch.float32)
    assert RectangleCopies([(empty, empty.clone())], DEVICE).num_launches == 0
    one = numbered((4, 6), torch.float32)
    for wrong in ((one, one[:2]), (one.t(), one.t().clone())):
        try:
            RectangleCopies([wrong], DEVICE)
        except ValueError:
            continue
        raise AssertionError(f"{wrong[0].shape}, {wrong[0].stride()} was not refused")
    num_ways = blocks_by_copy_engines(rng)
    print(f"{num_cases} rectangle cases on {DEVICE}; copy engines: {num_ways} ways")


if __name__ == "__main__":
    main()
