"""A View -> an 8-bit RGB picture, by one documented decode policy, and a picture -> what an encoder eats."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from probing import decode
from probing.files import Memo
from probing.types import View

if TYPE_CHECKING:
    import torch


def open_view(view: View) -> Image.Image:
    """The picture of a view, RGB, 8 bits.

    Raises ValueError that names the file, whatever is wrong with it.
    """
    try:
        picture = _decoded(replace(view, steps=()), view.path.stat().st_mtime_ns if view.path.exists() else 0)
        for step in view.steps:
            picture = _STEPS[str(step[0])](picture, *step[1:])
        return picture if view.steps else picture.copy()  # what is kept is nobody's to change
    except Exception as error:  # a broken file makes decoders raise nearly anything
        empty = view.path.is_file() and view.path.stat().st_size == 0
        reason = "empty file" if empty else f"{type(error).__name__}: {error}"
        for path in (str(view.path), repr(str(view.path))[1:-1]):
            reason = reason.replace(path, view.name)
        raise ValueError(f"{view.name}: {reason}") from error


@functools.lru_cache(maxsize=1)  # views are ordered by file: a picture is decoded once for all its steps
def _decoded(view: View, _modified: int) -> Image.Image:
    policy, _, *options = view.decode
    if policy == "nifti":
        assert view.frame is not None
        kind, low, high = options if len(options) == 3 else ("percentiles", *options)
        return decode.nifti(view.path, *view.frame, str(kind), float(low), float(high))
    if policy == "none":
        raise ValueError("there is no picture: only encoder=file can be asked about it")
    with decode.opened(view.path, view.member) as file:
        if policy == "dicom":
            window = (float(options[0]), float(options[1])) if options else None
            return decode.dicom(file, view.name, view.frame[1] if view.frame else None, window)
        return decode.pillow(file, view.name)


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
    `mean`, `std`; `input: fast` resizes bytes in torch instead, antialiased too: within one grey level
    of Pillow, two for a few values of a million.
    """
    import torch
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode, v2

    resize, crop = policy["resize"], policy.get("crop")
    size = list(resize) if isinstance(resize, (list, tuple)) else resize
    steps: list[Any] = [transforms.Resize(size, InterpolationMode(policy["interpolation"]), antialias=True)]
    if crop:
        steps.append(transforms.CenterCrop(crop))
    mean, std = list(policy["mean"]), list(policy["std"])
    if policy.get("input", "exact") == "exact":
        return transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(mean, std, inplace=True)])
    low, high = (torch.tensor(v)[:, None, None] for v in (mean, std))

    def fast(picture: Image.Image) -> torch.Tensor:
        values = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]  # channels last in memory: resized the fastest
        values = v2.functional.resize(values, size, InterpolationMode(policy["interpolation"]), antialias=True)
        if crop:
            values = v2.functional.center_crop(values, [crop, crop])
        return torch.addcdiv(-low / high, values[0], 255 * high)

    return fast


def digests(folder: Path, views: Iterable[View]) -> tuple[dict[View, str], dict[View, str]]:
    """SHA-256 of the base of each view, remembered in `folder`; and the reason for each that can not be read."""
    views = list(views)
    found, failed = Memo(folder).of((v.base for v in views if v.decode[0] != "none"), _digest, "digests")
    named = {v: hashlib.sha256(v.name.encode()).hexdigest() for v in views if v.decode[0] == "none"}  # no picture, a name
    return named | {v: found[v.base] for v in views if v.base in found}, {v: failed[v.base] for v in views if v.base in failed}


def _digest(path: Path, member: str | None) -> str:
    if not S_ISREG(path.stat().st_mode):
        raise OSError(0, "not a plain file")
    with decode.opened(path, member) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
