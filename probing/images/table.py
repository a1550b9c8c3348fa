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
from probing.tables import Cell, holds_bytes, is_missing, lacking, read_table, root_of, stamp_of
from probing.types import Sample, View

log = logging.getLogger("probing")
NO_PICTURES = "For rows without pictures type images.image=null images.id=COLUMN"


def load(
    *, name: str, path: str, image: str | None = "image", root: str | None = None, id: str | None = None, window: Any = None
) -> list[Sample]:
    """One sample per row. Every column of the table is a column of the sample.

    image: the column with the file, relative to `root` (a folder or a zip file; by default the table's folder), or the
    column of a parquet table that holds the bytes; null for rows without pictures. id: the column that names a row; by
    default `image`. Equal rows count once. Raises ValueError for an unknown column, two different rows with one id,
    a file that lies outside `root`, and when not one file is there.
    """
    table = read_table(path, "images.path")
    table.note(Path(path).name)
    file = root_of(path)
    stored = _stored(file, image)
    for option, column in (("image", None if stored else image), ("id", id)):
        if column is not None and column not in table.columns:
            raise lacking(f"images.{option}", column, table.columns, NO_PICTURES)
    if image is None and id is None:
        raise ValueError(
            f"images.image=null: rows without pictures need names. Type images.id= one of {', '.join(table.columns)}"
        )
    place = root_of(root, "images.root") if root else file.parent
    named = image is not None and not stored  # pictures lie in files
    seen: dict[str, Mapping[str, Cell]] = {}
    samples, repeated, empty = [], 0, []
    for number, row in enumerate(table.rows):
        key = f"row {number}" if stored and id is None else str(row[id or str(image)])
        if is_missing(key) or (named and is_missing(row[str(image)])):
            empty.append(number + 2)  # as a spreadsheet counts, below the header
        elif key not in seen:
            seen[key] = row
            view = _view(key, row, number, image, stored, place, file, window)
            samples.append(Sample(key, (view,), key, key, meta=row))
        elif seen[key] == row and not stored:  # of stored pictures only the plain columns are compared
            repeated += 1
        else:
            differ = ", ".join(c for c in row if row[c] != seen[key][c])
            raise ValueError(
                f"images.path={path}: two rows are called {key!r} and differ in {differ}. Type images.id=COLUMN if another column names the rows"
            )
    if empty:
        log.warning(f"{len(empty):,} rows name no image and are left out: rows {', '.join(map(str, empty[:5]))}")
    if repeated:
        log.warning(f"{repeated:,} rows repeat another row; each image is used once")
    if not samples:
        raise ValueError(f"images.path={path}: not one of {len(table.rows):,} rows has a value in {id or image}")
    if named and place.is_dir() and not any(s.views[0].path.exists() for s in samples):
        raise ValueError(
            f"images.image={image}: none of {len(samples):,} files is below {place}, as {samples[0].views[0].name}. "
            "Type images.root= the folder or zip file that they are relative to"
        )
    return samples


def stamp(*, path: str, image: str | None = "image", root: str | None = None, **_: Any) -> list[Any]:
    """The table's bytes; size and time of every file that it names."""
    file = root_of(path)
    place = root_of(root, "images.root") if root else file.parent
    if image is None or _stored(file, image):
        return stamp_of(path)
    if place.is_file():
        return [*stamp_of(path), *sizes(place.parent, [place.name])]
    named = (row.get(image, "") for row in read_table(path, "images.path").rows)
    return [*stamp_of(path), *sizes(place, sorted({_relative(str(n), place) for n in named if not is_missing(n)}))]


def _stored(path: Path, image: str | None) -> bool:
    """Whether `image` is a column of a parquet table that holds bytes."""
    if image is None or path.suffix.lower() != ".parquet":
        return False
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(path)
    except (OSError, ValueError):  # read_table says what is wrong with it
        return False
    return image in schema.names and holds_bytes(schema.field(image).type)


def _relative(file: str, place: Path) -> str:
    """A file as the table has it -> its path relative to `place`, with slashes."""
    file = file.replace("\\", "/")  # tables made on Windows
    if file.startswith("/") and place.is_dir():
        for top in (place.absolute(), place.resolve()):
            if Path(file).is_relative_to(top):
                return Path(file).relative_to(top).as_posix()
    return file.removeprefix("./")


def _view(
    key: str, row: Mapping[str, Cell], number: int, image: str | None, stored: bool, place: Path, table: Path, window: Any
) -> View:
    if image is None:
        return View(table, key, decode=("none", 1))
    if stored:
        return View(table, key, member=f"{image}:{number}")
    file = _relative(str(row[image]), place)
    if leaves(file):
        raise ValueError(
            f"{file}: lies outside {place}, which is refused. If it is meant type images.root= a folder that holds it"
        )
    policy: tuple[str | int | float, ...] = ("pillow", 1)
    if file.lower().endswith((".dcm", ".dicom")):
        policy = ("dicom", 1, *(window_of(window) or ()))
    if place.is_file():
        return View(place, file, decode=policy, member=file)
    return View(place / file, file, decode=policy)
