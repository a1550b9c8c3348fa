"""What a notebook calls. Stable: `embeddings`, `results`, `load`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probing import jobs, records
from probing.jobs.configure import compose
from probing.types import Encoder

if TYPE_CHECKING:
    import numpy as np
    import pandas


def embeddings(
    encoder: str, data: str | None = None, tap: str | None = None, readout: str | None = None, overrides: Sequence[str] = ()
) -> tuple[list[str], np.ndarray]:
    """The ids [N] and embeddings [N,D] of the samples of a data card (or of the default images and task).

    They are computed if the store lacks them. `overrides` are further options as on the command line.

    >>> ids, values = probing.embeddings("efficientnet_lite0", "position_axial", tap="stage.3")  # doctest: +SKIP
    """
    typed = [f"{k}={v}" for k, v in (("encoder", encoder), ("data", data), ("tap", tap), ("readout", readout)) if v is not None]
    return jobs.embeddings(compose([*typed, "floors=false", *overrides]))


def load(encoder: str, overrides: Sequence[str] = ()) -> Encoder:
    """An encoder by its YAML's name, with its weights, in eval mode: module, preprocess, taps.

    >>> encoder = probing.load("efficientnet_lite0")  # doctest: +SKIP
    >>> encoder.module(encoder.preprocess(picture)[None])  # doctest: +SKIP
    """
    return jobs.load(compose([f"encoder={encoder}", *overrides]))


def results(folder: str | Path = "outputs") -> pandas.DataFrame:
    """One tidy row per estimate of every finished run under `folder`."""
    return records.results(folder)
