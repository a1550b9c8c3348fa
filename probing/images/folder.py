"""A folder, or a zip file, of pictures.

python probe.py images=folder images.path=/data/films images.group=-2 task=orientation
"""

from __future__ import annotations

from typing import Any

from probing.collect import scan
from probing.tables import root_of
from probing.types import Sample, View

EXTENSIONS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif")


def load(*, name: str, path: str, files: str = "*") -> list[Sample]:
    """Every picture below `path` whose relative path matches the glob `files` (* crosses folders).

    Columns: `folder` (the file's folder) and `file`. Raises ValueError when there is no picture.
    """
    root = root_of(path)
    inside = root.is_file()
    found = scan(root, files, EXTENSIONS)
    if not found:
        raise ValueError(f"{path}: no picture matches images.files={files}. Pictures end in {' '.join(EXTENSIONS)}")
    samples = []
    for relative, _, _ in found:
        folder, _, file = relative.rpartition("/")
        view = View(root, relative, member=relative) if inside else View(root / relative, relative)
        samples.append(Sample(relative, (view,), relative, relative, meta={"folder": folder or ".", "file": file}))
    return samples


def stamp(*, path: str, files: str = "*", **_: Any) -> list[Any]:
    """Relative path, size and time of every file."""
    return list(scan(root_of(path), files, EXTENSIONS))
