"""python tests/speed/storage.py

100,000 x 768 float32, written and read back, on one disk (the temporary folder's; TMPDIR chooses another).

Ours: Store.write in parts of PART_BYTES as `embed` does, each part synced and renamed; then a new Store reads all
keys in the order in which they were written.
Rival: plain h5py, one file, the whole array in one call, with the same chunks and checksums (256 x 768, fletcher32)
and the keys as fixed bytes, synced once at the end; then reads keys and values whole. It need not find rows by key,
which is what a store is for: "read by key" is a rival that also makes a dictionary of its keys and looks all up.
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
from functools import partial
from pathlib import Path

import h5py
import numpy as np
from pairs import ratio, rounds, timed
from tabulate import tabulate

from probing.embed import PART_BYTES
from probing.store import CHUNK, Store
from probing.types import Tap

ROWS, WIDTH, PAIRS, READS, TARGET = 100_000, 768, 7, 3, 0.80
CELL = (Tap("final_norm", "norm", "tokens", ("cls",)), "mean")
VALUES = np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32)
KEYS = [uuid.UUID(int=i).hex for i in range(ROWS)]


def ours_write(folder: Path) -> None:
    store = Store(folder)
    rows = PART_BYTES // VALUES[0].nbytes
    for i in range(0, ROWS, rows):
        store.write(KEYS[i : i + rows], {CELL: VALUES[i : i + rows]})


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


def rival_read_by_key(folder: Path) -> np.ndarray:
    with h5py.File(folder / "rows.h5", "r") as file:
        row_of = {key.decode(): row for row, key in enumerate(file["keys"][()].tolist())}
        rows = np.array([row_of[key] for key in KEYS])
        values = file["values"][()]
    return values if (rows == np.arange(len(values))).all() else values[rows]


WRITE = {"ours": ours_write, "rival": rival_write}
READ = {"ours": ours_read, "rival": rival_read, "rival by key": rival_read_by_key}


def once(number: int) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of one write and of the fastest of three reads. Who goes first alternates with `number`."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {who: Path(temporary, who.split()[0]) for who in READ}
        for who in WRITE:
            folders[who].mkdir()
        writing = rounds({who: partial(timed, partial(call, folders[who])) for who, call in WRITE.items()}, 1, number)
        reading = rounds({who: partial(timed, partial(call, folders[who])) for who, call in READ.items()}, READS, number)
        assert all(np.array_equal(call(folders[who]), VALUES) for who, call in READ.items())
    return {who: min(found) for who, found in writing.items()}, {who: min(found) for who, found in reading.items()}


def main() -> None:
    once(1)  # warm-up
    writing, reading = zip(*(once(i) for i in range(PAIRS)), strict=True)
    rows = []
    for name, found, rival in (
        ("write", writing, "rival"),
        ("read", reading, "rival"),
        ("read by key", reading, "rival by key"),
    ):
        ours, other = ([seconds[who] for seconds in found] for who in ("ours", rival))
        speeds = {f"{who} rows/s": f"{ROWS / statistics.median(s):,.0f}" for who, s in (("ours", ours), ("rival", other))}
        rows.append({f"{ROWS:,} x {WIDTH}": name, **speeds, **ratio(other, ours, TARGET)})
    print(tabulate(rows, headers="keys", disable_numparse=True))


if __name__ == "__main__":
    main()
