"""A label that is known because we made it: every image, once per class, with the steps of that class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from probing.types import Sample, Task


def load(samples: Sequence[Sample], *, name: str, classes: Mapping[str, Sequence[Sequence[Any]]]) -> Task:
    """classes: class name -> steps of `probing.picture`, such as [[square], [rot90, 1]].

    The copies of an image share its group and its source.
    """
    made = []
    for sample in samples:
        for label, steps in classes.items():
            views = tuple(v.then(*(tuple(s) for s in steps)) for v in sample.views)
            made.append(replace(sample, id=f"{sample.id}@{label}", views=views, label=str(label)))
    return Task(name, "classes", tuple(map(str, classes)), tuple(made))
