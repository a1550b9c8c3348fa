"""Tokens -> vectors. One function for all encoders; the table says which readout a layout has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from probing.types import READOUTS, Tap, Tokens

if TYPE_CHECKING:
    import torch

VALID = {"vector": ("native",), "grid": ("mean", "grid2", "grid4"), "tokens": ("cls", "mean", "grid2", "grid4")}


def valid(tap: Tap) -> tuple[str, ...]:
    """The readouts that a tap has."""
    return tuple(r for r in VALID[tap.layout] if r != "cls" or "cls" in tap.prefix)


def check(tap: Tap, readout: str) -> None:
    """Raise ValueError unless the tap has this readout."""
    if readout not in valid(tap):
        known = "" if readout in READOUTS else f" (known readouts: {', '.join(READOUTS)})"
        raise ValueError(
            f"readout={readout} does not fit tap {tap.name} (layout {tap.layout}){known}. Type readout="
            + " or readout=".join(valid(tap))
        )


def tokens(tap: Tap, output: torch.Tensor) -> Tokens:
    """The raw output at a tap, [B,L,D], [B,D,H,W] or [B,D], as Tokens."""
    if tap.layout == "vector":
        return Tokens(output.flatten(1)[:, None], ("vector",), None)
    if tap.layout == "grid":
        rows, columns = output.shape[2:]
        return Tokens(output.flatten(2).transpose(1, 2), ("patch",) * (rows * columns), (rows, columns))
    patches = output.shape[1] - len(tap.prefix)
    side = math.isqrt(patches)
    grid = (side, side) if side * side == patches else None
    return Tokens(output, tap.prefix + ("patch",) * patches, grid)


def read(found: Tokens, readout: str) -> torch.Tensor:
    """Tokens -> [B,D']: native, cls and mean give D' = D; grid2 and grid4 give 4 D and 16 D, cell by cell. Never a view of the tokens."""
    from torch.nn.functional import adaptive_avg_pool2d

    if readout in ("native", "cls"):
        return found.values[:, found.kinds.index("vector" if readout == "native" else "cls")].clone()
    patches = found.values[:, len(found.kinds) - found.kinds.count("patch") :]
    if readout == "mean":
        return patches.mean(1)
    if found.grid is None:
        raise ValueError(f"readout={readout} needs patches on a grid, and this tap has {patches.shape[1]} in a row")
    side = int(readout.removeprefix("grid"))
    image = patches.transpose(1, 2).unflatten(2, found.grid)
    return adaptive_avg_pool2d(image, side).flatten(2).transpose(1, 2).flatten(1)
