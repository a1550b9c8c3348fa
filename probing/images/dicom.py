"""DICOM files: one sample per file, or per frame, with header fields as columns.

python probe.py images=dicom images.path=/data/mimic/files images.group=-3 images.headers=[] task=orientation limit=5000
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probing.collect import Found, none_left, scan, unread
from probing.decode import window_of
from probing.files import Memo
from probing.tables import Cell, lacking, root_of
from probing.types import Sample, View

if TYPE_CHECKING:
    import pydicom

OTHERS = (".txt", ".csv", ".gz", ".json", ".html", ".zip", ".png", ".jpg", ".jpeg", ".xml", ".pdf", ".md", ".nii", "dicomdir")
ORDER = ("SeriesInstanceUID", "InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "NumberOfFrames")


def load(
    *,
    name: str,
    path: str,
    memo: Path,
    left: dict[str, str],
    files: str = "*",
    headers: Sequence[str] = (),
    frames: str = "first",
    window: Any = None,
) -> list[Sample]:
    """Every DICOM file below the folder `path` whose relative path matches the glob `files`.

    headers: keywords of the header (DICOM PS3.6) that become columns; with any, also `slice` and `slices` (the place in
    its series, by position along the normal of the slice, else by number) and `position` (mm along that normal).
    Without, no header is read. frames: first, middle, or all; the last two add the column `frame`. window: file, a
    named CT window, or [centre, width]. Each header is read once and remembered. Files that are no DICOM with a picture
    go to `left`, name -> reason. Column of every image: `folder`.
    """
    root = _folder(path)
    if frames not in ("first", "middle", "all"):
        raise ValueError(f"images.frames={frames}: type first, middle or all")
    _check_keywords(headers)
    policy: tuple[str | int | float, ...] = ("dicom", 1, *(window_of(window) or ()))
    relatives = [r for r, _, _ in _files(root, files)]
    if not relatives:
        raise ValueError(f"{path}: no file matches images.files={files}")
    rows: dict[str, Mapping[str, Any]] = {r: {} for r in relatives}
    if headers or frames != "first":
        tags = ",".join(dict.fromkeys([*headers, *ORDER]))
        found, failed = Memo(memo / "headers").of([(root / r, tags) for r in relatives], _header, "headers")
        left |= unread(root, failed)
        rows = {r: found[root / r, tags] for r in relatives if (root / r, tags) in found}
        if not rows:
            raise none_left(path, left, "DICOM picture")
    places = _places(rows) if headers else {}
    samples = []
    for relative, row in rows.items():
        columns = {k: row.get(k, "") for k in headers} | places.get(relative, {}) | {"folder": relative.rpartition("/")[0] or "."}
        count = int(row.get("NumberOfFrames") or 1)
        chosen: dict[str, Sequence[int]] = {"first": [0], "middle": [count // 2], "all": range(count)}
        for frame in chosen[frames]:
            one = frames == "first" or count == 1  # then the view is the same whichever frames are asked for
            key, place = (relative, None) if one else (f"{relative}/{frame}", ("frame", frame))
            own = columns if frames == "first" else {**columns, "frame": frame}
            samples.append(Sample(key, (View(root / relative, relative, place, policy),), relative, key, meta=own))
    return samples


def stamp(*, path: str, files: str = "*", **_: Any) -> list[Any]:
    """Relative path, size and time of every file."""
    return list(_files(_folder(path), files))


def _folder(path: str) -> Path:
    root = root_of(path)
    if not root.is_dir():
        raise ValueError(f"images.path={path}: images=dicom reads a folder, and this is a file. Type the folder that holds it")
    return root


def _files(root: Path, files: str) -> list[Found]:
    return [f for f in scan(root, files, ("",)) if not f[0].lower().endswith(OTHERS)]


def _check_keywords(headers: Sequence[str]) -> None:
    if not headers:
        return
    from pydicom.datadict import keyword_dict

    if unknown := [h for h in headers if h not in keyword_dict]:
        close = str(lacking("images.headers", unknown[0], keyword_dict)).partition(" There are")[0]
        raise ValueError(close.replace("column", "keyword of DICOM") + " Keywords are spelled as in DICOM PS3.6, as PatientID")


def _header(path: Path, tags: str | None) -> dict[str, Cell]:
    """Keyword -> text or number; several values are joined by a backslash, as in the file."""
    import pydicom

    wanted = (tags or "").split(",")
    data = pydicom.dcmread(path, force=True, stop_before_pixels=True, specific_tags=[*wanted, "Rows"])
    if "Rows" not in data:
        raise ValueError("no DICOM file with a picture")
    return {keyword: _value(data[keyword]) for keyword in wanted if keyword in data and not data[keyword].is_empty}


def _value(element: pydicom.DataElement) -> Cell:
    """Numbers are what DICOM calls so: an AccessionNumber of 00123 is a text."""
    value = element.value
    if element.VR == "SQ":  # coded: what the codes mean
        return "\\".join(str(item.get("CodeMeaning", "")) for item in value)
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if several or element.VR not in ("IS", "DS", "US", "SS", "UL", "SL", "FL", "FD"):
        return "\\".join(str(v) for v in value) if several else str(value).strip()
    return float(value) if element.VR in ("DS", "FL", "FD") else int(value)


def _places(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Cell]]:
    """Where each file lies in its series."""
    series: dict[str, list[tuple[float, str, float | None]]] = defaultdict(list)
    for relative, row in rows.items():
        position = _along_normal(row)
        rank = position if position is not None else float(row.get("InstanceNumber") or 0)
        series[str(row.get("SeriesInstanceUID", relative))].append((rank, relative, position))
    out: dict[str, dict[str, Cell]] = {}
    for members in series.values():
        for place, (_, relative, position) in enumerate(sorted(members, key=lambda m: m[:2])):
            out[relative] = {"slice": place, "slices": len(members)}
            if position is not None:
                out[relative]["position"] = round(position, 3)
    return out


def _along_normal(row: Mapping[str, Any]) -> float | None:
    try:
        position = [float(v) for v in str(row["ImagePositionPatient"]).split("\\")]
        axes = [float(v) for v in str(row["ImageOrientationPatient"]).split("\\")]
        return float(np.dot(np.cross(axes[:3], axes[3:]), position))
    except (KeyError, ValueError):
        return None
