"""What image sources share: finding files, groups, joins with a table.

A source is a module with load(...) -> samples without labels, and stamp(...) -> what says, without opening a picture,
whether its data have changed. `columns` of a sample are its `meta`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch, translate
from pathlib import Path
from typing import Any

from probing.tables import is_missing, read_table, rows_of
from probing.types import Sample

log = logging.getLogger("probing")
Found = tuple[str, int, int]  # relative path, size in bytes, time in ns


# --- files -------------------------------------------------------------------------------------------------------


def scan(root: Path, files: str, endings: tuple[str, ...]) -> list[Found]:
    """Every file below `root` whose relative path matches the glob `files` (* crosses folders) and whose name has one
    of the endings, sorted by path; or the members of a zip. Linked folders come last, and one that leads to a folder
    seen before is left out. What starts with a dot is passed over."""
    if root.is_file():
        return _members(root, files, endings)
    matches = None if files == "*" else re.compile(translate(files)).match
    found: list[Found] = []
    folders, seen = [(str(root), "")], set()
    links: list[tuple[str, str]] = []
    while folders or links:
        folder, prefix = folders.pop() if folders else links.pop()
        if (real := os.path.realpath(folder)) in seen:
            log.warning(f"{prefix.rstrip('/')}: a link to a folder that is read already; left out")
            continue
        seen.add(real)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] == ".":  # what systems leave beside the pictures
                        continue
                    relative = prefix + name
                    if _is_dir(entry):
                        (links if entry.is_symlink() else folders).append((entry.path, relative + "/"))
                    elif name.lower().endswith(endings) and (matches is None or matches(relative)):
                        found.append((relative, *_size_and_time(entry)))
        except PermissionError as error:
            raise ValueError(f"{prefix or root}: this folder can not be read ({error.strerror})") from error
    return sorted(found)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: embedding will leave it out by name
        return False


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        stat = entry.stat()
        return stat.st_size, stat.st_mtime_ns
    except OSError:  # a link that leads nowhere: embedding will leave it out by name
        return 0, 0


def _members(path: Path, files: str, endings: tuple[str, ...]) -> list[Found]:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"images.path={path}: neither a folder nor a zip file ({error})") from error
    time = path.stat().st_mtime_ns
    found = []
    for info in inside:
        if info.is_dir() or not info.filename.lower().endswith(endings) or not fnmatch(info.filename, files):
            continue
        if leaves(info.filename):
            raise ValueError(f"{path.name}: its member {info.filename!r} leads out of the archive, which is refused")
        if not any(part.startswith((".", "__MACOSX")) for part in info.filename.split("/")):
            found.append((info.filename, info.file_size, time))
    return sorted(found)


def leaves(relative: str) -> bool:
    """Whether a relative path leads out of its root."""
    return relative.startswith(("/", "\\")) or ".." in Path(relative.replace("\\", "/")).parts


def sizes(root: Path, relatives: Iterable[str]) -> list[Found]:
    """Size and time of files that a table names; 0, 0 of those that are not there."""
    found = []
    for relative in relatives:
        try:
            stat = os.stat(root / relative)
            found.append((relative, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((relative, 0, 0))
    return found


# --- groups ------------------------------------------------------------------------------------------------------


def group_of(name: str, columns: Mapping[str, Any], group: int | str) -> str:
    """A part of the path by number (-2: the folder it lies in), a column, a glob that a part of the path must match, or
    `file` for every file on its own."""
    if group == "file":
        return name
    if isinstance(group, int):
        parts = Path(name).parts
        if not -len(parts) <= group < len(parts):
            raise ValueError(
                f"{name}: it has {len(parts)} path parts, so images.group={group} names none. Type images.group={-len(parts)} to -1"
            )
        return parts[group]
    if group in columns:
        if is_missing(columns[group]):
            raise ValueError(f"{name}: its column {group} is empty, and images.group={group} asks for it")
        return str(columns[group])
    match = next((p for p in Path(name).parts if fnmatch(p, group)), None)
    if match is None:
        known = f" Columns: {', '.join(sorted(columns))}" if columns else ""
        raise ValueError(f"{name}: there is no column {group}, and no part of the path matches images.group={group}.{known}")
    return match


def joined(marks: Sequence[Sequence[Hashable]]) -> list[int]:
    """Number of the component of each item, where items that share a mark are in one component."""
    parent = list(range(len(marks)))

    def top(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[Hashable, int] = {}
    for i, own in enumerate(marks):
        for mark in own:
            one, other = sorted((top(first.setdefault(mark, i)), top(i)))
            parent[other] = one
    return [top(i) for i in range(len(marks))]


# --- joins ---------------------------------------------------------------------------------------------------------


def join(samples: Sequence[Sample], labels: str, key: str | None) -> list[Sample]:
    """Samples with the columns of the row of the table `labels` whose column `key` is the sample's column of that name,
    its id, file name, or file name without ending. Images without a row are left out."""
    table = read_table(labels, "images.labels")
    if key is None or key not in table.columns:
        raise ValueError(
            f"images.key={'' if key is None else key}: the table {labels} has no such column. There are: {', '.join(table.columns)}"
        )
    rows: dict[str, dict[str, Any]] = {}
    for given in rows_of(table):
        if rows.setdefault(str(given[key]), given) != given:
            raise ValueError(f"images.labels={labels}: two different rows have {key} = {given[key]!r}")
    kept = []
    for s in samples:
        file = s.views[0].name.rpartition("/")[2]
        names = (str(s.meta.get(key, "")), s.id, s.views[0].name, file, file.partition(".")[0])
        row = rows.get(next((n for n in names if n in rows), ""))
        if row is not None:
            kept.append(replace(s, meta={**s.meta, **row}))
    if not kept:
        raise ValueError(
            f"images.key={key}: no image has a row. Images are called like {samples[0].views[0].name!r}, the column holds {next(iter(rows), '')!r}"
        )
    if len(kept) < len(samples):
        log.warning(
            f"{len(samples) - len(kept):,} of {len(samples):,} images have no row in {Path(labels).name} and are left out"
        )
    return kept


def grouped(samples: Sequence[Sample], group: int | str | Sequence[int | str] | None) -> list[Sample]:
    """Samples with the groups that images.group asks for; of a list of several, images that share any are one group."""
    if group is None:
        if len({s.group for s in samples}) == len(samples):
            log.warning(
                "every image is a group of its own: type images.group= a column, -2 (the folder), a glob such as 'patient_*', or file to say so"
            )
        return list(samples)
    several = [group] if isinstance(group, (int, str)) else list(group)
    own = [[group_of(s.views[0].name, s.meta, g) for g in several] for s in samples]
    if len(several) == 1:
        return [replace(s, group=g) for s, (g,) in zip(samples, own, strict=True)]
    number = joined([[(i, g) for i, g in enumerate(gs)] for gs in own])
    return [replace(s, group=" ".join(own[n])) for s, n in zip(samples, number, strict=True)]
