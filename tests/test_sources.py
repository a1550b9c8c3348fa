"""Data that people bring: DICOM trees, NIfTI volumes with masks, tables, parquet and zip files, each made here by code,
small, and laid out like the real ones. What a source gives, what it refuses, and one command line for each."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import logging
import re
import shlex
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CONF, NOTHING, ROOT, film
from test_docs import config

from probing.collect import join
from probing.images import dicom, folder, nifti, table
from probing.jobs import configure
from probing.picture import open_view
from probing.types import Sample, Task

Cli = Callable[..., tuple[int, str, str]]
needs_dicom = pytest.mark.skipif(not importlib.util.find_spec("pydicom"), reason="needs the extra dicom")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)


def task(tmp_path: Path, *typed: str, left: dict[str, str] | None = None) -> Task:
    """The task that a command line stands for."""
    return configure.task_of(config([f"outputs={tmp_path / 'outputs'}", *typed], []), {} if left is None else left)


# --- DICOM, as MIMIC-CXR lies on the disk --------------------------------------------------------------------------


def write_dicom(path: Path, values: np.ndarray, **fields: Any) -> None:
    """An uncompressed DICOM file: values [H,W] or [frames,H,W], 16 bits."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.1.1"
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = f"1.2.{abs(hash(path)) % 10**12}"
    data.Rows, data.Columns = values.shape[-2:]
    if values.ndim == 3:
        data.NumberOfFrames = len(values)
    data.SamplesPerPixel, data.PhotometricInterpretation, data.PixelRepresentation = 1, "MONOCHROME2", 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 16, 15
    data.PixelData = values.astype("<u2").tobytes()
    for keyword, value in fields.items():
        setattr(data, keyword, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)


@pytest.fixture(scope="session")
def mimic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 patients of 2 studies of 2 films (PA, and AP or LATERAL), and their metadata.csv.gz without paths."""
    pytest.importorskip("pydicom")
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("mimic")
    rows = []
    for number in range(40):
        patient, study, shot = number // 4, number // 2, number % 2
        view = "PA" if shot == 0 else "AP" if study % 2 else "LATERAL"
        name = f"{number:08x}-{number:04x}"
        place = root / "files" / f"p1{patient % 2}" / f"p1000{patient:04d}" / f"s5041{study:04d}" / f"{name}.dcm"
        pixels = np.asarray(film(rng, 40, 48), np.uint16) * 16
        write_dicom(place, pixels if view == "PA" else pixels.T, PatientID=f"{patient:05d}", ViewPosition=view, Modality="DX",
                    StudyInstanceUID=f"1.5.{study}", SeriesInstanceUID=f"1.6.{study}", InstanceNumber=shot + 1,
                    AccessionNumber="00123")  # fmt: skip
        rows.append({"dicom_id": name, "subject_id": f"1000{patient:04d}", "study_id": f"5041{study:04d}", "ViewPosition": view})
    with gzip.open(root / "metadata.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (root / "files" / "index.html").write_text("no film")
    return root


def of_mimic(root: Path) -> list[str]:
    return [
        "images=dicom",
        f"images.path={root / 'files'}",
        f"images.labels={root / 'metadata.csv.gz'}",
        "images.key=dicom_id",
        "images.headers=[]",
    ]


VIEWS = ("images.where={ViewPosition: [PA, AP]}", "task=column", "task.column=ViewPosition")


@pytest.mark.parametrize("group", ["subject_id", "-3", "p1000*"])
def test_labels_of_dicom_files_are_joined_from_a_table_without_paths(group: str, mimic: Path, tmp_path: Path) -> None:
    found = task(tmp_path, *of_mimic(mimic), f"images.group={group}", *VIEWS)
    assert found.classes == ("AP", "PA") and Counter(s.label for s in found.samples) == {"PA": 20, "AP": 10}
    assert len(set(found.groups)) == 10
    with gzip.open(mimic / "metadata.csv.gz", "rt") as file:
        truth = {row["dicom_id"]: row for row in csv.DictReader(file)}
    for s in found.samples:
        row = truth[Path(s.id).stem]
        assert s.label == row["ViewPosition"] and row["subject_id"] in s.id
        assert group != "subject_id" or s.group == row["subject_id"]


def test_limit_takes_of_many_from_all_patients(mimic: Path, tmp_path: Path) -> None:
    found = task(tmp_path, *of_mimic(mimic), "images.group=subject_id", "limit=20", *VIEWS)
    assert len(found.samples) == 20 and set(Counter(found.groups).values()) == {2}


def test_without_headers_no_file_is_opened(mimic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pydicom

    monkeypatch.setattr(pydicom, "dcmread", None)
    assert len(task(tmp_path, *of_mimic(mimic), "images.group=-3", "task=orientation").samples) == 160


def test_headers_are_columns_read_once(mimic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ["images=dicom", f"images.path={mimic / 'files'}", "images.headers=[PatientID,ViewPosition,AccessionNumber]"]
    found = task(tmp_path, *ask, *VIEWS)
    assert len(found.samples) == 30 and len(set(found.groups)) == 10
    meta = found.samples[0].meta
    assert meta["PatientID"] == "00000" and meta["AccessionNumber"] == "00123", "a text that looks like a number stays one"
    assert meta["slices"] == 2 and meta["slice"] in (0, 1)
    import pydicom

    monkeypatch.setattr(pydicom, "dcmread", None)
    assert task(tmp_path, *ask, *VIEWS) == found


@needs_dicom
def test_slices_are_in_the_order_of_their_series(tmp_path: Path) -> None:
    for name, z in (("c", 0.0), ("a", 5.0), ("b", -5.0)):
        write_dicom(tmp_path / "ct" / name, np.full((8, 8), 7), SeriesInstanceUID="1.2.3", ImagePositionPatient=[1, 2, z],
                    ImageOrientationPatient=[1, 0, 0, 0, 1, 0], InstanceNumber=1)  # fmt: skip
    found = dicom.load(name="d", path=str(tmp_path / "ct"), memo=tmp_path / "m", left={}, headers=["InstanceNumber"])
    assert {s.id: (s.meta["slice"], s.meta["position"]) for s in found} == {"b": (0, -5.0), "c": (1, 0.0), "a": (2, 5.0)}


@needs_dicom
def test_frames_of_a_cine(tmp_path: Path) -> None:
    cine = np.arange(5)[:, None, None] * np.ones((5, 8, 8)) * 1000
    write_dicom(tmp_path / "us" / "cine.dcm", cine, PatientID="p", WindowCenter=2000, WindowWidth=4001)
    write_dicom(tmp_path / "us" / "still.dcm", np.arange(64).reshape(8, 8), PatientID="q")
    given: dict[str, list[Sample]] = {}
    for frames in ("first", "middle", "all"):
        given[frames] = dicom.load(name="d", path=str(tmp_path / "us"), memo=tmp_path / "m", left={}, frames=frames)
    assert [s.id for s in given["all"]] == [*(f"cine.dcm/{i}" for i in range(5)), "still.dcm"]
    assert [int(np.asarray(open_view(s.views[0]))[0, 0, 0]) for s in given["all"][:5]] == [0, 64, 128, 191, 255]
    assert [s.views[0].frame for s in given["middle"]] == [("frame", 2), None]
    assert [s.id for s in given["first"]] == ["cine.dcm", "still.dcm"]


@needs_dicom
def test_files_that_are_no_dicom_are_named_and_the_others_go_on(mimic: Path, tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(mimic / "files", tmp_path / "films"))
    (root / "p10" / "notes").write_text("no film at all, but long enough to look into" * 20)
    next(root.rglob("*.dcm")).write_bytes(b"")
    left: dict[str, str] = {}
    found = task(tmp_path, "images=dicom", f"images.path={root}", *VIEWS, left=left)
    assert len(left) == 2 and "p10/notes" in left and 28 < len(found.samples) < 31
    assert str(tmp_path) not in json.dumps(left)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["images.group=subjectid"], ["images.group=subjectid", "Did you mean images.group=subject_id?"]),
        (["images.key=dicomid"], ["images.key=dicomid", "Did you mean images.key=dicom_id?", "study_id"]),
        (["images.key=subject_id"], ["two rows have subject_id", "differ in dicom_id"]),
        (["images.key=null"], ["images.key=: there is no such column", "dicom_id", "names the image"]),
        (["images.headers=[PatientId]"], ["images.headers=PatientId", "images.headers=PatientID"]),
        (["images.frames=last"], ["images.frames=last", "first, middle or all"]),
        (["images.files=*.dicom"], ["no file matches images.files=*.dicom"]),
        (["images.window=lungs"], ["images.window=lungs", "lung"]),
        (["images.where={ViewPositon: PA}"], ["no column ViewPositon", "Did you mean ViewPosition?"]),
        (["images.where={ViewPosition: LL}"], ["no image has ViewPosition = LL", "AP, LATERAL, PA"]),
    ],
)
def test_a_request_of_dicom_that_can_not_be_met(typed: list[str], said: list[str], mimic: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        task(tmp_path, *of_mimic(mimic), "images.group=subject_id", "task=orientation", *typed)
    assert all(words in str(refusal.value) for words in said) and "\n" not in str(refusal.value)


def test_a_table_that_fits_no_image_says_what_stands_on_both_sides(mimic: Path, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("name,side\nalpha,left\nbeta,right\n")
    with pytest.raises(ValueError, match=r"none of 40 images has a row.*\.dcm.*'alpha'.*images.key= one of name, side"):
        task(tmp_path, *of_mimic(mimic), f"images.labels={tmp_path / 'other.csv'}", "images.key=name", "task=orientation")


# --- NIfTI, as TotalSegmentator lies on the disk -------------------------------------------------------------------

LIVER = {"s0001": (slice(2, 8), slice(3, 9), slice(4, 9)), "s0002": (slice(12, 18), slice(3, 9), slice(10, 16))}


def write_nifti(path: Path, values: np.ndarray, spacing: Sequence[float] = (2, 2, 5), turn: bool = False) -> None:
    """A volume given in RAS+. turn: stored from left to right the other way round, as most CTs are."""
    import nibabel

    affine = np.diag([*spacing, 1.0])
    if turn:
        values, affine = (
            values[::-1],
            affine @ np.array([[-1, 0, 0, len(values) - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]]),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)


@pytest.fixture(scope="session")
def totalseg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10 CTs of 20 x 24 x 18 voxels with masks of the liver (a bright block) and of two kidneys."""
    pytest.importorskip("nibabel")
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("totalseg")
    for number in range(1, 11):
        name = f"s{number:04d}"
        ct = rng.normal(-50, 20, (20, 24, 18))
        mask, kidneys = np.zeros((2, *ct.shape), np.uint8)
        place = LIVER.get(name, (slice(2, 8), slice(3, 9), slice(4 + number % 4, 12)))
        mask[place] = 1
        kidneys[3:5, 12:15, 6:9] = kidneys[14:16, 12:15, 6:9] = 1
        ct[mask > 0] += 200
        write_nifti(root / name / "ct.nii.gz", ct.astype(np.int16), turn=number % 2 == 0)
        write_nifti(root / name / "segmentations" / "liver.nii.gz", mask, turn=number % 2 == 0)
        write_nifti(root / name / "segmentations" / "kidneys.nii.gz", kidneys)  # the same place, stored another way
    return root


def slices(root: Path, memo: Path, left: dict[str, str] | None = None, **more: Any) -> list[Sample]:
    return nifti.load(name="n", path=str(root), memo=memo, left={} if left is None else left, **more)


@pytest.mark.parametrize("files", ["*", "*/ct.nii.gz"])
@pytest.mark.parametrize("masks", [None, "segmentations/*.nii.gz", {"liver": "segmentations/liver.nii.gz"}])
def test_masks_are_never_taken_for_images(files: str, masks: Any, totalseg: Path, tmp_path: Path) -> None:
    found = slices(totalseg, tmp_path, files=files, masks=masks)
    assert {s.meta["volume"] for s in found} == {f"s{i:04d}/ct.nii.gz" for i in range(1, 11)}


def test_masks_beside_their_volume_are_no_images_either(totalseg: Path, tmp_path: Path) -> None:
    for name in ("t1", "seg"):
        write_nifti(tmp_path / "brats" / "b1" / f"b1_{name}.nii", np.ones((4, 4, 4), np.uint8))
    found = slices(tmp_path / "brats", tmp_path, masks={"tumour": "*_seg.nii"})
    assert {s.meta["volume"] for s in found} == {"b1/b1_t1.nii"} and found[0].meta["tumour_contains"] == "yes"


def test_slices_lie_at_multiples_of_the_step(totalseg: Path, tmp_path: Path) -> None:
    found = slices(totalseg, tmp_path, planes=["axial", "sagittal"], step_mm=10)
    one = [s for s in found if s.meta["volume"] == "s0001/ct.nii.gz"]
    assert [s.meta["position"] for s in one if s.meta["plane"] == "axial"] == list(range(0, 86, 10))
    assert [s.meta["index"] for s in one if s.meta["plane"] == "sagittal"] == [0, 5, 10, 15]
    assert [s.meta["fraction"] for s in one if s.meta["plane"] == "axial"][0::8] == [0, pytest.approx(16 / 17)]
    assert len(slices(totalseg, tmp_path, step_mm=1000)) == 10, "every volume gives one at least"


def test_a_window_in_hounsfield_units(totalseg: Path, tmp_path: Path) -> None:
    (view,) = {s.views[0] for s in slices(totalseg, tmp_path, window="abdomen") if s.id == "s0001/ct.nii.gz/axial/006"}
    assert view.decode == ("nifti", 1, "window", 50, 400)
    shown = np.asarray(open_view(view))[..., 0]
    assert 60 < np.median(shown) < 70 and shown.shape == (24, 20)  # -50 HU is an eighth of the way from -150 to 250


def test_what_masks_say_agrees_with_the_picture(totalseg: Path, tmp_path: Path) -> None:
    found = slices(totalseg, tmp_path, window=[50, 400], masks="segmentations/*.nii.gz", planes=["axial", "coronal", "sagittal"])
    for s in (s for s in found if s.meta["folder"] in LIVER):
        m = s.meta
        x, y, z = LIVER[str(m["folder"])]
        inside = {"sagittal": x, "coronal": y, "axial": z}[str(m["plane"])]
        present = inside.start <= int(m["index"]) < inside.stop
        assert m["liver_contains"] == ("yes" if present else "no") and m["liver_count"] == int(present)
        shown = np.asarray(open_view(s.views[0]))[..., 0]
        bright = shown > 150
        assert bright.any() == present
        if not present:
            assert "liver_x" not in m
            continue
        rows, cols = np.nonzero(bright)
        height, width = shown.shape
        assert m["liver_x"] == pytest.approx((cols.mean() + 0.5) / width, abs=1e-3)
        assert m["liver_y"] == pytest.approx((rows.mean() + 0.5) / height, abs=1e-3)
        assert [m[f"liver_{e}"] for e in ("left", "right", "top", "bottom")] == pytest.approx(
            [cols.min() / width, (cols.max() + 1) / width, rows.min() / height, (rows.max() + 1) / height], abs=1e-3
        )
        if m["plane"] != "sagittal":  # RAS+: small x is the patient's left, which the picture shows at the right
            assert m["liver_side"] == ("left" if m["folder"] == "s0001" else "right")
            assert (m["liver_side"] == "left") == (m["liver_x"] > 0.5)
        else:
            assert "liver_side" not in m
    axial = [s for s in found if s.meta["plane"] == "axial" and s.meta["index"] == 8]
    assert {s.meta["kidneys_count"] for s in axial} == {2}


def test_masks_are_read_once(totalseg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = slices(totalseg, tmp_path, masks="segmentations/*.nii.gz")
    monkeypatch.setattr(nifti, "read_nifti", None)
    monkeypatch.setattr(nifti, "read_header", None)
    assert slices(totalseg, tmp_path, masks="segmentations/*.nii.gz") == before


def test_a_volume_or_mask_that_can_not_be_read_is_named(totalseg: Path, tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(totalseg, tmp_path / "ts"))
    (root / "s0003" / "ct.nii.gz").write_bytes(b"no volume")
    (root / "s0004" / "segmentations" / "liver.nii.gz").unlink()
    write_nifti(root / "s0005" / "segmentations" / "liver.nii.gz", np.zeros((20, 24, 17), np.uint8))
    write_nifti(root / "s0006" / "segmentations" / "liver.nii.gz", np.zeros((20, 24, 18), np.uint8), (2, 2, 4))
    left: dict[str, str] = {}
    found = slices(root, tmp_path, left, masks={"liver": "segmentations/liver.nii.gz"})
    assert set(left) == {"s0003/ct.nii.gz", *(f"s000{i}/segmentations/liver.nii.gz" for i in (4, 5, 6))}
    assert (
        "No such file" in left["s0004/segmentations/liver.nii.gz"]
        and "grid 20 x 24 x 17" in left["s0005/segmentations/liver.nii.gz"]
    )
    assert "elsewhere" in left["s0006/segmentations/liver.nii.gz"] and str(tmp_path) not in json.dumps(left)
    assert {s.meta["folder"] for s in found if "liver_contains" not in s.meta} == {"s0004", "s0005", "s0006"}


def test_labels_of_volumes_are_joined_by_their_folder(totalseg: Path, tmp_path: Path) -> None:
    (tmp_path / "meta.csv").write_text("image_id;sex\n" + "".join(f"s{i:04d};{'mf'[i % 2]}\n" for i in range(1, 9)))
    found = task(tmp_path, "images=nifti", f"images.path={totalseg}", f"images.labels={tmp_path / 'meta.csv'}", "images.key=image_id",
                 "task=column", "task.column=sex")  # fmt: skip
    assert found.classes == ("f", "m") and len(set(found.groups)) == 8


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["images.planes=[transverse]"], ["no plane transverse", "sagittal, coronal, axial"]),
        (["images.step_mm=0"], ["images.step_mm=0", "above 0"]),
        (["images.files=*.mha"], ["no volume matches images.files=*.mha", ".nii.gz"]),
        (["images.masks=segmentation/*.nii.gz"], ["no volume has such a mask", "s0001/ct.nii.gz"]),
        (["images.masks={liver: segmentations/livr.nii.gz}"], ["none of 10 files is a mask", "livr.nii.gz"]),
        (["images.masks={liver: ../../../etc/x.nii}"], ["outside images.path"]),
        (["images.masks=*.nii.gz"], ["is no mask of images.masks"]),
        (["images.group=volum"], ["Did you mean images.group=volume?"]),
    ],
)
def test_a_request_of_nifti_that_can_not_be_met(typed: list[str], said: list[str], totalseg: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        task(tmp_path, "images=nifti", f"images.path={totalseg}", "task=column", "task.column=plane", *typed)
    assert all(words in str(refusal.value) for words in said) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("source", ["dicom", "nifti"])
def test_a_file_in_the_place_of_a_folder_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=f"images={source} reads a folder"):
        task(tmp_path, f"images={source}", f"images.path={tmp_path / 'x.zip'}", "task=orientation")


# --- a table of frames, as a lab has it ----------------------------------------------------------------------------

TYPES = ("0-IIa", "Is", "Ip")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 frames of 12 patients in frames.csv: file, patient, video, paris_type."""
    root = tmp_path_factory.mktemp("lab")
    rng = np.random.default_rng(1)
    rows = []
    for number in range(48):
        patient, kind = number // 4, TYPES[number % 3]
        file = f"frames/p{patient:02d}/{number:02d}.png"
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shown = film(rng, 40, 40)
        (shown if kind == "0-IIa" else shown.rotate(180)).save(root / file)
        rows.append([file, f"p{patient:02d}", f"v{number // 2:02d}", kind])
    write_table(root / "frames.csv", rows)
    return root


def write_table(
    path: Path, rows: Sequence[Sequence[Any]], header: Sequence[str] = ("file", "patient", "video", "paris_type")
) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def read(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def of_lab(path: Path, *more: str) -> list[str]:
    return ["images=table", f"images.path={path}", "images.image=file", *more, "task=column", "task.column=paris_type"]


PARIS = "task.map={0-IIa: flat, Is: polypoid, Ip: polypoid}"


def test_frames_by_patient_with_a_map_of_classes(lab: Path, tmp_path: Path) -> None:
    found = task(tmp_path, *of_lab(lab / "frames.csv", "images.group=patient"), PARIS)
    assert found.classes == ("flat", "polypoid") and Counter(s.label for s in found.samples) == {"flat": 16, "polypoid": 32}
    assert len(set(found.groups)) == 12 and found.samples[0].id == "frames/p00/00.png"
    assert open_view(found.samples[0].views[0]).size == (40, 40)


def test_two_columns_of_groups_join_what_shares_either(tmp_path: Path, lab: Path) -> None:
    rows = read(lab / "frames.csv")
    rows[7][2] = rows[8][2]  # a video that two patients share
    rows[20][1] = ""  # one of the two may lack
    write_table(lab / "shared.csv", rows)
    found = task(tmp_path, *of_lab(lab / "shared.csv", "images.group=[patient,video]"))
    group = {s.id: s.group for s in found.samples}
    assert len(set(group.values())) == 11 and group[rows[7][0]] == group[rows[8][0]] == group[rows[4][0]]
    assert group[rows[20][0]] == group[rows[21][0]]
    with pytest.raises(ValueError, match=r"its column patient is empty, as in 1 of 48 images"):
        task(tmp_path, *of_lab(lab / "shared.csv", "images.group=patient"))


@pytest.mark.parametrize("empty", ["", "NaN", "NA", "null", " "])
def test_an_empty_label_is_no_class(empty: str, lab: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = read(lab / "frames.csv")
    for row in rows[:3]:
        row[3] = empty
    write_table(lab / "empty.csv", rows)
    found = task(tmp_path, *of_lab(lab / "empty.csv", "images.group=patient"))
    assert found.classes == ("0-IIa", "Ip", "Is") and len(found.samples) == 45
    assert "3 samples have no paris_type" in caplog.text and "frames/p00/00.png" in caplog.text
    assert len(task(tmp_path, *of_lab(lab / "empty.csv", "images.group=patient"), PARIS).samples) == 45


def test_repeated_rows_count_once_and_spaces_are_taken_off(lab: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = read(lab / "frames.csv")
    rows[5][3] = f" {rows[5][3]} "
    write_table(lab / "twice.csv", [*rows, rows[0], rows[1]])
    found = task(tmp_path, *of_lab(lab / "twice.csv", "images.group=patient"))
    assert len(found.samples) == 48 and found.classes == ("0-IIa", "Ip", "Is")
    assert "2 rows repeat another row" in caplog.text and "spaces around 1 cells are taken off: paris_type (1)" in caplog.text
    write_table(lab / "differ.csv", [*rows, [*rows[0][:3], "Ip"]])
    with pytest.raises(ValueError, match=r"two rows are called 'frames/p00/00.png' and differ in paris_type. Type images.id"):
        task(tmp_path, *of_lab(lab / "differ.csv", "images.group=patient"))


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".jsonl", ".xlsx", ".parquet"])
def test_frames_from_a_table_of_any_format(ending: str, lab: Path, tmp_path: Path) -> None:
    from test_tables import write

    if ending in (".xlsx", ".parquet"):
        pytest.importorskip("openpyxl" if ending == ".xlsx" else "pyarrow")
    header = ["file", "patient", "video", "paris_type"]
    path = write(tmp_path, ending, [dict(zip(header, row, strict=True)) for row in read(lab / "frames.csv")])
    found = task(tmp_path, *of_lab(Path(path), f"images.root={lab}", "images.group=patient"))
    assert found.samples == task(tmp_path, *of_lab(lab / "frames.csv", "images.group=patient")).samples


def test_paths_of_other_machines(lab: Path, tmp_path: Path) -> None:
    rows = read(lab / "frames.csv")
    plain = task(tmp_path, *of_lab(lab / "frames.csv", "images.group=patient")).samples
    for name, spelled in (("windows.csv", lambda f: f.replace("/", "\\")), ("whole.csv", lambda f: str(lab / f))):
        write_table(lab / name, [[spelled(row[0]), *row[1:]] for row in rows])
        found = task(tmp_path, *of_lab(lab / name, "images.group=patient")).samples
        assert [s.views for s in found] == [s.views for s in plain]


@pytest.mark.parametrize("file", ["../secret.png", "frames/../../secret.png", "/etc/passwd", "C:/secret.png", "..\\secret.png"])
def test_a_path_that_leads_out_is_refused(file: str, lab: Path, tmp_path: Path) -> None:
    write_table(lab / "out.csv", [*read(lab / "frames.csv"), [file, "p", "v", "Is"]])
    with pytest.raises(ValueError, match=r"lies outside .*which is refused.*images.root="):
        task(tmp_path, *of_lab(lab / "out.csv", "images.group=patient"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["images.image=files"], ["images.image=files", "Did you mean images.image=file?", "images.image=null"]),
        (["images.id=fram"], ["images.id=fram", "There are: file, patient, video, paris_type"]),
        (["images.group=patients"], ["Did you mean images.group=patient?"]),
        (["task.column=paris"], ["task.column=paris", "Did you mean task.column=paris_type?"]),
        (["images.image=null"], ["rows without pictures need names", "images.id= one of file, patient"]),
        (["images.root=/nowhere"], ["images.root=/nowhere", "no such file or folder"]),
        (["images.root=frames"], ["none of 48 files is below", "images.root="]),
        (["images.image=paris_type", "images.id=file"], ["none of 48 files"]),
        (["task.map={0-IIa: flat, Is: polypoid}"], ["also has 'Ip' (16)", "null to leave it out"]),
        (["images.where={patient: p99}"], ["no image has patient = p99", "p00"]),
    ],
)
def test_a_request_of_a_table_that_can_not_be_met(
    typed: list[str], said: list[str], lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab)
    with pytest.raises(ValueError) as refusal:
        task(tmp_path, *of_lab(lab / "frames.csv", "images.group=patient"), *typed)
    assert all(words in str(refusal.value) for words in said) and "\n" not in str(refusal.value)


def test_the_stamp_of_a_table_follows_its_files(lab: Path, tmp_path: Path) -> None:
    import os
    import shutil

    root = Path(shutil.copytree(lab, tmp_path / "lab"))
    stamp = lambda **more: table.stamp(path=str(root / "frames.csv"), image="file", **more)  # noqa: E731
    before = stamp()
    (root / "notes.txt").write_text("beside")
    assert stamp() == before and len(before) == 49 and str(tmp_path) not in json.dumps(before)
    os.utime(root / "frames/p00/00.png", (1, 1))
    touched = stamp()
    (root / "frames.csv").write_text((root / "frames.csv").read_text() + "\n")
    assert before != touched != stamp()


def test_rows_without_pictures(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.csv", [[f"r{i}", f"p{i // 2}", "", "Is" if i % 3 else "Ip"] for i in range(12)])
    found = task(tmp_path, "images=table", f"images.path={tmp_path / 'rows.csv'}", "images.image=null", "images.id=file",
                 "images.group=patient", "task=column", "task.column=paris_type")  # fmt: skip
    assert [s.id for s in found.samples][:2] == ["r0", "r1"] and all(s.views[0].decode == ("none", 1) for s in found.samples)
    with pytest.raises(ValueError, match="no picture"):
        open_view(found.samples[0].views[0])


# --- parquet and zip -----------------------------------------------------------------------------------------------


def png(picture: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session", params=["binary", "struct"])
def parquet(request: pytest.FixtureRequest, lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's frames inside of a table, plain or as data sets of the hub have them; row 3 has no picture."""
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = read(lab / "frames.csv")
    inside: list[Any] = [(lab / row[0]).read_bytes() for row in rows]
    inside[3] = None
    if request.param == "struct":
        inside = [{"bytes": b, "path": row[0]} for b, row in zip(inside, rows, strict=True)]
    path = tmp_path_factory.mktemp(request.param) / "train.parquet"
    found = pyarrow.table({"image": inside, "patient": [r[1] for r in rows], "paris_type": [r[3] for r in rows]})
    pyarrow.parquet.write_table(found, path, row_group_size=10)
    return path


def test_pictures_inside_a_parquet_table(parquet: Path, lab: Path, tmp_path: Path) -> None:
    found = task(
        tmp_path, "images=table", f"images.path={parquet}", "images.group=patient", "task=column", "task.column=paris_type"
    )
    assert len(found.samples) == 48 and len(set(found.groups)) == 12
    rows = read(lab / "frames.csv")
    by_id = {s.id: s for s in found.samples}
    from PIL import Image

    for number in (0, 9, 10, 47):
        s = by_id[f"row {number}"]
        assert s.label == rows[number][3]
        assert (np.asarray(open_view(s.views[0])) == np.asarray(Image.open(lab / rows[number][0]).convert("RGB"))).all()
    with pytest.raises(ValueError, match=r"row 3: .*holds no picture"):
        open_view(by_id["row 3"].views[0])


@pytest.fixture(scope="session")
def zipped(films: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "films.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(films.rglob("*.png")):
            archive.write(file, file.relative_to(films))
        archive.writestr("__MACOSX/files/._0.png", b"\0")
        archive.writestr("files/.hidden.png", b"\0")
        archive.writestr("readme.txt", b"no picture")
    return path


def test_a_zip_of_pictures_is_as_its_folder(zipped: Path, films: Path) -> None:
    inside, beside = (folder.load(name="f", path=str(p)) for p in (zipped, films))
    assert [(s.id, s.meta) for s in inside] == [(s.id, s.meta) for s in beside] and len(inside) == 48
    for one, other in list(zip(inside, beside, strict=True))[::12]:
        assert (np.asarray(open_view(one.views[0])) == np.asarray(open_view(other.views[0]))).all()


@pytest.mark.parametrize("member", ["../secret.png", "/etc/x.png", "a/../../x.png", "..\\x.png"])
def test_a_zip_whose_members_lead_out_is_refused(member: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.png", b"")
        archive.writestr(member, b"")
    with pytest.raises(ValueError, match=r"leads out of the archive, which is refused"):
        folder.load(name="f", path=str(tmp_path / "x.zip"))


def test_a_file_that_is_no_zip(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"images.path=.*neither a folder nor a zip file"):
        folder.load(name="f", path=str(tmp_path / "x.zip"))


def test_a_table_of_members_of_a_zip(zipped: Path, films: Path, tmp_path: Path) -> None:
    files = sorted(p.relative_to(films).as_posix() for p in films.rglob("*.png"))
    write_table(tmp_path / "t.csv", [[f, f.split("/")[2], "v", "ab"[i % 2]] for i, f in enumerate(files)])
    found = task(tmp_path, *of_lab(tmp_path / "t.csv", f"images.root={zipped}", "images.group=patient"))
    assert len(found.samples) == 48 and open_view(found.samples[0].views[0]).size == (60, 72)


# --- one command line for each -------------------------------------------------------------------------------------


CHEAP = (*NOTHING, "protocol.folds=2", "protocol.inner=2", "workers=0")


def run(cli: Cli, *typed: str) -> str:
    code, out, err = cli(*typed, *CHEAP)
    assert code == 0, out + err
    return out


def test_a_dicom_tree_with_its_table_in_one_command(cli: Cli, mimic: Path) -> None:
    command = [*of_mimic(mimic), "images.group=subject_id", *VIEWS]
    out = run(cli, *command)
    assert "30 samples of 30 images in 10 groups" in out and "ViewPosition is" in out
    assert "already done" in run(cli, *command)


def test_the_card_of_views(cli: Cli, mimic: Path, tmp_path: Path) -> None:
    typed = ("data=mimic_view", f"images.path={mimic / 'files'}")
    found = task(tmp_path, *typed, f"images.labels={mimic / 'metadata.csv.gz'}")
    assert len(found.samples) == 30 and len(set(found.groups)) == 10 and found.classes == ("AP", "PA")
    code, _, err = cli(*typed, *CHEAP)
    assert code == 1 and re.search(r"images.labels=.*metadata.csv.gz: there is no such file", err)


def test_the_card_of_livers(cli: Cli, totalseg: Path) -> None:
    out = run(cli, "data=totalseg_liver", f"images.path={totalseg}")
    assert "90 samples of 90 images in 10 groups; 2 classes" in out and "task=liver" in out


def test_nifti_volumes_in_one_command(cli: Cli, totalseg: Path) -> None:
    typed = ("images.planes=[axial,coronal]", "images.step_mm=20", "images.window=abdomen", "task=column", "task.column=plane")
    assert "plane is" in run(cli, "images=nifti", f"images.path={totalseg}", "images.files=*/ct.nii.gz", *typed)


def test_a_table_of_frames_in_one_command(cli: Cli, lab: Path, tmp_path: Path) -> None:
    rows = read(lab / "frames.csv")
    (lab / "broken.png").write_bytes(b"no picture")
    write_table(lab / "one.csv", [*rows, ["broken.png", "p00", "v00", "Is"], ["absent.png", "p01", "v02", "Is"]])
    out = run(cli, *of_lab(lab / "one.csv", "images.group=[patient,video]"), PARIS)
    assert "48 samples of 48 images in 12 groups" in out
    assert "left out, 2 files" in out and "absent.png: No such file" in out and "broken.png: UnidentifiedImageError" in out
    (result,) = (tmp_path / "outputs" / "probe").glob("*/result.json")
    assert set(json.loads(result.read_text())["skipped"]) == {"broken.png", "absent.png"}
    assert str(lab) not in result.read_text()


@pytest.mark.parametrize("parquet", ["struct"], indirect=True)
def test_a_parquet_table_in_one_command(cli: Cli, parquet: Path) -> None:
    out = run(cli, "images=table", f"images.path={parquet}", "images.group=patient", "task=column", "task.column=paris_type")
    assert "47 samples of 47 images in 12 groups" in out and "row 3: " in out


def test_a_zip_in_one_command(cli: Cli, zipped: Path) -> None:
    assert "96 samples of 48 images in 12 groups" in run(
        cli, "images=folder", f"images.path={zipped}", "images.group=-3", "task=flip"
    )


def test_studies_of_pydicom_in_one_command(cli: Cli) -> None:
    pytest.importorskip("pydicom")
    pytest.importorskip("data_store")
    out = run(cli, "images=embedded_studies", "images.frames=2", "images.where={modality: [CT, MR, ultrasound]}", "task=column",
              "task.column=modality")  # fmt: skip
    assert "samples" in out and "3 classes" in out


def test_encoders_over_cards_of_different_sources_in_a_folder_of_ones_own(
    cli: Cli, mimic: Path, lab: Path, tmp_path: Path
) -> None:
    import shutil

    own = tmp_path / "mine"
    shutil.copytree(CONF, own)
    (own / "data").mkdir()
    for name, images, typed, answer in (
        ("views", "dicom", of_mimic(mimic)[1:], "{ViewPosition: [PA, AP]}"),
        ("polyps", "table", of_lab(lab / "frames.csv")[1:3], "{paris_type: [Is, 0-IIa]}"),
    ):
        lines = [f"  {t.removeprefix('images.').replace('=', ': ', 1)}" for t in typed]
        column = re.findall(r"\w+", answer)[0]
        group = "subject_id" if images == "dicom" else "patient"
        (own / "data" / f"{name}.yaml").write_text(
            f"# @package _global_\ndefaults:\n  - override /images: {images}\n  - override /task: column\nimages:\n"
            + "\n".join([*lines, f"  group: {group}", f"  where: {answer}"])
            + f"\ntask:\n  column: {column}\n"
        )
    cheap = [n for n in CHEAP if not n.startswith("encoder")]
    code, out, err = cli("--config-dir", str(own), "-m", "encoder=tiny,pixels", "data=views,polyps", *cheap)
    assert code == 0, out + err
    shown = out[out.rindex("job    ") :]
    assert shown.count("\nprobe ") == 4 and "4 done" in shown
    assert re.search(r"tiny +ViewPosition +dicom", shown) and re.search(r"pixels +paris_type +table", shown)


@pytest.mark.parametrize(
    "typed", ["'images.where={ViewPosition: [PA, AP]}'", "+images.where.ViewPosition=[PA,AP]", "data=mimic_view"]
)
def test_a_filter_as_the_shell_and_hydra_take_it(typed: str, mimic: Path, tmp_path: Path) -> None:
    """With one pair of quotes, or for one column without any, or in a card."""
    words = [*shlex.split(typed), *of_mimic(mimic), "images.group=-3", "task=column", "task.column=ViewPosition"]
    found = configure.task_of(configure.compose([*words, f"outputs={tmp_path / 'outputs'}"]), {})
    assert Counter(s.label for s in found.samples) == {"PA": 20, "AP": 10}


def test_every_card_opens_with_its_command() -> None:
    for path in sorted((ROOT / "conf" / "data").glob("*.yaml")):
        assert f"# python probe.py data={path.stem}" in path.read_text(), path.name


def test_a_join_takes_one_way_for_all_and_refuses_a_name_that_two_files_have(tmp_path: Path) -> None:
    from probing.types import View

    def images(*paths: str) -> list[Sample]:
        return [Sample(p, (View(Path(p), p),), p, p) for p in paths]

    table = tmp_path / "labels.csv"
    table.write_text("key,side\n0,left\n1,right\n")
    with pytest.raises(ValueError, match=r"'0' fits a/0\.png and b/0\.png"):
        join(images("a/0.png", "b/0.png", "b/1.png"), str(table), "key")
    table.write_text("file,side\n0.png,left\n1.png,right\n")
    named = [replace(s, meta={"file": s.id.rpartition("/")[2]}) for s in images("a/0.png", "b/0.png")]
    with pytest.raises(ValueError, match=r"'0\.png' fits a/0\.png and b/0\.png"):
        join(named, str(table), "file")
    table.write_text("key,side\n0,left\n1,right\n")
    # By folder one row may mean several images, and a file that is called like a folder's row is not joined with it.
    found = join(images("0/x.png", "0/y.png", "1/x.png", "2/1.png"), str(table), "key")
    assert {s.id: s.meta["side"] for s in found} == {"0/x.png": "left", "0/y.png": "left", "1/x.png": "right"}
