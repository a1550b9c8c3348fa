"""A folder of pictures.

python probe.py images=folder images.path=/data/films images.group=-2 task=orientation
"""

from __future__ import annotations

import logging
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from probing.types import Sample, View

log = logging.getLogger("probing")
EXTENSIONS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif")


def load(*, name: str, path: str, files: str = "*", group: int | str | None = None) -> list[Sample]:
    """Every picture below `path` whose relative path matches the glob `files` (* crosses folders).

    group: a part of the path by number (-2: the folder the file lies in, -3: the one above), a glob that a part must
    match (patient_*), or "file" for every file on its own. Columns: `folder` (the file's folder) and `file`.
    Raises ValueError when there is no picture, or a file without a group.
    """
    root = Path(path).expanduser()
    found = _files(root, files)
    if not found:
        raise ValueError(f"{path}: no picture matches images.files={files}. Pictures end in {' '.join(EXTENSIONS)}")
    if group is None:
        log.warning(
            "every file is a group of its own: type images.group=-2 (the folder), a glob such as images.group='patient_*', or images.group=file to say so"
        )
    samples = []
    for entry in found:
        relative = Path(entry.path).relative_to(root)
        meta = {"folder": relative.parent.as_posix(), "file": relative.name}
        samples.append(
            Sample(
                relative.as_posix(),
                (View(Path(entry.path), relative.as_posix()),),
                _group(relative, group),
                relative.as_posix(),
                meta=meta,
            )
        )
    return samples


def stamp(*, path: str, files: str = "*", **_: Any) -> list[Any]:
    """Relative path, size and time of every file."""
    root = Path(path).expanduser()
    return [[os.path.relpath(e.path, root), *_size_and_time(e)] for e in _files(root, files)]


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: embedding will leave it out by name
        return False


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        return entry.stat().st_size, entry.stat().st_mtime_ns
    except OSError:  # a link that leads nowhere: embedding will leave it out by name
        return 0, 0


def _files(root: Path, files: str) -> list[os.DirEntry[str]]:
    """Every picture below `root` once: linked folders come last, and one that leads to a folder seen before is left out."""
    if not root.is_dir():
        raise ValueError(f"images.path={root}: there is no such folder")
    found: list[os.DirEntry[str]] = []
    folders, seen = [str(root)], set()
    links: list[str] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        if (real := os.path.realpath(folder)) in seen:
            log.warning(f"{os.path.relpath(folder, root)}: a link to a folder that is read already; left out")
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.startswith("."):  # what systems leave beside the pictures
                    continue
                if _is_dir(entry):
                    (links if entry.is_symlink() else folders).append(entry.path)
                elif entry.name.lower().endswith(EXTENSIONS) and fnmatch(os.path.relpath(entry.path, root), files):
                    found.append(entry)
    return sorted(found, key=lambda e: e.path)


def _group(relative: Path, group: int | str | None) -> str:
    parts = relative.parts
    if group is None or group == "file":
        return relative.as_posix()
    if isinstance(group, int):
        if not -len(parts) <= group < len(parts):
            raise ValueError(
                f"{relative.as_posix()}: it has {len(parts)} path parts, so images.group={group} names none. Type images.group={-len(parts)} to -1"
            )
        return parts[group]
    match = next((p for p in parts if fnmatch(p, group)), None)
    if match is None:
        raise ValueError(f"{relative.as_posix()}: no part of the path matches images.group={group}")
    return match
