"""Each decode policy, held against values computed by hand."""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from probing import decode
from probing import picture as module
from probing.picture import digests, open_view
from probing.types import View

pydicom = pytest.importorskip("pydicom")
RAMP = np.linspace(0, 4095, 48 * 64).round().reshape(48, 64).astype(np.uint16)


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)
    decode._note.cache_clear()


def made(values: np.ndarray = RAMP, bits: int = 12, **tags: Any) -> Any:
    """A DICOM object of one grey or colour picture, or of frames [F,H,W]."""
    from pydicom.dataset import Dataset, FileMetaDataset

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3.4"
    colour = values.ndim == 3 and values.shape[2] == 3
    data.Rows, data.Columns = values.shape[:2] if colour or values.ndim == 2 else values.shape[1:]
    data.SamplesPerPixel, data.PhotometricInterpretation = (3, "RGB") if colour else (1, "MONOCHROME2")
    if colour:
        data.PlanarConfiguration = 0
    elif values.ndim == 3:
        data.NumberOfFrames = len(values)
    data.BitsAllocated = 8 * values.dtype.itemsize
    data.BitsStored, data.HighBit = (8, 7) if values.dtype.itemsize == 1 else (bits, bits - 1)
    data.PixelRepresentation = int(values.dtype.kind == "i")
    data.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    return data


def shown(folder: Path, data: Any, *window: float, frame: int | None = None) -> np.ndarray:
    data.save_as(folder / "a.dcm", enforce_file_format=True)
    place = None if frame is None else ("frame", frame)
    picture = np.asarray(open_view(View(folder / "a.dcm", "a.dcm", place, ("dicom", 1, *window))))
    assert picture.ndim == 3 and picture.dtype == np.uint8
    return picture


def grey(folder: Path, data: Any, *window: float, frame: int | None = None) -> np.ndarray:
    picture = shown(folder, data, *window, frame=frame)
    assert (picture[..., :1] == picture).all()
    module._decoded.cache_clear()  # the next object has the same name
    return picture[..., 0].astype(int)


def linear(values: np.ndarray, centre: float, width: float) -> np.ndarray:
    """PS3.3 C.11.2.1.2.1, onto 0 to 255."""
    values = np.asarray(values, float)
    scaled = ((values - (centre - 0.5)) / (width - 1) + 0.5) * 255
    scaled[values <= centre - 0.5 - (width - 1) / 2] = 0
    scaled[values > centre - 0.5 + (width - 1) / 2] = 255
    return scaled


# --- DICOM -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("centre", "width"), [(2048, 4096), (1000, 300), (40, 2)])
def test_the_window_of_the_file_and_the_negative_of_monochrome1(tmp_path: Path, centre: float, width: float) -> None:
    window = {"WindowCenter": [centre, 10], "WindowWidth": [width, 20]}  # the first of several counts
    one = grey(tmp_path, made(**window))
    assert np.abs(one - linear(RAMP, centre, width)).max() <= 0.51
    two = grey(tmp_path, made(**window, PhotometricInterpretation="MONOCHROME1"))
    assert np.array_equal(255 - one, two)


def test_values_are_rescaled_before_a_named_window(tmp_path: Path) -> None:
    data = made(RescaleSlope="0.5", RescaleIntercept="-1024", WindowCenter="0", WindowWidth="10")
    for name, window in decode.WINDOWS.items():
        assert decode.window_of(name) == window == decode.window_of(list(window))
        assert np.abs(grey(tmp_path, data, *window) - linear(RAMP * 0.5 - 1024, *window)).max() <= 0.51, name
    assert decode.window_of("file") is None is decode.window_of(None)
    for wrong in ("brian", [40], [40, 0], [40, -5]):
        with pytest.raises(ValueError, match=r"images\.window.*brain"):
            decode.window_of(wrong)


def test_signed_values(tmp_path: Path) -> None:
    values = (RAMP.astype(int) - 2048).astype(np.int16)
    assert np.abs(grey(tmp_path, made(values, 16), 0, 1000) - linear(values, 0, 1000)).max() <= 0.51


@pytest.mark.parametrize("tags", [{}, {"WindowCenter": "2048", "WindowWidth": "0"}, {"WindowCenter": "", "WindowWidth": "9"}])
def test_without_a_window_the_range_of_values_is_shown(
    tmp_path: Path, tags: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    part = RAMP[10:30]
    found = grey(tmp_path, made(part, **tags))
    assert np.abs(found - (part - part.min()) / np.ptp(part) * 255).max() <= 0.51
    assert ("a.dcm" in caplog.text and "window" in caplog.text) == bool(tags)


def test_a_voi_table_comes_before_the_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from pydicom.dataset import Dataset

    table = Dataset()
    table.LUTDescriptor, table.LUTData = [4096, 0, 16], [257 * (255 - i // 16) for i in range(4096)]
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "US"
    data = made(WindowCenter="2048", WindowWidth="4096", VOILUTSequence=[table])
    assert np.abs(grey(tmp_path, data) - (255 - RAMP // 16)).max() <= 1
    del table.LUTData
    assert np.abs(grey(tmp_path, data) - linear(RAMP, 2048, 4096)).max() <= 0.51
    assert "VOI table" in caplog.text and "a.dcm" in caplog.text


def test_frames_are_frames_and_no_channels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = np.stack([np.full((32, 32), 30 * (i + 1), np.uint8) for i in range(3)])
    data = made(values, WindowCenter="128", WindowWidth="256")
    for frame in range(3):
        assert np.abs(grey(tmp_path, data, frame=frame) - 30 * (frame + 1)).max() <= 1
    assert "frames" not in caplog.text
    assert np.abs(grey(tmp_path, data) - 30).max() <= 1 and "3 frames" in caplog.text
    with pytest.raises(ValueError, match=r"a\.dcm.*frame 3 of 3"):
        shown(tmp_path, data, frame=3)


def test_colour_and_palette(tmp_path: Path) -> None:
    red = np.zeros((32, 32, 3), np.uint8) + np.array([250, 10, 20], np.uint8)
    assert np.array_equal(shown(tmp_path, made(red)), red)
    luminance = np.zeros((32, 32, 3), np.uint8) + np.array([76, 85, 255], np.uint8)
    data = made(luminance, PhotometricInterpretation="YBR_FULL", SOPInstanceUID="1.2.5")
    data.save_as(tmp_path / "b.dcm", enforce_file_format=True)
    found = np.asarray(open_view(View(tmp_path / "b.dcm", "b.dcm", decode=("dicom", 1))))
    assert np.abs(found.astype(int) - [254, 0, 0]).max() <= 4
    indices = np.arange(256, dtype=np.uint8).reshape(16, 16)
    data = made(indices, PhotometricInterpretation="PALETTE COLOR")
    for name, entries in (("Red", range(256)), ("Green", range(255, -1, -1)), ("Blue", [7] * 256)):
        setattr(data, f"{name}PaletteColorLookupTableDescriptor", [256, 0, 16])
        data[f"{name}PaletteColorLookupTableDescriptor"].VR = "US"
        setattr(data, f"{name}PaletteColorLookupTableData", np.array([v * 256 for v in entries], "<u2").tobytes())
    data.save_as(tmp_path / "c.dcm", enforce_file_format=True)
    found = np.asarray(open_view(View(tmp_path / "c.dcm", "c.dcm", decode=("dicom", 1))))
    assert np.array_equal(found.reshape(-1, 3), np.stack([np.arange(256), np.arange(255, -1, -1), np.full(256, 7)], 1))


def test_compressed_equals_raw(tmp_path: Path) -> None:
    data = made(WindowCenter="2048", WindowWidth="4096")
    raw = grey(tmp_path, data)
    data.compress(pydicom.uid.RLELossless, generate_instance_uid=False)
    assert np.array_equal(grey(tmp_path, data), raw)


def test_what_can_not_be_decoded_says_why(tmp_path: Path) -> None:
    from pydicom.encaps import encapsulate

    cases: list[tuple[Any, str]] = []
    data = made()
    del data.PixelData
    cases.append((data, "no pixel data"))
    data = made()
    data.PixelData = data.PixelData[: len(data.PixelData) // 2]
    cases.append((data, r"3072|6144"))
    data = made()
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLosslessSV1
    data.PixelData = encapsulate([b"\xff\xd8\xff\xc3" + b"\0" * 60 + b"\xff\xd9"])
    data["PixelData"].VR = "OB"
    cases.append((data, r"1\.2\.840\.10008\.1\.2\.4\.70.*vision-probing\[dicom\]"))
    for number, (broken, says) in enumerate(cases):
        broken.save_as(tmp_path / f"{number}.dcm", enforce_file_format=True)
        with pytest.raises(ValueError, match=rf"(?s)^{number}\.dcm.*({says})"):
            open_view(View(tmp_path / f"{number}.dcm", f"{number}.dcm", decode=("dicom", 1)))
    (tmp_path / "text.dcm").write_text("patient,label\n")
    with pytest.raises(ValueError, match=r"^text\.dcm"):
        open_view(View(tmp_path / "text.dcm", "text.dcm", decode=("dicom", 1)))


def test_real_compressed_studies_equal_their_raw_twins() -> None:
    from pydicom.data import get_testdata_file

    for raw, packed in (("MR2_UNCR.dcm", "MR2_J2KR.dcm"), ("RG1_UNCR.dcm", "RG1_J2KR.dcm")):
        paths = [get_testdata_file(name, download=False) for name in (raw, packed)]
        if not all(paths):
            pytest.skip("pydicom-data is not installed")
        one, two = (np.asarray(open_view(View(Path(p), raw, decode=("dicom", 1)))) for p in paths)
        assert np.array_equal(one, two) and np.ptp(one) > 100


# --- members -----------------------------------------------------------------------------------------------------


def test_members_of_archives_are_the_plain_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    opened = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(opened, "PNG")
    content = opened.getvalue()
    (tmp_path / "a.png").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("films/a.png", content)
    rows = [None, {"bytes": content, "path": "a.png"}]
    pyarrow.parquet.write_table(pyarrow.table({"raw": [b"", content], "image": rows}), tmp_path / "all.parquet", row_group_size=1)
    views = [
        View(tmp_path / "a.png", "a.png"),
        View(tmp_path / "all.zip", "films/a.png", member="films/a.png"),
        View(tmp_path / "all.parquet", "row 1", member="raw:1"),
        View(tmp_path / "all.parquet", "row 1", member="image:1"),
    ]
    pictures = [np.asarray(open_view(v)) for v in views]
    assert all(np.array_equal(p, pictures[0]) for p in pictures)
    found, failed = digests(tmp_path / "digests", views)
    assert not failed and {v.key(d) for v, d in found.items()} == {views[0].key(hashlib.sha256(content).hexdigest())}
    for view in (View(tmp_path / "all.parquet", "row 0", member="image:0"), View(tmp_path / "all.zip", "b.png", member="b.png")):
        with pytest.raises(ValueError, match=view.name):
            open_view(view)


# --- what would fill the memory ----------------------------------------------------------------------------------


def test_absurd_sizes_are_refused_and_the_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nibabel = pytest.importorskip("nibabel")
    Image.new("1", (3000, 2000)).save(tmp_path / "large.png")
    data = made()
    data.Rows = data.Columns = 60000
    data.save_as(tmp_path / "large.dcm", enforce_file_format=True)
    with zipfile.ZipFile(tmp_path / "large.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(50_000_000))
    large = View(tmp_path / "large.png", "large.png")
    assert open_view(large).size == (3000, 2000)
    monkeypatch.setenv(decode.PIXELS, "5000000")
    module._decoded.cache_clear()
    for view, says in (
        (large, "3000 x 2000 = 6,000,000 pixels.*PROBING_MAX_PIXELS=6000000"),
        (View(tmp_path / "large.dcm", "large.dcm", decode=("dicom", 1)), "60000 x 60000.*PROBING_MAX_PIXELS"),
        (View(tmp_path / "large.zip", "a.png", member="a.png"), "50,000,000 bytes"),
    ):
        with pytest.raises(ValueError, match=says):
            open_view(view)
    header = nibabel.Nifti1Header()
    header.set_data_shape((32000, 32000, 32000))
    (tmp_path / "large.nii").write_bytes(header.binaryblock + bytes(100))
    with pytest.raises(ValueError, match=r"large\.nii.*32000 x 32000 x 32000 voxels"):
        open_view(View(tmp_path / "large.nii", "large.nii", ("axial", 0), ("nifti", 1, 0.5, 99.5)))


# --- NIfTI -------------------------------------------------------------------------------------------------------


def test_a_volume_is_the_same_however_it_is_stored(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    values = np.random.default_rng(0).integers(-500, 500, (5, 7, 9)).astype(np.int16)
    stored = {
        "ras": (values, np.diag([2.0, 3, 4, 1])),
        "lps": (values[::-1, ::-1], np.array([[-2.0, 0, 0, 8], [0, -3, 0, 18], [0, 0, 4, 0], [0, 0, 0, 1]])),
        "turned": (values.transpose(2, 0, 1), np.array([[0.0, 2, 0, 0], [0, 0, 3, 0], [4, 0, 0, 0], [0, 0, 0, 1]])),
    }
    for name, (array, affine) in stored.items():
        for kind, slope in (("int", None), ("float", None), ("scaled", (0.5, -100.0))):
            image = nibabel.Nifti1Image(array.astype(np.float32) if kind == "float" else array.copy(), affine)
            if slope:
                image.header.set_slope_inter(*slope)
            path = tmp_path / f"{name}_{kind}.nii.gz"
            nibabel.save(image, path)
            found = decode.read_nifti(path)
            want = values * 0.5 - 100 if slope else values
            assert np.array_equal(found.real(found.stored), want.astype(np.float32)), path.name
            assert np.allclose(found.affine, np.diag([2.0, 3, 4, 1])), path.name
            for plane, axis in zip(decode.PLANES, range(3), strict=True):
                assert np.array_equal(found.values(plane, 3), np.take(want, 3, axis).astype(np.float32))
            assert np.allclose(found.percentiles(5, 95), np.percentile(want, [5, 95]), atol=1e-3)


def test_a_window_shows_what_percentiles_would(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    values = np.linspace(-1000, 1000, 4 * 6 * 8).reshape(4, 6, 8).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "a.nii")
    found = decode.shown(tmp_path / "a.nii", "axial", 2, "window", 50.0, 400.0)
    assert np.array_equal(found, (np.clip((values[:, :, 2] + 150) / 400, 0, 1) * 255).round().astype(np.uint8))
