"""python tests/speed/extraction.py

Images per second of `embed` on the CPU; then tests/speed/memory.py.

Ours: digests and keys of 192 JPEG pictures (500 x 375), then `embed` of some taps into a fresh store.
Rival: a bare loop over a torch DataLoader with the same pictures, order, batches of 32, number of workers (that of
workers=auto) and preprocess function; it calls the very same module and keeps one output. It is given our memory format
(channels_last, model and batch), which is up to twice as fast for convolutions: so what is compared is overhead alone.
Left out for both, as they come once per store: loading the model, and settling the store with its canaries.

Targets, of the rival's images per second (median of 7 interleaved pairs): three taps >= 0.97, twelve taps >= 0.95.
"computing time" is the same ratio in CPU seconds, which other work on the machine disturbs less.
"""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import ratio, rounds, spent
from PIL import Image
from tabulate import tabulate
from torch.utils.data import DataLoader, Dataset

from probing.embed import Request, embed, settle
from probing.jobs.configure import compose, load_encoder, plans_of, workers_of
from probing.picture import digests
from probing.store import Cell
from probing.types import Encoder, View

PICTURES, BATCH, PAIRS = 192, 32, 7
TAPS = {
    "efficientnet_lite0": {"3 taps": "[stage.0,stage.3,final_norm]"},
    "vit_s16": {"3 taps": "[block.3,block.7,final_norm]", "12 blocks": f"[{','.join(f'block.{i}' for i in range(12))}]"},
}
TARGET = {"3 taps": 0.97, "12 blocks": 0.95}


def draw(folder: Path, count: int) -> list[Path]:
    """Smooth colours and some noise, as JPEG files."""
    rng, paths = np.random.default_rng(0), []
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.asarray(coarse, np.int16) + rng.integers(-8, 9, (375, 500, 1), dtype=np.int16)
        paths.append(folder / f"{i:04}.jpg")
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


class Plain(Dataset[torch.Tensor]):
    def __init__(self, paths: list[Path], encoder: Encoder) -> None:
        self.paths, self.encoder = paths, encoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.encoder.preprocess(Image.open(self.paths[i]).convert("RGB"))


def rival(paths: list[Path], encoder: Encoder, workers: int) -> tuple[float, float]:
    def loop() -> None:
        kept = []
        with torch.inference_mode():
            for batch in DataLoader(Plain(paths, encoder), batch_size=BATCH, num_workers=workers):
                kept.append(encoder.module(batch.contiguous(memory_format=torch.channels_last)).cpu())
        assert sum(map(len, kept)) == len(paths)

    return spent(loop)


def ours(paths: list[Path], encoder: Encoder, workers: int, cells: list[Cell]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as root:
        store = settle(Path(root), encoder, "", "cpu", BATCH)

        def run() -> list[str]:
            found, _ = digests(Path(root, "digests"), [View(p, p.name) for p in paths])
            views = {view.key(d): view for view, d in found.items()}
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # progress
                embed([Request(encoder, cells, store)], views, "cpu", workers)
            return list(views)

        keys: list[str] = []
        seconds = spent(lambda: keys.extend(run()))
        assert not store.missing(keys, cells)[0]
        return seconds


def prepare(name: str, taps: str, *more: str) -> tuple[Encoder, int, list[Cell]]:
    """The encoder in our memory format, the number of workers and the cells, all as the command line gives them."""
    cfg = compose([f"encoder={name}", f"tap={taps}", "readout=mean", "floors=false", "device=cpu", f"batch_size={BATCH}", *more])
    plan = plans_of(cfg)[0]
    encoder = load_encoder(cfg, plan)
    encoder.module.to(memory_format=torch.channels_last)
    return encoder, workers_of(cfg), plan.cells


def compare(name: str, paths: list[Path]) -> list[dict[str, Any]]:
    encoder, workers, _ = prepare(name, "null")
    calls = {"rival": partial(rival, paths, encoder, workers)}
    calls |= {n: partial(ours, paths, encoder, workers, prepare(name, taps)[2]) for n, taps in TAPS[name].items()}
    rival(paths[:BATCH], encoder, workers)  # warm-up
    found = {n: list(zip(*pairs, strict=True)) for n, pairs in rounds(calls, PAIRS).items()}  # seconds, computing seconds
    speed = {n: f"{len(paths) / statistics.median(wall):.1f}" for n, (wall, _) in found.items()}
    rows = []
    for n in TAPS[name]:
        wall, computing = (ratio(rivals, own, TARGET[n]) for rivals, own in zip(found["rival"], found[n], strict=True))
        shown = {"encoder": name, "taps": n, "images/s": speed[n], "rival's": speed["rival"], **wall}
        rows.append({**shown, "computing time": computing["ours / rival"]})
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = draw(Path(folder), PICTURES)
        rows = [row for name in TAPS for row in compare(name, paths)]
    print(tabulate(rows, headers="keys", disable_numparse=True), flush=True)
    subprocess.run([sys.executable, Path(__file__).with_name("memory.py")], check=True)


if __name__ == "__main__":
    main()
