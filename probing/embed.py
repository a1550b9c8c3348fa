"""Encoders x views -> rows in their stores: one decode of each picture, one forward pass for all cells, resumable."""

from __future__ import annotations

import difflib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from probing import picture, readouts
from probing.files import sweep
from probing.store import Cell, Store, versions
from probing.types import Arrays, Encoder, Tap, View, digest

log = logging.getLogger("probing")
PART_BYTES, PART_SECONDS = 64 << 20, 60
CANARY_TOLERANCE = 1e-3  # of the largest value; library versions that change more than this start a new store


@dataclass
class Request:
    """What is asked of one encoder: the cells, and the store that the rows go to."""

    encoder: Encoder
    cells: Sequence[Cell]
    store: Store


class _Pictures(Dataset[Any]):
    """View i -> (i, one tensor per image policy, None) or (i, [], reason) for a file that can not be read."""

    def __init__(self, views: Sequence[View], preprocess: Mapping[str, Any]) -> None:
        self.views, self.preprocess = views, preprocess

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, i: int) -> tuple[int, list[torch.Tensor], str | None]:
        try:
            opened = picture.open_view(self.views[i])
        except ValueError as error:
            return i, [], str(error)
        return i, [prepare(opened) for prepare in self.preprocess.values()], None


def _collate(
    items: list[tuple[int, list[torch.Tensor], str | None]],
) -> tuple[list[int], list[torch.Tensor], list[tuple[int, str]]]:
    """Numbers of the pictures that could be read, one batch [B,C,H,W] per image policy, and the others with reasons."""
    good = [(i, tensors) for i, tensors, reason in items if reason is None]
    batches = [torch.stack(same) for same in zip(*(tensors for _, tensors in good), strict=True)]
    return [i for i, _ in good], batches, [(i, reason) for i, _, reason in items if reason is not None]


def _batches(views: Sequence[View], size: int, workers: int) -> list[list[int]]:
    """Numbers of the views of each batch. A DataLoader gives batch k to worker k mod `workers`: where there are volumes,
    all slices of one go to one worker, so that it is decoded once."""
    share = workers if any(v.decode[0] == "nifti" for v in views) else 1
    queues: list[list[int]] = [[] for _ in range(max(share, 1))]
    for _, numbers in groupby(range(len(views)), key=lambda i: views[i].path):
        min(queues, key=len).extend(numbers)
    parts = [[queue[i : i + size] for i in range(0, len(queue), size)] for queue in queues]
    return [batch for several in zip_longest(*parts) for batch in several if batch]


def device_of(choice: str) -> torch.device:
    """device=auto is CUDA where there is one, else the CPU."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={choice}: this machine has no CUDA device that torch can use. Type device=cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    return torch.device(choice)


def embed(requests: Sequence[Request], views: Mapping[str, View], device: str, workers: int) -> dict[str, str]:
    """Embed what the stores lack. views: key -> View. Returns key -> reason for the views that could not be read.

    What has been computed is in the stores when this returns or raises, also on Ctrl-C and on a full disk.
    """
    order = sorted(views, key=lambda k: (str(views[k].path), views[k].frame or ("", 0), k))
    lacking = [r.store.missing(order, r.cells) for r in requests]
    wanted = set().union(*(keys for keys, _ in lacking)) if lacking else set()
    todo = [k for k in order if k in wanted]
    if not todo:
        return {}
    where = device_of(device)
    writers = [_Writer(r, set(keys), cells, where) for r, (keys, cells) in zip(requests, lacking, strict=True) if keys]
    preprocess = {w.encoder.policy: w.encoder.preprocess for w in writers}
    loader: DataLoader[Any] = DataLoader(
        _Pictures([views[k] for k in todo], preprocess),
        batch_sampler=_batches([views[k] for k in todo], writers[0].batch, workers),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=where.type == "cuda",
    )
    failed: dict[str, str] = {}
    log.info(f"embedding {len(todo):,} views x {len(writers)} encoders ({', '.join(w.encoder.name for w in writers)}) on {where}")
    with ExitStack() as stack, tqdm(total=len(todo), unit="view", desc="embed", mininterval=0.5) as bar:
        for writer in writers:
            stack.callback(writer.close)  # also on Ctrl-C, and for each writer whatever happens to another
        started = time.monotonic()
        for number, (good, pictures, bad) in enumerate(loader):
            failed.update({todo[i]: reason for i, reason in bad})
            for writer in writers if good else ():
                writer.add([todo[i] for i in good], pictures[list(preprocess).index(writer.encoder.policy)])
            bar.update(len(good) + len(bad))
            minutes = (time.monotonic() - started) / bar.n * (len(todo) - bar.n) / 60
            if number == 0 and minutes > 1:
                bar.write(f"about {minutes:.0f} min to go on {where}; limit=64 would look at 64 images alone", file=sys.stdout)
    return failed


class _Writer:
    """Runs one encoder and fills its store. The last batch is padded to full size and a store keeps its batch size,
    because a row's last bits depend on how many rows it is computed with."""

    def __init__(self, request: Request, keys: set[str], cells: Sequence[Cell], where: torch.device) -> None:
        self.encoder, self.store, self.keys, self.cells, self.where = request.encoder, request.store, keys, cells, where
        self.batch: int = self.store.card()["batch_size"]
        sweep(self.store.folder)
        self.encoder.module.to(where).to(memory_format=torch.channels_last)  # twice as fast for convolutions on a CPU
        self.waiting: list[str] = []
        self.pictures: torch.Tensor | None = None  # of the keys that wait for a full batch
        self.rows: list[tuple[list[str], dict[Cell, np.ndarray]]] = []
        self.since = time.monotonic()

    def add(self, keys: list[str], pictures: torch.Tensor) -> None:
        """Take the pictures [B,C,H,W] of those keys that the store lacks."""
        wanted = [i for i, k in enumerate(keys) if k in self.keys]
        if len(wanted) < len(keys):
            keys, pictures = [keys[i] for i in wanted], pictures[wanted]
        self.pictures = pictures if self.pictures is None else torch.cat([self.pictures, pictures])
        self.waiting += keys
        while len(self.waiting) >= self.batch:
            self._run(self.batch)
        size = sum(rows.nbytes for _, values in self.rows for rows in values.values())
        if size >= PART_BYTES or (self.rows and time.monotonic() - self.since > PART_SECONDS):
            self._write()

    def close(self) -> None:
        """Run what waits for a full batch and write what is not written yet, whatever ended the run."""
        try:
            while self.waiting:
                self._run(self.batch)
        finally:
            if self.rows:
                self._write()
            self.encoder.module.cpu()

    def _run(self, count: int) -> None:
        """Embed the first `count` waiting pictures."""
        assert self.pictures is not None
        keys, pictures = self.waiting[:count], self.pictures[:count]
        self.waiting = self.waiting[count:]
        self.pictures = self.pictures[count:] if self.waiting else None
        values, batch = within_memory(self.encoder, pictures, self.cells, self.where, self.batch)
        if batch < self.batch:
            self.batch = batch
            self.store.write_card({**self.store.card(), "batch_size": batch})
        self.rows.append((keys, values))

    def _write(self) -> None:
        keys = [k for part, _ in self.rows for k in part]
        self.store.write(keys, {c: np.concatenate([values[c] for _, values in self.rows]) for c in self.cells})
        self.rows.clear()
        self.since = time.monotonic()


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def hooks(
    encoder: Encoder, taps: Sequence[Tap], take: Callable[[Tap, torch.Tensor], Any] = lambda _, output: output
) -> Iterator[dict[str, Any]]:
    """Tap name -> take(tap, raw output of its module), filled by each forward pass. The hooks are gone afterwards.

    `take` runs inside the forward pass: a later module may overwrite the output in place. Raises ValueError for a
    module path that is not there, with the nearest ones, and for an output that is no tensor.
    """
    found: dict[str, Any] = {}
    modules = dict(encoder.module.named_modules(remove_duplicate=False))
    handles = []
    try:
        for tap in taps:
            if tap.path not in modules:
                near = difflib.get_close_matches(tap.path, modules, 5, 0.3)
                raise ValueError(f"tap {tap.name}: {encoder.name} has no module {tap.path!r}. Near names: {', '.join(near)}")

            def keep(_module: Any, _inputs: Any, output: Any, tap: Tap = tap) -> None:
                if not isinstance(output, torch.Tensor):
                    raise ValueError(
                        f"tap {tap.name}: module {tap.path!r} of {encoder.name} gives a {type(output).__name__}, not one tensor. "
                        "Tap a module inside or after it"
                    )
                found[tap.name] = take(tap, output)

            handles.append(modules[tap.path].register_forward_hook(keep))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def within_memory(
    encoder: Encoder, pictures: torch.Tensor, cells: Sequence[Cell], where: torch.device, batch_size: int
) -> tuple[dict[Cell, np.ndarray], int]:
    """`forward` in batches of `batch_size`, halved as often as memory runs out; also the batch size that went."""
    while True:
        try:
            found = [forward(encoder, part, cells, where, batch_size) for part in pictures.split(batch_size)]
            return {c: np.concatenate([f[c] for f in found]) for c in cells}, batch_size
        except RuntimeError as error:
            if not _out_of_memory(error) or batch_size == 1:
                raise
            batch_size //= 2
            log.warning(f"{encoder.name}: out of memory; going on with batches of {batch_size}")
            if where.type == "cuda":
                torch.cuda.empty_cache()


def forward(
    encoder: Encoder, pictures: torch.Tensor, cells: Sequence[Cell], where: torch.device, batch_size: int
) -> dict[Cell, np.ndarray]:
    """Preprocessed pictures [B,C,H,W] -> cell -> [B,D] float32, in one pass padded to `batch_size`."""
    count = len(pictures)
    if count < batch_size:
        pictures = torch.cat([pictures, pictures[-1:].expand(batch_size - count, *pictures.shape[1:])])
    encoder.module.eval()
    batch = pictures.to(where, memory_format=torch.channels_last, non_blocking=True)
    taps = list(dict.fromkeys(tap for tap, _ in cells))

    def take(tap: Tap, output: torch.Tensor) -> dict[str, torch.Tensor]:
        found = readouts.tokens(tap, output)
        return {readout: readouts.read(found, readout) for other, readout in cells if other == tap}

    with hooks(encoder, taps, take) as found, torch.inference_mode():
        encoder.module(batch)
        if unreached := [tap.name for tap in taps if tap.name not in found]:
            raise ValueError(f"tap {unreached[0]}: a forward pass of {encoder.name} does not run the module that it names")
        return {(tap, readout): found[tap.name][readout][:count].float().cpu().numpy() for tap, readout in cells}


def copy(root: Path, arrays: Arrays, spec: str, cells: Sequence[Cell], ids: Mapping[str, str]) -> tuple[Store, dict[str, str]]:
    """Bring rows that were extracted elsewhere into a store. ids: key -> id of the sample. Returns the store, and key ->
    reason for the ids that the arrays lack or whose row is not finite. Raises ValueError if they lack all."""
    # Rows are kept under keys of pictures but chosen by ids: other names of the same pictures are another store.
    store = Store(root / f"{arrays.name}-{digest(arrays.fingerprint, sorted(ids.items()))[:16]}")
    _vouch(store, arrays.name, arrays.fingerprint, spec, 1)
    place = {id: i for i, id in enumerate(arrays.ids)}
    if not arrays.ids:
        raise ValueError(f"encoder={arrays.name}: the file has no embeddings")
    if not any(id in place for id in ids.values()):
        copies = " A task that changes pictures, as orientation does, needs a row for each copy, called ID@CLASS."
        raise ValueError(
            f"encoder={arrays.name}: no image has a row.{copies if '@' in next(iter(ids.values())) else ''} Images are called like {next(iter(ids.values()))!r}, rows like {arrays.ids[0]!r}. "
            "Name both alike: images.id=COLUMN chooses the names of a table's rows"
        )
    failed = {k: f"encoder={arrays.name} has no row for it" for k, id in ids.items() if id not in place}
    keys, wanted = store.missing([k for k in ids if k not in failed], cells)
    rows = {c: [_vector(arrays.values[c[0].name][place[ids[k]]], *c) for k in keys] for c in wanted}
    broken = [i for i, _ in enumerate(keys) if not all(np.isfinite(r[i]).all() for r in rows.values())]
    failed |= {keys[i]: f"its row in encoder={arrays.name} is not finite" for i in broken}
    kept = [i for i in range(len(keys)) if i not in set(broken)]
    if kept:
        store.write([keys[i] for i in kept], {c: np.stack([r[i] for i in kept]) for c, r in rows.items()})
    return store, failed


def _vector(row: np.ndarray, tap: Tap, readout: str) -> np.ndarray:
    """[D] or [L,D] -> [D'], over the row's own tokens."""
    values = np.asarray(row, np.float32)
    if tap.layout == "vector":
        return values
    return readouts.read(readouts.tokens(tap, torch.from_numpy(values[None])), readout)[0].numpy()


def settle(root: Path, encoder: Encoder, spec: str, device: str, batch_size: int) -> Store:
    """The store of an encoder under `root`, after its canaries.

    A store keeps the rows of eight drawn pictures. Under library versions that it does not know they are embedded
    again: where they agree the store goes on, where not a new one is begun and a sentence says so.
    """
    cells = [(tap, "native" if tap.layout == "vector" else "mean") for tap in encoder.taps]
    where = device_of(device)
    encoder.module.to(where).to(memory_format=torch.channels_last)
    rows, _ = within_memory(encoder, torch.stack([encoder.preprocess(p) for p in _canaries()]), cells, where, 8)
    name = f"{encoder.name}-{encoder.fingerprint}"
    differ = {}
    for folder in sorted(root.glob(f"{name}*")):
        store = Store(folder)
        if store.empty():  # killed before its canaries were written: begin it
            break
        differ[folder.name] = store.canary_difference(rows)
        if differ[folder.name] <= CANARY_TOLERANCE:
            return _vouch(store, encoder.name, encoder.fingerprint, spec, batch_size)
    else:
        store = Store(root / (f"{name}-{versions()}" if differ else name))
        for other, by in differ.items():
            log.warning(
                f"{encoder.name}: these library versions change its embeddings (canaries differ by {by:.0e} from {other}); "
                f"beginning the store {store.folder.name}"
            )
    store.write([f"canary {i}" for i in range(8)], rows, prefix="canary")
    return _vouch(store, encoder.name, encoder.fingerprint, spec, batch_size)


def _vouch(store: Store, name: str, fingerprint: str, spec: str, batch_size: int) -> Store:
    """Write down that this spec, under these library versions, belongs to the store."""
    card = {"name": name, "fingerprint": fingerprint, "batch_size": batch_size, **store.card()}
    for key, value in (("specs", spec), ("versions", versions())):
        card[key] = sorted({*card.get(key, ()), value})
    store.write_card(card)
    return store


def _canaries() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (8, 12, 12, 3), dtype=np.uint8)
    return [Image.fromarray(c).resize((300, 300), Image.Resampling.BICUBIC) for c in coarse]
