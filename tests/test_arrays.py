"""Embeddings that were extracted elsewhere: joined by id, whatever their file, and named when something is wrong."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from probing.encoders import file
from probing.types import Arrays, Tap

Run = Callable[..., dict[str, Any]]
Cli = Callable[..., tuple[int, str, str]]
VECTOR = Tap("features", "embeddings", "vector")
TOKENS = Tap("features", "embeddings", "tokens")
MANY, WIDTH = 48, 8
LABELS = np.arange(MANY) % 2
VALUES = (np.random.default_rng(0).normal(size=(MANY, WIDTH)) + 4 * LABELS[:, None]).astype(np.float32)
IDS = [f"胸 {i:02d}.png" for i in range(MANY)]


def load(path: Path, tap: Tap = VECTOR, **changes: Any) -> Arrays:
    return file.load(name="file", path=str(path), taps=(tap,), **changes)


def written(folder: Path, kind: str, order: np.ndarray, values: np.ndarray = VALUES, ids: list[str] = IDS) -> Path:
    """The rows in the order asked for, in a file of a kind."""
    path = folder / f"rows.{kind}"
    names, rows = [ids[i] for i in order], values[order]
    if kind == "npz":
        np.savez(path, ids=np.array(names), embeddings=rows)
    elif kind == "h5":
        with h5py.File(path, "w") as opened:
            opened["embeddings"] = rows
            opened.create_dataset("ids", data=np.array(names, object), dtype=h5py.string_dtype())
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"ids": names, "embeddings": rows.tolist()}), path)
    return path


def table(folder: Path) -> Path:
    path = folder / "labels.csv"
    with open(path, "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["image", "label", "patient_id"])
        writer.writerows([id, ("left", "right")[LABELS[i]], f"P{i // 4}"] for i, id in enumerate(IDS))
    return path


def asked(folder: Path, rows: Path, *more: str) -> list[str]:
    source = ["images=table", f"images.path={table(folder)}", "images.image=null", "images.id=image", "images.group=patient_id"]
    task = ["task=column", "task.column=label", "probe=knn", "protocol.permutations=19"]
    return ["encoder=file", f"encoder.path={rows}", *source, *task, *more]


@pytest.mark.parametrize("kind", ["npz", "h5", "parquet"])
def test_rows_are_joined_by_id_whatever_their_order(tmp_path: Path, kind: str) -> None:
    found = load(written(tmp_path, kind, np.random.default_rng(1).permutation(MANY)))
    assert sorted(found.ids) == sorted(IDS)
    place = {id: i for i, id in enumerate(found.ids)}
    assert np.array_equal(np.stack([found.values["features"][place[id]] for id in IDS]), VALUES)


def test_a_probe_of_shuffled_rows_finds_what_is_there(cli: Cli, tmp_path: Path) -> None:
    rows = written(tmp_path, "npz", np.random.default_rng(1).permutation(MANY))
    code, out, err = cli(*asked(tmp_path, rows))
    assert code == 0, err
    assert "label is decodable (features, native): balanced accuracy 1.000" in out
    assert "no pixel floor" in out and "48 samples" in out
    code, out, _ = cli(*asked(tmp_path, rows))
    assert code == 0 and "already done" in out


def test_another_content_of_the_file_is_another_run(run: Run, tmp_path: Path) -> None:
    one = run(*asked(tmp_path, written(tmp_path, "npz", np.arange(MANY))))
    noise = np.random.default_rng(5).normal(size=VALUES.shape).astype(np.float32)
    two = run(*asked(tmp_path, written(tmp_path, "npz", np.arange(MANY), noise)))
    assert one["folder"] != two["folder"] and "not confirm" not in one["says"] and "is decodable" not in two["says"]


def test_half_precision_and_long_vectors_keep_their_values(tmp_path: Path, run: Run) -> None:
    import probing

    half = (VALUES * 9000 / np.abs(VALUES).max()).astype(np.float16)
    path = written(tmp_path, "npz", np.arange(MANY), half)
    ids, values = probing.embeddings("file", overrides=[*asked(tmp_path, path)[1:], f"outputs={tmp_path / 'outputs'}"])
    assert ids == sorted(IDS) and values.dtype == np.float32
    assert np.array_equal(values, half[np.argsort(IDS)].astype(np.float32))


def test_rows_that_are_missing_or_not_finite_are_left_out_by_name(cli: Cli, tmp_path: Path) -> None:
    broken = VALUES.copy()
    broken[[3, 17], 1] = np.nan
    code, out, err = cli(*asked(tmp_path, written(tmp_path, "npz", np.arange(MANY - 2), broken)))
    assert code == 0, err
    for name, why in ((IDS[3], "not finite"), (IDS[17], "not finite"), (IDS[46], "no row"), (IDS[47], "no row")):
        assert any(name in line and why in line for line in out.splitlines()), name
    assert "44 samples" in out


def test_tokens_are_pooled_over_the_images_own(tmp_path: Path) -> None:
    from probing import embed

    counts, path = np.array([4, 9, 6]), tmp_path / "ragged.h5"
    with h5py.File(path, "w") as opened:
        data = opened.create_dataset("embeddings", (3,), dtype=h5py.vlen_dtype(np.float32))
        for i, n in enumerate(counts):
            data[i] = np.full(n * 8, i + 1.0, np.float32)
        opened["tokens"] = counts
        opened.create_dataset("ids", data=np.array(IDS[:3], object), dtype=h5py.string_dtype())
    flat = tmp_path / "flat.npz"
    np.savez(flat, ids=IDS[:3], embeddings=np.repeat([1.0, 2, 3], counts)[:, None] * np.ones(8), tokens=counts)
    dense = tmp_path / "dense.npz"
    np.savez(dense, ids=IDS[:3], embeddings=np.arange(1, 4)[:, None, None] * np.ones((3, 5, 8)))
    for place in (path, flat, dense):
        store, failed = embed.copy(
            tmp_path / place.stem, load(place, TOKENS), "spec", [(TOKENS, "mean")], dict(zip("abc", IDS, strict=False))
        )
        assert not failed
        np.testing.assert_allclose(store.read(list("abc"), (TOKENS, "mean")), np.arange(1, 4)[:, None] * np.ones((3, 8)))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"embeddings": VALUES}, r"no array 'ids'.*embeddings"),
        ({"ids": IDS, "features": VALUES}, r"no array 'embeddings'.*features.*path=NAME"),
        ({"ids": IDS[:-1], "embeddings": VALUES}, r"\(48, 8\) does not fit 47 ids"),
        ({"ids": [*IDS[:-1], IDS[0]], "embeddings": VALUES}, f"two rows have the id '{IDS[0]}'"),
        ({"ids": IDS, "embeddings": VALUES[:, 0]}, r"\(48,\) does not fit"),
    ],
)
def test_a_file_that_does_not_fit_says_what_it_holds(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "rows.npz")


def test_damaged_files_and_other_kinds_are_one_sentence(tmp_path: Path) -> None:
    for name in ("rows.npz", "rows.h5", "rows.parquet", "rows.txt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 no such thing")
        with pytest.raises(ValueError, match=rf"encoder\.path=.*{name}"):
            load(tmp_path / name)
    np.savez(tmp_path / "pickled.npz", ids=np.array([{"a": 1}], object), embeddings=VALUES)
    with pytest.raises(ValueError, match=r"can not be read.*pickle"):
        load(tmp_path / "pickled.npz")


def test_no_row_and_no_common_name_are_errors(cli: Cli, tmp_path: Path) -> None:
    others = [f"other_{i}" for i in range(MANY)]
    code, _, err = cli(*asked(tmp_path, written(tmp_path, "npz", np.arange(MANY), ids=others)))
    assert code == 1 and "no image has a row" in err and "other_0" in err and IDS[0] in err
    np.savez(tmp_path / "none.npz", ids=np.empty(0, str), embeddings=np.empty((0, 8)))
    code, _, err = cli(*asked(tmp_path, tmp_path / "none.npz", "name=none"))
    assert code == 1 and "no embeddings" in err


def test_another_encoder_says_that_there_are_no_pictures(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli(*asked(tmp_path, tmp_path, "encoder=tiny")[2:])
    assert code == 1 and "needs pictures" in err and "encoder=file" in err


def test_other_names_of_the_same_rows_are_not_taken_for_them(run: Run, tmp_path: Path) -> None:
    """One store for all runs: another id column, or another array of ids, is another join."""
    import json

    path = tmp_path / "rows.npz"
    turned = [IDS[(i + 1) % MANY] for i in range(MANY)]  # each id has the row of its neighbour, of the other class
    np.savez(path, ids=np.array(IDS), others=np.array(turned), embeddings=VALUES, noise=np.zeros(3))
    rows = csv.DictReader(table(tmp_path).open(encoding="utf-8"))
    both = tmp_path / "both.csv"
    with open(both, "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["image", "wrong", "label", "patient_id"])
        writer.writerows([r["image"], IDS[(i * 7 + 3) % MANY], r["label"], r["patient_id"]] for i, r in enumerate(rows))
    base = [*asked(tmp_path, path), f"images.path={both}"]
    stores = set()
    for more in ([], ["images.id=wrong"], ["encoder.ids=others"]):
        outcome = run(*base, *more)
        assert json.loads((Path(outcome["folder"]) / "result.json").read_text())["cells"]
        stores = {p.name for p in (tmp_path / "outputs" / "embeddings").glob("file-*")}
    assert len(stores) == 2  # rows without pictures are kept under their names, so another column needs no other store
