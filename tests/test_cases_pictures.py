"""The awkward pictures, DICOM and NIfTI files, names and tables of ../shared/cases: each row of its expected.csv."""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED

from probing import decode
from probing.collect import grouped
from probing.images import folder
from probing.images import table as tables
from probing.picture import digests, open_view
from probing.tasks import column
from probing.types import Sample, Task, View

MAKER = SHARED / "cases" / "make_inputs.py"


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder of inputs, and per file what a right program does with it."""
    if not MAKER.is_file():
        pytest.skip("../shared/cases is not here")
    root = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, str(MAKER), str(root)], check=True, capture_output=True)
    with open(root / "expected.csv", encoding="utf-8", newline="") as opened:
        return root, {row["file"]: json.loads(row["check"]) for row in csv.DictReader(opened)}


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)
    decode._note.cache_clear()


def view(root: Path, name: str) -> View:
    policy: tuple[str | int | float, ...] = ("dicom", 1) if name.endswith(".dcm") else ("pillow", 1)
    return View(root / name, name, decode=policy)


def shown(root: Path, name: str) -> np.ndarray:
    return np.asarray(open_view(view(root, name)))


def at(picture: np.ndarray, place: str) -> np.ndarray:
    row, col = map(int, place.split(","))
    return picture[row, col].astype(int)


def test_pictures_and_dicom(cases: tuple[Path, dict[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture) -> None:
    root, expected = cases
    faults = []
    for name, check in expected.items():
        if name.startswith(("images/", "dicom/")):
            caplog.clear()
            try:
                picture_case(root, name, check, caplog)
            except (AssertionError, ValueError) as error:
                faults.append(f"{name}: {error}")
    assert not faults, "\n".join(faults)


def picture_case(root: Path, name: str, check: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    if check.get("outcome") == "file_error":
        with pytest.raises(ValueError, match=Path(name).name.replace(".", r"\.")):
            if "peak_mb_max" in check:
                assert peak(root, name) < check["peak_mb_max"]
            open_view(view(root, name))
        return
    if "peak_mb_max" in check:
        assert peak(root, name) < check["peak_mb_max"]
        assert list(open_view(view(root, name)).size) == check["size"]
        return
    picture, tol = shown(root, name), check.get("tol", 0)
    assert picture.ndim == 3 and picture.shape[2] == 3 and picture.dtype == np.uint8
    levels = np.unique(picture[..., 0])
    tests: dict[str, Callable[[Any], bool]] = {
        "pixels": lambda want: all(np.abs(at(picture, p) - v).max() <= tol for p, v in want.items()),
        "opaque_pixel": lambda want: all((at(picture, p) == v).all() for p, v in want.items()),
        "display": lambda want: all(np.abs(at(picture, p) - v).max() <= tol for p, v in want.items()),
        "size": lambda want: [picture.shape[1], picture.shape[0]] == want,
        "distinct_levels_min": lambda want: len(levels) >= want,
        "distinct_values": lambda want: levels.tolist() == want,
        "monotonic": lambda _: bool((np.diff(picture[..., 0].ravel().astype(int)) >= 0).all()),
        "bright_corner": lambda _: picture[:10, :8].mean() > picture[-10:, :8].mean() + 50 < picture[:10, -8:].mean() + 150,
        "same_as": lambda want: np.array_equal(picture, shown(root, want)),
        "corner_not": lambda want: picture[0, 0].tolist() != want,
        "mean_rgb": lambda want: bool(np.abs(picture.reshape(-1, 3).mean(0) - want).max() <= tol),
        "mean_rgb_first": lambda want: bool(np.abs(picture.reshape(-1, 3).mean(0) - want).max() <= 2),
        "frames": lambda want: f"{want} frames" in caplog.text,
        "modality": lambda _: True,  # the range after rescaling shows in the values displayed
        "tol": lambda _: True,
    }
    for key, want in check.items():
        assert key in tests, f"no test for {key}"
        assert tests[key](want), f"{key}: {want}"


def peak(root: Path, name: str) -> float:
    """Most memory, in MB, of a process that opens the file."""
    code = (
        "import sys; from pathlib import Path; from probing.picture import open_view; from probing.types import View\n"
        "try: open_view(View(Path(sys.argv[1]), 'x'))\nexcept ValueError: pass\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    if not Path("/proc/self/status").exists():
        return 0.0
    done = subprocess.run([sys.executable, "-c", code, str(root / name)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024


def test_volumes(cases: tuple[Path, dict[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture) -> None:
    root, expected = cases
    for name, check in expected.items():
        if not name.startswith("nifti/"):
            continue
        caplog.clear()
        whole = View(root / name, name, ("axial", 5), ("nifti", 1, 0.0, 100.0))
        if check.get("outcome") == "file_error":
            with pytest.raises(ValueError, match=Path(name).name):
                open_view(whole)
            continue
        volume = decode.read_nifti(root / name)
        if "ras_voxel" in check:
            x, y, z = check["ras_voxel"]
            assert volume.real(volume.stored)[x, y, z] == check["value"] == volume.real(volume.stored).max(), name
            assert volume.values("axial", z)[x, y] == check["value"]
        if "values" in check:
            assert sorted(np.unique(volume.real(volume.stored))) == check["values"], name
        if "nan_voxels" in check:
            assert np.isfinite(volume.values("sagittal", 1)).all()
            assert str(check["nan_voxels"]) in caplog.text, name
        assert np.asarray(open_view(whole)).dtype == np.uint8


def test_names(cases: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    root, expected = cases
    found = {s.id: s for s in folder.load(name="folder", path=str(root / "names"))}
    for name, check in expected.items():
        if not name.startswith("names/"):
            continue
        id = name.removeprefix("names/")
        if "size" in check:
            assert list(open_view(found[id].views[0]).size) == check["size"], id
        elif "label_from_folder" in check:
            assert found[id].meta["folder"] == check["label_from_folder"]
        elif "distinct_ids" in check:
            assert sum(i.endswith("/scan.png") for i in found) == check["distinct_ids"]
    assert not any("DS_Store" in id for id in found)
    assert len(found) == len({s.id for s in found.values()})


def task_from(root: Path, name: str) -> tuple[list[Sample], Task]:
    samples = tables.load(name="table", path=str(root / name), root=str(root / "tables" / "images"))
    samples = grouped(samples, "patient_id")
    return samples, column.load(samples, name="label", column="label")


def test_tables(cases: tuple[Path, dict[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    root, expected = cases
    for name, check in expected.items():
        if not name.startswith("tables/"):
            continue
        caplog.clear()
        if check.get("outcome") == "error":
            with pytest.raises(ValueError) as error:
                task_from(root, name)
            assert all(word in str(error.value) for word in check["message_has"]), name
            continue
        samples, task = task_from(root, name)
        if "classes" in check:
            assert list(task.classes) == check["classes"], name
        if "rows" in check or "used_rows" in check:
            assert len(task.samples) == check.get("rows", check.get("used_rows")), name
        if "dropped" in check:
            assert all(n in caplog.text for n in check["dropped"]) and "2 samples" in caplog.text
        if name.endswith("repeated_rows.csv"):
            assert "3 rows repeat" in caplog.text
        if name.endswith("spaces_in_labels.csv"):
            assert "2" in caplog.text and "space" in caplog.text, caplog.text
        if "missing" in check:
            _, unread = digests(tmp_path / "digests", [s.views[0] for s in samples])
            assert sorted(v.name for v in unread) == check["missing"]
        if "leaking_patients" in check:
            assert all(p in caplog.text for p in check["leaking_patients"]), caplog.text
        if "message_has" in check:
            from test_nested import PROTOCOL

            from probing.evaluate import check as check_task

            with pytest.raises(ValueError) as error:
                check_task(task, PROTOCOL)
            assert all(word in str(error.value) for word in check["message_has"]) and "1 samples" in str(error.value)
