"""The command line: what is typed, what comes back, what is written, what is refused and with which words."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from conftest import NOTHING

Cli = Callable[..., tuple[int, str, str]]
Run = Callable[..., dict[str, Any]]
Shell = Callable[..., CompletedProcess[str]]


def of(films: Path) -> tuple[str, ...]:
    return ("images=folder", f"images.path={films}", "images.group=-3", *NOTHING)


def test_help_shows_examples_that_compose(cli: Cli, films: Path) -> None:
    code, out, _ = cli("--help")
    examples = [shlex.split(line)[2:] for line in out.splitlines() if line.startswith("  python probe.py")]
    assert code == 0 and len(examples) > 8
    from probing.jobs.configure import compose

    for words in examples:
        typed = [w for w in words if re.match(r"[\w.]+=\S+$", w) and not (words[0] == "-m" and "," in w)]
        assert typed or not words or words[0] == "-m" or words[0] == "a"
        compose(typed)


def test_one_command_probes_a_folder_of_films(shell: Shell, films: Path, tmp_path: Path) -> None:
    """Patients in the path, one command, a table, a sentence, a folder, the command to type again."""
    found = shell(
        "images=folder", f"images.path={films}", "images.group=-3", "encoder=tiny", "task=orientation", "protocol.permutations=99"
    )
    assert found.returncode == 0, found.stderr
    assert "192 samples of 48 images in 12 groups" in found.stdout
    for row in ("tiny", "pixels", "shuffled labels", "planted signal", "majority", "chance"):
        assert row in found.stdout
    assert "orientation is decodable" in found.stdout and f"images.path={films}" in found.stdout
    (folder,) = (tmp_path / "outputs" / "probe").iterdir()
    assert {p.name for p in folder.iterdir()} == {"result.json", "predictions.csv", "arrays.npz", "roots.local.json"}
    again = shell(
        "images=folder", f"images.path={films}", "images.group=-3", "encoder=tiny", "task=orientation", "protocol.permutations=99"
    )
    assert again.returncode == 0 and "already done" in again.stdout
    table = lambda text: text[text.index("192 samples") : text.index("is decodable")]  # noqa: E731
    assert table(again.stdout) == table(found.stdout)


def test_no_path_of_the_machine_is_written(run: Run, films: Path, tmp_path: Path) -> None:
    run(*of(films), "task=orientation")
    for path in (tmp_path / "outputs").rglob("*"):
        if path.is_file() and path.name != "roots.local.json":
            assert str(films).encode() not in path.read_bytes(), path.name
    (result,) = (tmp_path / "outputs").glob("probe/*/result.json")
    assert "<root:images>" in json.loads(result.read_text())["command"]


def test_predictions_are_out_of_fold_rows_of_every_sample(run: Run, films: Path, tmp_path: Path) -> None:
    run(*of(films), "task=flip")
    (path,) = (tmp_path / "outputs").glob("probe/*/predictions.csv")
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 96 and len({r["id"] for r in rows}) == 96
    by_group = {}
    for row in rows:
        by_group.setdefault(row["group"], set()).add(row["fold"])
    assert all(len(folds) == 1 for folds in by_group.values())
    assert all(abs(float(r["p_original"]) + float(r["p_mirrored"]) - 1) < 1e-4 for r in rows)


def test_what_changes_a_number_changes_the_folder(run: Run, films: Path, tmp_path: Path) -> None:
    import os
    import shutil

    base = of(films)
    folders = [run(*base, "task=flip")["folder"]]
    for change in (
        "readout=cls",
        "tap=block.1",
        "tap=all",
        "limit=40",
        "seed=1",
        "protocol.folds=4",
        "name=other",
        "floors=true",
    ):
        folders.append(run(*base, "task=flip", change)["folder"])
    for shard in (0, 1):
        folders.append(run(*base, "task=flip", "job=embed", "shards=2", f"shard={shard}")["folder"])
    copy = tmp_path / "copy"
    shutil.copytree(films, copy)
    moved = of(copy)
    same = run(*moved, "task=flip")
    assert same["folder"] == folders[0] and same["state"] == "already done"  # the same files elsewhere
    first = next(copy.rglob("*.png"))
    os.utime(first, (1, 1))
    folders.append(run(*moved, "task=flip")["folder"])
    assert len(set(folders)) == len(folders)
    for change in ("device=cpu", "batch_size=7", "workers=1"):
        assert run(*base, "task=flip", change)["state"] == "already done", change


def test_tap_all_reads_each_picture_once(run: Run, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probing import picture

    opened: list[Any] = []
    real = picture.open_view
    monkeypatch.setattr(picture, "open_view", lambda view: opened.append(view) or real(view))
    out = run(*of(films), "task=flip", "tap=all", "workers=0")
    assert len(opened) == 96
    (path,) = (tmp_path / "outputs").glob("probe/*/result.json")
    cells = json.loads(path.read_text())["cells"]
    assert [c["tap"] for c in cells] == ["block.0", "block.1", "block.2", "final_norm", "chosen inside"]
    assert out["state"] == "done"


def test_a_sweep_ends_in_one_table_and_again_in_nothing(shell: Shell, films: Path, tmp_path: Path) -> None:
    arguments = ("-m", *of(films), "encoder=tiny,pixels", "task=orientation,flip")
    first = shell(*arguments)
    assert first.returncode == 0, first.stderr
    table = first.stdout[first.stdout.rindex("job    ") :]
    assert table.count("\nprobe ") == 4 and "4 done" in table
    assert (tmp_path / "outputs" / "results.csv").exists()
    again = shell(*arguments)
    assert again.returncode == 0 and "4 already done: nothing was left to do" in again.stdout
    assert not list((tmp_path / "outputs" / ".sweeps").rglob("*.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outputs"]


def test_one_job_of_a_sweep_fails_and_the_others_go_on(shell: Shell, films: Path) -> None:
    found = shell("-m", *of(films), "task=flip", "protocol.folds=5,50")
    assert found.returncode == 1
    assert "1 done, 1 failed" in found.stdout and "Type protocol.folds=12" in found.stdout


def test_a_misspelt_choice_stops_a_sweep_before_its_first_job(cli: Cli, films: Path, tmp_path: Path) -> None:
    code, _, err = cli("-m", *of(films), "task=flip,orientatoin")
    assert code == 2 and "Did you mean orientation?" in err
    assert not (tmp_path / "outputs" / "probe").exists()


@pytest.mark.parametrize(
    "typed,said",
    [
        (["encoder=efficientnet_lite"], ["no such encoder", "Did you mean efficientnet_lite0?", "vit_s16"]),
        (["encoder=[tiny,pixels]"], ["takes one name", "-m encoder=tiny,pixels", "encoders=[tiny,pixels]"]),
        (["encoder=tiny,pixels"], ["-m encoder=tiny,pixels"]),
        (["encodr=tiny"], ["no such option", "Did you mean encoder?"]),
        (["task=colum"], ["Did you mean column?", "orientation"]),
        (["job=prob"], ["Did you mean probe?"]),
        (["weights=/ckpt/epoch=10-val_loss=0.31.ckpt"], ["'weights=\"/ckpt/epoch=10-val_loss=0.31.ckpt\"'"]),
        (["protocol.fold=3"], ["Did you mean protocol.folds?"]),
    ],
)
def test_a_command_that_can_not_be_understood(cli: Cli, typed: list[str], said: list[str]) -> None:
    code, _, err = cli(*typed)
    assert code == 2
    assert err.strip().count("\n") == 0, "one sentence, no traceback"
    for words in said:
        assert words in err


@pytest.mark.parametrize(
    "typed,said",
    [
        (["tap=blok.1"], ["no such tap", "Did you mean block.1?", "final_norm"]),
        (["readout=grid3"], ["readout=grid3", "Type readout=cls"]),
        (["readout=native"], ["does not fit tap final_norm", "readout=mean"]),
        (["task=column"], ["task.column=", "There are: file, folder"]),
        (["task=column", "task.column=foldr"], ["Did you mean task.column=folder?"]),
        (["task=column", "task.column=folder"], ["lies in one group alone", "images.where"]),
        (["images.group=-9"], ["5 path parts", "images.group=-5 to -1"]),
        (["images.group=x*"], ["no part of the path matches images.group=x*"]),
        (["images.files=*.bmp"], ["no picture matches images.files=*.bmp"]),
        (["images.path=nowhere"], ["nowhere", "no such file or folder"]),
        (["images.path=???"], ["images.path has no value"]),
        (["'images.where={fil: x}'"], ["no column fil", "Did you mean file?"]),
        (["protocol.folds=50"], ["12 groups", "50 folds", "protocol.folds=12"]),
        (["weights=/no/such.pt"], ["no such file", "weights=hub"]),
        (["'weights=\"/ckpt/epoch=10-val_loss=0.31.ckpt\"'"], ["epoch=10-val_loss=0.31.ckpt", "no such file"]),
        (["weights=hub"], ["no published weights", "weights=PATH"]),
        (["encoder=pixels", "weights=random"], ["encoder=pixels has no weights"]),
        (["device=cuda"], ["no CUDA device", "device=cpu"]),
        (["limit=0"], ["limit=0"]),
        (["probe.scaling=zscore"], ["probe.scaling=zscore", "none, global or feature"]),
        (["shards=2"], ["job=embed"]),
        (["encoders=[tiny,pixels]"], ["job=embed", "-m encoder=tiny,pixels"]),
        (["job=embed", "shard=2", "shards=2"], ["shard=0 to shard=1"]),
        (["encoder._target_=os.system"], ["neither ours nor scikit-learn's", "allow=[os]"]),
        (["encoder._target_=probing.records.os.kill"], ["neither ours nor scikit-learn's"]),
        (["encoder._target_=probing.jobs.show.subprocess.run"], ["neither ours nor scikit-learn's"]),
        (["batch_size=0"], ["batch_size=0", "1 or more"]),
        (["seed=-1"], ["seed=-1", "0 or more"]),
        (["protocol.null=nestd"], ["ridge or nested"]),
        (["name=../x"], ["name=../x", "letters"]),
        (["device=tpu"], ["device=tpu", "cuda"]),
    ],
)
def test_a_request_that_can_not_be_met(cli: Cli, films: Path, tmp_path: Path, typed: list[str], said: list[str]) -> None:
    (tmp_path / "nothing").mkdir()
    code, out, err = cli(*of(films), "task=flip", *(shlex.split(t)[0] for t in typed))
    assert code == 1, out + err
    assert err.strip().count("\n") == 0, "one sentence, no traceback"
    for words in said:
        assert words in err
    assert "embedding" not in out, "it is said before the long work"


def test_one_class_is_refused(cli: Cli, tmp_path: Path) -> None:
    from PIL import Image

    for patient in "abcdef":
        (tmp_path / "one" / patient / "scan").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "one" / patient / "scan" / "x.png")
    code, _, err = cli("images=folder", "images.path=one", "images.group=0", *NOTHING, "task=column", "task.column=file")
    assert code == 1 and "the one class 'x.png'" in err


def test_a_truncated_picture_is_left_out_by_name_and_the_rest_goes_on(
    run: Run, films: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    copy = tmp_path / "films"
    shutil.copytree(films, copy)
    bad = sorted(copy.rglob("*.png"))[5]
    bad.write_bytes(bad.read_bytes()[:200])
    sorted(copy.rglob("*.png"))[9].write_bytes(b"")
    out = run(*of(copy), "task=flip")
    result = json.loads((Path(out["folder"]) / "result.json").read_text())
    assert out["state"] == "done" and result["images"] == 46
    assert str(bad.relative_to(copy)) in result["skipped"] and any("empty file" in r for r in result["skipped"].values())


def test_limit_shrinks_the_folds_and_is_undetermined(run: Run, films: Path) -> None:
    out = run(*of(films), "task=orientation", "limit=3", "probe=linear")
    result = json.loads((Path(out["folder"]) / "result.json").read_text())
    assert result["images"] == 3 and result["groups"] == 3
    assert result["cells"][0]["finding"] == "undetermined" and "limit" in out["says"]


def test_embed_then_probe_needs_no_model(run: Run, films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*of(films), "task=flip", "job=embed")
    from probing.encoders import timm

    monkeypatch.setattr(timm, "load", None)
    assert run(*of(films), "task=flip")["state"] == "done"


def test_shards_together_hold_what_one_run_holds(run: Run, films: Path, tmp_path: Path) -> None:
    for shard in range(3):
        run(*of(films), "task=flip", "job=embed", "shards=3", f"shard={shard}")
    sharded = run(*of(films), "task=flip")
    whole = run(*of(films), "task=flip", outputs=tmp_path / "whole")
    read = lambda out: (Path(out["folder"]) / "predictions.csv").read_bytes()  # noqa: E731
    assert read(sharded) == read(whole)
    stores = [next((tmp_path / where / "embeddings").glob("tiny-*")) for where in ("outputs", "whole")]
    rows = []
    for folder in stores:
        import h5py

        parts = [h5py.File(p, "r") for p in sorted(folder.glob("part-*.h5"))]
        rows.append({k: v.tobytes() for p in parts for k, v in zip(p["keys"][()], p["taps/final_norm/mean"][()], strict=True)})
    assert rows[0] == rows[1] and len(rows[0]) == 96


def test_several_encoders_in_one_pass(cli: Cli, films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from probing import picture

    opened: list[Any] = []
    real = picture.open_view
    monkeypatch.setattr(picture, "open_view", lambda view: opened.append(view) or real(view))
    code, out, err = cli(*of(films), "task=flip", "job=embed", "encoders=[tiny,pixels]", "workers=0")
    assert code == 0, err
    assert len(opened) == 96 and re.search(r"96 views in pixels-\w+, tiny-\w+", out)


def test_status_tells_done_failed_and_interrupted(cli: Cli, run: Run, films: Path, tmp_path: Path) -> None:
    run(*of(films), "task=flip")
    with pytest.raises(ValueError):
        run(*of(films), "task=flip", "protocol.folds=50")
    ghost = tmp_path / "outputs" / "probe" / "ghost-00000000"
    ghost.mkdir()
    import socket

    (ghost / "status.json").write_text(
        json.dumps({"state": "running", "host": socket.gethostname(), "pid": 2**22 + 1, "slurm": None, "time": 0})
    )
    code, out, _ = cli("job=status")
    assert code == 0
    for word in ("done", "failed", "interrupted", "50 folds", "results.csv"):
        assert word in out


def test_encoders_prints_what_there_is(cli: Cli) -> None:
    code, out, _ = cli("job=encoders")
    assert code == 0
    for word in ("efficientnet_lite0", "vit_s16", "pixels", "tiny", "stage.0-6", "block.0-11", "Apache-2.0"):
        assert word in out


def test_the_notebook_functions(run: Run, films: Path, tmp_path: Path) -> None:
    import probing

    run(*of(films), "task=flip")
    table = probing.results(tmp_path / "outputs")
    row = table[table.metric == "balanced accuracy"].iloc[0]
    assert row.encoder == "tiny" and row.low <= row.value <= row.high and row["floor_majority"] == 0.5 and row.groups == 12
    settings = [f"hydra.searchpath=[file://{Path(__file__).parent / 'conf'}]", f"outputs={tmp_path / 'outputs'}"]
    data = ["images=folder", f"images.path={films}", "images.group=-3", "task=flip"]
    ids, values = probing.embeddings("tiny", overrides=[*settings, *data])
    assert values.shape == (96, 32) and len(set(ids)) == 96 and ids[0].endswith("@mirrored")
    encoder = probing.load("tiny", overrides=settings)
    assert [t.name for t in encoder.taps] == ["block.0", "block.1", "block.2", "final_norm"] and not encoder.module.training


def test_the_conf_folder_where_one_stands_is_searched(shell: Shell, films: Path, tmp_path: Path) -> None:
    """A source of one's own: ten lines in a folder of one's own, allowed by name."""
    import subprocess
    import sys

    from conftest import ROOT

    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "mine.yaml").write_text("_target_: mylab.load\nname: mine\n")
    (tmp_path / "mylab.py").write_text(
        "from dataclasses import replace\nfrom probing.types import Task\n"
        "def load(samples, *, name):\n"
        "    return Task(name, 'classes', ('a', 'b'), tuple(replace(s, label='ab'[i % 2]) for i, s in enumerate(samples)))\n"
    )
    base = [
        sys.executable,
        str(ROOT / "probe.py"),
        "images=folder",
        f"images.path={films}",
        "images.group=-3",
        "encoder=pixels",
        "probe=knn",
        "task=mine",
    ]
    refused = subprocess.run(base, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1 and "allow=[mylab]" in refused.stderr
    import os

    found = subprocess.run(
        [*base, "allow=[mylab]"], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert found.returncode == 0 and "mine is" in found.stdout, found.stderr
