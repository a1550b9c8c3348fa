"""What an encoder must keep, ours or somebody's own: `python probe.py job=encoders check=[mine]`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from probing import readouts
from probing.embed import Cell, device_of, forward
from probing.types import Encoder

TOLERANCE = 1e-4  # of the largest value, float32
SIDES = ((96, 128), (300, 200), (128, 128))


def check(encoder: Encoder, again: Encoder, device: str) -> list[dict[str, str]]:
    """One row per promise: what it says, whether it holds, and what was found. `again` is the same encoder, loaded a
    second time."""
    where = device_of(device)
    pictures = _pictures()
    cells: list[Cell] = [
        (tap, readout) for tap in encoder.taps for readout in readouts.valid(tap) if not readout.startswith("grid")
    ]

    def evaluation() -> str:
        training = [name or "the module" for name, m in encoder.module.named_modules() if m.training]
        return f"{training[0]} is in training mode: call eval()" if training else ""

    def preprocessing() -> str:
        made = [encoder.preprocess(p) for p in pictures]
        if any(m.dtype != torch.float32 or m.ndim != 3 for m in made):
            return f"preprocess gives {made[0].dtype} {tuple(made[0].shape)}, not float32 [C,H,W]"
        shapes = {tuple(m.shape) for m in made}
        if len(shapes) > 1:
            return f"pictures of different size give different shapes, which no batch holds: {sorted(shapes)}"
        return "" if all(torch.isfinite(m).all() for m in made) else "preprocess gives values that are not finite"

    def batch() -> torch.Tensor:
        return torch.stack([encoder.preprocess(p) for p in pictures])

    def taps() -> str:
        rows = forward(encoder, batch(), cells, where, len(pictures))
        bad = next((c for c, r in rows.items() if not np.isfinite(r).all()), None)
        return f"tap {bad[0].name} gives values that are not finite" if bad else ""

    def repeats() -> str:
        one, two = (forward(encoder, batch(), cells, where, len(pictures)) for _ in range(2))
        return next((f"tap {c[0].name}: two passes differ" for c in cells if not np.array_equal(one[c], two[c])), "")

    def company() -> str:
        together = forward(encoder, batch(), cells, where, len(pictures))
        alone = forward(encoder, batch()[:1], cells, where, 1)
        for c in cells:
            apart = float(np.abs(together[c][0] - alone[c][0]).max() / max(np.abs(together[c][0]).max(), 1e-12))
            if not apart < TOLERANCE:
                return f"tap {c[0].name}: a picture's row depends on its batch (by {apart:.0e} of the largest value)"
        return ""

    def pictures_matter() -> str:
        rows = forward(encoder, batch(), cells, where, len(pictures))
        alive = {c[0] for c, r in rows.items() if np.ptp(r, axis=0).max() > 0}  # a class token may be the same at first
        return next((f"tap {t.name}: all pictures give one row" for t in encoder.taps if t not in alive), "")

    def fingerprint() -> str:
        same = encoder.fingerprint == again.fingerprint
        return (
            ""
            if same and encoder.fingerprint
            else f"loaded twice, it has two fingerprints: {encoder.fingerprint}, {again.fingerprint}"
        )

    promises: dict[str, Callable[[], str]] = {
        "evaluation mode": evaluation,
        "preprocess: any picture to one float32 shape": preprocessing,
        "every tap is reached, has its layout, is finite": taps,
        "two passes give the same rows": repeats,
        "a row does not depend on its batch": company,
        "different pictures give different rows": pictures_matter,
        "a stable fingerprint": fingerprint,
    }
    encoder.module.to(where)
    rows = []
    for says, promise in promises.items():
        try:
            fault = promise()
        except Exception as error:  # somebody's own code may raise anything
            fault = f"{type(error).__name__}: {error}"
        rows.append({"encoder": encoder.name, "promise": says, "holds": "no" if fault else "yes", "found": fault})
    return rows


def _pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    coarse = [rng.integers(0, 256, (9, 9, 3), dtype=np.uint8) for _ in SIDES]
    return [Image.fromarray(c).resize(side, Image.Resampling.BICUBIC) for c, side in zip(coarse, SIDES, strict=True)]
