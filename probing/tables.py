"""Tables that people bring: CSV, TSV, JSONL (each also .gz), parquet, xlsx."""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet", ".xlsx")
MISSING = ("", "nan", "na", "n/a", "none", "null", "<na>")  # a cell that says so has no value


def root_of(path: str, option: str = "images.path") -> Path:
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"{option}={path}: there is no such file or folder")
    return root


def is_missing(value: Any) -> bool:
    return value is None or str(value).strip().lower() in MISSING


def read_table(path: str, option: str) -> pandas.DataFrame:
    """A CSV, TSV, JSONL (each also .gz), parquet or xlsx file. Names of columns are trimmed; cells of CSV, TSV and xlsx
    are text. Raises ValueError that names the file."""
    import pandas

    file = root_of(path, option)
    name = file.name.lower().removesuffix(".gz")
    try:
        if name.endswith((".csv", ".tsv")):
            table = pandas.read_csv(file, sep=_separator(file), dtype=str, keep_default_na=False, encoding="utf-8-sig")
        elif name.endswith(".jsonl"):
            table = pandas.read_json(file, lines=True, dtype=False)
        elif name.endswith(".parquet"):
            import pyarrow.parquet

            schema = pyarrow.parquet.read_schema(file)
            plain = [c.name for c in schema if not holds_bytes(c.type)]
            table = pandas.read_parquet(file, columns=plain)
        elif name.endswith(".xlsx"):
            table = pandas.read_excel(file, dtype=str, keep_default_na=False)
        else:
            raise ValueError(f"tables end in {' '.join(ENDINGS)}")
    except ImportError as error:
        raise ValueError(f"{option}={path}: reading it needs pip install 'vision-probing[tables]' ({error})") from error
    except Exception as error:  # a broken table makes readers raise nearly anything
        raise ValueError(f"{option}={path}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    table.columns = [str(c).strip() for c in table.columns]
    if twice := [c for c, n in Counter(table.columns).items() if n > 1]:
        raise ValueError(f"{option}={path}: two columns are called {twice[0]!r}")
    return table


def _separator(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8-sig") if path.name.endswith(".gz") else open(path, encoding="utf-8-sig") as file:
        head = file.readline(1 << 16)
    return max(",\t;", key=head.count)


def holds_bytes(kind: Any) -> bool:
    """Whether a column of parquet holds files: bytes, or a struct with them."""
    import pyarrow

    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) or pyarrow.types.is_struct(kind)


def rows_of(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """One mapping per row: text or number per column, an empty text where there is no value."""
    rows = []
    for row in table.to_dict("records"):
        rows.append({str(c): _cell(v) for c, v in row.items()})
    return rows


def _cell(value: Any) -> str | float:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return value if value == value else ""
    return "" if value is None or value is not value or str(value) in ("NaT", "<NA>") else str(value).strip()


def stamp_of(path: str | None) -> list[Any]:
    """What says whether a table has changed: its bytes."""
    return [] if path is None else [hashlib.sha256(root_of(path).read_bytes()).hexdigest()]
