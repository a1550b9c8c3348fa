"""What image sources share: finding files, groups, joins with a table.

A source is a module with load(...) -> samples without labels, and stamp(...) -> what says, without opening a picture,
whether its data have changed. `columns` of a sample are its `meta`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch, fnmatchcase, translate
from operator import attrgetter
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from probing.tables import Cell, is_missing, lacking, read_table
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
    in_order = True
    while folders or links:
        in_order = in_order and bool(folders)
        folder, prefix = folders.pop() if folders else links.pop()
        try:
            own = os.stat(folder)
            if (mark := (own.st_dev, own.st_ino)) in seen:
                log.warning(f"{prefix.rstrip('/')}: a link to a folder that is read already; left out")
                continue
            seen.add(mark)
            with os.scandir(folder) as entries:
                here, below = _entries(entries, prefix, endings, matches)
        except OSError as error:
            raise ValueError(f"{prefix.rstrip('/') or root}: this folder can not be read ({error.strerror})") from error
        found += here
        in_order = in_order and not (here and below)
        for entry in sorted(below, key=lambda e: f"{e.name}/", reverse=True):
            (links if entry.is_symlink() else folders).append((entry.path, f"{prefix}{entry.name}/"))
    return found if in_order else sorted(found)


def _entries(
    entries: Iterable[os.DirEntry[str]], prefix: str, endings: tuple[str, ...], matches: Callable[[str], Any] | None
) -> tuple[list[Found], list[os.DirEntry[str]]]:
    """The files of one folder that are asked for, by name, and its folders. A file with one of the endings costs one
    call of the system, all others none."""
    here: list[Found] = []
    below = []
    for entry in sorted(entries, key=attrgetter("name")):
        name = entry.name
        if name[0] == ".":  # what systems leave beside the pictures
            continue
        try:
            if name.endswith(endings) or name.lower().endswith(endings):
                stat = entry.stat()
                if not S_ISDIR(stat.st_mode):
                    if matches is None or matches(prefix + name):
                        here.append((prefix + name, stat.st_size, stat.st_mtime_ns))
                    continue
                below.append(entry)
            elif entry.is_dir():
                below.append(entry)
        except OSError:  # a link that leads nowhere or to itself: embedding will leave it out by name
            if name.lower().endswith(endings) and (matches is None or matches(prefix + name)):
                here.append((prefix + name, 0, 0))
    return here, below


def _members(path: Path, files: str, endings: tuple[str, ...]) -> list[Found]:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"images.path={path}: neither a folder nor a zip file ({error})") from error
    time = path.stat().st_mtime_ns
    found = {}
    for info in inside:
        name = info.filename
        if info.is_dir() or not name.lower().endswith(endings) or not fnmatchcase(name, files):
            continue
        if leaves(name):
            raise ValueError(f"{path.name}: its member {name!r} leads out of the archive, which is refused")
        if not any(part.startswith((".", "__MACOSX")) for part in name.split("/")):
            found[name] = (name, info.file_size, time)  # of two members with one name readers give the last
    return sorted(found.values())


def leaves(relative: str) -> bool:
    """Whether a relative path leads out of its root."""
    parts = relative.replace("\\", "/").split("/")
    return ".." in parts or not parts[0] or (len(parts[0]) == 2 and parts[0][1] == ":")


def unread(root: Path, failed: Mapping[tuple[Path, str | None], str]) -> dict[str, str]:
    """name -> reason for files below `root` that can not be read; no path of this machine stands in either."""
    out = {}
    for (path, _), reason in failed.items():
        name = path.relative_to(root).as_posix()
        out[name] = reason.replace(str(path), name)
    return out


def none_left(path: str, left: Mapping[str, str], what: str) -> ValueError:
    """The error when not one file can be read."""
    name, reason = next(iter(left.items()))
    return ValueError(f"{path}: none of {len(left):,} files is a {what} that can be read. {name}: {reason}")


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


def group_of(name: str, columns: Mapping[str, Cell], group: int | str) -> str:
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
        return "" if is_missing(columns[group]) else str(columns[group])
    match = next((p for p in Path(name).parts if fnmatch(p, group)), None)
    if match is None:
        known = lacking("images.group", group, sorted(columns))
        raise ValueError(f"{name}: no part of the path matches images.group={group}, and {str(known).partition(': ')[2]}")
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
    its id, path, file name with or without ending, or one of its folders: the one way, for all, that finds most rows.
    Where both have a column of one name, the table's counts. Images without a row are left out. Raises ValueError for a
    file name that two folders have and one row means."""
    table = read_table(labels, "images.labels")
    table.note(Path(labels).name)
    if key is None or key not in table.columns:
        raise lacking("images.key", key, table.columns, f"It is the column of {Path(labels).name} that names the image")
    rows: dict[str, Mapping[str, Cell]] = {}
    for given in table.rows:
        name = str(given[key])
        if is_missing(name):
            continue
        if (other := rows.setdefault(name, given)) != given:
            differ = ", ".join(c for c in given if given[c] != other[c])
            raise ValueError(
                f"images.labels={labels}: two rows have {key} = {name!r} and differ in {differ}. Keep one, or type images.key= a column that names one image"
            )
    names = [_names(s, key) for s in samples]
    ways = list(dict.fromkeys(way for found in names for way in found))
    best = max(ways, key=lambda way: sum(found.get(way) in rows for found in names))  # of equals the first
    kept: list[Sample] = []
    meant: dict[str, str] = {}
    for s, found in zip(samples, names, strict=True):
        if best in found and (name := found[best]) in rows:
            kept.append(replace(s, meta={**s.meta, **rows[name]}))
            path = s.views[0].name
            if name in (found[FILE], found[STEM]) and name != path and meant.setdefault(name, path) != path:
                raise ValueError(
                    f"images.key={key}: {name!r} fits {meant[name]} and {path}. Name the images by their path below images.path"
                )
    if not kept:
        raise ValueError(
            f"images.key={key}: none of {len(samples):,} images has a row. Images are called like {samples[0].views[0].name!r}, "
            f"the column holds {next(iter(rows), '')!r}. Type images.key= one of {', '.join(table.columns)}"
        )
    if len(kept) < len(samples):
        log.warning(
            f"{len(samples) - len(kept):,} of {len(samples):,} images have no row in {Path(labels).name} and are left out"
        )
    return kept


FILE, STEM = "file name", "file name without ending"


def _names(sample: Sample, key: str) -> dict[str, str]:
    """What a table may call an image, by the way of calling it, the most certain first."""
    path = sample.views[0].name
    *folders, file = path.split("/")
    stem = file.lower().removesuffix(".gz")
    found = {"its column": str(sample.meta[key])} if key in sample.meta and not is_missing(sample.meta[key]) else {}
    found |= {"id": sample.id, "path": path, FILE: file, STEM: file[: len(stem) - len(_ending(stem))] if _ending(stem) else file}
    return found | {f"folder {-i}": name for i, name in enumerate(reversed(folders), 2)}


def _ending(name: str) -> str:
    """The ending of a file name: of 1.2.840.113 there is none, as endings have letters."""
    found = re.search(r"\.(?=\d*[a-z])\w{1,5}$", name)
    return found.group() if found else ""


def grouped(samples: Sequence[Sample], group: int | str | Sequence[int | str] | None) -> list[Sample]:
    """Samples with the groups that images.group asks for; of a list of several, images that share any are one group,
    and an image may lack some of them."""
    if group is None:
        if len({s.group for s in samples}) == len(samples):
            log.warning(
                "every image is a group of its own: type images.group= a column, -2 (the folder), a glob such as 'patient_*', or file to say so"
            )
        return list(samples)
    several = [group] if isinstance(group, (int, str)) else list(group)
    own = [[group_of(s.views[0].name, s.meta, g) for g in several] for s in samples]
    if empty := [s.id for s, gs in zip(samples, own, strict=True) if not any(gs)]:
        asked = " and ".join(map(str, several))
        raise ValueError(
            f"{empty[0]}: its column {asked} is empty, as in {len(empty):,} of {len(samples):,} images, and images.group asks for it. Type images.group=-2 (the folder) or file, or leave such images out with images.where"
        )
    if len(several) == 1:
        found = [replace(s, group=g) for s, (g,) in zip(samples, own, strict=True)]
    else:
        number = joined([[(i, g) for i, g in enumerate(gs) if g] for gs in own])
        found = [replace(s, group=" ".join(filter(None, own[n]))) for s, n in zip(samples, number, strict=True)]
    _note_splits(found)
    return found


def _note_splits(samples: Sequence[Sample]) -> None:
    """A column `split` of the user's decides nothing; if it tears a group, what was trained on it is worth a look."""
    parts: dict[str, set[str]] = {}
    for s in samples:
        if "split" in s.meta:
            parts.setdefault(s.group, set()).add(str(s.meta["split"]))
    if torn := sorted(g for g, names in parts.items() if len(names) > 1):
        log.warning(
            f"{len(torn)} groups lie in several parts of the column split: {', '.join(torn[:5])}. It decides nothing here: folds are made of whole groups"
        )
