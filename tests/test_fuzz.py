"""Broken bytes of every kind end in a picture, a table, or one sentence that names the file: never in a crash."""

from __future__ import annotations

import gzip
import io
import time
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from probing import decode, picture
from probing.picture import open_view
from probing.tables import read_table
from probing.types import View

SECONDS = 3  # of one file; a hang is far more
GREY = (np.arange(256, dtype=np.uint8).reshape(16, 16) * 3) % 251


def saved(ending: str, **options: object) -> bytes:
    opened = io.BytesIO()
    Image.fromarray(np.dstack([GREY, GREY.T, GREY])).save(opened, ending, **options)
    return opened.getvalue()


def dicom() -> bytes:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import Dataset, FileMetaDataset

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3"
    data.Rows = data.Columns = 16
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME1"
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 12, 11, 0
    data.RescaleSlope, data.RescaleIntercept, data.WindowCenter, data.WindowWidth = "1", "-1024", "40", "400"
    data.PixelData = GREY.astype("<u2").tobytes()
    opened = io.BytesIO()
    data.save_as(opened, enforce_file_format=True)
    return opened.getvalue()


def nifti() -> bytes:
    nibabel = pytest.importorskip("nibabel")
    return bytes(nibabel.Nifti1Image(GREY[None].repeat(4, 0).astype(np.int16), np.eye(4)).to_bytes())


def xlsx() -> bytes:
    pandas, opened = pytest.importorskip("pandas"), io.BytesIO()
    pytest.importorskip("openpyxl")
    pandas.DataFrame({"image": ["a.png", "b.png"], "label": [1, 2]}).to_excel(opened, index=False)
    return opened.getvalue()


def zipped() -> bytes:
    opened = io.BytesIO()
    with zipfile.ZipFile(opened, "w") as archive:
        archive.writestr("a.png", saved("PNG"))
    return opened.getvalue()


SEEDS: dict[str, Callable[[], bytes]] = {
    "a.png": lambda: saved("PNG"),
    "a.jpg": lambda: saved("JPEG"),
    "a.tif": lambda: saved("TIFF", compression="tiff_lzw"),
    "a.gif": lambda: saved("GIF"),
    "a.bmp": lambda: saved("BMP"),
    "a.dcm": dicom,
    "a.nii": nifti,
    "a.nii.gz": lambda: gzip.compress(nifti(), 1),
    "a.zip": zipped,
    "a.csv": lambda: 'image,label\na.png,links\nb.png,"re,chts"\né.png,\n'.encode(),
    "a.csv.gz": lambda: gzip.compress(b"image,label\na.png,1\nb.png,2\n", 1),
    "a.jsonl": lambda: b'{"image": "a.png", "label": 1}\n{"image": "b.png", "label": null}\n',
    "a.xlsx": xlsx,
}
# Executions of the slow suite; kinds with a slow reader get fewer. 50,000 in all.
SHARE = {"a.png": 6500, "a.jpg": 5500, "a.tif": 4000, "a.gif": 3500, "a.bmp": 3000, "a.dcm": 9000, "a.nii": 7000, "a.nii.gz": 3000,
         "a.zip": 2000, "a.csv": 3000, "a.csv.gz": 1500, "a.jsonl": 1500, "a.xlsx": 500}  # fmt: skip


@cache
def seed(name: str) -> bytes:
    return SEEDS[name]()


@st.composite
def broken(draw: st.DrawFn, name: str) -> bytes:
    """The bytes of a whole file with up to six changes: a byte, a run of bytes, a cut, a doubled part, an end."""
    content = bytearray(seed(name))
    for _ in range(draw(st.integers(1, 6))):
        # Half of the places lie in the header, where a change means most.
        place = draw(st.one_of(st.integers(0, min(400, len(content))), st.integers(0, len(content))))
        kind = draw(st.sampled_from(["byte", "run", "cut", "double", "end", "edge"]))
        if kind == "byte" and place < len(content):
            content[place] = draw(st.integers(0, 255))
        elif kind == "run":
            content[place : place + 4] = draw(st.binary(max_size=4))
        elif kind == "cut":
            del content[place : place + draw(st.integers(1, 40))]
        elif kind == "double":
            content[place:place] = content[place : place + 30]
        elif kind == "end":
            del content[place:]
        elif kind == "edge":  # the largest numbers, where sizes and counts stand
            content[place : place + 4] = draw(
                st.sampled_from([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x7f\xff\xff\xff"])
            )
    return bytes(content)


def view_of(path: Path) -> View:
    if path.name.endswith(".dcm"):
        return View(path, path.name, decode=("dicom", 1))
    if ".nii" in path.name:
        return View(path, path.name, ("axial", 3), ("nifti", 1, 0.5, 99.5))
    return View(path, path.name, member="a.png" if path.suffix == ".zip" else None)


def one(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for cached in (decode.volume, decode._ends, decode._archive, picture._decoded):
        cached.cache_clear()
    started = time.monotonic()
    try:
        if path.name.endswith((".csv", ".csv.gz", ".jsonl", ".xlsx")):
            read_table(str(path), "images.path")
        else:
            found = open_view(view_of(path))
            assert found.mode == "RGB" and found.width * found.height <= decode.most_pixels()
    except ValueError as error:
        assert path.name in str(error)
    assert time.monotonic() - started < SECONDS


def fuzz(name: str, examples: int, folder: Path) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(broken(name))
    def run(content: bytes) -> None:
        one(folder / name, content)

    run()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for the files, with a limit on pixels that is often met, and on memory where the system has one."""
    monkeypatch.setenv(decode.PIXELS, "1000000")
    return tmp_path


@pytest.mark.parametrize("name", SEEDS)
def test_the_whole_file_is_read(name: str, folder: Path) -> None:
    one(folder / name, seed(name))
    if not name.endswith((".csv", ".csv.gz", ".jsonl", ".xlsx")):
        assert open_view(view_of(folder / name)).size == (16, 4 if ".nii" in name else 16)[::-1] or ".nii" in name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEDS)
def test_some_broken_files_are_one_sentence(name: str, folder: Path) -> None:
    fuzz(name, 25, folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEDS)
def test_many_broken_files_are_one_sentence(name: str, folder: Path) -> None:
    """50,000 in all: no other exception, no hang, and no memory beyond what the limit on pixels allows."""
    status = Path("/proc/self/status")
    before = _peak(status)
    fuzz(name, SHARE[name], folder)
    assert _peak(status) - before < 500


def _peak(status: Path) -> float:
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024 if status.exists() else 0.0


def test_the_shares_add_up() -> None:
    assert sum(SHARE.values()) == 50_000 and set(SHARE) == set(SEEDS)
