"""python tests/speed/storage.py

100,000 x 768 float32, written and read back, on one disk (the temporary folder's; TMPDIR chooses another).

Ours: Store.write in parts of PART_ROWS rows as `embed` does, each part synced and renamed; then a new Store reads all
keys in the order in which they were written.
Rival: plain h5py, one file, the whole array in one call, with the same chunks and checksums (256 x 768, fletcher32)
and the keys as fixed bytes, synced once at the end; then reads keys and values whole.
Each pass has a fresh folder. What is read was written just before, so reads come from the page cache for both: that
leaves the overhead, not the disk. The fastest of three interleaved reads counts, for both: the first touch of new
memory takes longer than the reading on some machines. What is read is compared with what was written, untimed.

Targets: writing >= 0.80 and reading >= 0.80 of the rival's rows per second (median of 7 interleaved pairs).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import uuid
from pathlib import Path

import h5py
import numpy as np
from pairs import ratio, rounds, timed
from tabulate import tabulate

from probing.embed import PART_ROWS
from probing.store import CHUNK, Store
from probing.types import Tap

ROWS, WIDTH, PAIRS, READS, TARGET = 100_000, 768, 7, 3, 0.80
CELL = (Tap("final_norm", "norm", "tokens", ("cls",)), "mean")
VALUES = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
KEYS = [uuid.UUID(int=i).hex for i in range(ROWS)]


def ours_write(folder: Path) -> None:
    store = Store(folder)
    for i in range(0, ROWS, PART_ROWS):
        store.write(KEYS[i : i + PART_ROWS], {CELL: VALUES[i : i + PART_ROWS]})


def ours_read(folder: Path) -> np.ndarray:
    return Store(folder).read(KEYS, CELL)


def rival_write(folder: Path) -> None:
    with h5py.File(folder / "rows.h5", "w") as file:
        file["keys"] = np.array(KEYS, "S")
        file.create_dataset("values", data=VALUES, chunks=(CHUNK, WIDTH), fletcher32=True)
    with open(folder / "rows.h5", "rb+") as written:
        os.fsync(written.fileno())


def rival_read(folder: Path) -> np.ndarray:
    with h5py.File(folder / "rows.h5", "r") as file:
        file["keys"][()]
        return file["values"][()]


def main() -> None:
    write, read = {"ours": ours_write, "rival": rival_write}, {"ours": ours_read, "rival": rival_read}
    writing, reading = ({"ours": list[float](), "rival": list[float]()} for _ in range(2))
    for i in range(-1, PAIRS):  # round -1 warms up
        with tempfile.TemporaryDirectory() as folder:
            places = {who: Path(folder, who) for who in write}
            for place in places.values():
                place.mkdir()
            wrote = rounds({who: lambda who=who: timed(lambda: write[who](places[who])) for who in write}, 1, i)
            found = rounds({who: lambda who=who: timed(lambda: read[who](places[who])) for who in read}, READS, i)
            assert all(np.array_equal(read[who](places[who]), VALUES) for who in read)
        if i >= 0:
            for who in write:
                writing[who] += wrote[who]
                reading[who].append(min(found[who]))
    rows = []
    for name, seconds in (("write", writing), ("read", reading)):
        speeds = {f"{who} rows/s": f"{ROWS / statistics.median(seconds[who]):,.0f}" for who in seconds}
        rows.append({f"{ROWS:,} x {WIDTH}": name, **speeds, **ratio(seconds["rival"], seconds["ours"], TARGET)})
    print(tabulate(rows, headers="keys", disable_numparse=True))


if __name__ == "__main__":
    main()
