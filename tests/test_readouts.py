"""Tokens to vectors: against the libraries' own pooling and against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probing import readouts
from probing.types import READOUTS, Tap

GRID = Tap("final_norm", "bn2", "grid")
VIT = Tap("block.3", "blocks.3", "tokens", ("cls",))
REGISTERS = Tap("norm", "norm", "tokens", ("cls", "reg", "reg"))
BARE = Tap("patches", "patches", "tokens")
VECTOR = Tap("pooled", "pool", "vector")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def pooled(image: np.ndarray, side: int) -> np.ndarray:
    """[D,H,W] -> [side*side*D], cell by cell in raster order; cell i covers floor(i*n/side) to ceil((i+1)*n/side)."""
    _, height, width = image.shape
    rows = [(i * height // side, -(-(i + 1) * height // side)) for i in range(side)]
    columns = [(i * width // side, -(-(i + 1) * width // side)) for i in range(side)]
    return np.concatenate([image[:, a:b, c:d].mean((1, 2)) for a, b in rows for c, d in columns])


@pytest.mark.parametrize("grid", [(4, 4), (7, 7), (8, 8), (14, 14), (3, 3), (5, 9), (16, 6)])
@pytest.mark.parametrize("side", [2, 4])
def test_a_grid_readout_is_the_mean_of_each_cell(grid: tuple[int, int], side: int) -> None:
    output = random(2, 6, *grid)
    vectors = readouts.read(readouts.tokens(GRID, output), f"grid{side}").numpy()
    assert vectors.shape == (2, side * side * 6)
    for vector, image in zip(vectors, output.numpy(), strict=True):
        assert np.abs(vector - pooled(image, side)).max() < 1e-6


@pytest.mark.parametrize("tap", [VIT, REGISTERS, BARE])
def test_tokens_give_what_their_patches_give_on_a_grid(tap: Tap) -> None:
    image, prefix = random(2, 6, 7, 7), random(2, len(tap.prefix), 6) * 100
    output = torch.cat([prefix, image.flatten(2).transpose(1, 2)], 1)
    found = readouts.tokens(tap, output)
    assert found.grid == (7, 7) and found.kinds.count("patch") == 49 and found.kinds[: len(tap.prefix)] == tap.prefix
    for readout in ("mean", "grid2", "grid4"):
        assert torch.allclose(readouts.read(found, readout), readouts.read(readouts.tokens(GRID, image), readout), atol=1e-6)
    if "cls" in tap.prefix:
        assert torch.equal(readouts.read(found, "cls"), prefix[:, 0])


def test_the_mean_equals_the_librarys_pooling() -> None:
    from timm.layers import SelectAdaptivePool2d, global_pool_nlc

    image = random(3, 10, 7, 5)
    assert torch.allclose(
        readouts.read(readouts.tokens(GRID, image), "mean"), SelectAdaptivePool2d(pool_type="avg", flatten=True)(image), atol=1e-6
    )
    output = random(3, 52, 10)
    ours = readouts.read(readouts.tokens(REGISTERS, output), "mean")
    assert torch.allclose(ours, global_pool_nlc(output, "avg", num_prefix_tokens=3), atol=1e-6)
    assert torch.equal(readouts.read(readouts.tokens(VIT, output[:, :50]), "cls"), global_pool_nlc(output[:, :50], "token"))


def test_the_mean_ignores_where_patches_lie_and_a_grid_does_not() -> None:
    output = random(2, 17, 6)
    mixed = torch.cat([output[:, :1], output[:, 1:].flip(1)], 1)
    one, other = (readouts.tokens(VIT, o) for o in (output, mixed))
    assert torch.allclose(readouts.read(one, "mean"), readouts.read(other, "mean"), atol=1e-6)
    for readout in ("grid2", "grid4"):
        cells = readouts.read(one, readout).unflatten(1, (-1, 6))
        assert torch.allclose(cells.flip(1), readouts.read(other, readout).unflatten(1, (-1, 6)), atol=1e-6)
        assert not torch.allclose(cells, cells.flip(1), atol=1e-3)


def test_a_vector_is_read_as_it_is() -> None:
    for shape in ((4, 10), (4, 10, 1, 1)):
        output = random(*shape)
        assert torch.equal(readouts.read(readouts.tokens(VECTOR, output), "native"), output.flatten(1))


def test_patches_in_a_row_have_a_mean_and_no_grid() -> None:
    found = readouts.tokens(VIT, random(2, 1 + 12, 6))
    assert found.grid is None and readouts.read(found, "mean").shape == (2, 6)
    with pytest.raises(ValueError, match=r"grid4.*12 in a row"):
        readouts.read(found, "grid4")


@pytest.mark.parametrize("tap", [GRID, VIT, REGISTERS, BARE, VECTOR], ids=["grid", "vit", "registers", "bare", "vector"])
def test_the_table_is_what_read_can_do_and_its_errors_say_what_to_type(tap: Tap) -> None:
    output = random(2, 6) if tap is VECTOR else random(2, 6, 4, 4) if tap is GRID else random(2, len(tap.prefix) + 16, 6)
    for readout in READOUTS:
        if readout in readouts.valid(tap):
            readouts.check(tap, readout)
            assert readouts.read(readouts.tokens(tap, output), readout).shape[0] == 2
        else:
            with pytest.raises(ValueError) as refusal:
                readouts.check(tap, readout)
            assert tap.name in str(refusal.value)
            assert all(f"readout={r}" in str(refusal.value) for r in readouts.valid(tap))
    with pytest.raises(ValueError, match="known readouts: native, cls, mean, grid2, grid4"):
        readouts.check(tap, "grid3")
