"""Tables as people have them, in every format, and what is said about those that can not be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing.tables import ENDINGS, Table, is_missing, lacking, read_table, stamp_of

COLUMNS = ("file", "patient", "type", "age")
ROWS: list[dict[str, Any]] = [
    {"file": "a/0.png", "patient": "007", "type": "0-IIa", "age": 61},
    {"file": "b, c/1.png", "patient": "008", "type": 'a "flat" one', "age": 7.5},
    {"file": "ä/2.png", "patient": "009", "type": None, "age": None},
]


def write(folder: Path, ending: str, rows: list[dict[str, Any]] = ROWS) -> str:
    """The same rows in any of the formats."""
    path = folder / f"table{ending}"
    kind = ending.removesuffix(".gz")
    columns = list(rows[0])
    if kind in (".parquet", ".xlsx"):
        import pandas

        frame = pandas.DataFrame(rows)
        frame.to_parquet(path) if kind == ".parquet" else frame.to_excel(path, index=False)
        return str(path)
    if kind == ".jsonl":
        text = "\n".join(json.dumps(row) for row in rows)
    else:
        import csv
        import io

        out = io.StringIO()
        csv.writer(out, delimiter="\t" if kind == ".tsv" else ",").writerows([columns, *([r[c] for c in columns] for r in rows)])
        text = out.getvalue()
    with gzip.open(path, "wb") if ending.endswith(".gz") else open(path, "wb") as file:
        file.write(text.encode())
    return str(path)


def text(tmp_path: Path, content: str, name: str = "t.csv") -> Table:
    path = tmp_path / name
    path.write_bytes(content.encode())
    return read_table(str(path), "images.path")


@pytest.mark.parametrize("ending", ENDINGS)
def test_one_table_in_every_format(ending: str, tmp_path: Path) -> None:
    if ending in (".parquet", ".xlsx"):
        pytest.importorskip("pyarrow" if ending == ".parquet" else "openpyxl")
    found = read_table(write(tmp_path, ending), "images.path")
    assert found.columns == COLUMNS and not found.trimmed
    assert [r["patient"] for r in found.rows] == ["007", "008", "009"], "leading zeros of a text stay"
    assert [r["type"] for r in found.rows] == ["0-IIa", 'a "flat" one', ""]
    assert [r["file"] for r in found.rows] == ["a/0.png", "b, c/1.png", "ä/2.png"]
    assert [float(r["age"]) for r in found.rows if r["age"] != ""] == [61, 7.5] and found.rows[2]["age"] == ""


def test_whole_numbers_stay_whole_beside_empty_cells(tmp_path: Path) -> None:
    """A patient 12 who is called 12.0 in one table finds no partner in another."""
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"patient": pyarrow.array([12, None, 14])}), tmp_path / "t.parquet")
    assert [r["patient"] for r in read_table(str(tmp_path / "t.parquet"), "x").rows] == [12, "", 14]
    lines = '{"patient": 12}\n\n{"other": true}\n'
    assert text(tmp_path, lines, "t.jsonl").rows == ({"patient": 12, "other": ""}, {"patient": "", "other": "True"})


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_separators_line_ends_and_a_byte_order_mark(separator: str, end: str, mark: str, tmp_path: Path) -> None:
    lines = [separator.join(row) for row in (("file", "side"), ("a.png", "left"), ("b.png", "right"))]
    found = text(tmp_path, mark + end.join(lines) + end + end)
    assert found.rows == ({"file": "a.png", "side": "left"}, {"file": "b.png", "side": "right"})


def test_spaces_are_taken_off_and_counted(tmp_path: Path) -> None:
    found = text(tmp_path, "file , side\na.png, left\nb.png,left\nc.png,  \n d.png,right \n")
    assert found.columns == ("file", "side") and [r["side"] for r in found.rows] == ["left", "left", "", "right"]
    assert found.trimmed == {"side": 2, "file": 1}


def test_a_short_row_is_filled_and_a_column_without_a_name_has_one(tmp_path: Path) -> None:
    found = text(tmp_path, ",file,side\n0,a.png,left\n1,b.png\n")
    assert found.columns == ("column 1", "file", "side") and found.rows[1] == {"column 1": "1", "file": "b.png", "side": ""}


@given(
    st.lists(
        st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")), min_size=2, max_size=2),
        min_size=1,
    )
)
def test_what_a_csv_writer_writes_is_read(tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]]) -> None:
    import csv

    path = tmp_path_factory.mktemp("t") / "t.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["one", "two"], *cells])
    assert [tuple(r.values()) for r in read_table(str(path), "x").rows] == [tuple(c.strip() for c in row) for row in cells]


@pytest.mark.parametrize("value", ["", "  ", "NaN", "nan", "NA", "n/a", "NULL", "null", "<NA>", "None", None, float("nan")])
def test_cells_that_have_no_value(value: Any) -> None:
    assert is_missing(value)


@pytest.mark.parametrize("value", ["none", "no", "0", 0, False, "N", "nano", "unknown"])
def test_cells_that_have_one(value: Any) -> None:
    assert not is_missing(value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", "", "nothing in it"),
        ("t.csv", "file,side\n", "columns but no rows"),
        ("t.csv", "file,side,file\na,b,c\n", "two columns are called file. Rename"),
        ("t.csv", "file,side\na,b\nc,d,e\n", "line 3 has 3 cells, and there are 2 columns"),
        ("t.csv", "file,side\na,\xe4\n", "no UTF-8 text"),
        ("t.csv.gz", "file,side\na,b\n", "BadGzipFile"),
        ("t.jsonl", '{"file": 1}\n{"file"\n', "line 2 is no JSON"),
        ("t.jsonl", "[1]\n", "line 1 is no mapping"),
        ("t.parquet", "file", "t.parquet"),
        ("t.xlsx", "file", "t.xlsx"),
        ("t.txt", "file", "tables end in .csv"),
    ],
)
def test_a_table_that_can_not_be_read(name: str, content: str, said: str, tmp_path: Path) -> None:
    if name in ("t.parquet", "t.xlsx"):
        pytest.importorskip("pyarrow" if name == "t.parquet" else "openpyxl")
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match="images.path=.*" + said) as refusal:
        read_table(str(path), "images.path")
    assert "\n" not in str(refusal.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"images.labels=.*no such file"):
        read_table(str(tmp_path / "t.csv"), "images.labels")


def test_an_unknown_column_is_answered_with_the_nearest() -> None:
    said = str(lacking("images.key", "dicomid", ["dicom_id", "subject_id"], "Type it"))
    assert (
        said
        == "images.key=dicomid: there is no such column. Did you mean images.key=dicom_id? There are: dicom_id, subject_id. Type it"
    )
    assert "…" in str(lacking("x", "y", map(str, range(100)))) and "Did you" not in str(lacking("x", None, ["abc"]))


def test_the_stamp_is_the_content(tmp_path: Path) -> None:
    before = stamp_of(write(tmp_path, ".csv"))
    (tmp_path / "other").mkdir()
    assert stamp_of(write(tmp_path / "other", ".csv")) == before and stamp_of(None) == []
    assert stamp_of(write(tmp_path, ".csv", ROWS[:2])) != before
