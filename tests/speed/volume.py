"""python tests/speed/volume.py

Thirty slices of one gzipped NIfTI volume of 512 x 512 x 300 int16 (noise on a gradient, so that it compresses like a
scan), as `embed` asks for them: views in the order of the file, through `open_view`, nothing kept from before. The
rival is one whole decode: nibabel loads the file and gives its voxels as they are stored.

Target: <= 1.2 times one whole decode, also for sagittal slices, with a window and with percentiles.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
from pairs import rounds, timed
from tabulate import tabulate

from probing import decode, picture
from probing.types import View

SHAPE, SLICES, PAIRS, TARGET = (512, 512, 300), 30, 7, 1.2
WINDOW, PERCENTILES = ("nifti", 1, "window", 50.0, 400.0), ("nifti", 1, 0.5, 99.5)


def draw(path: Path) -> None:
    rng = np.random.default_rng(0)
    values = np.linspace(-1000, 1000, SHAPE[0])[:, None, None] + rng.integers(0, 30, SHAPE)
    nibabel.save(nibabel.Nifti1Image(values.astype(np.int16), np.diag([0.8, 0.8, 1.5, 1])), path)


def ours(path: Path, plane: str, policy: tuple[str | int | float, ...]) -> None:
    for cached in (decode.volume, decode._ends, picture._decoded):
        cached.cache_clear()
    size = SHAPE[decode.PLANES.index(plane)]
    for index in np.linspace(0, size - 1, SLICES).astype(int):
        picture.open_view(View(path, path.name, (plane, int(index)), policy))


def rival(path: Path) -> None:
    np.asanyarray(nibabel.load(path).dataobj.get_unscaled())  # type: ignore[attr-defined]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan.nii.gz"
        draw(path)
        calls = {"rival": partial(rival, path)}
        for plane in ("axial", "sagittal"):
            for name, policy in (("window", WINDOW), ("percentiles", PERCENTILES)):
                calls[f"{plane}, {name}"] = partial(ours, path, plane, policy)
        seconds = rounds({who: partial(timed, call) for who, call in calls.items()}, PAIRS)
    rows = []
    for who in list(calls)[1:]:
        pairs = [o / r for o, r in zip(seconds[who], seconds["rival"], strict=True)]
        middle = statistics.median(pairs)
        verdict = f"<= {TARGET} {'met' if middle <= TARGET else 'MISSED'}"
        rows.append(
            [who, f"{statistics.median(seconds[who]):.2f}", f"{middle:.3f}", f"{min(pairs):.3f} - {max(pairs):.3f}", verdict]
        )
    print(f"one whole decode: {statistics.median(seconds['rival']):.2f} s")
    print(tabulate(rows, headers=["30 slices", "s", "ours / one decode", "min - max", "target"], disable_numparse=True))


if __name__ == "__main__":
    main()
