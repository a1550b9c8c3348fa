"""A label that stands in a column of the image source.

python probe.py task=column task.column=plane          python probe.py task=column task.column=position task.kind=number
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from probing.types import Sample, Task

log = logging.getLogger("probing")
MOST_CLASSES = 50


def load(
    samples: Sequence[Sample], *, name: str, column: str | None, kind: Literal["classes", "number"] = "classes", unit: str = ""
) -> Task:
    """The label of each sample is `column` of its metadata. Samples without a value are left out, by name.

    Raises ValueError for an unknown column, with the columns there are.
    """
    columns = sorted({c for s in samples for c in s.meta})
    if column is None or column not in columns:
        near = difflib.get_close_matches(str(column), columns, 1)
        hint = f" Did you mean task.column={near[0]}?" if near else ""
        raise ValueError(
            f"task.column={'' if column is None else column}: there is no such column.{hint} There are: {', '.join(columns)}"
        )
    empty = [s.id for s in samples if str(s.meta.get(column, "")).strip() in ("", "nan", "None")]
    if empty:
        log.warning(
            f"{len(empty)} samples have no {column} and are left out: {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
        )
        gone = set(empty)
        samples = [s for s in samples if s.id not in gone]
    if kind == "number":
        return Task(name, kind, (), tuple(replace(s, label=_number(s, column)) for s in samples), unit)
    classes = tuple(sorted({str(s.meta[column]).strip() for s in samples}))
    if len(classes) > MOST_CLASSES:
        raise ValueError(
            f"task.column={column}: {len(classes)} different values are too many classes. Type task.kind=number if it is a number"
        )
    return Task(name, kind, classes, tuple(replace(s, label=str(s.meta[column]).strip()) for s in samples))


def _number(sample: Sample, column: str) -> float:
    try:
        return float(sample.meta[column])
    except ValueError as error:
        raise ValueError(
            f"task.column={column}: {sample.id} has {sample.meta[column]!r}, not a number. Type task.kind=classes if these are names"
        ) from error
