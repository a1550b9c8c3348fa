"""Slices of NIfTI volumes, and what segmentation masks say about each.

python probe.py images=nifti images.path=/data/ts 'images.files=*/ct.nii.gz' images.window=abdomen task=column task.column=plane
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from probing.collect import Found, none_left, scan, unread
from probing.decode import PLANES, read_header, read_nifti, window_of
from probing.files import Memo
from probing.tables import root_of
from probing.types import Sample, View

ENDINGS = (".nii", ".nii.gz")
PERCENTILES = (0.5, 99.5)
NO_IMAGES = ("segmentations", "segmentation", "masks", "labels", "labelstr", "labelsts", "labelsval")  # folders that hold masks


def load(
    *,
    name: str,
    path: str,
    memo: Path,
    left: dict[str, str],
    files: str = "*",
    planes: Sequence[str] = ("axial",),
    step_mm: float = 10,
    window: Any = None,
    masks: Mapping[str, str] | str | None = None,
) -> list[Sample]:
    """Slices of every volume below the folder `path` whose relative path matches the glob `files`, every `step_mm` in
    each plane. With files=* folders of masks (segmentations, masks, labels, labelsTr, ...) are passed over.

    window: a named CT window, [centre, width], or null for percentiles of the voxels. masks: column -> path or glob of a mask,
    relative to the volume's folder; or one glob of masks, which are then named by their files. Masks are no volumes. Where
    a volume lacks one of the masks, or it has another grid, its slices have no value. Columns: volume, folder, plane,
    index, position (mm, of the scanner: comparable within a volume alone), fraction (of the way through the volume),
    and per mask: NAME_contains (yes, no), NAME_count (parts), NAME_side (left or right of the volume's middle),
    NAME_x, NAME_y (centre) and NAME_left, NAME_top, NAME_right, NAME_bottom (box), as shares of the picture.
    The group is the volume. Files that can not be read go to `left`, name -> reason.
    """
    root = _folder(path)
    if unknown := [p for p in planes if p not in PLANES]:
        raise ValueError(f"images.planes: there is no plane {unknown[0]}. There are: {', '.join(PLANES)}")
    if not step_mm > 0:
        raise ValueError(f"images.step_mm={step_mm}: type a distance above 0")
    own = window_of(window)
    policy: tuple[str | int | float, ...] = ("nifti", 1, *(("window", *own) if own else PERCENTILES))
    relatives = [r for r, _, _ in _volumes(root, files, masks)]
    if not relatives:
        but = " and is no mask of images.masks" if masks else ""
        raise ValueError(f"{path}: no volume matches images.files={files}{but}. Volumes end in {' '.join(ENDINGS)}")
    headers, failed = Memo(memo / "volumes").of(
        [(root / r, None) for r in relatives], lambda p, _: list(read_header(p)), "headers"
    )
    left |= unread(root, failed)
    grids = {r: headers[root / r, None] for r in relatives if (root / r, None) in headers}
    if not grids:
        raise none_left(path, left, "volume")
    slices = {r: _slices(grid, planes, step_mm) for r, grid in grids.items()}
    measured = _measured(root, grids, slices, masks, memo, left)
    samples = []
    for relative, chosen in slices.items():
        for plane, index, position, fraction in chosen:
            key = f"{relative}/{plane}/{index:03d}"
            view = View(root / relative, relative, (plane, index), policy)
            columns: dict[str, Any] = {
                "volume": relative,
                "folder": relative.rpartition("/")[0] or ".",
                "plane": plane,
                "index": index,
                "position": position,
                "fraction": fraction,
            }
            samples.append(Sample(key, (view,), relative, key, meta={**columns, **measured.get((relative, plane, index), {})}))
    return samples


def stamp(*, path: str, files: str = "*", masks: Mapping[str, str] | str | None = None, **_: Any) -> list[Any]:
    """Relative path, size and time of every volume, and with masks of every NIfTI file."""
    root = _folder(path)
    return list(scan(root, "*", ENDINGS) if masks else _volumes(root, files, None))


def _folder(path: str) -> Path:
    root = root_of(path)
    if not root.is_dir():
        raise ValueError(f"images.path={path}: images=nifti reads a folder, and this is a file. Type the folder that holds it")
    return root


def _volumes(root: Path, files: str, masks: Mapping[str, str] | str | None) -> list[Found]:
    """What matches `files` and is no mask. A mask that is named keeps its whole folder out, if that is a folder below
    the volume's."""
    found = scan(root, files, ENDINGS)
    patterns = [masks] if isinstance(masks, str) else list((masks or {}).values())
    below = [f"{p.rpartition('/')[0]}/*" for p in patterns if "/" in p]
    out = [f for f in found if not any(fnmatch(f[0], p) or fnmatch(f[0], f"*/{p}") for p in (*patterns, *below))]
    if files != "*":
        return out
    return [f for f in out if not any(part.lower() in NO_IMAGES for part in f[0].split("/")[:-1])]


def _slices(
    header: tuple[Sequence[int], Sequence[Sequence[float]]], planes: Sequence[str], step_mm: float
) -> list[tuple[str, int, float, float]]:
    """Plane, index, position in mm and fraction of the way, of slices at multiples of `step_mm`."""
    shape, affine = header
    out = []
    for plane in planes:
        axis = PLANES.index(plane)
        size = float(np.linalg.norm(np.asarray(affine)[:3, axis]))
        start = float(affine[axis][3])
        positions = start + size * np.arange(shape[axis])
        wanted = np.arange(np.ceil(positions[0] / step_mm - 1e-6), positions[-1] / step_mm + 1e-6) * step_mm
        if not wanted.size:  # a volume thinner than the step
            wanted = np.array([start + size * (shape[axis] // 2)])
        for index in np.unique(np.clip(np.round((wanted - start) / size), 0, shape[axis] - 1).astype(int)):
            fraction = float(index / max(shape[axis] - 1, 1))
            out.append((plane, int(index), round(float(positions[index]), 3), round(fraction, 6)))
    return out


def _measured(
    root: Path,
    grids: Mapping[str, Any],
    slices: Mapping[str, Sequence[tuple[str, int, float, float]]],
    masks: Mapping[str, str] | str | None,
    memo: Path,
    left: dict[str, str],
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(volume, plane, index) -> columns of all masks of the volume."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    asked: dict[tuple[Path, str | None], list[tuple[str, str]]] = {}
    for relative, chosen in slices.items():
        folder = (root / relative).parent
        own = (
            {p.name.partition(".")[0]: p for p in sorted(folder.glob(masks)) if p != root / relative}
            if isinstance(masks, str)
            else {k: _one(folder, v) for k, v in (masks or {}).items()}
        )
        wanted = json.dumps([*grids[relative], [[plane, index] for plane, index, _, _ in chosen]])
        for name, path in own.items():
            if not path.resolve().is_relative_to(root.resolve()):
                raise ValueError(f"images.masks: {name} of {relative} lies outside images.path, which is refused")
            asked.setdefault((path, wanted), []).append((relative, name))
    if masks and not asked:
        raise ValueError(f"images.masks={masks}: no volume has such a mask in its folder, as {next(iter(slices))}")
    done, failed = Memo(memo / "masks").of(asked, _measure, "masks")
    if asked and not done:
        raise none_left(f"images.masks={masks}", unread(root, failed), "mask")
    left |= unread(root, failed)
    for base, places in asked.items():
        for relative, name in places:
            for plane, index, columns in done.get(base, ()):
                row = found.setdefault((relative, plane, index), {})
                row.update({f"{name}_{k}": v for k, v in columns.items()})
    return found


def _one(folder: Path, mask: str) -> Path:
    """The file that a path or a glob names. Raises ValueError for a glob that names several: they are not all of one volume."""
    found = sorted(folder.glob(mask)) if "*" in mask else []
    if len(found) > 1:
        raise ValueError(
            f"images.masks: {mask} names {found[0].name} and {found[1].name} beside one volume. Name one mask per volume, as a folder per volume has it"
        )
    return found[0] if found else folder / mask


def _measure(path: Path, wanted: str | None) -> list[list[Any]]:
    """[plane, index, columns] of the slices of one mask, which must lie on the grid of its volume."""
    from scipy import ndimage

    shape, affine, chosen = json.loads(wanted or "[]")
    volume = read_nifti(path)
    if list(volume.stored.shape) != shape:
        raise ValueError(
            f"its grid {' x '.join(map(str, volume.stored.shape))} is not that of its volume, {' x '.join(map(str, shape))}"
        )
    corners = np.array([[0, 0, 0, 1], [*shape, 1]])
    if not np.allclose(volume.affine @ corners.T, np.array(affine) @ corners.T, atol=0.5):  # mm, at two opposite corners
        raise ValueError("it lies elsewhere in space than its volume")
    out = []
    for plane, index in chosen:
        shown = volume.values(plane, index).T[::-1, ::-1] > 0  # as the picture shows it
        columns: dict[str, Any] = {"contains": "yes" if shown.any() else "no", "count": int(ndimage.label(shown)[1])}
        if shown.any():
            rows, cols = np.nonzero(shown)
            height, width = shown.shape
            columns |= {
                "x": round((cols.mean() + 0.5) / width, 4),
                "y": round((rows.mean() + 0.5) / height, 4),
                "left": round(cols.min() / width, 4),
                "right": round((cols.max() + 1) / width, 4),
                "top": round(rows.min() / height, 4),
                "bottom": round((rows.max() + 1) / height, 4),
            }
            if plane != "sagittal" and columns["x"] != 0.5:  # the picture's left is the patient's right
                columns["side"] = "right" if columns["x"] < 0.5 else "left"
        out.append([plane, index, columns])
    return out
