"""One decode policy: what every file looks like, where left and up are, and what an encoder gets to see of it."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from omegaconf import OmegaConf
from PIL import Image

from probing.decode import volume
from probing.images.embedded import CANVAS
from probing.picture import digests, open_view, preprocess
from probing.types import Step, View

T = Image.Transpose
STORED = {  # how a picture is stored so that this EXIF orientation shows it upright
    2: T.FLIP_LEFT_RIGHT,
    3: T.ROTATE_180,
    4: T.FLIP_TOP_BOTTOM,
    5: T.TRANSPOSE,
    6: T.ROTATE_90,
    7: T.TRANSVERSE,
    8: T.ROTATE_270,
}
CASES = (
    "gray16_full_range.png",
    "rgb16.png",
    "palette_transparent.png",
    "palette_transparent_twin.png",
    "rgba_hidden_colour.png",
    "gray_alpha.png",
    "cmyk_red.jpg",
    "exif_orientation_1.jpg",
    "exif_orientation_3.jpg",
    "exif_orientation_6.jpg",
    "truncated.jpg",
    "zero_byte.png",
    "png_named.jpg",
    "bomb_30000x30000.png",
    "one_pixel_1000x1.png",
    "one_pixel_1x1000.png",
    "animated.gif",
    "multipage.tif",
    "one_bit.png",
    "two_bit_gray.png",
)
LARGE = "large_96_megapixel.png"


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)


def generator() -> ModuleType:
    """The generator of the shared awkward inputs. pydicom, which only its DICOM part calls, need not be installed."""
    pytest.importorskip("nibabel")
    path = SHARED / "cases" / "make_inputs.py"
    if not path.is_file():
        pytest.skip("the shared awkward inputs are not here")
    absent = {} if importlib.util.find_spec("pydicom") else {"pydicom", "pydicom.dataset", "pydicom.sequence", "pydicom.uid"}
    for name in absent:
        sys.modules[name] = ModuleType(name)
        for member in ("Dataset", "FileMetaDataset", "Sequence", "ExplicitVRLittleEndian"):
            setattr(sys.modules[name], member, None)
    try:
        spec = importlib.util.spec_from_file_location("make_inputs", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for name in absent:
            del sys.modules[name]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Folder of the shared inputs, and file -> what a right program does with it."""
    module = generator()
    out = module.Out(tmp_path_factory.mktemp("cases"))
    module.images(out)
    module.niftis(out)
    out.finish(["file", "kind", "expected", "check"])
    with open(out.root / "expected.csv", encoding="utf-8", newline="") as file:
        return out.root, {row["file"]: json.loads(row["check"]) for row in csv.DictReader(file)}


def opened(path: Path, *steps: Step, name: str = "file") -> np.ndarray:
    return np.asarray(open_view(View(path, name, steps=tuple(steps))))


def slice_of(path: Path, plane: str, index: int) -> np.ndarray:
    return np.asarray(open_view(View(path, "volume.nii.gz", (plane, index), ("nifti", 1, 0.0, 100.0))))[..., 0]


def drawing(width: int = 37, height: int = 53, seed: int = 0) -> Image.Image:
    """A smooth coloured picture that no turn or flip maps on itself."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    drawing().save(tmp_path / "drawn.png")
    return tmp_path / "drawn.png"


# --- the shared awkward inputs -----------------------------------------------------------------------------------


def test_every_shared_picture_has_its_test(cases: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    assert {n for n in cases[1] if n.startswith("images/")} == {f"images/{n}" for n in (*CASES, LARGE)}


@pytest.mark.parametrize("name", CASES)
def test_a_shared_picture_looks_as_it_should(
    name: str, cases: tuple[Path, dict[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    root, expected = cases
    name = f"images/{name}"
    check = expected[name]
    if check.get("outcome") == "file_error":
        with pytest.raises(ValueError, match=re.escape(name)) as refusal:
            opened(root / name, name=name)
        assert str(root) not in str(refusal.value), "reports are sent to others: no path of this machine in them"
        return
    pixels = opened(root / name, name=name)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    for where, colour in {**check.get("pixels", {}), **check.get("opaque_pixel", {})}.items():
        row, column = map(int, where.split(","))
        assert np.abs(pixels[row, column].astype(int) - colour).max() <= check.get("tol", 0)
    if "size" in check:
        assert list(pixels.shape[1::-1]) == check["size"]
    if "bright_corner" in check:
        assert pixels[:20, :12].min() > 215 and pixels[-20:].max() < 200
    if "same_as" in check:
        assert (pixels == opened(root / check["same_as"])).all()
    if "corner_not" in check:
        assert (pixels[0, 0] == 0).all(), "what is transparent is black, the documented background"
    if "distinct_levels_min" in check:
        assert len(np.unique(pixels)) >= check["distinct_levels_min"]
    if check.get("monotonic"):
        assert (np.diff(pixels[..., 0].ravel().astype(int)) >= 0).all()
    if "distinct_values" in check:
        assert np.unique(pixels).tolist() == check["distinct_values"]
    for key in ("mean_rgb", "mean_rgb_first"):
        if key in check:
            assert np.abs(pixels.mean((0, 1)) - check[key]).max() <= check.get("tol", 0)
    if "frames" in check:
        assert name in caplog.text and str(check["frames"]) in caplog.text, "frames that are left out are reported"


@pytest.mark.parametrize("name", ["bomb_30000x30000.png", pytest.param(LARGE, marks=pytest.mark.slow)])
def test_a_huge_picture_stays_within_its_memory(name: str, cases: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    root, expected = cases
    code = (
        "import sys; from pathlib import Path; from probing.picture import open_view; from probing.types import View\n"
        "try: print(open_view(View(Path(sys.argv[1]), 'huge.png')).size)\n"
        "except ValueError as error: print(error)\n"
        "print(next(int(line.split()[1]) // 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root / "images" / name)], capture_output=True, text=True, check=True)
    said, peak = done.stdout.strip().splitlines()
    assert int(peak) < expected[f"images/{name}"]["peak_mb_max"]
    assert said == "(12000, 8000)" if name == LARGE else "900000000" in said


@pytest.mark.parametrize("name", ["nifti/truncated.nii.gz", "nifti/empty.nii.gz"])
def test_a_broken_volume_fails_by_name(name: str, cases: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    root, _ = cases
    with pytest.raises(ValueError, match=re.escape(name)) as refusal:
        open_view(View(root / name, name, ("axial", 0), ("nifti", 1, 0.0, 100.0)))
    assert str(root) not in str(refusal.value)


def test_one_volume_in_two_orders_of_its_axes_gives_the_same_slices(cases: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    root, expected = cases
    marks = expected["nifti/marker_ras.nii.gz"]["ras_voxel"]
    for plane, index in zip(("sagittal", "coronal", "axial"), marks, strict=True):
        ras, lps = (slice_of(root / f"nifti/marker_{order}.nii.gz", plane, index) for order in ("ras", "lps"))
        assert (ras == lps).all() and ras.max() == 255 and (ras > 0).sum() == 1
        assert slice_of(root / "nifti/marker_lps.nii.gz", plane, index + 1).max() == 0


# --- pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("extension", ["png", "jpg", "tif"])
def test_exif_orientation_is_applied(orientation: int, extension: str, tmp_path: Path) -> None:
    upright = drawing()
    stored = upright.transpose(STORED[orientation]) if orientation in STORED else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{extension}"
    stored.save(path, exif=exif, **({"quality": 98, "subsampling": 0} if extension == "jpg" else {}))
    shown = opened(path).astype(int)
    assert shown.shape == (53, 37, 3)
    assert np.abs(shown - np.asarray(upright)).max() <= (12 if extension == "jpg" else 0)


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_sixteen_bit_grey_keeps_its_high_byte(extension: str, tmp_path: Path) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(values).save(tmp_path / f"deep.{extension}")
    assert (opened(tmp_path / f"deep.{extension}") == (values >> 8)[..., None]).all()


def test_transparency_is_laid_over_black(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (16, 16, 4), dtype=np.uint8)
    colours[:4, :, 3], colours[4:8, :, 3] = 0, 255
    Image.fromarray(colours).save(tmp_path / "veil.png")
    shown = opened(tmp_path / "veil.png").astype(float)
    assert np.abs(shown - colours[..., :3] * (colours[..., 3:] / 255)).max() <= 1
    assert (shown[:4] == 0).all() and (shown[4:8] == colours[4:8, :, :3]).all()


@pytest.mark.parametrize("mode", ["L", "RGB", "1"])
def test_a_grey_picture_has_three_equal_channels(mode: str, tmp_path: Path) -> None:
    drawing().convert("L").convert(mode).save(tmp_path / "grey.png")
    shown = opened(tmp_path / "grey.png")
    assert shown.shape == (53, 37, 3) and (shown == shown[..., :1]).all() and shown.max() > 200


def test_a_floating_point_picture_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match="floating-point"):
        opened(tmp_path / "float.tif")


@pytest.mark.parametrize("name", ["plain.png", "it's.png", 'a "quoted" it\'s.png', "back\\slash.png", "胸部 é.png", "tab\t.png"])
def test_an_error_names_the_file_and_never_the_folder(name: str, tmp_path: Path) -> None:
    root = tmp_path / "private"
    root.mkdir()
    (root / name).write_bytes(b"this is no picture")
    with pytest.raises(ValueError, match=f"^{re.escape(f'films/{name}')}: ") as refusal:
        opened(root / name, name=f"films/{name}")
    assert "private" not in str(refusal.value)


def test_a_file_that_went_away_fails_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"films/gone\.png") as refusal:
        opened(tmp_path / "gone.png", name="films/gone.png")
    assert str(tmp_path) not in str(refusal.value)


# --- steps -------------------------------------------------------------------------------------------------------


def test_steps_undo_each_other(drawn: Path) -> None:
    plain = opened(drawn)
    turn: Step = ("rot90", 1)
    assert (opened(drawn, ("mirror",), ("mirror",)) == plain).all()
    assert (opened(drawn, turn, turn, turn, turn) == plain).all()
    assert (opened(drawn, turn, ("rot90", 3)) == plain).all()
    assert (opened(drawn, turn, turn) == opened(drawn, ("rot90", 2))).all()
    for step in (turn, ("rot90", 2), ("rot90", 3), ("mirror",)):
        changed = opened(drawn, step)
        assert changed.shape != plain.shape or (changed != plain).any()


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_turns_are_counter_clockwise(quarters: int, drawn: Path) -> None:
    assert (opened(drawn, ("rot90", quarters)) == np.rot90(opened(drawn), quarters)).all()
    assert (opened(drawn, ("mirror",)) == opened(drawn)[:, ::-1]).all()


@pytest.mark.parametrize("size", [(37, 53), (53, 37), (36, 53), (40, 40)])
def test_the_square_is_the_centre_and_turning_it_loses_nothing(size: tuple[int, int], tmp_path: Path) -> None:
    drawing(*size).save(tmp_path / "a.png")
    square = opened(tmp_path / "a.png", ("square",))
    assert square.shape == (min(size), min(size), 3)
    assert (opened(tmp_path / "a.png", ("square",), ("square",)) == square).all()
    for quarters in (1, 2, 3):
        turned = opened(tmp_path / "a.png", ("square",), ("rot90", quarters))
        assert turned.shape == square.shape and (np.sort(turned, None) == np.sort(square, None)).all()


def test_leaving_out_the_square_after_a_canvas_changes_no_picture(drawn: Path) -> None:
    view = View(drawn, "drawn.png").then(("pad", 61), ("square",))
    assert view.steps == (("pad", 61),)
    assert (np.asarray(open_view(view)) == opened(drawn, ("pad", 61), ("square",))).all()


def test_a_canvas_is_black_and_never_too_small(drawn: Path) -> None:
    padded = opened(drawn, ("pad", 61))
    assert (padded[4:57, 12:49] == opened(drawn)).all() and padded.sum() == opened(drawn).sum()
    with pytest.raises(ValueError, match="canvas"):
        opened(drawn, ("pad", 52))


ENCODERS = {p.stem: OmegaConf.load(p) for p in sorted((ROOT / "conf" / "encoder").glob("*.yaml"))}
POLICIES = {name: spec.image for name, spec in ENCODERS.items() if "image" in spec}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_canvas_tells_no_slice_from_its_mirror_image(policy: Any, tmp_path: Path) -> None:
    half = np.random.default_rng(1).integers(0, 256, (189, 99), dtype=np.uint8)
    Image.fromarray(np.hstack([half, half[:, -2::-1]])).save(tmp_path / "symmetric.png")  # 197 wide: odd, as the slices are
    prepare = preprocess(policy)

    def difference(side: int) -> float:
        views = [View(tmp_path / "symmetric.png", "symmetric.png", steps=(("pad", side), *s)) for s in ((), (("mirror",),))]
        one, other = (prepare(open_view(v)) for v in views)
        return float((one - other).abs().max())

    assert CANVAS % 2 == 1 and difference(CANVAS) == 0
    assert difference(CANVAS + 1) > 0, "control: an even canvas gives the mirror away"


# --- volumes -----------------------------------------------------------------------------------------------------

SIDES = (9, 11, 7)  # left-right, back-front, down-up
MARK = (7, 8, 1)  # right, front, low


def stored(path: Path, order: str) -> Path:
    """A volume with one bright voxel, right, front and low, and its axes stored in this order."""
    nibabel = pytest.importorskip("nibabel")
    from nibabel.orientations import axcodes2ornt, ornt_transform

    values = np.zeros(SIDES, np.int16)
    values[MARK] = 1000
    image = nibabel.Nifti1Image(values, np.diag([1.0, 2.0, 3.0, 1.0]))
    turned = image.as_reoriented(ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(order)))
    assert "".join(nibabel.aff2axcodes(turned.affine)) == order
    nibabel.save(turned, path)
    return path


@pytest.mark.parametrize("order", ["RAS", "LPS", "LAS", "PIR", "SPL", "ILA"])
def test_left_is_right_and_up_is_up_whatever_the_order_of_the_axes(order: str, tmp_path: Path) -> None:
    """Radiological: you face the patient, so what is right in the patient is left in the picture."""
    path = stored(tmp_path / "volume.nii.gz", order)
    (right, front, low), (wide, deep, tall) = MARK, SIDES
    expected = {
        "axial": (low, (tall, deep, wide), (deep - 1 - front, wide - 1 - right)),  # front is up, right is left
        "coronal": (front, (deep, tall, wide), (tall - 1 - low, wide - 1 - right)),  # head is up, right is left
        "sagittal": (right, (wide, tall, deep), (tall - 1 - low, deep - 1 - front)),  # head is up, the nose is left
    }
    for plane, (index, (slices, rows, columns), bright) in expected.items():
        shown = slice_of(path, plane, index)
        assert shown.shape == (rows, columns)
        assert np.argwhere(shown).tolist() == [list(bright)]
        assert all(slice_of(path, plane, i).max() == 0 for i in range(slices) if i != index)


def test_a_volume_is_read_once_for_all_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "volume.nii.gz", "LPS")
    import nibabel

    loads: list[Path] = []
    real = nibabel.load
    monkeypatch.setattr(nibabel, "load", lambda p: loads.append(p) or real(p))
    volume.cache_clear()
    for plane, count in zip(("sagittal", "coronal", "axial"), SIDES, strict=True):
        for i in range(count):
            slice_of(path, plane, i)
    assert len(loads) == 1


def test_a_slice_that_is_not_there_fails_by_name(tmp_path: Path) -> None:
    path = stored(tmp_path / "volume.nii.gz", "RAS")
    with pytest.raises(ValueError, match=r"volume\.nii\.gz"):
        slice_of(path, "axial", 7)


# --- what an encoder eats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["efficientnet_lite0", "vit_s16"])
def test_preprocessing_equals_the_librarys(name: str) -> None:
    import timm

    spec = OmegaConf.load(ROOT / "conf" / "encoder" / f"{name}.yaml")
    model = timm.create_model(spec.architecture, pretrained=False)
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    ours = preprocess(spec.image)
    for i, size in enumerate([(301, 257), (97, 400), (224, 224), (33, 35), (641, 480), (256, 255)]):
        picture = drawing(*size, seed=i)
        assert (ours(picture) - theirs(picture)).abs().max() < 1e-6


def test_a_pair_of_sides_squashes_the_whole_picture() -> None:
    policy = OmegaConf.load(ROOT / "conf" / "encoder" / "pixels.yaml").image
    picture = drawing(301, 97)
    expected = np.asarray(picture.resize((24, 24), Image.Resampling.BILINEAR)) / 255 * 2 - 1
    assert np.abs(preprocess(policy)(picture).numpy() - expected.transpose(2, 0, 1)).max() < 1e-6


def test_preprocessing_is_the_same_twice_and_float32() -> None:
    for policy in POLICIES.values():
        one, other = (preprocess(policy)(drawing()) for _ in range(2))
        assert one.dtype == torch.float32 and torch.equal(one, other)


# --- digests -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files whose bytes are read for a digest."""
    seen: list[str] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda f, kind: seen.append(Path(f.name).name) or real(f, kind))
    yield seen


def digests_of(root: Path, paths: Iterable[Path]) -> tuple[dict[Path, str], dict[Path, str]]:
    found, failed = digests(root / "digests", [View(p, p.name) for p in paths])
    return {v.path: d for v, d in found.items()}, {v.path: r for v, r in failed.items()}


def test_a_digest_is_of_the_bytes_and_remembered(tmp_path: Path, reads: list[str]) -> None:
    paths = [tmp_path / f"private_{i}.png" for i in range(3)]
    for path, content in zip(paths, (b"one", b"two", b"one"), strict=True):
        path.write_bytes(content)
    found, failed = digests_of(tmp_path, [*paths, paths[0]])
    assert not failed and found[paths[0]] == hashlib.sha256(b"one").hexdigest() == found[paths[2]] != found[paths[1]]
    assert sorted(reads) == [p.name for p in paths]
    assert digests_of(tmp_path, paths) == (found, {}) and len(reads) == 3

    paths[1].write_bytes(b"three")
    again, _ = digests_of(tmp_path, paths)
    assert again[paths[1]] == hashlib.sha256(b"three").hexdigest() and reads[3:] == [paths[1].name]
    assert again[paths[0]] == found[paths[0]]


def test_a_file_changed_in_place_without_changing_its_size_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    before = digests_of(tmp_path, [path])[0][path]
    path.write_bytes(b"two")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))
    assert digests_of(tmp_path, [path])[0][path] != before


def test_digests_write_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "patient_smith"
    folder.mkdir()
    (folder / "film_jones.png").write_bytes(b"one")
    digests_of(tmp_path, [folder / "film_jones.png"])
    written = list((tmp_path / "digests").iterdir())
    assert written
    for path in written:
        text = path.name + path.read_text()
        assert not any(part in text for part in ("smith", "jones", tmp_path.name, ".png"))


def test_a_file_that_can_not_be_read_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(b"one")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    bad = [tmp_path / n for n in ("gone.png", "folder.png", "loop.png")]
    found, failed = digests_of(tmp_path, [*bad, tmp_path / "good.png"])
    assert list(found) == [tmp_path / "good.png"]
    assert set(failed) == set(bad) and not any(str(tmp_path) in reason for reason in failed.values())


# --- the fast input path -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize, crop", [(48, 40), ([32, 32], None), (200, 180)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_the_fast_path_is_within_a_grey_level(resize: Any, crop: int | None, interpolation: str) -> None:
    policy = {"resize": resize, "crop": crop, "interpolation": interpolation, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}
    exact, fast = preprocess(policy), preprocess({**policy, "input": "fast"})
    rng = np.random.default_rng(0)
    for shape in ((75, 110, 3), (110, 75, 3), (61, 61, 3)):
        picture = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
        one, two = exact(picture), fast(picture)
        assert one.shape == two.shape and one.dtype == two.dtype
        grey = (one - two).abs() * torch.tensor(policy["std"])[:, None, None] * 255
        assert grey.max() < 2.01 and (grey > 1.01).float().mean() < 1e-3


def test_a_file_that_changes_under_its_name_is_decoded_anew(tmp_path: Path) -> None:
    view = View(tmp_path / "a.png", "a.png")
    for grey in (10, 200):
        Image.new("L", (8, 8), grey).save(view.path)
        os.utime(view.path, ns=(0, grey * 10**9))
        assert np.asarray(open_view(view))[0, 0].tolist() == [grey] * 3
    nibabel = pytest.importorskip("nibabel")
    slice_of = View(tmp_path / "a.nii", "a.nii", ("axial", 0), ("nifti", 1, "window", 50.0, 100.0))
    for value in (20, 80):
        nibabel.save(nibabel.Nifti1Image(np.full((4, 4, 4), value, np.int16), np.eye(4)), slice_of.path)
        os.utime(slice_of.path, ns=(0, value * 10**9))
        assert np.asarray(open_view(slice_of))[0, 0, 0] == round(value * 2.55)


def test_views_of_one_file_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probing import decode

    picture = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    for name in ("a.png", "b.png"):
        picture.save(tmp_path / name)
    opened: list[str] = []
    real = decode.pillow
    monkeypatch.setattr(decode, "pillow", lambda file, name: opened.append(name) or real(file, name))
    turns = [[("rot90", q)] if q else [] for q in range(4)]
    shown = {
        (n, q): np.asarray(open_view(View(tmp_path / n, n).then(*turns[q]))) for n in ("a.png", "b.png") for q in (0, 1, 2, 3, 0)
    }
    assert opened == ["a.png", "b.png"]
    assert all(np.array_equal(np.rot90(shown["a.png", 0], q), shown["a.png", q]) for q in range(4))
