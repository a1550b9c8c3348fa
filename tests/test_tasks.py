"""Labels that we make, and labels that stand in a column."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, film
from omegaconf import OmegaConf
from PIL import Image

from probing.collect import grouped
from probing.images import folder
from probing.picture import open_view
from probing.tasks import column, transform
from probing.types import Sample, Task, View


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)


def made(samples: list[Sample], name: str) -> Task:
    """The task of a YAML over these samples."""
    spec: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "task" / f"{name}.yaml"))
    return transform.load(samples, name=name, classes=spec["classes"])


@pytest.fixture
def samples(films: Path) -> list[Sample]:
    return grouped(folder.load(name="folder", path=str(films)), -3)


@pytest.mark.parametrize(("name", "copies"), [("orientation", 4), ("flip", 2)])
def test_every_image_comes_once_per_class(name: str, copies: int, samples: list[Sample]) -> None:
    task = made(samples, name)
    assert len(task.samples) == copies * len(samples) == len({s.id for s in task.samples})
    assert set(Counter(s.label for s in task.samples).values()) == {len(samples)}
    by_source = {source: {s.label for s in task.samples if s.source == source} for source in {s.source for s in task.samples}}
    assert all(labels == set(task.classes) for labels in by_source.values())
    assert all(len({s.group for s in task.samples if s.source == source}) == 1 for source in by_source)
    assert len({s.views[0].key("0" * 64) for s in task.samples if s.source == task.samples[0].source}) == copies


def test_the_order_of_the_images_changes_nothing(samples: list[Sample]) -> None:
    assert made(samples, "orientation") == made(samples[::-1], "orientation")


@pytest.mark.parametrize("size", [(60, 72), (72, 60), (61, 72), (64, 64)])
def test_the_copies_are_turned_as_they_are_labelled_and_nothing_else_tells_them_apart(
    size: tuple[int, int], tmp_path: Path
) -> None:
    film(np.random.default_rng(0), *size).save(tmp_path / "film.png")
    sample = Sample("film", (View(tmp_path / "film.png", "film.png"),), "patient", "film")
    shown = {s.label: np.asarray(open_view(s.views[0])) for s in made([sample], "orientation").samples}
    assert set(shown) == {"upright", "90", "180", "270"}
    for label, quarters in (("90", 1), ("180", 2), ("270", 3)):
        assert (shown[label] == np.rot90(shown["upright"], quarters)).all()
    assert len({p.shape for p in shown.values()}) == 1, "neither sides nor a crop tell the answer"
    flipped = {s.label: np.asarray(open_view(s.views[0])) for s in made([sample], "flip").samples}
    assert (flipped["mirrored"] == flipped["original"][:, ::-1]).all()
    assert (flipped["original"] == shown["upright"]).all()


def test_a_picture_that_is_its_own_mirror_image_gives_two_equal_copies(tmp_path: Path) -> None:
    half = np.random.default_rng(0).integers(0, 256, (20, 10), dtype=np.uint8)
    Image.fromarray(np.hstack([half, half[:, ::-1]])).save(tmp_path / "a.png")
    original, mirrored = made([Sample("a", (View(tmp_path / "a.png", "a.png"),), "a", "a")], "flip").samples
    assert (np.asarray(open_view(original.views[0])) == np.asarray(open_view(mirrored.views[0]))).all()
    assert original.label != mirrored.label


def test_a_shared_view_is_one_view_whichever_task_asks(samples: list[Sample]) -> None:
    upright = {s.views[0] for s in made(samples, "orientation").samples if s.label == "upright"}
    assert upright == {s.views[0] for s in made(samples, "flip").samples if s.label == "original"}


# --- columns -----------------------------------------------------------------------------------------------------


def table(*rows: dict[str, Any]) -> list[Sample]:
    view = View(Path("a.png"), "a.png")
    return [Sample(f"s{i:02d}", (view,), f"g{i}", f"s{i:02d}", meta=row) for i, row in enumerate(rows)]


def test_a_column_becomes_the_label() -> None:
    rows = table({"side": "left", "age": "61"}, {"side": "right", "age": 7.5}, {"side": " left ", "age": 40})
    task = column.load(rows, name="side", column="side")
    assert task.classes == ("left", "right") and [s.label for s in task.samples] == ["left", "right", "left"]
    assert task.labels.tolist() == [0, 1, 0]
    ages = column.load(rows, name="age", column="age", kind="number", unit="years")
    assert ages.labels.tolist() == [61, 7.5, 40] and ages.unit == "years"


def test_one_map_of_classes_whatever_the_order() -> None:
    rows = table(*({"plane": p} for p in ("axial", "coronal", "sagittal", "axial")))
    assert column.load(rows[::-1], name="plane", column="plane") == column.load(rows, name="plane", column="plane")


@pytest.mark.parametrize("empty", ["", "  ", float("nan"), None, "NaN", "NA", "null", "None"])
def test_samples_without_a_value_are_left_out_by_name(empty: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = table({"side": "left"}, {"side": "right"}, {"side": empty}, {})
    rows[0].meta["age"] = 3  # type: ignore[index]
    task = column.load(rows, name="side", column="side")
    assert [s.id for s in task.samples] == ["s00", "s01"] and task.classes == ("left", "right")
    assert "2 samples" in caplog.text and "s02" in caplog.text and "s03" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        ("sid", "classes", ("task.column=sid", "task.column=side", "age")),
        (None, "classes", ("task.column", "age", "side")),
        ("side", "number", ("s00", "'left'", "task.kind=classes")),
        ("age", "classes", ("task.column=age", "60", "task.kind=number")),
        ("same", "classes", ("one", "60")),
    ],
)
def test_an_error_says_what_there_is_and_what_to_type(wanted: str | None, kind: Any, words: tuple[str, ...]) -> None:
    rows = table(*({"side": ("left", "right")[i % 2], "age": i, "same": "one"} for i in range(60)))
    with pytest.raises(ValueError) as refusal:
        column.load(rows, name="test", column=wanted, kind=kind)
    assert all(word in str(refusal.value) for word in words)


def test_a_number_that_is_not_finite_is_refused_by_name() -> None:
    rows = table({"age": 3}, {"age": "inf"})
    with pytest.raises(ValueError, match="s01"):
        column.load(rows, name="age", column="age", kind="number")


def test_spaces_around_values_are_taken_off_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    task = column.load(table({"side": "left "}, {"side": "left"}, {"side": " right"}), name="side", column="side")
    assert task.classes == ("left", "right") and "side: spaces around 2 values are taken off" in caplog.text


def test_a_column_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task.column=side: not one sample has a value. Type task.column= one of age, side"):
        column.load(table({"side": "", "age": 3}, {"side": "NA", "age": 4}), name="side", column="side")


# --- a map of classes --------------------------------------------------------------------------------------------

PARIS = table(*({"type": t} for t in ("0-IIa", "Is", " Ip ", "", "none", "Is")))


def test_a_map_renames_joins_and_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    task = column.load(PARIS, name="t", column="type", map={"0-IIa": "flat", "Is": "polypoid", "Ip": "polypoid", "none": None})
    assert {s.id: s.label for s in task.samples} == {"s00": "flat", "s01": "polypoid", "s02": "polypoid", "s05": "polypoid"}
    assert "task.map leaves 1 samples out" in caplog.text and "1 samples have no type" in caplog.text


def test_a_value_that_the_map_does_not_name_is_an_error_and_one_that_never_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"task.map: type also has 'Ip' \(1\), 'none' \(1\)\. Map each to a class, or to null"):
        column.load(PARIS, name="t", column="type", map={"0-IIa": "flat", "Is": "polypoid"})
    column.load(PARIS, name="t", column="type", map={"0-IIa": "a", "Is": "b", "Ip": "b", "none": "b", "Isp": "b"})
    assert "type never is Isp" in caplog.text


def test_a_value_that_reads_as_missing_can_be_a_class() -> None:
    rows = table({"grade": "NA"}, {"grade": "1"}, {"grade": "2"})
    assert column.load(rows, name="g", column="grade", map={"NA": "zero", 1: "one", 2: None}).classes == ("one", "zero")  # type: ignore[dict-item]


def test_yes_and_no_of_a_yaml_file_are_pointed_out() -> None:
    rows = table({"polyp": "yes"}, {"polyp": "no"})
    with pytest.raises(ValueError, match="put yes, no, on, off and numbers in quotes"):
        column.load(rows, name="p", column="polyp", map={True: "a", False: "b"})  # type: ignore[dict-item]
