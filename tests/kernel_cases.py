"""Cases of the copies' kernels, a script: on CPU under TRITON_INTERPRET=1, on a GPU as it is."""

from __future__ import annotations

import random

import torch
from hybridrl.kernels import copy_engine, quantize, rectangles, reference
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
    """Copies blocks in each way that this host has, between work on other streams that waits for
    them; returns the ways.
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


def rounding_case() -> None:
    """Every bfloat16 number up to 448, in blocks whose scale is 1: as torch casts it."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.float().abs() <= reference.FP8_MAX].to(DEVICE)
    weight = torch.zeros(-(-numbers.numel() // 128), 128, dtype=torch.bfloat16, device=DEVICE)
    weight.view(-1)[: numbers.numel()] = numbers
    scales = torch.ones(-(-weight.size(0) // 128), 1, device=DEVICE)
    dest = torch.zeros(weight.shape, dtype=torch.uint8, device=DEVICE)
    quantize.QuantizedCopies([(ops.Tiles(weight, scales), dest)], DEVICE).run()
    assert torch.equal(dest, weight.float().to(torch.float8_e4m3fn).view(torch.uint8))


def blocks_case(rng: random.Random) -> None:
    """Rectangles of blocks of many magnitudes, in strided rows, that begin anywhere in a block."""
    block = rng.choice([128, 16])
    tiles, dests, wanted = [], [], []
    for _ in range(3):
        row, column = rng.choice([(0, 0), (3, 16), (rng.randrange(block), rng.randrange(block))])
        rows, columns = rng.choice([1, 48, 300]), rng.choice([16, 100, 272, 2200])
        source = numbered((rows + 1, columns + rng.choice([0, 3, 16])), rng.choice(DTYPES[:2]))
        source *= (10.0 ** torch.randint(-9, 6, (rows + 1, 1))).to(source)
        source[:30, :30] *= rng.choice([0, 1])
        if rng.random() < 0.3:
            source[rows - 1, columns - 1] = rng.choice([float("nan"), float("inf")])
        shape = -(-(row + rows) // block), -(-(column + columns) // block)
        scales = torch.zeros(shape[0], shape[1] + 1, device=DEVICE)
        tiles.append(ops.Tiles(source[1:, :columns], scales[:, :-1], row, column))
        dests.append(torch.full((rows, columns + 16), 9, dtype=torch.uint8, device=DEVICE))
    copies = [tile._replace(scales=tile.scales.clone()) for tile in tiles]
    quantize.BlockMaxima(tiles, DEVICE, block).run()
    reference.BlockMaxima(copies, DEVICE, block).run()
    for tile, copy in zip(tiles, copies, strict=True):
        assert torch.equal(tile.scales.view(torch.int32), copy.scales.view(torch.int32))
        tile.scales.copy_(ops.power_of_two_scales(tile.scales.contiguous()))
        wanted.append(ops.quantize_blocks(tile, block))
    views = [dest[:, :-16] for dest in dests]
    quantize.QuantizedCopies(list(zip(tiles, views, strict=True)), DEVICE, 5, block).run()
    for dest, found, values in zip(dests, views, wanted, strict=True):
        one, other = (part.view(torch.float8_e4m3fn).float() for part in (found, values))
        assert ((found == values) | one.isnan() & other.isnan()).all()
        assert (dest[:, -16:] == 9).all()


def refused_blocks() -> None:
    weight, scales = numbered((128, 130), torch.float32), numbered((1, 2), torch.float32)
    dest = torch.zeros(128, 130, dtype=torch.uint8, device=DEVICE)
    tiles = ops.Tiles(weight, scales)
    for wrong, place, match in (
        (tiles, dest[:, :128], "shapes must be equal"),
        (tiles._replace(scales=scales[:, :1]), dest, "scales of shape (1, 2)"),
        (tiles._replace(row=1), dest, "scales of shape (2, 2)"),
        (tiles, dest.float(), "torch.uint8"),
        (
            tiles._replace(weight=weight.t(), scales=numbered((2, 1), torch.float32)),
            dest.t(),
            "con",
        ),
    ):
        try:
            quantize.QuantizedCopies([(wrong, place)], DEVICE)
        except ValueError as error:
            assert match in str(error), error
            continue
        raise AssertionError(f"not refused: {match}")


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
    RectangleCopies([(empty, empty.clone())], DEVICE).run()
    one = numbered((4, 6), torch.float32)
    for wrong in ((one, one[:2]), (one.t(), one.t().clone())):
        try:
            RectangleCopies([wrong], DEVICE)
        except ValueError:
            continue
        raise AssertionError(f"{wrong[0].shape}, {wrong[0].stride()} was not refused")
    rounding_case()
    for _ in range(4):
        blocks_case(rng)
    refused_blocks()
    num_ways = blocks_by_copy_engines(rng)
    print(f"{num_cases} rectangle cases on {DEVICE}; copy engines: {num_ways} ways")


if __name__ == "__main__":
    main()
