"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probing.types import digest

STALE_SECONDS, FLUSH_SECONDS, AT_ONCE = 86_400, 60, 256
THREADS = min(8, os.cpu_count() or 1)  # a reader may hold a whole volume
Base = tuple[Path, str | None]  # a file, or a member of it


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`: synced and renamed to it when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """A mapping that has these keys. Raises ValueError that names a file which is damaged."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}). Remove it and launch again") from error
    if not isinstance(found, dict) or any(k not in found for k in keys):
        raise ValueError(f"{path}: damaged. Remove it and launch again")
    return found


def sweep(folder: Path) -> None:
    """Remove temporaries that a killed writer left, once they are a day old."""
    for path in folder.glob(".tmp-*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with whole(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1))


class Memo:
    """What reading a file once has told, remembered in `folder` by the file's path, size and time, in parts that are
    never rewritten. Only a digest of each path is written down, never the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, Any] = {}
        for part in sorted(folder.glob("part-*.json")):
            with contextlib.suppress(ValueError):  # a damaged part costs one more reading of its files
                self.known.update(read_json(part))

    def of(
        self, bases: Iterable[Base], read: Callable[[Path, str | None], Any], what: str
    ) -> tuple[dict[Base, Any], dict[Base, str]]:
        """read(path, member) of each, once; and the reason for each that can not be read. What is new is kept also
        when this is interrupted. `what` stands before the progress bar of long work."""
        found, failed, todo = {}, {}, []
        for base in dict.fromkeys(bases):
            try:
                mark = self._mark(*base)
            except OSError as error:
                failed[base] = error.strerror or type(error).__name__
                continue
            if mark in self.known:
                found[base] = self.known[mark]
            else:
                todo.append((base, mark))
        if todo:
            self._read(todo, read, what, found, failed)
        return found, failed

    def _read(
        self,
        todo: list[tuple[Base, str]],
        read: Callable[[Path, str | None], Any],
        what: str,
        found: dict[Base, Any],
        failed: dict[Base, str],
    ) -> None:
        from tqdm import tqdm

        def guarded(base: Base) -> tuple[Any, str | None]:
            try:
                return read(*base), None
            except Exception as error:  # a broken file makes readers raise nearly anything
                return None, (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"

        new: dict[str, Any] = {}
        since = time.monotonic()
        try:
            with ThreadPoolExecutor(THREADS) as pool, tqdm(total=len(todo), desc=what, unit="file", delay=2) as bar:
                for start in range(0, len(todo), AT_ONCE):
                    some = todo[start : start + AT_ONCE]
                    for (base, mark), (value, reason) in zip(some, pool.map(guarded, [b for b, _ in some]), strict=True):
                        if reason is None:
                            found[base] = new[mark] = value
                        else:
                            failed[base] = reason
                    bar.update(len(some))
                    if time.monotonic() - since > FLUSH_SECONDS:
                        self._keep(new)
                        since = time.monotonic()
        finally:
            self._keep(new)

    def _keep(self, new: dict[str, Any]) -> None:
        if new:
            write_json(self.folder / f"part-{uuid.uuid4().hex}.json", new)
            self.known.update(new)
            new.clear()

    @staticmethod
    def _mark(path: Path, member: str | None) -> str:
        stat = path.stat()
        return digest(os.path.abspath(path), stat.st_size, stat.st_mtime_ns, member)
