"""DICOM files: one sample per file, or per frame, with header fields as columns.

python probe.py images=dicom images.path=/data/mimic/files images.group=-3 task=orientation limit=5000
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from probing.collect import scan
from probing.decode import window_of
from probing.files import Memo
from probing.tables import root_of
from probing.types import Sample, View

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
    """Every DICOM file below `path` whose relative path matches the glob `files`.

    headers: keywords of the header (DICOM PS3.6) that become columns; with any, also `slice` and `slices` (the place in
    its series, by position along the normal of the slice, else by number) and `position` (mm along that normal).
    Without, no header is read. frames: first, middle, or all. window: file, a named CT window, or [centre, width].
    Each header is read once and remembered. Files that are no DICOM go to `left`, name -> reason.
    """
    root = root_of(path)
    if frames not in ("first", "middle", "all"):
        raise ValueError(f"images.frames={frames}: type first, middle or all")
    policy: tuple[str | int | float, ...] = ("dicom", 1, *(window_of(window) or ()))
    relatives = [r for r, _, _ in _files(root, files)]
    if not relatives:
        raise ValueError(f"{path}: no file matches images.files={files}")
    rows: dict[str, Mapping[str, Any]] = {r: {} for r in relatives}
    if headers or frames != "first":
        tags = ",".join(dict.fromkeys([*headers, *ORDER]))
        found, failed = Memo(memo / "headers").of([(root / r, tags) for r in relatives], _header, "headers")
        left |= {r: failed[root / r, tags] for r in relatives if (root / r, tags) in failed}
        rows = {r: found[root / r, tags] for r in relatives if (root / r, tags) in found}
    places = _places(rows) if headers else {}
    samples = []
    for relative, row in rows.items():
        columns = {k: row.get(k, "") for k in headers} | places.get(relative, {}) | {"folder": relative.rpartition("/")[0]}
        count = int(row.get("NumberOfFrames") or 1)
        chosen: dict[str, Sequence[int | None]] = {"first": [None], "middle": [count // 2], "all": range(count)}
        for frame in chosen[frames]:
            key = relative if frame is None or count == 1 else f"{relative}/{frame}"
            place = None if frame is None or count == 1 else ("frame", frame)
            samples.append(Sample(key, (View(root / relative, relative, place, policy),), relative, key, meta=columns))
    return samples


def stamp(*, path: str, files: str = "*", **_: Any) -> list[Any]:
    """Relative path, size and time of every file."""
    return [list(found) for found in _files(root_of(path), files)]


def _files(root: Path, files: str) -> list[tuple[str, int, int]]:
    return [f for f in scan(root, files, ("",)) if not f[0].lower().endswith(OTHERS)]


def _header(path: Path, tags: str | None) -> dict[str, Any]:
    """Keyword -> text or number; several values are joined by a backslash, as in the file."""
    import pydicom

    wanted = (tags or "").split(",")
    data = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=[*wanted, "SOPClassUID"])
    out: dict[str, Any] = {}
    for keyword in wanted:
        value = data.get(keyword)
        if value is None or value == "":
            continue
        several = isinstance(value, Sequence) and not isinstance(value, str)
        text = "\\".join(str(v) for v in value) if several else str(value)
        try:
            out[keyword] = float(text) if "." in text and keyword not in ("PatientID", "AccessionNumber") else int(text)
        except ValueError:
            out[keyword] = text
        if keyword.endswith(("UID", "ID")):
            out[keyword] = text
    return out


def _places(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Where each file lies in its series."""
    series: dict[str, list[tuple[float, str, float | None]]] = defaultdict(list)
    for relative, row in rows.items():
        position = _along_normal(row)
        rank = position if position is not None else float(row.get("InstanceNumber") or 0)
        series[str(row.get("SeriesInstanceUID", relative))].append((rank, relative, position))
    out: dict[str, dict[str, Any]] = {}
    for members in series.values():
        for place, (_, relative, position) in enumerate(sorted(members, key=lambda m: m[:2])):
            out[relative] = {"slice": place, "slices": len(members)} | (
                {} if position is None else {"position": round(position, 3)}
            )
    return out


def _along_normal(row: Mapping[str, Any]) -> float | None:
    try:
        position = [float(v) for v in str(row["ImagePositionPatient"]).split("\\")]
        axes = [float(v) for v in str(row["ImageOrientationPatient"]).split("\\")]
        return float(np.dot(np.cross(axes[:3], axes[3:]), position))
    except (KeyError, ValueError):
        return None
