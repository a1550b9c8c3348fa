"""Pictures made by code, a tiny encoder of a real class, and a runner that composes and runs a job in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
CONF = ROOT / "tests" / "conf"
SHARED = ROOT.parent / "shared"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
NOTHING = ("floors=false", "protocol.permutations=19", "encoder=tiny", "probe=knn")  # the cheapest run that has all parts


def film(rng: np.random.Generator, width: int = 60, height: int = 72) -> Image.Image:
    """A drawing that has an up and a down: two dark lungs in a bright body, a bright base."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    x, y = x / width, y / height
    jitter = rng.normal(0, 0.03, 6)
    body = 150 + 60 * y
    for centre in (0.3, 0.7):
        inside = ((x - centre - jitter[0]) / (0.15 + jitter[1])) ** 2 + ((y - 0.42 - jitter[2]) / (0.28 + jitter[3])) ** 2 < 1
        body = np.where(inside, 40, body)
    body = body + 30 * (y > 0.75 + jitter[4]) + rng.normal(0, 6, body.shape)
    return Image.fromarray(np.clip(body, 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 chest-film-like PNGs: 12 patients of 2 studies of 2 films, as files/p10/p1000xxxx/s5xxxx/name.png."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("films")
    for patient in range(12):
        for study in range(2):
            folder = root / "files" / f"p{10 + patient % 2}" / f"p{10000 + patient}" / f"s{500 + study}"
            folder.mkdir(parents=True)
            for shot in range(2):
                film(rng).save(folder / f"{shot}.png")
    return root


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """run("task=flip", ...) -> outcome of the job, in this process, with outputs under tmp_path/outputs."""
    from hydra import compose, initialize_config_dir

    from probing import jobs

    def call(*overrides: str, outputs: Path | None = None) -> dict[str, Any]:
        where = [f"outputs={outputs or tmp_path / 'outputs'}", f"hydra.searchpath=[file://{CONF}]"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("config", [*overrides, *where])
            return jobs.run(cfg, jobs.Launch(overrides))

    return call


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """shell("task=flip", ...) -> python probe.py ..., as a user types it, standing in tmp_path."""

    def call(*arguments: str, cwd: Path | None = None, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [*(program or (sys.executable, str(ROOT / "probe.py"))), "--config-dir", str(CONF), *arguments]
        return subprocess.run(command, cwd=cwd or tmp_path, capture_output=True, text=True, timeout=300)

    return call


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """cli("task=flip", ...) -> (exit code, stdout, stderr) of the command line, in this process, standing in tmp_path."""
    import logging

    from probing import __main__

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["probe.py", "--config-dir", str(CONF), *arguments])
        logging.getLogger("probing").handlers.clear()  # each call speaks to the stdout of its own test
        with pytest.raises(SystemExit) as end:
            __main__.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call
