"""Nested, grouped cross-validation of a scikit-learn estimator: what is predicted for a sample never saw its group.

Protocol and sources: docs/statistics.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probing import stats
from probing.types import Task

SMALL = 5_000_000  # values x settings below which worker processes cost more than they save


@dataclass(frozen=True)
class Protocol:
    """How a probe is judged. null: "ridge" screens the permutations by a ridge probe, "nested" repeats all of it."""

    name: str
    number: int
    folds: int
    inner: int
    repeats: int
    permutations: int
    null: str
    delta: float
    seed: int
    limited: bool = False

    def __post_init__(self) -> None:
        if self.null not in ("ridge", "nested"):
            raise ValueError(f"protocol.null={self.null}: type ridge or nested")
        if min(self.folds, self.inner) < 2 or self.repeats < 1:
            raise ValueError("type protocol.folds and protocol.inner of 2 folds or more, and protocol.repeats of 1 or more")


@dataclass(frozen=True)
class Probe:
    """An estimator under scikit-learn's contract, its grid (parameter -> values) and how features are scaled."""

    estimator: Any
    grid: Mapping[str, Sequence[Any]]
    scaling: str


@dataclass(frozen=True)
class Nested:
    """Out-of-fold predictions of one nested search."""

    score: np.ndarray  # [R,N,K] probabilities, or [R,N,1] numbers
    fold: np.ndarray  # [R,N]
    inner: np.ndarray  # [R,F] best inner score of each outer fold (higher is better)
    chosen: tuple[str, ...]
    unconverged: int
    fits: int


def nested(
    values: np.ndarray,
    labels: np.ndarray,
    task: Task,
    probe: Probe,
    protocol: Protocol,
    tick: Callable[[], object] = lambda: None,
) -> Nested:
    """Grouped outer folds x repeats; every hyper-parameter is chosen in grouped inner folds of the training part."""
    from joblib import Parallel, cpu_count, delayed, parallel_config

    strata = labels if task.kind == "classes" else None
    fold = np.stack([stats.folds(strata, task.groups, protocol.folds, protocol.seed + r) for r in range(protocol.repeats)])
    places = [(r, f) for r in range(protocol.repeats) for f in range(protocol.folds)]
    classes = len(task.classes) or None
    settings = _settings(probe)
    small = values.size * len(settings) < SMALL
    score = np.full((protocol.repeats, len(labels), classes or 1), np.nan)
    inner, chosen, unconverged = np.empty((protocol.repeats, protocol.folds)), [], 0
    with parallel_config("loky", inner_max_num_threads=1):
        work = Parallel(n_jobs=1 if small else min(cpu_count(), len(places)), return_as="generator")
        done = work(
            delayed(_outer)(values, labels, task.groups, classes, fold[r] == f, probe, settings, protocol) for r, f in places
        )
        for (r, f), (predicted, best, which, failed) in zip(places, done, strict=True):
            score[r, fold[r] == f], inner[r, f] = predicted, best
            chosen.append(str(settings[which]))
            unconverged += failed
            tick()
    return Nested(score, fold, inner, tuple(chosen), unconverged, len(places) * (len(settings) * protocol.inner + 1))


def _settings(probe: Probe) -> list[dict[str, Any]]:
    from sklearn.model_selection import ParameterGrid

    return list(ParameterGrid({k: list(v) for k, v in probe.grid.items()}))


def _outer(
    values: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    classes: int | None,
    test: np.ndarray,
    probe: Probe,
    settings: Sequence[Mapping[str, Any]],
    protocol: Protocol,
) -> tuple[np.ndarray, float, int, int]:
    """One outer fold: predictions for its test part [N_test,K], best inner score, chosen setting, unconverged fits."""
    from threadpoolctl import threadpool_limits

    train, y, inner_groups = values[~test], labels[~test], groups[~test]
    count = min(protocol.inner, len(np.unique(inner_groups)))
    scores, failed = np.zeros(len(settings)), 0
    with threadpool_limits(1):  # many small fits; and the same bits however many processes share them
        if count > 1:
            inside = stats.folds(y if classes else None, inner_groups, count, protocol.seed)
            for g in range(count):
                fit, held = inside != g, inside == g
                predictions, missed = _fit(train[fit], y[fit], train[held], settings, classes, probe)
                scores += [_inner_score(p, y[held], classes) / count for p in predictions]
                failed += missed
        else:  # limit= left one group to train on: nothing can be chosen, so take the middle of the grid
            scores[len(settings) // 2] = 1
        if not np.isfinite(scores).all():
            raise ValueError("an inner fold gave a score that is not finite, so no hyper-parameter can be chosen")
        best = int(np.argmax(scores))
        (predicted,), missed = _fit(train, y, values[test], [settings[best]], classes, probe)
    return predicted, float(scores[best]), best, failed + missed


def _fit(
    train: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    settings: Sequence[Mapping[str, Any]],
    classes: int | None,
    probe: Probe,
) -> tuple[list[np.ndarray], int]:
    """Predictions [N_test,K] per setting, and how many fits did not converge. The estimator is one object throughout,
    so warm_start works along the grid."""
    from sklearn.base import clone
    from sklearn.exceptions import ConvergenceWarning

    if classes is not None and len(np.unique(labels)) == 1:  # the other classes all lie in the held-out groups
        return [np.tile(np.eye(classes)[labels[0]], (len(test), 1))] * len(settings), 0
    train, test = _scale(train, test, probe.scaling)
    estimator = clone(probe.estimator)
    centre, size = (0, 1) if classes else (labels.mean(), labels.std() or 1.0)  # scikit-learn may fit in float32
    target = labels if classes else (labels - centre) / size
    found, failed = [], 0
    for setting in settings:
        if "n_neighbors" in setting:
            setting = {**setting, "n_neighbors": min(setting["n_neighbors"], len(train))}
        estimator.set_params(**setting)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            estimator.fit(train, target)
        failed += any(issubclass(w.category, ConvergenceWarning) for w in caught)
        if classes is None:
            found.append(np.asarray(estimator.predict(test), float).reshape(-1, 1) * size + centre)
            continue
        probability = np.zeros((len(test), classes))  # over the full class list, also when a fold lacks one
        probability[:, estimator.classes_] = estimator.predict_proba(test)
        found.append(probability)
    return found, failed


def _scale(train: np.ndarray, test: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray]:
    """none; global: centred, one scale for all features (safe when the test cohort shifts); feature: each its own."""
    if how == "none":
        return train, test
    centre = train.mean(0)
    size = np.sqrt(((train - centre) ** 2).mean(0 if how == "feature" else None))
    size = np.where(size > 1e-12, size, 1).astype(train.dtype)
    return (train - centre) / size, (test - centre) / size


def _inner_score(predicted: np.ndarray, labels: np.ndarray, classes: int | None) -> float:
    """Log-loss over the full class list, or squared error; negative, so that higher is better."""
    if classes is None:
        return float(-((predicted[:, 0] - labels) ** 2).mean())
    return float(np.log(np.clip(predicted[np.arange(len(labels)), labels], 1e-7, 1)).mean())
