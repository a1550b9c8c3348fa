"""Tables that people bring: CSV, TSV, JSONL (each also .gz), parquet, xlsx."""

from __future__ import annotations

import contextlib
import csv
import difflib
import gzip
import hashlib
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("probing")
Cell = str | float  # a whole number stays an int
ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet", ".xlsx")
MISSING = ("", "nan", "na", "n/a", "#n/a", "null", "<na>")  # in any case; `none` is a class, `None` is what Python writes


@dataclass(frozen=True)
class Table:
    """Rows of a table, column -> cell: text without spaces around it, or a number; an empty text where there is no value.
    `trimmed` counts the cells of each column that had spaces around them."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    trimmed: Mapping[str, int]

    def note(self, name: str) -> None:
        """Say how many cells were not taken as they stand."""
        if self.trimmed:
            columns = ", ".join(f"{c} ({n:,})" for c, n in self.trimmed.items())
            log.warning(f"{name}: spaces around {sum(self.trimmed.values()):,} cells are taken off: {columns}")


def root_of(path: str, option: str = "images.path") -> Path:
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"{option}={path}: there is no such file or folder")
    return root


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: empty, NaN, NA, N/A, null in any case, or None."""
    return value is None or (text := str(value).strip()) == "None" or text.lower() in MISSING


def lacking(option: str, column: Any, columns: Iterable[str], advice: str = "") -> ValueError:
    """The error for a column that is not there: the nearest one, all there are, what to type."""
    there = list(dict.fromkeys(columns))
    close = difflib.get_close_matches(str(column), there, 1)
    hint = f" Did you mean {option}={close[0]}?" if close else ""
    shown = ", ".join(there[:40]) + (", …" if len(there) > 40 else "")
    asked = "" if column is None else column
    return ValueError(f"{option}={asked}: there is no such column.{hint} There are: {shown or 'none'}{advice and f'. {advice}'}")


def read_table(path: str, option: str) -> Table:
    """A CSV, TSV, JSONL (each also .gz), parquet or xlsx file; of xlsx the first sheet, of parquet the columns that hold
    plain values. Raises ValueError that names the file."""
    file = root_of(path, option)
    name = file.name.lower().removesuffix(".gz")
    reader = next((r for end, r in _READERS.items() if name.endswith(end)), None)
    try:
        if reader is None:
            raise ValueError(f"tables end in {' '.join(ENDINGS)}")
        header, body = reader(file)
        columns = _named(header)
        if twice := [c for c, n in Counter(columns).items() if n > 1]:
            raise ValueError(f"two columns are called {' and two '.join(twice[:5])}. Rename one in the table")
        rows, trimmed = _cleaned(columns, body)
    except ImportError as error:
        raise ValueError(f"{option}={path}: reading it needs pip install 'vision-probing[tables]' ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}={path}: it is no UTF-8 text ({error.reason}). Save the table as CSV UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{option}={path}: {str(error).splitlines()[0]}") from error
    except Exception as error:  # a broken table makes readers raise nearly anything
        said = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{option}={path}: {type(error).__name__}: {said}") from error
    if not rows:
        raise ValueError(f"{option}={path}: the table has {'columns but no rows' if columns else 'nothing in it'}")
    return Table(columns, rows, trimmed)


def _named(header: Sequence[Any]) -> tuple[str, ...]:
    """Names of columns, trimmed; one without a name is called by its place."""
    names = ["" if h is None else str(h).strip() for h in header]
    return tuple(n or f"column {i + 1}" for i, n in enumerate(names)) if any(names) else ()


def _cleaned(columns: Sequence[str], body: Iterable[Sequence[Any]]) -> tuple[tuple[Mapping[str, Cell], ...], Mapping[str, int]]:
    rows, trimmed = [], Counter[str]()
    for row in body:
        cells: dict[str, Cell] = {}
        for column, value in zip(columns, row, strict=True):
            if type(value) is str:
                if value[:1].isspace() or value[-1:].isspace():
                    value = value.strip()
                    trimmed[column] += bool(value)  # a cell of nothing but spaces is an empty one
                cells[column] = value
            else:
                cells[column] = _cell(value)
        rows.append(cells)
    return tuple(rows), dict(trimmed)


def _cell(value: Any) -> Cell:
    if value is None or value != value:  # NaN and NaT are not even equal to themselves
        return ""
    return value if type(value) in (int, float) else str(value).strip()


# --- one reader for each ending: path -> header, rows of as many cells ---------------------------------------------

Read = tuple[Sequence[Any], Iterator[Sequence[Any]]]


def _text(path: Path) -> TextIO:
    plain = gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")  # noqa: SIM115
    return io.TextIOWrapper(plain, encoding="utf-8-sig", newline="")  # type: ignore[arg-type]


def _separated(path: Path) -> Read:
    with _text(path) as file:
        head = file.readline(1 << 20)
    separator = max(",\t;|", key=head.count)
    file = _text(path)
    lines = csv.reader(file, delimiter=separator)
    header: list[str] = next(lines, [])

    def body() -> Iterator[Sequence[str]]:
        with contextlib.closing(file):
            for row in lines:
                if len(row) > len(header):
                    raise ValueError(f"line {lines.line_num} has {len(row)} cells, and there are {len(header)} columns")
                if row:
                    yield row if len(row) == len(header) else [*row, *[""] * (len(header) - len(row))]

    return header, body()


def _jsonl(path: Path) -> Read:
    rows: list[dict[str, Any]] = []
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON ({error})") from error
            if isinstance(row, dict):
                rows.append(row)
            elif row is not None:
                raise ValueError(f"line {number} is no mapping of column to value")
    columns = list(dict.fromkeys(c for row in rows for c in row))
    return columns, ([row.get(c) for c in columns] for row in rows)


def _parquet(path: Path) -> Read:
    import pyarrow.parquet
    from pyarrow import types

    schema = pyarrow.parquet.read_schema(path)
    kept = [f.name for f in schema if not (holds_bytes(f.type) or types.is_nested(f.type) or f.name.startswith("__index_level_"))]
    if not kept:  # nothing but pictures
        return ["row"], ((i,) for i in range(pyarrow.parquet.read_metadata(path).num_rows))
    table = pyarrow.parquet.read_table(path, columns=kept)
    return kept, zip(*(column.to_pylist() for column in table.columns), strict=True)


def _xlsx(path: Path) -> Read:
    import openpyxl

    with contextlib.closing(openpyxl.load_workbook(path, read_only=True, data_only=True)) as book:
        rows = [list(row) for row in book.worksheets[0].iter_rows(values_only=True)]
    rows = [row for row in rows if any(v is not None for v in row)]
    header = rows[0] if rows else []
    while header and header[-1] is None and all(row[len(header) - 1 :] in ([], [None]) for row in rows):
        header = header[:-1]  # formatted cells beside the table
    return header, ([*row[: len(header)], *[None] * (len(header) - len(row))] for row in rows[1:])


_READERS = {".csv": _separated, ".tsv": _separated, ".jsonl": _jsonl, ".parquet": _parquet, ".xlsx": _xlsx}


def holds_bytes(kind: Any) -> bool:
    """Whether a column of parquet holds files: bytes, or a struct with them."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(holds_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def stamp_of(path: str | None) -> list[Any]:
    """What says whether a table has changed: its bytes."""
    if path is None:
        return []
    with open(root_of(path, "images.labels"), "rb") as file:
        return [hashlib.file_digest(file, "sha256").hexdigest()]
