"""A View -> an 8-bit RGB picture, by one documented decode policy, and a picture -> what an encoder eats.

Policy "pillow" (version 1): EXIF orientation is applied; 16-bit grey keeps its high byte; palette and alpha are laid
over black; CMYK and 1-bit become RGB; of several frames the first is taken.
Policy "nifti" (version 1): the volume is turned to RAS+, windowed between two percentiles of its voxels, and cut
into slices in radiological convention (the patient's left is at the right; superior or anterior is up).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from probing.files import read_json, write_json
from probing.types import View, digest

if TYPE_CHECKING:
    import torch

log = logging.getLogger("probing")
PLANES = ("sagittal", "coronal", "axial")  # axis 0, 1, 2 of a RAS+ volume


def open_view(view: View) -> Image.Image:
    """The picture of a view, RGB, 8 bits.

    Raises ValueError that names the file, whatever is wrong with it.
    """
    try:
        picture = _nifti(view) if view.frame else _pillow(view)
        for step in view.steps:
            picture = _STEPS[str(step[0])](picture, *step[1:])
        return picture
    except Exception as error:  # a broken file makes decoders raise nearly anything
        empty = view.path.is_file() and view.path.stat().st_size == 0
        reason = "empty file" if empty else f"{type(error).__name__}: {error}"
        for path in (str(view.path), repr(str(view.path))[1:-1]):
            reason = reason.replace(path, view.name)
        raise ValueError(f"{view.name}: {reason}") from error


@functools.cache  # once per file, not once per view
def _note_frames(name: str, frames: int) -> None:
    log.warning(f"{name}: {frames} frames; the first is taken")


def _pillow(view: View) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice this size is still refused
        with Image.open(view.path) as file:
            if (frames := getattr(file, "n_frames", 1)) > 1:
                _note_frames(view.name, frames)
            picture = ImageOps.exif_transpose(file)
            picture.load()
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        picture = Image.fromarray((np.clip(values, 0, 65535) // 256).astype(np.uint8))
    elif picture.mode == "F":
        raise ValueError("a floating-point picture has no defined grey scale")
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture)
    return picture.convert("RGB")


@functools.lru_cache(maxsize=1)  # views are ordered by file: a volume is decoded once per pass
def volume(path: Path, low: float, high: float) -> np.ndarray:
    """A NIfTI volume, RAS+, uint8, windowed between the percentiles `low` and `high` of its voxels."""
    import nibabel

    image = nibabel.as_closest_canonical(nibabel.load(path))  # type: ignore[arg-type, attr-defined]
    values = np.asarray(image.dataobj, np.float32)  # type: ignore[attr-defined]
    if values.ndim == 4 and values.shape[3] == 1:  # one point in time
        values = values[..., 0]
    if (bad := ~np.isfinite(values)).any() and not bad.all():
        log.warning(f"{path.name}: {bad.sum()} voxels that are no number are taken as the smallest")
        values = np.where(bad, values[~bad].min(), values)
    if values.ndim != 3:
        raise ValueError(f"a volume of shape {values.shape} is not three-dimensional")
    bottom, top = np.percentile(values, [low, high])
    return (np.clip((values - bottom) / max(top - bottom, 1e-6), 0, 1) * 255).round().astype(np.uint8)


def _nifti(view: View) -> Image.Image:
    assert view.frame is not None
    plane, index = view.frame
    values = volume(view.path, float(view.decode[2]), float(view.decode[3]))
    flat = np.take(values, index, PLANES.index(plane))  # two of x, y, z in this order
    return Image.fromarray(np.ascontiguousarray(flat.T[::-1, ::-1])).convert("RGB")


def _pad(picture: Image.Image, side: int) -> Image.Image:
    """Centre on a black square. Where side and picture differ in parity the margins differ by one pixel, and that
    alone tells a picture from its mirror image: sources choose a side of the parity of their slices."""
    if max(picture.size) > side:
        raise ValueError(f"a picture of {picture.size} does not fit a canvas of {side}")
    canvas = Image.new("RGB", (side, side))
    canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return canvas


def _square(picture: Image.Image) -> Image.Image:
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


_ROTATE = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}
_STEPS: dict[str, Callable[..., Image.Image]] = {
    "pad": _pad,
    "square": _square,
    "rot90": lambda picture, quarters: picture.transpose(_ROTATE[quarters]),  # counter-clockwise
    "mirror": lambda picture: picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def preprocess(policy: Mapping[str, Any]) -> Callable[[Image.Image], torch.Tensor]:
    """Picture -> [C,H,W] float32, as torchvision does it on PIL pictures.

    policy: `resize` (shorter side, or [height, width] to squash), `crop` (centre crop, or null), `interpolation`,
    `mean`, `std`.
    """
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    resize, crop = policy["resize"], policy.get("crop")
    steps: list[Any] = [
        transforms.Resize(
            list(resize) if isinstance(resize, (list, tuple)) else resize, InterpolationMode(policy["interpolation"])
        )
    ]
    if crop:
        steps.append(transforms.CenterCrop(crop))
    steps += [transforms.ToTensor(), transforms.Normalize(list(policy["mean"]), list(policy["std"]))]
    return transforms.Compose(steps)


class Digests:
    """SHA-256 of files, remembered in `folder` by path, size and time, in parts that are never rewritten.

    Only a digest of each path is written down, never the path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, str] = {}
        for part in sorted(folder.glob("part-*.json")):
            with contextlib.suppress(ValueError):  # a damaged part costs one more reading of its files
                self.known.update(read_json(part))

    def of(self, paths: Iterable[Path]) -> tuple[dict[Path, str], dict[Path, str]]:
        """The digest of each file, and the reason for each file that can not be read. New digests become one part."""
        found, new, failed = {}, {}, {}
        for path in dict.fromkeys(paths):
            try:
                stat = path.stat()
                if not S_ISREG(stat.st_mode):
                    raise OSError(0, "not a plain file")
                mark = digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns)
                if mark not in self.known:
                    with open(path, "rb") as file:
                        new[mark] = self.known[mark] = hashlib.file_digest(file, "sha256").hexdigest()
                found[path] = self.known[mark]
            except OSError as error:
                failed[path] = error.strerror or type(error).__name__
        if new:
            write_json(self.folder / f"part-{uuid.uuid4().hex}.json", new)
        return found, failed
