"""Pictures that the rows of a table name, or hold (parquet); or rows without pictures, for encoder=file.

python probe.py images=table images.path=frames.csv images.image=file images.group=[patient,video] task=column task.column=paris_type
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probing.collect import leaves, sizes
from probing.decode import window_of
from probing.tables import holds_bytes, is_missing, read_table, root_of, rows_of, stamp_of
from probing.types import Sample, View

log = logging.getLogger("probing")


def load(
    *, name: str, path: str, image: str | None = "image", root: str | None = None, id: str | None = None, window: Any = None
) -> list[Sample]:
    """One sample per row. Every column of the table is a column of the sample.

    image: the column with the file, relative to `root` (a folder or a zip file; by default the table's folder), or the
    column of a parquet table that holds the bytes; null for rows without pictures. id: the column that names a row; by
    default `image`. Equal rows count once. Raises ValueError for an unknown column, two different rows with one id,
    and a file that lies outside `root`.
    """
    table = read_table(path, "images.path")
    stored = _stored(Path(path).expanduser(), image)
    for option, column in (("image", None if stored else image), ("id", id)):
        if column is not None and column not in table.columns:
            raise ValueError(
                f"images.{option}={column}: there is no such column. There are: {', '.join(table.columns)}. "
                "For rows without pictures type images.image=null images.id=COLUMN"
            )
    if image is None and id is None:
        raise ValueError(
            f"images.image=null: rows without pictures need names. Type images.id= one of {', '.join(table.columns)}"
        )
    place = root_of(root, "images.root") if root else root_of(path).parent
    seen: dict[str, Mapping[str, Any]] = {}
    samples, repeated, empty = [], 0, []
    for number, row in enumerate(rows_of(table)):
        key = f"row {number}" if stored and id is None else str(row[id or str(image)])
        if is_missing(key):
            empty.append(number + 2)  # as a spreadsheet counts, below the header
        elif key not in seen:
            seen[key] = row
            samples.append(
                Sample(key, (_view(key, row, number, image, stored, place, root_of(path), window),), key, key, meta=row)
            )
        elif seen[key] == row:
            repeated += 1
        else:
            differ = [c for c in row if row[c] != seen[key][c]]
            raise ValueError(
                f"images.path={path}: two rows are called {key!r} and differ in {', '.join(differ)}. Type images.id=COLUMN if another column names the rows"
            )
    if empty:
        log.warning(f"{len(empty)} rows name no image and are left out: rows {', '.join(map(str, empty[:5]))}")
    if repeated:
        log.warning(f"{repeated} rows repeat another row; each image is used once")
    if not samples:
        raise ValueError(f"images.path={path}: the table has no row that names an image")
    _note_split(samples)
    return samples


def stamp(*, path: str, image: str | None = "image", root: str | None = None, **_: Any) -> list[Any]:
    """The table's bytes; size and time of every file that it names."""
    names: set[str] = set()
    if image is not None and not _stored(Path(path).expanduser(), image):
        table = read_table(path, "images.path")
        names = {str(v) for v in table[image]} if image in table.columns else set()
    place = root_of(root, "images.root") if root else root_of(path).parent
    files = sizes(place.parent, [place.name]) if place.is_file() else sizes(place, sorted(names))
    return [*stamp_of(path), *map(list, files)]


def _stored(path: Path, image: str | None) -> bool:
    """Whether `image` is a column of a parquet table that holds bytes."""
    if image is None or path.suffix.lower() != ".parquet" or not path.exists():
        return False
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(path)
    return image in schema.names and holds_bytes(schema.field(image).type)


def _view(
    key: str, row: Mapping[str, Any], number: int, image: str | None, stored: bool, place: Path, table: Path, window: Any
) -> View:
    if image is None:
        return View(table, key, decode=("none", 1))
    if stored:
        return View(table, key, member=f"{image}:{number}")
    file = str(row[image])
    if Path(file).is_absolute() and place.is_dir() and Path(file).is_relative_to(place.resolve()):
        file = Path(file).relative_to(place.resolve()).as_posix()
    if leaves(file):
        raise ValueError(f"{file}: lies outside {place}. If it is meant, type images.root= a folder that holds it")
    policy: tuple[str | int | float, ...] = ("pillow", 1)
    if file.lower().endswith((".dcm", ".dicom")):
        policy = ("dicom", 1, *(window_of(window) or ()))
    if place.is_file():
        return View(place, file, decode=policy, member=file)
    return View(place / file, file, decode=policy)


def _note_split(samples: list[Sample]) -> None:
    if any("split" in s.meta for s in samples):
        log.warning("the column split decides nothing: folds are made of whole groups")
