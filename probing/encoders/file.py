"""Embeddings that were extracted elsewhere: an npz, HDF5 or parquet file with ids and arrays.

python probe.py encoder=file encoder.path=features.npz images=table images.path=labels.csv images.image=null images.id=image task=column task.column=label
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from probing.store import read_arrays
from probing.tables import root_of
from probing.types import Arrays, Tap, digest


def load(*, name: str, path: str, taps: tuple[Tap, ...], ids: str = "ids", counts: str = "tokens") -> Arrays:
    """Rows by the id of a sample.

    A tap's `path` names its array: [N,D] (layout vector), or tokens (layout tokens) as [N,L,D], or flat as
    [sum of L, D] or [N] rows of L x D numbers beside `counts` [N], the number of tokens of each image. ids: the array
    with the ids [N]. Raises ValueError for a file without these arrays, with the arrays there are, for two rows with
    one id, and for shapes that do not fit.
    """
    file = root_of(path, "encoder.path")
    try:
        found = _arrays(file)
    except Exception as error:  # a broken file makes readers raise nearly anything
        raise ValueError(f"encoder.path={path}: it can not be read ({error})") from error
    wanted = [ids, *dict.fromkeys(t.path for t in taps)]
    if missing := [w for w in wanted if w not in found]:
        raise ValueError(
            f"encoder.path={path}: it has no array {missing[0]!r}. There are: {', '.join(sorted(found))}. "
            f"Type encoder.ids=NAME, or 'encoder.taps.{taps[0].name}.path=NAME'"
        )
    names = [v.decode() if isinstance(v, bytes) else str(v) for v in found[ids].tolist()]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"encoder.path={path}: two rows have the id {twice!r}")
    values = {t.name: _rows(found[t.path], found.get(counts), t, len(names), path) for t in taps}
    with open(file, "rb") as opened:
        mark = digest(hashlib.file_digest(opened, "sha256").hexdigest(), ids, counts)[:16]
    return Arrays(name, tuple(names), values, taps, mark)


def _arrays(file: Path) -> Mapping[str, np.ndarray]:
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as opened:
            return {k: opened[k] for k in opened.files}
    if file.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(file)
        return {c: _column(table.column(c).to_pylist()) for c in table.column_names}
    if file.suffix in (".h5", ".hdf5"):
        return read_arrays(file)
    raise ValueError("embeddings end in .npz, .h5, .hdf5 or .parquet")


def _column(cells: Sequence[Any]) -> np.ndarray:
    if cells and isinstance(cells[0], list) and len({len(c) for c in cells}) > 1:  # tokens, as many as there are
        out = np.empty(len(cells), object)
        out[:] = [np.asarray(c, np.float32) for c in cells]
        return out
    return np.array(cells)


def _rows(array: np.ndarray, counts: np.ndarray | None, tap: Tap, many: int, path: str) -> Sequence[np.ndarray]:
    """One [D] or [L,D] per id."""
    where = f"encoder.path={path}: array {tap.path!r} of shape {array.shape}"
    if tap.layout == "vector" and array.ndim == 2 and len(array) == many:
        return list(array)
    if tap.layout == "tokens" and array.ndim == 3 and len(array) == many:
        return list(array)
    if tap.layout == "tokens" and counts is not None and len(counts) == many:
        if array.ndim == 2 and len(array) == counts.sum():
            return np.split(array, np.cumsum(counts)[:-1])
        if (
            array.ndim == 1
            and len(array) == many
            and array.dtype == object
            and all(len(r) % c == 0 for r, c in zip(array, counts, strict=True))
        ):
            return [np.reshape(r, (c, -1)) for r, c in zip(array, counts, strict=True)]
    raise ValueError(f"{where} does not fit {many} ids as layout {tap.layout}")
