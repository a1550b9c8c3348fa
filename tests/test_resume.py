"""Killed at any moment and started again, a run ends in the same bytes; and who reads meanwhile reads no nonsense."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CONF, NOTHING, ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from probing.jobs.configure import expand
from probing.picture import digests
from probing.records import results
from probing.store import Store
from probing.types import View

# A wave is a new run, killed again and again: in a phase, the n-th time that it enters it.
WAVE = (("card", 1), ("embed", 5), ("embed", 8), ("write", 2), ("write", 1), ("probe", 2), ("save", 1))
PRELOAD = [
    "pytest",
    "hydra",
    "timm",
    "torchvision.transforms",
    "sklearn.neighbors",
    "sklearn.dummy",
    "probing.embed",
    "probing.evaluate",
    "probing.jobs.show",
    "probing.encoders.timm",
    "probing.images.folder",
    "probing.tasks.transform",
]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and the fork server")


def work(cfg: Any, outputs: str, report: Connection | None) -> None:
    """A whole run in a child process. With `report` it is slow, and says when it enters a phase."""
    import torch
    from threadpoolctl import threadpool_limits
    from tqdm import tqdm

    from probing import embed, evaluate, files, jobs, records

    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process would leave behind
    embed.PART_BYTES = 24 * 32 * 4
    if report is not None:

        def slowed(owner: Any, name: str, phase: str, seconds: float) -> None:
            real = getattr(owner, name)

            @functools.wraps(real)
            def call(*args: Any, **kwargs: Any) -> Any:
                report.send(phase)
                time.sleep(seconds)
                return real(*args, **kwargs)

            setattr(owner, name, call)

        slowed(Store, "write_card", "card", 0.05)
        slowed(embed, "forward", "embed", 0.01)
        slowed(Store, "write", "write", 0.0)
        slowed(evaluate, "nested", "probe", 0.05)
        slowed(records.Run, "save", "save", 0.0)
        for name in ("fsync", "replace"):  # half a file is on the disk for a while
            real = getattr(files.os, name)
            setattr(files.os, name, lambda *args, real=real: time.sleep(0.02) or real(*args))
    with threadpool_limits(1):
        jobs.run(OmegaConf.merge(cfg, {"outputs": outputs}), jobs.Launch(()))


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Children are forked from a process that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@pytest.fixture
def cfg(films: Path) -> Any:
    options = ["task=orientation", "images=folder", f"images.path={films}", "images.group=-3", "batch_size=8", "workers=0"]
    options += ["protocol.folds=3", "protocol.inner=2", f"hydra.searchpath=[file://{CONF}]"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", [*NOTHING, *options])


def finish(server: ForkServerContext, cfg: Any, outputs: Path) -> bytes:
    """Run to the end; the bytes of predictions.csv."""
    child = server.Process(target=work, args=(cfg, str(outputs), None))
    child.start()
    child.join(120)
    assert child.exitcode == 0, "a run that was killed before has to go through"
    (found,) = outputs.glob("probe/*/predictions.csv")
    return found.read_bytes()


def kill(server: ForkServerContext, cfg: Any, outputs: Path, phase: str, times: int, delay: float) -> str | None:
    """Start a run and kill it `delay` seconds into a phase, or into saving if that comes first. The phase in which it
    died, or None if it was quicker."""
    receive, send = server.Pipe(duplex=False)
    child = server.Process(target=work, args=(cfg, str(outputs), send))
    child.start()
    send.close()
    last = "start"
    try:
        while times and last != "save":
            last = receive.recv()
            times -= last == phase
        time.sleep(delay)
        os.kill(child.pid or 0, signal.SIGKILL)
        while receive.poll(1):
            last = receive.recv()
    except (EOFError, OSError):  # there is nobody at the other end
        pass
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), f"a run that was killed before has to go on; it failed after {last}"
    return last if child.exitcode else None


@contextmanager
def watching(root: Path, reference: dict[str, np.ndarray], cell: Any) -> Iterator[Counter[str]]:
    """Another reader of all stores below `root`: what it reads is counted, and must be the reference's."""
    seen: Counter[str] = Counter()
    stores: dict[Path, Store] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for folder in root.glob("*/embeddings/tiny-*"):
                try:
                    found = stores.setdefault(folder, Store(folder))
                    absent = set(found.missing(list(reference), [cell])[0])
                    there = [k for k in reference if k not in absent]
                    rows = found.read(there, cell)
                    seen["reads"] += 1
                    seen["most rows"] = max(seen["most rows"], len(there))
                    seen["wrong rows"] += sum((rows[i] != reference[k]).any() for i, k in enumerate(there))
                    found.card()
                except Exception as error:
                    seen[f"{type(error).__name__}: {error}"] += 1
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("kills", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_change_no_byte(kills: int, films: Path, tmp_path: Path, server: ForkServerContext, cfg: Any) -> None:
    expected = finish(server, cfg, tmp_path / "whole")
    (folder,) = (tmp_path / "whole" / "embeddings").glob("tiny-*")
    tap = next(t for t in expand(cfg.encoder.taps) if t.name == cfg.encoder.tap)
    pictures = sorted(films.rglob("*.png"))
    found, _ = digests(tmp_path / "digests", [View(p, p.name) for p in pictures])
    turns = [("square",)], *([("square",), ("rot90", quarters)] for quarters in (1, 2, 3))
    keys = [v.then(*steps).key(d) for v, d in found.items() for steps in turns]
    reference = dict(zip(keys, Store(folder).read(keys, (tap, "mean")), strict=True))
    assert len(reference) == 192

    rng = np.random.default_rng(kills)
    died: Counter[str] = Counter()
    folders: list[Path] = []
    with watching(tmp_path / "killed", reference, (tap, "mean")) as seen:
        while died.total() < kills:
            folders.append(tmp_path / "killed" / str(len(folders)))
            for phase, times in WAVE:
                where = kill(server, cfg, folders[-1], phase, times, float(rng.uniform(0, 0.08)))
                died.update([where] if where else [])
        found = [finish(server, cfg, outputs) for outputs in folders]
        time.sleep(0.1)
    assert found == [expected] * len(folders)
    assert died.total() >= kills and len(died) >= 3, f"kills tell little if they hit few phases: {died}"
    assert "save" in died and {"embed", "write"} & set(died)
    assert seen.pop("reads") > kills and seen.pop("most rows") == 192 and seen.pop("wrong rows") == 0
    assert not seen, "who reads meanwhile meets no error"
    for outputs in folders:
        names = {p.name for p in outputs.rglob("*") if p.is_file() and not p.name.startswith(".tmp-")}
        assert {"result.json", "predictions.csv", "arrays.npz", "encoder.json"} <= names
        assert len(list(outputs.glob("probe/*"))) == 1 and len(list(outputs.glob("embeddings/tiny-*"))) == 1
        assert len(results(outputs)) == len(results(tmp_path / "whole"))
    print(f"died while: {dict(died)}; {len(folders)} runs")
