"""Embeddings on disk: `<store>/<encoder>-<fingerprint>/part-<uuid>.h5`. The only file that imports h5py.

Parts are immutable: written as `.tmp-<uuid>.h5`, closed, synced, renamed, and never opened for writing again. So any
number of processes read and write one store without a lock. In a part: /keys [N] and /taps/<tap>/<readout> [N,D]
float32 in chunks of 256 rows, checksummed. Two parts that hold one key hold the same row; the first by name counts.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from probing.files import read_json, whole, write_json
from probing.types import Tap, digest

Cell = tuple[Tap, str]  # a tap and a readout
CHUNK = 256


class Store:
    """The rows of one encoder. `folder` need not exist; reading an absent store finds nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: dict[str, tuple[list[str], dict[str, str]]] = {}  # part name -> keys, cell name -> definition

    def refresh(self) -> None:
        """Look for parts that other processes have added."""
        for path in sorted(self.folder.glob("part-*.h5")):
            if path.name not in self._parts:
                with _open(path) as part:
                    keys = [k.decode() for k in part["keys"][()]]
                    cells = {f"{t}/{r}": group.attrs["definition"] for t, group in part["taps"].items() for r in group}
                self._parts[path.name] = (keys, cells)

    def where(self, cell: Cell) -> dict[str, tuple[str, int]]:
        """Key -> (part, row) of every row of a cell."""
        found: dict[str, tuple[str, int]] = {}
        for name in sorted(self._parts):
            keys, cells = self._parts[name]
            if cells.get(_name(cell)) == cell[0].definition:
                for row, key in enumerate(keys):
                    found.setdefault(key, (name, row))
        return found

    def missing(self, keys: Sequence[str], cells: Sequence[Cell]) -> tuple[list[str], list[Cell]]:
        """The keys that lack a row in any of the cells, and the cells that lack any of the keys."""
        self.refresh()
        have = {c: self.where(c) for c in cells}
        absent = [k for k in dict.fromkeys(keys) if any(k not in have[c] for c in cells)]
        return absent, [c for c in cells if any(k not in have[c] for k in absent)]

    def read(self, keys: Sequence[str], cell: Cell) -> np.ndarray:
        """[N,D] float32: the rows of `keys`, in their order. Raises KeyError for a key that is not there."""
        self.refresh()
        where = self.where(cell)
        by_part: dict[str, list[tuple[int, int]]] = {}
        for i, key in enumerate(keys):
            part, row = where[key]
            by_part.setdefault(part, []).append((i, row))
        out: np.ndarray | None = None
        for name, places in by_part.items():
            with _open(self.folder / name) as part:
                data = part[f"taps/{_name(cell)}"]
                if out is None:
                    out = np.empty((len(keys), data.shape[1]), np.float32)
                to, rows = np.array(places).T
                if len(rows) == len(data) and (rows == np.arange(len(data))).all() and (np.diff(to) == 1).all():
                    data.read_direct(out, dest_sel=np.s_[to[0] : to[-1] + 1])  # a whole part in order: no copy
                else:
                    out[to] = data[()][rows]
        return out if out is not None else np.empty((0, 0), np.float32)

    def write(self, keys: Sequence[str], values: Mapping[Cell, np.ndarray], prefix: str = "part") -> Path:
        """Add one part: keys [N] and, per cell, values [N,D]. On any failure nothing is left behind."""
        final = self.folder / f"{prefix}-{uuid.uuid4().hex}.h5"
        # Built in memory and written by one plain write: HDF5 itself does not survive a disk that fills up.
        with h5py.File(final, "w", driver="core", backing_store=False, block_size=1 << 20) as part:
            part["keys"] = np.array([k.encode() for k in keys])
            for (tap, readout), rows in values.items():
                group = part.require_group(f"taps/{tap.name}")
                group.attrs["definition"] = tap.definition
                group.create_dataset(readout, data=rows, chunks=(min(CHUNK, len(rows)), rows.shape[1]), fletcher32=True)
            part.flush()
            image = part.id.get_file_image()
        with whole(final) as temporary:
            temporary.write_bytes(image)
        return final

    def card(self) -> dict[str, Any]:
        """encoder.json: name, fingerprint, batch size and the specs that led here; empty if there is none."""
        path = self.folder / "encoder.json"
        return read_json(path) if path.exists() else {}

    def write_card(self, card: Mapping[str, Any]) -> None:
        write_json(self.folder / "encoder.json", card)

    def empty(self) -> bool:
        """Whether nothing was ever written here, not even canaries."""
        return not any(self.folder.glob("canary-*.h5")) and not any(self.folder.glob("part-*.h5"))

    def canary_difference(self, rows: Mapping[Cell, np.ndarray]) -> float:
        """Largest difference of canary rows from the kept ones, as a share of the largest value; infinite if none of
        them can be compared."""
        worst, shared = 0.0, 0
        for path in self.folder.glob("canary-*.h5"):
            with _open(path) as part:
                for (tap, readout), new in rows.items():
                    group = part["taps"].get(tap.name)
                    if group is not None and group.attrs["definition"] == tap.definition:
                        shared += 1
                        difference = np.abs(group[readout][()] - new).max() / max(np.abs(new).max(), 1e-12)
                        worst = float(np.maximum(worst, difference))  # keeps NaN
        return worst if shared and np.isfinite(worst) else float("inf")


def find(root: Path, name: str, spec: str, versions: str | None) -> Store | None:
    """The store that an encoder's spec led to before, so that its weights need not be read again.

    `versions` must be among those that its canaries vouch for; None takes any.
    """
    for path in sorted(root.glob(f"{name}-*/encoder.json")):
        card = read_json(path, "specs", "versions")
        if spec in card["specs"] and (versions is None or versions in card["versions"]):
            return Store(path.parent)
    return None


def versions() -> str:
    """Digest of the versions of the libraries that decide what a row is."""
    return digest({p: importlib.metadata.version(p) for p in ("torch", "torchvision", "timm", "pillow", "numpy")})[:8]


def _name(cell: Cell) -> str:
    return f"{cell[0].name}/{cell[1]}"


@contextmanager
def _open(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as part:
            yield part
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:  # h5py raises any of these on damage
        raise OSError(
            f"{path}: this part of the store can not be read ({error}). Remove it and launch again: its rows are embedded anew"
        ) from error
