"""python tests/speed/input.py

From a file to the tensor that an encoder eats: 500 x 375 pictures to 224 (shorter side 256 bicubic, centre crop), one
process. Ours is `open_view` and `preprocess`, exact and with input=fast. The rival is a plain loop: Pillow opens,
converts to RGB, resizes and crops, numpy and torch scale and normalise. The tensors of the exact path equal the rival's
bit for bit; those of the fast path differ by one grey level, by two in a few values of a million. Both are asserted, untimed.

Targets on JPEG: exact >= 0.95 of the rival's pictures per second, fast >= 1.8 of the exact path's. PNG is reported.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pairs import ratio, rounds, timed
from PIL import Image
from tabulate import tabulate

from probing.picture import open_view, preprocess
from probing.types import View

MANY, PAIRS = 60, 9
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
POLICY = {"resize": 256, "crop": 224, "interpolation": "bicubic", "mean": MEAN, "std": STD}


def draw(folder: Path, ending: str) -> list[Path]:
    """Pictures with detail at several scales, which compress like photographs."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(MANY):
        layers = [rng.normal(0, 60 / n, (n, n, 3)) for n in (4, 16, 64)]
        whole = sum(
            np.stack(
                [
                    np.asarray(Image.fromarray(c.astype(np.float32)).resize((500, 375), Image.Resampling.BICUBIC))
                    for c in np.moveaxis(v, 2, 0)
                ],
                2,
            )
            for v in layers
        )
        paths.append(folder / f"{i}.{ending}")
        Image.fromarray(np.clip(128 + whole, 0, 255).astype(np.uint8)).save(paths[-1])
    return paths


def rival(path: Path) -> torch.Tensor:
    with Image.open(path) as file:
        picture = file.convert("RGB")
    picture = picture.resize((341, 256), Image.Resampling.BICUBIC)
    left, top = round((341 - 224) / 2.0), round((256 - 224) / 2.0)
    values = torch.from_numpy(np.array(picture.crop((left, top, left + 224, top + 224)), copy=True)).permute(2, 0, 1).contiguous()
    return values.float().div(255).sub_(torch.tensor(MEAN)[:, None, None]).div_(torch.tensor(STD)[:, None, None])


def all_of(call: Callable[[Path], torch.Tensor], paths: list[Path]) -> None:
    for path in paths:
        call(path)


def main() -> None:
    torch.set_num_threads(1)  # as in a worker process
    exact, fast = preprocess(POLICY), preprocess({**POLICY, "input": "fast"})
    calls: dict[str, Callable[[Path], torch.Tensor]] = {
        "rival": rival,
        "exact": lambda path: exact(open_view(View(path, path.name))),
        "fast": lambda path: fast(open_view(View(path, path.name))),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("jpg", "png"):
            paths = draw(Path(folder), ending)
            for path in paths[:8]:
                one, two, three = (call(path) for call in calls.values())
                assert torch.equal(one, two), "the exact path differs from the plain loop"
                grey = (three - two).abs() * torch.tensor(STD)[:, None, None] * 255
                assert grey.max() < 2.01 and (grey > 1.01).float().mean() < 1e-4, (
                    f"the fast path differs by {grey.max():.2f} grey levels"
                )
            all_of(calls["exact"], paths)  # warm-up
            seconds = rounds({who: partial(timed, partial(all_of, call, paths)) for who, call in calls.items()}, PAIRS)
            speed = {who: f"{MANY / statistics.median(s):,.0f}" for who, s in seconds.items()}
            for ours, other, target in (("exact", "rival", 0.95), ("fast", "exact", 1.8)):
                found = ratio(seconds[other], seconds[ours], target)
                if ending == "png":
                    found["target"] = "reported"
                rows.append(
                    {"pictures": ending, "ours": ours, "rival": other, "ours/s": speed[ours], "rival/s": speed[other], **found}
                )
    print(tabulate(rows, headers="keys", disable_numparse=True))


if __name__ == "__main__":
    main()
