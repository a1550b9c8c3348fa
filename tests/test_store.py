"""Rows on disk: what was written comes back, whatever happens while it is written."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from probing import files, store
from probing.files import STALE_SECONDS, sweep, whole, write_json
from probing.store import CHUNK, Store
from probing.types import Tap

NORM, POOL = Tap("final_norm", "norm", "tokens", ("cls",)), Tap("pooled", "pool", "vector")
CELL, OTHER = (NORM, "mean"), (POOL, "native")


def keys(n: int, start: int = 0) -> list[str]:
    return [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(start, start + n)]


def rows(n: int, width: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Store, list[str], np.ndarray]:
    """1,000 rows in seven parts of unequal size, longer and shorter than a chunk."""
    made, names, values = Store(tmp_path / "tiny-f"), keys(1000), rows(1000)
    edges = [0, 1, 40, CHUNK + 40, CHUNK + 41, 700, 950, 1000]
    for a, b in itertools.pairwise(edges):
        made.write(names[a:b], {CELL: values[a:b]})
    return Store(tmp_path / "tiny-f"), names, values


def parts(made: Store) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(made.folder.glob("part-*.h5"))}


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["as written", "backwards", "mixed", "with repeats", "one", "a stretch", "none"])
def test_rows_come_back_in_the_asked_order(kind: str, filled: tuple[Store, list[str], np.ndarray]) -> None:
    made, names, values = filled
    rng = np.random.default_rng(0)
    order: Sequence[int] = {
        "as written": range(1000),
        "backwards": range(999, -1, -1),
        "mixed": rng.permutation(1000).tolist(),
        "with repeats": rng.integers(0, 1000, 5000).tolist(),
        "one": [500, 500],
        "a stretch": range(296, 705),
        "none": [],
    }[kind]
    found = made.read([names[i] for i in order], CELL)
    assert found.dtype == np.float32 and len(found) == len(order)
    assert (found == values[list(order)]).all() if len(order) else found.size == 0


def test_many_rows_take_one_read_per_part(filled: tuple[Store, list[str], np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    made, names, _ = filled
    opened: list[str] = []
    real = h5py.File
    monkeypatch.setattr(h5py, "File", lambda path, *a, **k: opened.append(str(path)) or real(path, *a, **k))
    made.read([names[i] for i in np.random.default_rng(0).integers(0, 1000, 5000)], CELL)
    assert len(opened) <= 2 * 7, "once for the keys, once for the rows"


def test_a_key_that_is_not_there_is_an_error(filled: tuple[Store, list[str], np.ndarray]) -> None:
    made, names, _ = filled
    with pytest.raises(KeyError):
        made.read([*names[:3], "absent"], CELL)


def test_an_absent_store_has_nothing(tmp_path: Path) -> None:
    made = Store(tmp_path / "none")
    assert made.missing(["a", "b", "a"], [CELL]) == (["a", "b"], [CELL]) and made.card() == {}
    assert not (tmp_path / "none").exists()


def test_missing_is_by_key_and_cell(tmp_path: Path) -> None:
    made = Store(tmp_path / "tiny-f")
    made.write(["a", "b"], {CELL: rows(2), OTHER: rows(2, 3)})
    made.write(["c"], {CELL: rows(1)})
    assert made.missing(["a", "b", "c"], [CELL]) == ([], [])
    assert made.missing(["b", "c", "d"], [CELL]) == (["d"], [CELL])
    assert made.missing(["b", "c"], [CELL, OTHER]) == (["c"], [OTHER])
    assert made.missing(["a"], [(NORM, "grid2")]) == (["a"], [(NORM, "grid2")])


def test_a_tap_with_another_definition_is_another_tap(tmp_path: Path) -> None:
    made = Store(tmp_path / "tiny-f")
    made.write(["a"], {CELL: rows(1)})
    for changed in (Tap("final_norm", "blocks.2", "tokens", ("cls",)), Tap("final_norm", "norm", "tokens")):
        assert made.missing(["a"], [(changed, "mean")]) == (["a"], [(changed, "mean")])
    same = Tap("final_norm", "norm", "tokens", ("cls",))
    assert made.missing(["a"], [(same, "mean")]) == ([], [])
    other = (Tap("final_norm", "blocks.2", "tokens", ("cls",)), "mean")
    made.write(["a"], {other: rows(1, seed=1)})
    assert (made.read(["a"], other) == rows(1, seed=1)).all() and (made.read(["a"], CELL) == rows(1)).all()


def test_a_doubled_key_is_read_from_the_first_part_by_name(tmp_path: Path) -> None:
    written = {Store(tmp_path / "s").write(["a", "b"], {CELL: rows(2, seed=i)}).name: rows(2, seed=i) for i in range(5)}
    first = written[min(written)]
    assert (Store(tmp_path / "s").read(["b", "a"], CELL) == first[::-1]).all()
    watching = Store(tmp_path / "s")
    watching.refresh()
    assert (watching.read(["a"], CELL) == first[:1]).all()


def test_parts_are_never_rewritten_and_others_see_them_at_once(filled: tuple[Store, list[str], np.ndarray]) -> None:
    made, names, values = filled
    before = parts(made)
    assert made.missing(names, [CELL]) == ([], [])
    made.write(keys(5, 1000), {CELL: rows(5, seed=1)})
    made.write(names[:5], {OTHER: rows(5, 3)})
    assert made.missing(keys(5, 1000), [CELL]) == ([], [])
    assert (made.read(names, CELL) == values).all()
    assert {n: b for n, b in parts(made).items() if n in before} == before and len(parts(made)) == len(before) + 2


def test_a_part_says_what_is_in_it(filled: tuple[Store, list[str], np.ndarray]) -> None:
    """What others read without us: /keys and /taps/<tap>/<readout>, float32, in checksummed chunks, nothing pickled."""
    made, names, _ = filled
    with h5py.File(sorted(made.folder.glob("part-*.h5"))[0], "r") as part:
        data = part["taps/final_norm/mean"]
        assert data.dtype == np.float32 and data.fletcher32 and data.chunks[0] <= CHUNK
        assert part["keys"].dtype.kind == "S" and {k.decode() for k in part["keys"][()]} <= set(names)


def test_a_store_can_be_sent_to_another_process(filled: tuple[Store, list[str], np.ndarray]) -> None:
    made, names, values = filled
    made.refresh()
    assert (pickle.loads(pickle.dumps(made)).read(names, CELL) == values).all()


# --- damage ------------------------------------------------------------------------------------------------------


def damages(whole_file: bytes, data: bytes) -> dict[str, bytes]:
    made = {f"cut at {i}0 %": whole_file[: len(whole_file) * i // 10] for i in range(10)}
    for i in range(0, len(whole_file), 4096):
        made[f"page {i // 4096} lost"] = whole_file[:i] + bytes(min(4096, len(whole_file) - i)) + whole_file[i + 4096 :]
    at = whole_file.index(data) + 5
    made["one bit of a row"] = whole_file[:at] + bytes([whole_file[at] ^ 1]) + whole_file[at + 1 :]
    made["a web page"] = b"<html>404</html>"
    return made


def test_a_damaged_part_is_named_with_what_to_do_or_harmless(tmp_path: Path) -> None:
    names, values = keys(300), rows(300, 20)
    path = Store(tmp_path / "tiny-f").write(names, {CELL: values})
    content, errors = path.read_bytes(), 0
    for what, damaged in damages(content, values[7].tobytes()).items():
        path.write_bytes(damaged)
        made = Store(path.parent)
        try:
            absent, _ = made.missing(names, [CELL])
            left = [i for i, k in enumerate(names) if k not in set(absent)]
            assert (made.read([names[i] for i in left], CELL) == values[left]).all(), f"{what}: wrong rows"
        except OSError as error:
            errors += 1
            assert str(path) in str(error) and "Remove it" in str(error), what
        else:
            assert "cut" not in what and "bit" not in what
        path.write_bytes(content)
    assert errors > 15 and (Store(path.parent).read(names, CELL) == values).all()


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_nothing(filled: tuple[Store, list[str], np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    made, names, values = filled
    before = {p.name for p in made.folder.iterdir()}
    with pytest.raises(TypeError):
        made.write(["x"], {CELL: np.array([[object()]])})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(files.os, name, full)
            with pytest.raises(OSError) as error:
                made.write(["x"], {CELL: rows(1)})
            assert error.value.errno == errno.ENOSPC
    with monkeypatch.context() as broken:
        broken.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.write(["x"], {CELL: rows(1)})
    assert {p.name for p in made.folder.iterdir()} == before
    assert (made.read(names, CELL) == values).all() and made.missing(["x"], [CELL])[0] == ["x"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the size of files")
def test_a_full_disk_is_an_error_and_no_crash(filled: tuple[Store, list[str], np.ndarray]) -> None:
    """HDF5 crashes at exit when a file that it has open can not be written. A limit on file sizes stands for the disk."""
    made, names, values = filled
    before = {p.name for p in made.folder.iterdir()}
    code = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from probing.store import Store
from probing.types import Tap
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    Store(Path(sys.argv[1])).write([str(i) for i in range(1000)], {(Tap("t", "t", "vector"), "native"): np.ones((1000, 200), np.float32)})
except OSError as error:
    print("errno", error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code, str(made.folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"killed by signal {-done.returncode}: {done.stderr[-300:]}"
    assert done.stdout.strip() == f"errno {errno.EFBIG}"
    assert {p.name for p in made.folder.iterdir()} == before
    assert (made.read(names, CELL) == values).all()


def test_a_file_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    with whole(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")
    assert path.read_text() == "whole" and [p.name for p in path.parent.iterdir()] == ["a.json"]
    with pytest.raises(ZeroDivisionError), whole(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "whole" and [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_temporaries_are_no_parts_and_are_swept_only_when_old(filled: tuple[Store, list[str], np.ndarray]) -> None:
    made, names, values = filled
    young, old, odd = (made.folder / n for n in (".tmp-young.h5", ".tmp-old.h5", ".tmp-old.json"))
    for path in (young, old, odd):
        path.write_bytes(b"half a part")
    for path in (old, odd):
        os.utime(path, (time.time() - STALE_SECONDS - 60,) * 2)
    for part in made.folder.glob("part-*"):
        os.utime(part, (0, 0))
    assert (made.read(names, CELL) == values).all()
    sweep(made.folder)
    assert young.exists() and not old.exists() and not odd.exists()
    assert (Store(made.folder).read(names, CELL) == values).all(), "parts are never swept, however old"


# --- cards and canaries ------------------------------------------------------------------------------------------


def test_a_store_is_found_by_what_led_to_it(tmp_path: Path) -> None:
    card = {"name": "tiny", "fingerprint": "f", "batch_size": 8, "specs": ["one", "two"], "versions": ["v1"]}
    Store(tmp_path / "tiny-f").write_card(card)
    Store(tmp_path / "tiny-f-v2").write_card({**card, "versions": ["v2"]})
    Store(tmp_path / "tiny-g").write_card({**card, "specs": ["three"]})

    def found(name: str, spec: str, versions: str | None) -> str | None:
        made = store.find(tmp_path, name, spec, versions)
        return made and made.folder.name

    assert found("tiny", "one", "v1") == found("tiny", "two", "v1") == found("tiny", "one", None) == "tiny-f"
    assert found("tiny", "one", "v2") == "tiny-f-v2" and found("tiny", "three", "v1") == "tiny-g"
    assert found("tiny", "one", "v3") is None and found("tiny", "four", None) is None and found("other", "one", None) is None
    assert store.find(tmp_path / "none", "tiny", "one", None) is None


def test_canaries_are_compared_where_they_have_something_in_common(tmp_path: Path) -> None:
    made = Store(tmp_path / "tiny-f")
    assert made.canary_difference({CELL: rows(8)}) == float("inf")
    made.write([f"canary {i}" for i in range(8)], {CELL: rows(8)}, prefix="canary")
    assert made.canary_difference({CELL: rows(8)}) == 0
    assert made.canary_difference({CELL: rows(8), OTHER: rows(8, 3)}) == 0, "a tap that is new changes nothing"
    moved = rows(8)
    moved[3, 2] += 0.01 * np.abs(moved).max()
    assert 0.009 < made.canary_difference({CELL: moved}) < 0.011
    assert made.canary_difference({OTHER: rows(8, 3)}) == float("inf")
    assert made.missing(["canary 0"], [CELL])[0] != [], "canaries are no rows"


def test_canaries_that_are_not_finite_agree_with_nothing(tmp_path: Path) -> None:
    made = Store(tmp_path / "tiny-f")
    made.write([f"canary {i}" for i in range(8)], {CELL: rows(8)}, prefix="canary")
    assert not made.canary_difference({CELL: np.full((8, 6), np.nan, np.float32)}) < 1


def test_versions_are_those_of_the_libraries_that_make_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = store.versions(), store.importlib.metadata.version
    assert re.fullmatch(r"[0-9a-f]{8}", before) and store.versions() == before
    monkeypatch.setattr(store.importlib.metadata, "version", lambda p: "999" if p == "pillow" else real(p))
    assert store.versions() != before


def test_a_card_is_plain_json(tmp_path: Path) -> None:
    made = Store(tmp_path / "tiny-f")
    made.write_card({"name": "tiny", "specs": ["one"]})
    assert made.card() == json.loads((tmp_path / "tiny-f" / "encoder.json").read_text())
    write_json(tmp_path / "tiny-f" / "encoder.json", {"name": "other"})
    assert made.card() == {"name": "other"}
