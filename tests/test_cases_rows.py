"""The awkward embeddings, stores, probes, command lines and weights of ../shared/cases, each with its right behaviour."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import SHARED

from probing.encoders import file
from probing.types import Arrays, Tap

Run = Callable[..., dict[str, Any]]
Cli = Callable[..., tuple[int, str, str]]
Shell = Callable[..., "subprocess.CompletedProcess[str]"]
VECTOR, TOKENS = (Tap("features", "embeddings", layout) for layout in ("vector", "tokens"))


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = SHARED / "cases" / "make_inputs.py"
    if not maker.is_file():
        pytest.skip("../shared/cases is not here")
    folder = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, str(maker), str(folder)], check=True, capture_output=True)
    return folder


def load(path: Path, tap: Tap = VECTOR) -> Arrays:
    return file.load(name="file", path=str(path), taps=(tap,))


def asked(rows: Path, labels: Path, *more: str) -> list[str]:
    table = ["images=table", f"images.path={labels}", "images.image=null", "images.id=image", "images.group=patient_id"]
    return ["encoder=file", f"encoder.path={rows}", *table, "task=column", "task.column=label", "protocol.permutations=19", *more]


def result(outcome: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(outcome["folder"]) / "result.json").read_text())
    return found


def accuracy(outcome: dict[str, Any], metric: str = "accuracy", row: str = "encoder") -> float:
    return float(result(outcome)["cells"][0]["estimates"][row][metric]["value"])


# --- embeddings and stores ---------------------------------------------------------------------------------------


def labels_for(ids: tuple[str, ...], folder: Path) -> Path:
    path = folder / "labels.csv"
    with open(path, "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["image", "label", "patient_id"])
        writer.writerows([id, ("left", "right")[i % 2], f"P{i // 2}"] for i, id in enumerate(ids))
    return path


def test_rows_that_are_not_finite_are_named(cases: Path, cli: Cli, tmp_path: Path) -> None:
    rows = cases / "embeddings" / "nan_rows.h5"
    code, out, err = cli(*asked(rows, labels_for(load(rows).ids, tmp_path), "probe=knn"))
    assert code == 0, err
    assert all(any(name in line and "not finite" in line for line in out.splitlines()) for name in ("img_03.png", "img_17.png"))
    assert "38 samples" in out


def test_a_shuffled_store_is_joined_by_id(cases: Path, run: Run) -> None:
    outcome = run(*asked(cases / "embeddings" / "shuffled_store.h5", cases / "embeddings" / "shuffled_labels.csv"))
    assert accuracy(outcome) == 1.0


def test_each_image_is_pooled_over_its_own_tokens(cases: Path, tmp_path: Path) -> None:
    from probing import embed

    rows = load(cases / "embeddings" / "ragged_tokens.h5", TOKENS)
    store, failed = embed.copy(tmp_path, rows, "spec", [(TOKENS, "mean")], dict(zip("abc", rows.ids, strict=True)))
    assert not failed
    np.testing.assert_array_equal(store.read(list("abc"), (TOKENS, "mean")), np.arange(1, 4)[:, None] * np.ones((3, 8)))


def test_a_file_cut_off_is_named_and_an_empty_one_has_no_embeddings(cases: Path, cli: Cli, tmp_path: Path) -> None:
    labels = labels_for(tuple(f"i{i}" for i in range(40)), tmp_path)
    code, _, err = cli(*asked(cases / "store" / "truncated.h5", labels))
    assert code == 1 and "truncated.h5" in err and "Traceback" not in err
    code, _, err = cli(*asked(cases / "store" / "no_rows.h5", labels, "name=none"))
    assert code == 1 and "no embeddings" in err


def test_a_part_cut_off_is_named_and_can_be_embedded_anew(run: Run, films: Path, tmp_path: Path) -> None:
    data = [
        "images=folder",
        f"images.path={films}",
        "images.group=-3",
        "task=flip",
        "encoder=tiny",
        "floors=false",
        "probe=knn",
        "protocol.permutations=19",
    ]
    before = accuracy(run(*data))
    (part,) = (tmp_path / "outputs" / "embeddings").glob("tiny-*/part-*.h5")
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(OSError, match=rf"{part.name}.*Remove it"):
        run(*data, "rerun=true")
    part.unlink()
    assert accuracy(run(*data, "rerun=true")) == before


def test_one_row_per_chunk_is_read_in_seconds_and_in_any_order(cases: Path, tmp_path: Path) -> None:
    from probing import embed

    started = time.monotonic()
    rows = load(cases / "store" / "one_row_per_chunk.h5")
    order = np.random.default_rng(0).integers(0, len(rows.ids), 5000)  # with repeats
    ids = {f"{i:05d}": rows.ids[i] for i in range(len(rows.ids))}
    store, _ = embed.copy(tmp_path, rows, "spec", [(VECTOR, "native")], ids)
    found = store.read([f"{i:05d}" for i in order], (VECTOR, "native"))
    assert time.monotonic() - started < 30
    with h5py.File(cases / "store" / "one_row_per_chunk.h5", "r") as opened:
        whole = opened["embeddings"][()]
    np.testing.assert_array_equal(found, whole[order])


def test_text_ids_are_text(cases: Path) -> None:
    assert load(cases / "store" / "ids_as_bytes.h5").ids == ("img_00.png", "é.png", "胸.png", "img_03.png", "img_04.png")


# --- probes ------------------------------------------------------------------------------------------------------


def probed(run: Run, cases: Path, stem: str, *more: str) -> dict[str, Any]:
    return run(*asked(cases / "probes" / f"{stem}.h5", cases / "probes" / f"{stem}.csv", *more))


@pytest.mark.slow
def test_features_of_very_different_size(cases: Path, run: Run) -> None:
    outcome = probed(run, cases, "unscaled", "probe.scaling=feature")
    assert accuracy(outcome) >= 0.9
    assert not any("converge" in note for note in result(outcome)["cells"][0]["notes"])


def test_imbalance_without_a_signal(cases: Path, run: Run) -> None:
    outcome = probed(run, cases, "imbalanced_noise", "probe=knn")
    assert 0.3 <= accuracy(outcome, "balanced accuracy") <= 0.7
    assert accuracy(outcome, row="majority") == pytest.approx(0.95)
    assert "decodable" not in outcome["says"].split("(")[0].replace("not decodable", "")


@pytest.mark.slow
def test_three_classes_and_two_runs_are_equal(cases: Path, run: Run, tmp_path: Path) -> None:
    one = probed(run, cases, "three_classes")
    before = (Path(one["folder"]) / "predictions.csv").read_bytes()
    assert accuracy(one) == 1.0
    two = probed(run, cases, "three_classes", "rerun=true")
    assert (Path(two["folder"]) / "predictions.csv").read_bytes() == before


def test_fewer_patients_than_folds_names_both_numbers(cases: Path, run: Run) -> None:
    with pytest.raises(ValueError, match=r"\b3 groups .*\b5 folds"):
        probed(run, cases, "three_patients")


# --- command lines -----------------------------------------------------------------------------------------------

SHORT = ("encoder=tiny", "probe=knn", "protocol.permutations=19", "floors=false")


def data(films: Path) -> list[str]:
    return [*SHORT, "images=folder", f"images.path={films}", "images.group=-3"]


def test_an_equals_sign_in_a_value(cli: Cli, films: Path) -> None:
    code, _, err = cli(*data(films), "weights=/data/epoch=3-step=10.ckpt")
    assert code == 2 and """'weights="/data/epoch=3-step=10.ckpt"'""" in err
    code, _, err = cli(*data(films), 'weights="/data/epoch=3-step=10.ckpt"')
    assert code == 1 and "weights=/data/epoch=3-step=10.ckpt: there is no such file" in err


def test_two_equal_jobs_give_equal_numbers(cli: Cli, films: Path, tmp_path: Path) -> None:
    code, out, err = cli("-m", *data(films)[1:], "encoder=tiny,tiny", "task=flip", "rerun=true")
    assert code == 0, err
    said = [line.split("flip is")[1] for line in out.splitlines() if line.startswith("flip is")]
    assert len(said) == 2 and said[0] == said[1]
    code, out, _ = cli(*data(films), "task=flip", "rerun=true", f"store={tmp_path / 'fresh'}")
    assert said[0] in out


def test_one_job_of_a_sweep_fails_and_the_other_is_reported(cli: Cli, films: Path) -> None:
    code, out, _ = cli("-m", *data(films), "task=column", "task.column=file,no_such_column")
    assert code == 1 and "1 done, 1 failed" in out and "no_such_column" in out


@pytest.mark.parametrize("sweep", [("-m",), ()])
def test_a_misspelt_choice_refuses_the_sweep_up_front(cli: Cli, films: Path, tmp_path: Path, sweep: tuple[str, ...]) -> None:
    tasks = "task=flip,no_such_file_task" if sweep else "task=no_such_file_task"
    code, _, err = cli(*sweep, *data(films), tasks)
    assert code == 2 and "no_such_file_task" in err and "orientation" in err and "Traceback" not in err
    assert not list((tmp_path / "outputs").glob("probe/*"))
    code, _, err = cli(*sweep, *data(films)[1:], "encoder=tyny" + (",pixels" if sweep else ""))
    assert code == 2 and "Did you mean tiny?" in err


def test_a_relative_path_counts_from_where_it_is_typed(cli: Cli, films: Path, tmp_path: Path) -> None:
    shutil.copytree(films, tmp_path / "films")
    code, _, err = cli("-m", *SHORT, "images=folder", "images.path=films", "images.group=-3", "task=flip", "seed=0,1")
    assert code == 0, err


def test_a_missing_value_is_named_at_once(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli(*SHORT, "images=folder")
    assert code in (1, 2) and "images.path has no value. Type images.path=VALUE" in err
    assert not list((tmp_path / "outputs").glob("*/*"))


def test_a_solver_that_takes_two_classes_only(cli: Cli, films: Path) -> None:
    code, out, err = cli(
        *data(films)[:1],
        "floors=false",
        "protocol.permutations=19",
        *data(films)[4:],
        "probe=linear",
        "+probe.classes.estimator.solver=liblinear",
    )
    assert "Traceback" not in err + out
    assert code == 0 or "liblinear" in err


# --- weights -----------------------------------------------------------------------------------------------------


def test_weights_cut_off_are_named(cases: Path) -> None:
    from probing.weights import read

    with pytest.raises(ValueError, match=r"model\.safetensors.*damaged"):
        read(cases / "weights" / "truncated" / "model.safetensors")
    assert read(cases / "weights" / "tiny_vit" / "model.safetensors")["layernorm.weight"].shape == (32,)


def test_missing_keys_are_listed(cases: Path) -> None:
    from torch import nn

    from probing.weights import fill, read

    whole, part = (read(cases / "weights" / name / "model.safetensors") for name in ("tiny_vit", "missing_layer"))
    module = nn.Module()
    for key, value in whole.items():
        module.register_buffer(key.replace(".", "/"), value.clone())
    with pytest.raises(ValueError, match=r"missing.*encoder/layer/2/"):
        fill(module, {k.replace(".", "/"): v for k, v in part.items()})


def test_a_folder_without_weights_is_named(cases: Path, cli: Cli, films: Path) -> None:
    code, _, err = cli(*data(films), f"weights={cases / 'weights' / 'empty_folder'}")
    assert code == 1 and "empty_folder" in err and "Traceback" not in err
