"""python tests/speed/startup.py

Wall time of what needs no computing, each launch a new process, median of 7 (no rival: these are times, not ratios).

  python probe.py --help                                  target < 1.5 s
  a finished probe, launched again                        target < 2 s, without an import of torch
  a finished sweep of 100 probes (-m), launched again     target < 25 s

The finished probes are made first, cheaply: a tiny encoder of random weights on 12 drawn pictures in 6 folders, nearest
neighbours, no floors. "computing" is the mean CPU time, which other work on the machine disturbs less. All that is written lies in a temporary folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pairs import timed
from PIL import Image
from tabulate import tabulate

PROBE = str(Path(__file__).parents[2] / "probe.py")
LAUNCHES, JOBS = 7, 100
ENCODER = """
_target_: probing.encoders.timm.load
name: tiny
architecture: vit_tiny_patch16_224
weights: random
options: { img_size: 32, patch_size: 8, embed_dim: 32, depth: 3, num_heads: 2, num_classes: 0 }
image: { resize: 32, crop: 32, interpolation: bicubic, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5] }
taps:
  final_norm: { path: norm, layout: tokens, prefix: [cls] }
tap: final_norm
"""
TORCHLESS = """
import sys
from probing.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def launch(arguments: Sequence[str], folder: Path) -> str:
    """What a new process prints; its working folder is `folder`. Raises if it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def draw(folder: Path) -> None:
    """Two pictures in each of six folders, and the encoder's YAML."""
    rng = np.random.default_rng(0)
    for i in range(12):
        place = folder / "pictures" / f"patient_{i // 2}" / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((64, 48), Image.Resampling.BICUBIC).save(place)
    (folder / "configs/encoder").mkdir(parents=True)
    (folder / "configs/encoder/tiny.yaml").write_text(ENCODER)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draw(folder)
        images = ["images=folder", f"images.path={folder / 'pictures'}", "images.group=-2", "task=orientation"]
        options = ["probe=knn", "protocol.permutations=19", "floors=false", f"outputs={folder / 'outputs'}"]
        probe = ["--config-dir", str(folder / "configs"), "encoder=tiny", *images, *options]
        sweep = [PROBE, "-m", *probe, f"seed=range({JOBS})"]
        launch(sweep, folder)
        assert "already done" in launch([PROBE, *probe], folder)
        assert f"{JOBS} already done" in launch(sweep, folder)
        assert launch(["-c", TORCHLESS, *probe], folder).strip().endswith("False"), "a finished run imports torch"
        rows = []
        for name, arguments, target in (
            ("--help", [PROBE, "--help"], 1.5),
            ("a finished probe", [PROBE, *probe], 2),
            (f"a finished sweep of {JOBS}", sweep, 25),
        ):
            before = os.times()
            seconds = [timed(partial(launch, arguments, folder)) for _ in range(LAUNCHES)]
            computing = sum(os.times()[2:4]) - sum(before[2:4])  # of the children: user and system
            middle = statistics.median(seconds)
            verdict = f"< {target} s {'met' if middle < target else 'MISSED'}"
            around = f"{min(seconds):.2f} - {max(seconds):.2f}"
            rows.append([name, f"{middle:.2f}", around, f"{computing / LAUNCHES:.2f}", verdict])
    headers = ["launch", "median, s", "min - max, s", "of it computing, s", "target"]
    print(tabulate(rows, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
