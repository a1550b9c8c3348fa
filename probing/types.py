"""The nouns: frozen dataclasses, checked when they are made. This file imports nothing of ours.

Axes, always these letters: N samples, B batch, C H W image, L tokens, D width, K classes, R repeats.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

log = logging.getLogger("probing")
Step = tuple[str | int, ...]
Layout = Literal["tokens", "grid", "vector"]
ENCODER, TWIN, PIXELS = "encoder", "random weights", "pixels"  # the rows of a result that come from encoders
READOUTS = ("native", "cls", "mean", "grid2", "grid4")


def digest(*parts: Any) -> str:
    """Sixteen bytes of SHA-256, as hex, over the JSON of `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class View:
    """One picture as an encoder gets to see it: a base, how it is decoded, and what is then done to it.

    `frame` is (plane, index) for a slice of a volume, ("frame", index) for one of many frames. `decode` names the
    policy, its version and its window. `path` says where the file lies on this machine, `member` which part of a zip
    or parquet file is meant; `name` is the same relative to the root of its source, and is what reports show. None of
    the three is part of the key: the file, or the member, counts by its bytes.
    """

    path: Path
    name: str
    frame: tuple[str, int] | None = None
    decode: tuple[str | int | float, ...] = ("pillow", 1)
    steps: tuple[Step, ...] = ()
    member: str | None = None

    @property
    def base(self) -> tuple[Path, str | None]:
        """The file, or the member of it, that the picture is decoded from."""
        return self.path, self.member

    def then(self, *steps: Step) -> View:
        """The same view with more steps. A square canvas needs no further centred square."""
        kept = list(self.steps)
        for step in steps:
            if not (step == ("square",) and kept and kept[-1][0] in ("pad", "square")):
                kept.append(step)
        return replace(self, steps=tuple(kept))

    def key(self, file_digest: str) -> str:
        """Digest of base, decode and steps; `file_digest` is the SHA-256 of the bytes of the file or member."""
        return digest(file_digest, self.frame, self.decode, self.steps)


@dataclass(frozen=True)
class Sample:
    """A labelled view (or an unlabelled one, as image sources give them).

    `source` is the image that the sample was made from: copies of one image share it. `group` is what folds never
    split: a patient, study, article or block of a volume.
    """

    id: str
    views: tuple[View, ...]
    group: str
    source: str
    label: str | float | None = None
    meta: Mapping[str, str | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.views:
            raise ValueError(f"sample {self.id}: it has no view")
        if str(self.group).strip() in ("", "None", "nan"):
            raise ValueError(f"sample {self.id}: it has no group. Type images.group=file if every file is its own group")


@dataclass(frozen=True)
class Task:
    """A labelled set for one attribute. kind is "classes" (labels are names out of `classes`) or "number".

    Samples are kept in the order of their ids and identical ones once, so neither order nor repeats change a result.
    """

    name: str
    kind: Literal["classes", "number"]
    classes: tuple[str, ...]
    samples: tuple[Sample, ...]
    unit: str = ""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"task {self.name}: no sample is left. Look at images.where and limit")
        by_id: dict[str, Sample] = {}
        for s in self.samples:
            if by_id.setdefault(s.id, s) != s:
                raise ValueError(f"task {self.name}: two different samples have the id {s.id!r}. Ids must be unique")
        if len(by_id) < len(self.samples):
            log.warning(f"task {self.name}: {len(self.samples) - len(by_id)} repeated samples are used once")
        object.__setattr__(self, "samples", tuple(by_id[i] for i in sorted(by_id)))
        if self.kind == "classes":
            self._check_classes()
        elif bad := next((s for s in self.samples if not (isinstance(s.label, Real) and np.isfinite(float(s.label)))), None):
            raise ValueError(f"task {self.name}: the label of {bad.id} is {bad.label!r}, not a finite number")

    def _check_classes(self) -> None:
        found = {s.label for s in self.samples}
        if unknown := found - set(self.classes):
            raise ValueError(f"task {self.name}: labels {sorted(map(str, unknown))} are none of the classes {list(self.classes)}")
        if len(found) < 2:
            raise ValueError(
                f"task {self.name}: all {len(self.samples)} samples have the one class {found.pop()!r}; a probe needs two classes or more"
            )
        if missing := set(self.classes) - found:
            raise ValueError(f"task {self.name}: no sample has class {sorted(missing)}")

    @property
    def labels(self) -> np.ndarray:
        """[N] class numbers (int64) or values (float64)."""
        if self.kind == "number":
            return np.array([s.label for s in self.samples], float)
        number = {name: i for i, name in enumerate(self.classes)}
        return np.array([number[str(s.label)] for s in self.samples])

    @property
    def groups(self) -> np.ndarray:
        """[N] group numbers."""
        return np.unique([s.group for s in self.samples], return_inverse=True)[1]

    @property
    def sources(self) -> np.ndarray:
        """[N] source image numbers."""
        return np.unique([s.source for s in self.samples], return_inverse=True)[1]


@dataclass(frozen=True)
class Tap:
    """Where an activation is read: the output of the module at `path`, by a forward hook.

    layout: tokens [B,L,D] with `prefix` naming the tokens before the patches, grid [B,D,H,W], or vector [B,D].
    """

    name: str
    path: str
    layout: Layout
    prefix: tuple[str, ...] = ()

    @property
    def definition(self) -> str:
        return digest(self.path, self.layout, self.prefix)


@dataclass(frozen=True)
class Tokens:
    """What an encoder returns at a tap: values [B,L,D], the kind of each token (cls, reg, patch or vector), and the
    grid (rows, columns) of its patches in raster order, if it has one."""

    values: torch.Tensor
    kinds: tuple[str, ...]
    grid: tuple[int, int] | None

    def __post_init__(self) -> None:
        patches = self.kinds.count("patch")
        if self.values.ndim != 3 or self.values.shape[1] != len(self.kinds):
            raise ValueError(f"tokens of shape {tuple(self.values.shape)} do not fit {len(self.kinds)} kinds")
        if self.grid and self.grid[0] * self.grid[1] != patches:
            raise ValueError(f"{patches} patch tokens do not fill a grid of {self.grid[0]} x {self.grid[1]}")


@dataclass(frozen=True)
class Encoder:
    """A vision encoder, ready to run: `module` in eval mode, `preprocess` picture -> [C,H,W], taps, fingerprint.

    `policy` is the image policy as data; two encoders with an equal policy share one preprocessed picture. The
    fingerprint is a digest of weights, architecture, image policy and dtype: never of device, batch size or paths.
    """

    name: str
    module: torch.nn.Module
    preprocess: Callable[[Image], torch.Tensor]
    policy: str
    taps: tuple[Tap, ...]
    fingerprint: str


@dataclass(frozen=True)
class Arrays:
    """Embeddings that were extracted elsewhere, in the place of an Encoder: per tap one [D] or [L,D] for each id. The
    fingerprint is a digest of their file."""

    name: str
    ids: tuple[str, ...]
    values: Mapping[str, Sequence[np.ndarray]]
    taps: tuple[Tap, ...]
    fingerprint: str


@dataclass(frozen=True)
class Embeddings:
    """Rows of one (tap, readout) of an encoder: values [N,D], float32 and finite; row i belongs to keys[i]."""

    encoder: str
    fingerprint: str
    tap: str
    readout: str
    keys: tuple[str, ...]
    values: np.ndarray

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.keys):
            raise ValueError(
                f"{self.encoder} {self.tap} {self.readout}: values {self.values.shape} do not fit {len(self.keys)} keys"
            )
        bad = ~np.isfinite(self.values).all(1)
        if bad.any():
            raise ValueError(
                f"{self.encoder} {self.tap} {self.readout}: {bad.sum()} rows are not finite, first key {self.keys[int(np.argmax(bad))]}"
            )


@dataclass(frozen=True)
class Estimate:
    """A number that a person reads, with its 95 % interval (unless `method` says otherwise)."""

    value: float
    low: float
    high: float
    n: int
    groups: int
    method: str

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class ProbeResult:
    """One probed (tap, readout). score [R,N,K] holds class probabilities (K = 1: predicted numbers) and fold [R,N]
    the outer fold of every sample, both out of fold. `estimates` maps row name -> metric -> Estimate: the encoder
    itself and its floors. `null` [permutations] are the statistics under exchanged labels."""

    tap: str
    readout: str
    score: np.ndarray
    fold: np.ndarray
    chosen: tuple[str, ...]
    estimates: Mapping[str, Mapping[str, Estimate]]
    p: float | None
    null: np.ndarray
    finding: str
    tags: tuple[str, ...]
    reason: str  # why the finding is undetermined
    sentence: str = ""
    notes: tuple[str, ...] = ()
