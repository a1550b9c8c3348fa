"""A label that stands in a column of the image source.

python probe.py task=column task.column=plane          python probe.py task=column task.column=position task.kind=number
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from probing.tables import is_missing, lacking
from probing.types import Sample, Task

log = logging.getLogger("probing")
MOST_CLASSES = 50


def load(
    samples: Sequence[Sample],
    *,
    name: str,
    column: str | None,
    kind: Literal["classes", "number"] = "classes",
    unit: str = "",
    map: Mapping[str, str | None] | None = None,
) -> Task:
    """The label of each sample is `column` of its metadata, without spaces around it. Samples without a value (empty,
    NaN, NA, null) are left out, by name.

    map: value -> class, or null to leave it out; every value that occurs must be in it. Raises ValueError for an
    unknown column, with the columns there are.
    """
    columns = sorted({c for s in samples for c in s.meta})
    if column is None or column not in columns:
        raise lacking("task.column", column, columns)
    if spaced := sum(str(v) != str(v).strip() for s in samples if not is_missing(v := s.meta.get(column))):
        log.warning(f"{column}: spaces around {spaced:,} values are taken off")
    if map is not None:
        samples = _mapped(samples, column, {str(k): v for k, v in map.items()})
    empty = [s.id for s in samples if is_missing(s.meta.get(column))]
    if empty:
        log.warning(
            f"{len(empty):,} samples have no {column} and are left out: {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}"
        )
        gone = set(empty)
        samples = [s for s in samples if s.id not in gone]
    if not samples:
        raise ValueError(f"task.column={column}: not one sample has a value. Type task.column= one of {', '.join(columns)}")
    if kind == "number":
        return Task(name, kind, (), tuple(replace(s, label=_number(s, column)) for s in samples), unit)
    classes = tuple(sorted({str(s.meta[column]).strip() for s in samples}))
    if len(classes) > MOST_CLASSES:
        raise ValueError(
            f"task.column={column}: {len(classes)} different values are too many classes. Type task.kind=number if it is a number"
        )
    return Task(name, kind, classes, tuple(replace(s, label=str(s.meta[column]).strip()) for s in samples))


def _mapped(samples: Sequence[Sample], column: str, classes: Mapping[str, str | None]) -> list[Sample]:
    value = {s.id: str(s.meta.get(column, "")).strip() for s in samples}
    values = Counter(value.values())
    if unknown := [v for v in values if not is_missing(v) and v not in classes]:
        shown = ", ".join(f"{v!r} ({values[v]:,})" for v in unknown[:10]) + (", …" if len(unknown) > 10 else "")
        yes_no = " In a YAML file put yes, no, on, off and numbers in quotes" if {"True", "False"} & set(classes) else ""
        raise ValueError(f"task.map: {column} also has {shown}. Map each to a class, or to null to leave it out.{yes_no}")
    if absent := [c for c in classes if c not in values]:
        log.warning(f"task.map: {column} never is {', '.join(absent)}")
    mapped = [(s, classes.get(value[s.id], "")) for s in samples]
    kept = [replace(s, meta={**s.meta, column: str(name)}) for s, name in mapped if name is not None]
    if len(kept) < len(samples):
        log.warning(f"task.map leaves {len(samples) - len(kept):,} samples out")
    return kept


def _number(sample: Sample, column: str) -> float:
    try:
        return float(sample.meta[column])
    except ValueError as error:
        raise ValueError(
            f"task.column={column}: {sample.id} has {sample.meta[column]!r}, not a number. Type task.kind=classes if these are names"
        ) from error
