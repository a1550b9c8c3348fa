"""Files -> arrays and pictures, one documented policy per kind. The name and version of a policy are part of a View's
key, so a changed policy embeds anew.

pillow 1   PNG, JPEG, TIFF and what else Pillow reads: EXIF orientation applied; 16-bit keeps the high byte; palette and
           alpha laid over black; CMYK and 1-bit become RGB; of several frames the first is taken.
dicom 1    stored values -> modality LUT or rescale -> window -> 0 to 255; MONOCHROME1 is inverted, YBR and palette
           become RGB. The window is the file's first (a VOI LUT before it), or a named one, or [centre, width]. Where a
           file has none: the range of its values.
nifti 1    turned to RAS+, windowed, cut into slices in radiological convention (the patient's left is at the right;
           superior or anterior is up). The window is two percentiles of the voxels, or a named one, or [centre, width].
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

if TYPE_CHECKING:
    import pydicom

log = logging.getLogger("probing")
PLANES = ("sagittal", "coronal", "axial")  # axis 0, 1, 2 of a RAS+ volume
PIXELS = "PROBING_MAX_PIXELS"  # environment: worker processes obey it too
MOST_PIXELS, MOST_VOXELS, MOST_SAMPLED = 200_000_000, 1_500_000_000, 10_000_000
# Centre and width in Hounsfield units, as radiologists set them: https://radiopaedia.org/articles/windowing-ct
WINDOWS = {
    "brain": (40.0, 80.0),
    "subdural": (75.0, 215.0),
    "bone": (400.0, 1800.0),
    "lung": (-600.0, 1500.0),
    "mediastinum": (50.0, 350.0),
    "abdomen": (50.0, 400.0),
    "liver": (30.0, 150.0),
}
Window = tuple[float, float]


def window_of(choice: Any) -> Window | None:
    """A window as typed: `file` is None; a name; or [centre, width]. Raises ValueError with the names there are."""
    if choice in (None, "file"):
        return None
    if isinstance(choice, str) and choice in WINDOWS:
        return WINDOWS[choice]
    if isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) == 2:
        centre, width = (float(v) for v in choice)
        if width > 0:
            return centre, width
    raise ValueError(f"images.window={choice}: type file, [centre,width] with a width above 0, or one of {', '.join(WINDOWS)}")


# --- the bytes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, member: str | None) -> Iterator[io.BufferedIOBase]:
    """A file, or one member of it: a name in a zip, or `column:row` of a parquet table (bytes, or a struct that has
    them)."""
    if member is None:
        with open(path, "rb") as file:
            yield file
    elif path.suffix.lower() == ".parquet":
        column, _, row = member.rpartition(":")
        yield io.BytesIO(_cell(path, column, int(row)))
    else:
        archive = _archive(path, path.stat().st_mtime_ns, os.getpid())
        size = archive.getinfo(member).file_size
        if size > 8 * most_pixels():
            raise ValueError(f"it unpacks to {size:,} bytes, which is refused")
        with archive.open(member) as file:
            yield io.BytesIO(file.read())


@functools.lru_cache(maxsize=4)
def _archive(path: Path, _modified: int, _process: int) -> zipfile.ZipFile:  # a forked process must not share its place
    return zipfile.ZipFile(path)


def _cell(path: Path, column: str, row: int) -> bytes:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    for group in range(file.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if row < count:
            value = _row_group(path, path.stat().st_mtime_ns, column, group)[row].as_py()
            value = value.get("bytes") if isinstance(value, dict) else value
            if not isinstance(value, bytes):
                raise ValueError(f"column {column} holds no picture in this row")
            return value
        row -= count
    raise ValueError("the table has no such row")


@functools.lru_cache(maxsize=2)  # views are ordered by file and row
def _row_group(path: Path, _modified: int, column: str, group: int) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path).read_row_group(group, [column]).column(0)


# --- Pillow ------------------------------------------------------------------------------------------------------


@functools.cache  # once per file, not once per view
def _note(sentence: str) -> None:
    log.warning(sentence)


def most_pixels() -> int:
    return int(os.environ.get(PIXELS, MOST_PIXELS))


def check_pixels(width: int, height: int, frames: int = 1) -> None:
    """Raise ValueError for a picture that would fill the memory."""
    if width * height * frames > most_pixels():
        raise ValueError(
            f"{width} x {height}{f' x {frames}' if frames > 1 else ''} = {width * height * frames:,} pixels are refused. "
            f"If the file is honest type {PIXELS}={width * height * frames} before the command"
        )


def pillow(file: io.BufferedIOBase, name: str) -> Image.Image:
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # our own limit is below, and names the setting
    try:
        found = Image.open(file)  # type: ignore[arg-type]
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    with found:
        check_pixels(*found.size)
        if (frames := getattr(found, "n_frames", 1)) > 1:
            _note(f"{name}: {frames} frames; the first is taken")
        found.load()
        picture: Image.Image = found
        if found.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            picture = ImageOps.exif_transpose(found)
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        picture = Image.fromarray((np.clip(values, 0, 65535) // 256).astype(np.uint8))
    elif picture.mode == "F":
        raise ValueError("a floating-point picture has no defined grey scale")
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


# --- DICOM -------------------------------------------------------------------------------------------------------


def dicom(file: io.BufferedIOBase, name: str, frame: int | None, window: Window | None) -> Image.Image:
    """One frame. Raises ValueError for an object without pixels, for too few bytes, and for a transfer syntax that no
    installed package decodes, with its name."""
    import pydicom
    from pydicom.pixels import apply_color_lut, apply_modality_lut

    data = pydicom.dcmread(file, force=True)
    if "PixelData" not in data:
        raise ValueError("no pixel data")
    frames = int(data.get("NumberOfFrames") or 1)
    check_pixels(int(data.Columns), int(data.Rows))
    if frames > 1 and frame is None:
        _note(f"{name}: {frames} frames; the first is taken")
    if not 0 <= (frame or 0) < frames:
        raise ValueError(f"frame {frame} of {frames}")
    values = _pixels(data, frame or 0)
    kind = data.PhotometricInterpretation
    if kind == "PALETTE COLOR":
        return Image.fromarray(_high_byte(apply_color_lut(values, data))).convert("RGB")
    if values.ndim == 3:
        return Image.fromarray(_high_byte(values)).convert("RGB")
    values = np.asarray(apply_modality_lut(values, data), np.float32)
    shown = _shown(values, data, name, window)
    return Image.fromarray(255 - shown if kind == "MONOCHROME1" else shown).convert("RGB")


def _pixels(data: pydicom.Dataset, frame: int) -> np.ndarray:
    from pydicom.pixels import pixel_array

    syntax = data.file_meta.TransferSyntaxUID if "TransferSyntaxUID" in data.get("file_meta", {}) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning) if syntax is None else warnings.simplefilter("ignore", UserWarning)
            return pixel_array(data, index=frame)
    except (RuntimeError, NotImplementedError) as error:
        named = f"transfer syntax {syntax} ({getattr(syntax, 'name', '')})" if syntax else "no transfer syntax"
        raise ValueError(
            f"{named} can not be decoded: {str(error).splitlines()[0]}. Compressed syntaxes need pip install 'vision-probing[dicom]'"
        ) from error


def _high_byte(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint8) if values.dtype.itemsize == 1 else (values >> 8).astype(np.uint8)


def _shown(values: np.ndarray, data: pydicom.Dataset, name: str, window: Window | None) -> np.ndarray:
    """Values after the modality LUT -> 0 to 255, by the window asked for, the file's first, or the range of values."""
    from pydicom.pixels import apply_voi

    if window is None and "VOILUTSequence" in data:
        try:
            looked_up = np.asarray(apply_voi(values.astype(np.int64), data, index=0), np.float32)
            return scaled(looked_up, 0, float(2 ** int(data.VOILUTSequence[0].LUTDescriptor[2]) - 1))
        except Exception as error:
            _note(f"{name}: its VOI table can not be used ({type(error).__name__}); its window is taken")
    if window is None and "WindowCenter" in data and "WindowWidth" in data:
        centre, width = (_first(data[tag].value) for tag in ("WindowCenter", "WindowWidth"))
        if centre is not None and width is not None and width >= 1:
            window = centre, width
        else:
            _note(f"{name}: its window (centre {centre}, width {width}) can not be used; the range of its values is taken")
    if window is None:
        return scaled(values, float(values.min()), float(values.max()))
    centre, width = window  # the linear function of PS3.3 C.11.2.1.2.1
    half = max(width - 1, 1e-6) / 2
    return scaled(values, centre - 0.5 - half, centre - 0.5 + half)


def _first(value: Any) -> float | None:
    try:
        return float(value[0] if isinstance(value, Sequence) and not isinstance(value, str) else value)
    except (TypeError, ValueError, IndexError):
        return None


def scaled(values: np.ndarray, bottom: float, top: float) -> np.ndarray:
    """Values between `bottom` and `top` as 0 to 255, uint8."""
    shown = np.clip((values - bottom) / max(top - bottom, 1e-6), 0, 1)
    return (shown * 255).round().astype(np.uint8)


# --- NIfTI -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Volume:
    """A NIfTI volume, RAS+. `stored` [X,Y,Z] times `slope` plus `inter` are its values; `affine` [4,4] leads to mm."""

    stored: np.ndarray
    slope: float
    inter: float
    affine: np.ndarray
    name: str

    def values(self, plane: str, index: int) -> np.ndarray:
        """One slice, float32, two of x, y, z in this order; what is no number is the smallest value."""
        values = self.real(self.stored[(slice(None),) * PLANES.index(plane) + (index,)])  # a view: np.take copies the volume
        return values if self.stored.dtype.kind != "f" else np.where(np.isfinite(values), values, self.smallest)

    def real(self, stored: np.ndarray) -> np.ndarray:
        """Stored numbers as values, float32."""
        return stored.astype(np.float32) * np.float32(self.slope) + np.float32(self.inter)

    @functools.cached_property
    def smallest(self) -> float:
        """The smallest finite value of a volume of floats."""
        bad = ~np.isfinite(self.stored)
        if bad.any():
            _note(f"{self.name}: {bad.sum()} voxels that are no number are taken as the smallest")
        finite = self.stored[~bad] if not bad.all() else np.zeros(1)
        return min(self.slope * float(v) + self.inter for v in (finite.min(), finite.max()))

    def percentiles(self, low: float, high: float) -> Window:
        """Two percentiles of at most ten million voxels, evenly spaced."""
        some = self.stored.ravel(order="K")[:: -(-self.stored.size // MOST_SAMPLED)]
        if some.dtype.kind != "f":  # much faster on the stored integers
            bottom, top = sorted(self.slope * v + self.inter for v in np.percentile(some, [low, high]))
        else:
            some = self.real(some)
            bottom, top = np.percentile(np.where(np.isfinite(some), some, self.smallest), [low, high])
        return float(bottom), float(top)


def read_header(path: Path) -> tuple[list[int], list[list[float]]]:
    """Shape and affine of a volume, RAS+, without reading its voxels. Raises ValueError for what is no volume, and for
    one that would fill the memory."""
    import nibabel

    return _ras(nibabel.load(path))


def _ras(image: Any) -> tuple[list[int], list[list[float]]]:
    from nibabel.orientations import inv_ornt_aff, io_orientation

    shape = list(image.shape)
    if len(shape) == 4 and shape[3] == 1:  # one point in time
        shape = shape[:3]
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"a volume of shape {image.shape} is not three-dimensional")
    if np.prod(shape, dtype=float) > MOST_VOXELS:
        raise ValueError(f"a volume of {' x '.join(map(str, shape))} voxels is refused")
    turn = io_orientation(image.affine)
    if not np.isfinite(turn).all():
        raise ValueError("its affine says no orientation")
    affine = image.affine @ inv_ornt_aff(turn, shape)
    return [shape[int(np.flatnonzero(turn[:, 0] == axis)[0])] for axis in range(3)], affine.tolist()


def read_nifti(path: Path) -> Volume:
    """A volume with its voxels, in one decode. Raises ValueError as `read_header` does."""
    import nibabel
    from nibabel.orientations import apply_orientation, io_orientation

    image: Any = nibabel.load(path)
    _, affine = _ras(image)
    stored = image.dataobj.get_unscaled().reshape(image.shape[:3])
    if stored.dtype.fields or stored.dtype.kind not in "iuf":
        raise ValueError(f"voxels of type {stored.dtype} have no grey scale")
    slope, inter = float(image.dataobj.slope), float(image.dataobj.inter)
    return Volume(apply_orientation(stored, io_orientation(image.affine)), slope, inter, np.array(affine), path.name)


@functools.lru_cache(maxsize=1)  # views are ordered by file: a volume is decoded once per pass
def volume(path: Path, _modified: int) -> Volume:
    return read_nifti(path)


@functools.lru_cache(maxsize=4)
def _ends(path: Path, modified: int, kind: str, low: float, high: float) -> Window:
    return volume(path, modified).percentiles(low, high) if kind == "percentiles" else (low - high / 2, low + high / 2)


def shown(path: Path, plane: str, index: int, kind: str, low: float, high: float) -> np.ndarray:
    """One slice, uint8. kind: `percentiles` low and high of the voxels, or `window` with centre low and width high."""
    modified = path.stat().st_mtime_ns
    return scaled(volume(path, modified).values(plane, index), *_ends(path, modified, kind, low, high))


def nifti(path: Path, plane: str, index: int, kind: str, low: float, high: float) -> Image.Image:
    flat = shown(path, plane, index, kind, low, high)
    return Image.fromarray(np.ascontiguousarray(flat.T[::-1, ::-1])).convert("RGB")
