"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STALE_SECONDS = 86_400


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`: synced and renamed to it when the block ends well, removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """A mapping that has these keys. Raises ValueError that names a file which is damaged."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}). Remove it and launch again") from error
    if not isinstance(found, dict) or any(k not in found for k in keys):
        raise ValueError(f"{path}: damaged. Remove it and launch again")
    return found


def sweep(folder: Path) -> None:
    """Remove temporaries that a killed writer left, once they are a day old."""
    for path in folder.glob(".tmp-*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with whole(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1))
