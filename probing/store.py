"""Embeddings on disk: `<store>/<encoder>-<fingerprint>/part-<uuid>.h5`. The only file that imports h5py.

Parts are immutable: written as `.tmp-<uuid>.h5`, closed, synced, renamed, and never opened for writing again. So any
number of processes read and write one store without a lock. In a part: /keys [N] and /taps/<tap>/<readout> [N,D]
float32 in chunks of 256 rows, checksummed. Two parts that hold one key hold the same row; which is read depends on
their names alone.
"""

from __future__ import annotations

import importlib.metadata
import io
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
        self._parts: dict[str, tuple[np.ndarray, dict[tuple[str, str], int]]] = {}  # part -> keys, (cell, definition) -> width

    def refresh(self) -> None:
        """Look for parts that other processes have added."""
        for path in sorted(self.folder.glob("part-*.h5")):
            if path.name not in self._parts:
                with _open(path) as part:
                    cells = {
                        (f"{tap}/{readout}", group.attrs["definition"]): rows.shape[1]
                        for tap, group in part["taps"].items()
                        for readout, rows in group.items()
                    }
                    self._parts[path.name] = (part["keys"][()], cells)

    def _holding(self, cell: Cell) -> list[tuple[Path, np.ndarray, int]]:
        """File, keys and width of the parts that hold a cell, in the order of their names."""
        asked = (_name(cell), cell[0].definition)
        return [(self.folder / n, keys, cells[asked]) for n, (keys, cells) in sorted(self._parts.items()) if asked in cells]

    def missing(self, keys: Sequence[str], cells: Sequence[Cell]) -> tuple[list[str], list[Cell]]:
        """The keys that lack a row in any of the cells, and the cells that lack any of the keys."""
        self.refresh()
        lacking = {}
        for cell in cells:
            have = set().union(*(held.tolist() for _, held, _ in self._holding(cell)))
            lacking[cell] = {k for k in keys if k.encode() not in have}
        absent = set().union(*lacking.values())
        return [k for k in dict.fromkeys(keys) if k in absent], [c for c in cells if lacking[c]]

    def read(self, keys: Sequence[str], cell: Cell) -> np.ndarray:
        """[N,D] float32: the rows of `keys`, in their order. Raises KeyError for a key that is not there."""
        self.refresh()
        parts = self._holding(cell)
        starts = np.cumsum([0, *(len(held) for _, held, _ in parts)])
        rows = _rows(np.array(keys, "S"), [held for _, held, _ in parts])
        number = np.searchsorted(starts, rows, "right") - 1
        order = np.argsort(number, kind="stable")
        out = np.empty((len(keys), parts[0][2] if parts else 0), np.float32)
        for to in np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(keys) else ():
            which = number[to[0]]
            source = rows[to] - starts[which]
            with _open(parts[which][0]) as part:
                data = part[f"taps/{_name(cell)}"]
                if (np.diff(source) == 1).all() and (np.diff(to) == 1).all():  # a run of rows in order: no copy
                    data.read_direct(out[to[0] : to[-1] + 1], np.s_[source[0] : source[-1] + 1])
                else:
                    out[to] = data[()][source]
        return out

    def write(self, keys: Sequence[str], values: Mapping[Cell, np.ndarray], prefix: str = "part") -> Path:
        """Add one part: keys [N] and, per cell, values [N,D]. On any failure nothing is left behind."""
        final = self.folder / f"{prefix}-{uuid.uuid4().hex}.h5"
        with whole(final) as temporary, _Patient(temporary, "w+") as file:
            try:
                with h5py.File(file, "w") as part:
                    part["keys"] = np.array(keys, "S")
                    for (tap, readout), rows in values.items():
                        group = part.require_group(f"taps/{tap.name}")
                        group.attrs["definition"] = tap.definition
                        group.create_dataset(readout, data=rows, chunks=(min(CHUNK, len(rows)), rows.shape[1]), fletcher32=True)
            finally:
                if file.error is not None:
                    raise file.error
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


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The data sets at the top of an HDF5 file of somebody else's."""
    with h5py.File(path, "r") as file:
        return {name: data[()] for name, data in file.items() if isinstance(data, h5py.Dataset)}


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


def _rows(asked: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Row of each asked key, the rows of all parts counted through. Raises KeyError."""
    starts = np.cumsum([0, *map(len, parts)])
    first = {held[0]: number for number, held in reversed(list(enumerate(parts)))}
    runs: list[np.ndarray] = []
    at = 0
    while at < len(asked) and asked[at] in first:  # mostly asked as they were written, part by part: no dictionary then
        number = first[asked[at]]
        end = at + len(parts[number])
        if not np.array_equal(asked[at:end], parts[number]):
            break
        runs.append(np.arange(starts[number], starts[number + 1]))
        at = end
    if at == len(asked):
        return np.concatenate([np.empty(0, np.int64), *runs])
    row_of: dict[bytes, int] = {}
    for start, held in reversed(list(zip(starts[:-1], parts, strict=True))):
        row_of.update(zip(held.tolist(), range(start, start + len(held)), strict=True))
    return np.fromiter(map(row_of.__getitem__, asked.tolist()), np.int64, len(asked))


class _Patient(io.FileIO):
    """A file that keeps its first error of writing instead of raising it, since HDF5 crashes on a disk that fills up."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return len(data)


@contextmanager
def _open(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as part:
            yield part
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:  # h5py raises any of these on damage
        raise OSError(
            f"{path}: this part of the store can not be read ({error}). Remove it and launch again: its rows are embedded anew"
        ) from error
