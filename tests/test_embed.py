"""Encoders over views: one decode, one pass, the same bits however often it stops, and nothing lost on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NOTHING
from test_encoders import build

from probing import decode, files, picture, store
from probing import embed as module
from probing.embed import Request, device_of, embed, settle
from probing.store import Store
from probing.types import Encoder, Tap, View

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models are no faster on two threads, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def views(films: Path) -> dict[str, View]:
    """45 views, which no batch size below divides but 5, 9 and 15."""
    made = [View(p, p.relative_to(films).as_posix(), steps=(("square",),)) for p in sorted(films.rglob("*.png"))][:45]
    return {v.key(hashlib.sha256(v.path.read_bytes()).hexdigest()): v for v in made}


@pytest.fixture
def tiny() -> Encoder:
    return build("tiny")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 16 * 4 * 32 * 4)  # 16 rows of four taps


def request(root: Path, encoder: Encoder, batch_size: int = 8) -> Request:
    readout = "native" if encoder.taps[0].layout == "vector" else "mean"
    return Request(encoder, [(t, readout) for t in encoder.taps], settle(root, encoder, "spec", "cpu", batch_size))


def bare(root: Path, encoder: Encoder, batch_size: int = 8) -> Request:
    """A request to a store that has no canaries: for modules that stand for a mishap."""
    made = Store(root / f"{encoder.name}-{encoder.fingerprint}")
    made.write_card(
        {"name": encoder.name, "fingerprint": encoder.fingerprint, "batch_size": batch_size, "specs": [], "versions": []}
    )
    return Request(encoder, [(t, "mean") for t in encoder.taps], made)


def rows(asked: Request, views: Mapping[str, View]) -> list[np.ndarray]:
    """The rows of every cell, as a new process would read them."""
    return [Store(asked.store.folder).read(list(views), cell) for cell in asked.cells]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all((a == b).all() and a.shape == b.shape for a, b in zip(one, other, strict=True))


def kept(asked: Request, views: Mapping[str, View]) -> int:
    return len(views) - len(Store(asked.store.folder).missing(list(views), asked.cells)[0])


def some(views: Mapping[str, View], keys: Any) -> dict[str, View]:
    return {k: views[k] for k in keys}


class Mishap(torch.nn.Module):
    """An encoder's module to which something happens before it runs."""

    def __init__(self, inner: torch.nn.Module, before: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.inner, self.before = inner, before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(x)
        return self.inner(x)


def with_mishap(encoder: Encoder, before: Callable[[torch.Tensor], object]) -> Encoder:
    taps = tuple(replace(t, path=f"inner.{t.path}") for t in encoder.taps)
    return replace(encoder, module=Mishap(encoder.module, before), taps=taps)


def at_call(number: int, error: BaseException) -> Callable[[torch.Tensor], None]:
    """Raises at that call and goes well at all others."""
    calls = iter(range(1, 1_000_000))

    def before(_: torch.Tensor) -> None:
        if next(calls) == number:
            raise error

    return before


# --- the same bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_any_pieces_in_any_order_give_the_bits_of_one_run(
    seed: int, views: dict[str, View], tiny: Encoder, tmp_path: Path
) -> None:
    encoders = [tiny, build("pixels")]
    once = [request(tmp_path / "once", e) for e in encoders]
    assert embed(once, views, "cpu", 0) == {}
    rng = np.random.default_rng(seed)
    left = rng.permutation(list(views)).tolist()
    while left:
        n = int(rng.integers(1, 20))
        pieces = [request(tmp_path / "pieces", e, batch_size=int(rng.integers(1, 30)) if len(left) < 45 else 8) for e in encoders]
        embed(pieces[: rng.integers(1, 3)], some(views, left[:n]), "cpu", 0)
        embed(pieces, some(views, left[:n]), "cpu", 0)
        left = left[n:]
    for one, other in zip(once, pieces, strict=True):
        assert same(rows(one, views), rows(other, views)) and rows(one, views)[0].std() > 0


def test_a_store_keeps_its_batch_size(views: dict[str, View], tiny: Encoder, tmp_path: Path) -> None:
    sizes: list[int] = []
    watched = with_mishap(tiny, lambda x: sizes.append(len(x)))
    embed([request(tmp_path, watched, 8)], some(views, list(views)[:3]), "cpu", 0)
    asked = request(tmp_path, watched, 32)
    embed([asked], views, "cpu", 0)
    assert set(sizes) == {8} and asked.store.card()["batch_size"] == 8


def test_workers_change_no_row(views: dict[str, View], tiny: Encoder, tmp_path: Path) -> None:
    made = [request(tmp_path / str(workers), tiny) for workers in (0, 2)]
    assert [embed([asked], views, "cpu", workers) for workers, asked in zip((0, 2), made, strict=True)] == [{}, {}]
    assert same(rows(made[0], views), rows(made[1], views))


def test_the_pictures_can_be_sent_to_a_worker(views: dict[str, View], tiny: Encoder) -> None:
    pictures = module._Pictures(list(views.values()), {tiny.policy: tiny.preprocess})
    sent = pickle.loads(pickle.dumps(pictures))
    assert torch.equal(sent[3][1][0], pictures[3][1][0])


# --- no work twice -----------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded, in their order."""
    seen: list[str] = []
    real = picture.open_view
    monkeypatch.setattr(picture, "open_view", lambda view: seen.append(view.name) or real(view))
    return seen


def test_each_picture_is_decoded_once_for_all_encoders(
    views: dict[str, View], tiny: Encoder, tmp_path: Path, decoded: list[str]
) -> None:
    asked = [request(tmp_path, e) for e in (tiny, replace(build("tiny", seed=1), name="twin"), build("pixels"))]
    embed(asked, views, "cpu", 0)
    assert sorted(decoded) == sorted(v.name for v in views.values())
    assert [kept(a, views) for a in asked] == [45, 45, 45]


def test_what_is_there_is_not_done_again(views: dict[str, View], tiny: Encoder, tmp_path: Path, decoded: list[str]) -> None:
    calls: list[int] = []
    watched = with_mishap(tiny, lambda x: calls.append(len(x)))
    asked = request(tmp_path, watched)
    embed([asked], some(views, list(views)[:40]), "cpu", 0)
    calls.clear(), decoded.clear()
    embed([asked], views, "cpu", 0)
    assert len(calls) == 1 and sorted(decoded) == sorted(views[k].name for k in list(views)[40:])
    calls.clear(), decoded.clear()
    assert embed([asked], views, "cpu", 0) == {} and not calls and not decoded


def test_only_the_asked_cells_are_stored(views: dict[str, View], tiny: Encoder, tmp_path: Path) -> None:
    asked = request(tmp_path, tiny)
    first = replace_cells(asked, asked.cells[:1])
    embed([first], views, "cpu", 0)
    assert kept(first, views) == 45 and kept(asked, views) == 0
    before = {p.name for p in asked.store.folder.glob("part-*")}
    embed([asked], views, "cpu", 0)
    assert kept(asked, views) == 45
    grown = [p for p in asked.store.folder.glob("part-*") if p.name not in before]
    assert sum(p.stat().st_size for p in grown) < 45 * 4 * 32 * 3 + 40_000, "the cell that was there is not stored twice"


def replace_cells(asked: Request, cells: Any) -> Request:
    return Request(asked.encoder, cells, asked.store)


def test_a_volume_is_read_once_per_pass_in_whatever_order_its_slices_are_asked(
    tiny: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nibabel = pytest.importorskip("nibabel")
    made = []
    for name in ("one", "two"):
        values = np.random.default_rng(len(made)).integers(0, 999, (20, 20, 20)).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / f"{name}.nii.gz")
        for plane in decode.PLANES:
            made += [
                View(tmp_path / f"{name}.nii.gz", f"{name}.nii.gz", (plane, i), ("nifti", 1, 0.5, 99.5)) for i in range(0, 20, 4)
            ]
    by_key = {v.key(v.name): v for v in made}
    mixed = some(by_key, np.random.default_rng(0).permutation(list(by_key)))
    loads: list[str] = []
    real = nibabel.load
    monkeypatch.setattr(nibabel, "load", lambda path: loads.append(Path(path).name) or real(path))
    decode.volume.cache_clear()
    asked = request(tmp_path / "store", tiny)
    assert embed([asked], mixed, "cpu", 0) == {} and kept(asked, mixed) == 30
    assert sorted(loads) == ["one.nii.gz", "two.nii.gz"]


# --- mishaps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_picture_is_left_out_by_name_and_the_others_go_on(
    workers: int, views: dict[str, View], tiny: Encoder, tmp_path: Path
) -> None:
    asked = request(tmp_path / "store", tiny)
    bad = {}
    for i, content in enumerate((b"", b"no picture", None)):
        path = tmp_path / f"broken_{i}.png"
        if content is not None:
            path.write_bytes(content)
        bad[f"{i:032x}"] = View(path, f"films/broken_{i}.png")
    failed = embed([asked], {**bad, **views}, "cpu", workers)
    assert set(failed) == set(bad)
    assert all(bad[k].name in reason and str(tmp_path) not in reason for k, reason in failed.items())
    clean = request(tmp_path / "clean", tiny)
    embed([clean], views, "cpu", 0)
    assert same(rows(asked, views), rows(clean, views)), "a bad neighbour changes no bit"


def test_copies_of_one_bad_file_are_all_left_out(films: Path, tmp_path: Path, run: Callable[..., dict[str, Any]]) -> None:
    """Two empty files have one digest, so they are one view: both have to go."""
    root = tmp_path / "films"
    shutil.copytree(films / "files" / "p10", root)
    for name in ("p10000/s500", "p10002/s500"):
        (root / name / "2.png").write_bytes(b"")
    outcome = run(
        *NOTHING, "images=folder", f"images.path={root}", "images.group=0", "task=flip", "protocol.folds=3", "workers=0"
    )
    text = (Path(outcome["folder"]) / "result.json").read_text()
    assert "p10000/s500/2.png" in text and "p10002/s500/2.png" in text
    assert json.loads(text)["samples"] == 2 * 24


def test_out_of_memory_halves_the_batch_and_goes_on(
    views: dict[str, View], tiny: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def greedy(x: torch.Tensor) -> None:
        sizes.append(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    plain, short = bare(tmp_path / "plain", tiny, 16), bare(tmp_path / "short", with_mishap(tiny, greedy), 16)
    assert embed([plain], views, "cpu", 0) == embed([short], views, "cpu", 0) == {}
    for one, other in zip(rows(plain, views), rows(short, views), strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    assert sizes[:3] == [16, 8, 4] and set(sizes[3:]) == {4}, "it does not ask for too much again"
    assert Store(short.store.folder).card()["batch_size"] == 4 and "batches of 4" in caplog.text


def test_out_of_memory_with_one_picture_is_an_error(views: dict[str, View], tiny: Encoder, tmp_path: Path) -> None:
    def greedy(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        embed([bare(tmp_path, with_mishap(tiny, greedy))], views, "cpu", 0)


def test_an_encoder_that_can_not_hold_eight_pictures_still_gets_its_canaries(
    views: dict[str, View], tiny: Encoder, tmp_path: Path
) -> None:
    def greedy(x: torch.Tensor) -> None:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    asked = request(tmp_path, with_mishap(tiny, greedy), batch_size=4)
    embed([asked], views, "cpu", 0)
    assert kept(asked, views) == 45


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("CUDA error: device-side assert"), SystemExit(1)])
def test_what_was_computed_is_kept_whatever_ends_the_run(
    error: BaseException, views: dict[str, View], tiny: Encoder, tmp_path: Path
) -> None:
    """The mishap is lasting: a device that failed once fails again when the last rows are to be saved."""
    calls: list[int] = []

    def failing(_: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise error

    broken = bare(tmp_path, with_mishap(tiny, failing), 12)
    others = [bare(tmp_path, replace(build("tiny", seed=i), name=f"twin_{i}"), 8) for i in (1, 2)]
    with pytest.raises(type(error)):
        embed([others[0], broken, others[1]], views, "cpu", 0)
    assert kept(broken, views) == 24 and kept(others[0], views) == 40 and kept(others[1], views) == 32
    assert not list(tmp_path.rglob(".tmp-*"))

    again = Request(with_mishap(tiny, lambda _: None), broken.cells, broken.store)
    embed([again, *others], views, "cpu", 0)
    whole = bare(tmp_path / "whole", again.encoder, 12)
    embed([whole], views, "cpu", 0)
    assert same(rows(again, views), rows(whole, views)) and kept(others[1], views) == 45


def test_an_interrupt_is_kept_going_from(views: dict[str, View], tiny: Encoder, tmp_path: Path, decoded: list[str]) -> None:
    asked = bare(tmp_path, with_mishap(tiny, at_call(3, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        embed([asked], views, "cpu", 0)
    assert 16 <= kept(asked, views) < 45
    there = kept(asked, views)
    decoded.clear()
    embed([asked], views, "cpu", 0)
    assert len(decoded) == 45 - there and kept(asked, views) == 45


@pytest.mark.usefixtures("small_parts")
def test_a_full_disk_leaves_what_was_there(
    views: dict[str, View], tiny: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, synced, real = request(tmp_path, tiny), [], files.os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as full:
        full.setattr(files.os, "fsync", fsync)
        with pytest.raises(OSError) as error:
            embed([asked], views, "cpu", 0)
    assert error.value.errno == errno.ENOSPC
    assert kept(asked, views) == 16 and not list(tmp_path.rglob(".tmp-*"))
    embed([asked], views, "cpu", 0)
    whole = request(tmp_path / "whole", tiny)
    embed([whole], views, "cpu", 0)
    assert same(rows(asked, views), rows(whole, views))


@pytest.mark.usefixtures("small_parts")
def test_parts_are_written_along_the_way(
    views: dict[str, View], tiny: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path / "rows", tiny)
    embed([asked], views, "cpu", 0)
    assert len(list(asked.store.folder.glob("part-*"))) == 3
    monkeypatch.setattr(module, "PART_BYTES", 64 << 20)
    monkeypatch.setattr(module, "PART_SECONDS", 0)
    asked = request(tmp_path / "seconds", tiny)
    embed([asked], views, "cpu", 0)
    assert len(list(asked.store.folder.glob("part-*"))) > 3


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_every_view_is_in_one_batch_and_a_volume_with_one_worker(workers: int) -> None:
    sizes = (70, 5, 40, 33, 8)
    made = [
        View(Path(f"{i}.nii"), f"{i}.nii", ("axial", n), ("nifti", 1, 0.5, 99.5))
        for i, size in enumerate(sizes)
        for n in range(size)
    ]
    batches = module._batches(made, 8, workers)
    assert sorted(n for b in batches for n in b) == list(range(sum(sizes))) and max(map(len, batches)) == 8
    if workers > 1:
        first = batches[: 2 * workers]  # before a queue runs out
        owners = {
            made[n].path: {k % workers for k, b in enumerate(first) for m in b if made[m].path == made[n].path}
            for b in first
            for n in b
        }
        assert all(len(who) == 1 for who in owners.values())
    films = [View(Path(f"{n}.png"), f"{n}.png") for n in range(20)]
    assert module._batches(films, 8, workers) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


def test_a_device_that_is_not_there_is_an_error_that_says_what_to_type() -> None:
    assert device_of("cpu") == CPU
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert device_of("auto") == CPU
    with pytest.raises(ValueError, match=r"device=cuda:1.*device=cpu"):
        device_of("cuda:1")


# --- stores and library versions ---------------------------------------------------------------------------------


def upgrade(monkeypatch: pytest.MonkeyPatch, versions: str) -> None:
    for place in (store, module):
        monkeypatch.setattr(place, "versions", lambda: versions)


def other_rows(encoder: Encoder) -> Encoder:
    """The same encoder under a library that computes something else."""
    return replace(encoder, module=build("tiny", seed=9).module)


def test_equal_rows_under_other_versions_go_on_in_the_same_store(
    tiny: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = settle(tmp_path, tiny, "spec", "cpu", 8)
    upgrade(monkeypatch, "newer")
    assert store.find(tmp_path, "tiny", "spec", "newer") is None
    second = settle(tmp_path, tiny, "other spec", "cpu", 8)
    assert second.folder == first.folder and not caplog.text
    assert len(second.card()["versions"]) == 2 and second.card()["specs"] == ["other spec", "spec"]
    found = store.find(tmp_path, "tiny", "spec", "newer")
    assert found and found.folder == first.folder
    assert len(list(tmp_path.iterdir())) == 1 and len(list(first.folder.glob("canary-*"))) == 1


def test_other_rows_under_other_versions_begin_a_new_store_once(
    tiny: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, old = settle(tmp_path, tiny, "spec", "cpu", 8), store.versions()
    upgrade(monkeypatch, "newer")
    second = settle(tmp_path, other_rows(tiny), "spec", "cpu", 8)
    assert second.folder != first.folder and second.folder.name in caplog.text and "versions" in caplog.text
    caplog.clear()
    assert settle(tmp_path, other_rows(tiny), "spec", "cpu", 8).folder == second.folder
    assert not caplog.text, "the sentence is said once, when the store is begun"
    upgrade(monkeypatch, old)
    assert settle(tmp_path, tiny, "spec", "cpu", 8).folder == first.folder
    for versions, where in ((old, first), ("newer", second)):
        found = store.find(tmp_path, "tiny", "spec", versions)
        assert found and found.folder == where.folder


def test_a_tap_more_changes_no_store(tiny: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few, more = replace(tiny, taps=tiny.taps[:1]), replace(tiny, taps=(*tiny.taps, Tap("mine", "patch_embed", "tokens")))
    assert settle(tmp_path, few, "spec", "cpu", 8).folder == settle(tmp_path, more, "spec", "cpu", 8).folder
    assert not caplog.text


def test_a_store_whose_card_was_never_written_is_finished(views: dict[str, View], tiny: Encoder, tmp_path: Path) -> None:
    """A process that is killed between its canaries and its card."""
    asked = request(tmp_path, tiny)
    (asked.store.folder / "encoder.json").unlink()
    again = request(tmp_path, tiny)
    assert again.store.folder == asked.store.folder and again.store.card()["batch_size"] == 8
    embed([again], views, "cpu", 0)
    assert kept(again, views) == 45


def test_a_store_that_was_killed_before_its_canaries_is_begun(
    tiny: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / f"tiny-{tiny.fingerprint}"
    folder.mkdir()
    (folder / ".tmp-killed_before.h5").write_bytes(b"half a file")
    assert settle(tmp_path, tiny, "spec", "cpu", 8).folder == folder and not caplog.text
