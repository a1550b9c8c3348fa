"""python tests/speed/memory.py

Does the memory of `embed` grow with the number of pictures? The most anonymous memory over what it was after the
imports, of a small ViT (vit_tiny_patch16_224, three taps, batches of 32) on 96 and on 384 pictures, each in a process
of its own. The processes give freed memory back at once, so that what is read is what is in use.

Target: 384 pictures take less than 4 MB more than 96 (three taps of 288 more rows are 0.7 MB).
Linux alone says what is asked here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from extraction import BATCH, draw, ours, prepare
from tabulate import tabulate

STATUS = Path("/proc/self/status")
FEW, MANY, TARGET = 96, 384, 4
SMALL = ("encoder.architecture=vit_tiny_patch16_224", "encoder.name=vit_tiny")
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def anonymous() -> float:
    """The anonymous memory of this process now, in MB."""
    return int(STATUS.read_text().split("RssAnon:")[1].split()[0]) / 1024


def peak(paths: list[Path]) -> float:
    """By how many MB anonymous memory grows at most over what it is now."""
    before, highest, over = anonymous(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.005):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    ours(paths, *prepare("vit_s16", "[block.3,block.7,final_norm]", *SMALL))
    over.set()
    watcher.join()
    return highest - before


def main() -> None:
    if not STATUS.exists():
        return print("memory: not measured on this system")
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), MANY)
        for count in (FEW, MANY):
            command = [sys.executable, __file__, folder, str(count)]
            child = subprocess.run(command, env={**os.environ, **AT_ONCE}, stdout=subprocess.PIPE, text=True, check=True)
            peaks.append(float(child.stdout.split()[-1]))
    more = peaks[1] - peaks[0]
    row = [f"{peaks[0]:.1f}", f"{peaks[1]:.1f}", f"{more:+.1f}", f"< {TARGET} {'met' if more < TARGET else 'MISSED'}"]
    headers = ["peak memory, MB", f"{FEW} pictures", f"{MANY} pictures", "difference", "target"]
    print(tabulate([[f"vit_tiny, batches of {BATCH}", *row]], headers=headers, disable_numparse=True))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(peak(sorted(Path(sys.argv[1]).glob("*.jpg"))[: int(sys.argv[2])]))
    else:
        main()
