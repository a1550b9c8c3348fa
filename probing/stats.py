"""Grouped folds, cluster intervals, exchangeable labels. Facts and sources: docs/statistics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats as distributions

from probing.types import Estimate

RESAMPLES = 2_000
Metric = Callable[[np.ndarray], np.ndarray]  # sums over samples [..., S] -> value [...]


# --- metrics as functions of sums over samples, so that a resample of groups is one matrix product ---------------


def class_parts(labels: np.ndarray, right: np.ndarray, classes: int) -> np.ndarray:
    """[N,2K]: right answers per class, then samples per class. `right` [N] may be a mean over repeats."""
    hot = np.eye(classes)[labels]
    return np.concatenate([hot * right[:, None], hot], 1)


def accuracy(sums: np.ndarray) -> np.ndarray:
    """Share of right answers, from `class_parts`."""
    k = sums.shape[-1] // 2
    return sums[..., :k].sum(-1) / sums[..., k:].sum(-1)


def balanced_accuracy(sums: np.ndarray) -> np.ndarray:
    """Mean over classes of the share of right answers, from `class_parts`; a class that a resample lacks is left out."""
    k = sums.shape[-1] // 2
    with np.errstate(invalid="ignore"):
        return np.nanmean(sums[..., :k] / sums[..., k:], axis=-1)


def number_parts(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """[N,5]: squared error, absolute error, y, y squared, 1; the squares of labels brought to mean 0 and size 1."""
    size = labels.std() or 1.0  # R2 knows no unit: squares of tiny, huge or far-off labels would lose every digit
    error, y = predicted - labels, (labels - labels.mean()) / size
    return np.stack([(error / size) ** 2, np.abs(error), y, y**2, np.ones_like(y)], 1)


def r2(sums: np.ndarray) -> np.ndarray:
    """1 - squared error / variance around the mean, from `number_parts`."""
    square, _, y, y2, n = np.moveaxis(sums, -1, 0)
    return 1 - square / np.maximum(y2 - y**2 / n, 1e-12)


def mean_absolute_error(sums: np.ndarray) -> np.ndarray:
    return sums[..., 1] / sums[..., 4]


# --- intervals ---------------------------------------------------------------------------------------------------


def cluster_interval(parts: np.ndarray, groups: np.ndarray, metric: Metric, seed: int = 0, level: float = 0.95) -> Estimate:
    """Bootstrap over whole groups (percentile, `RESAMPLES` times). Few groups make a percentile interval too short,
    so it is widened by the ratio of the t to the normal quantile; a share of exactly 0 or 1 takes Wilson's interval
    with n = groups.
    """
    by_group, count = _group_sums(parts, groups)
    value = float(metric(parts.sum(0)))
    drawn = metric(_draws(count, seed) @ by_group)
    tail = (1 - level) / 2
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    if metric in (accuracy, balanced_accuracy) and value in (0.0, 1.0):
        low, high = wilson(value * count, count, level)
        return Estimate(value, low, high, len(parts), count, "Wilson over groups")
    wide = distributions.t.ppf(1 - tail, count - 1) / distributions.norm.ppf(1 - tail)
    low, high = value - wide * (value - low), value + wide * (high - value)
    if metric in (accuracy, balanced_accuracy, r2):
        high = min(high, 1.0)
    if metric in (accuracy, balanced_accuracy, mean_absolute_error):
        low = max(low, 0.0)
    return Estimate(value, float(low), float(high), len(parts), count, "cluster bootstrap")


def paired_difference(one: np.ndarray, other: np.ndarray, groups: np.ndarray, metric: Metric, seed: int = 0) -> Estimate:
    """metric(one) - metric(other) on the same samples, both resampled by the same groups."""
    width = one.shape[1]
    both = np.concatenate([one, other], 1)
    return cluster_interval(both, groups, lambda sums: metric(sums[..., :width]) - metric(sums[..., width:]), seed)


def wilson(hits: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share, for independent items."""
    z = distributions.norm.ppf(0.5 + level / 2)
    share, room = hits / n, z**2 / n
    centre, half = (share + room / 2) / (1 + room), z * np.sqrt(share * (1 - share) / n + room / (4 * n)) / (1 + room)
    return float(max(centre - half, 0)), float(min(centre + half, 1))


def _group_sums(parts: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, int]:
    count = int(groups.max()) + 1
    sums = np.zeros((count, parts.shape[1]))
    np.add.at(sums, groups, parts)
    return sums, count


def _draws(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(float)


# --- folds -------------------------------------------------------------------------------------------------------


def folds(labels: np.ndarray | None, groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """[N] fold of each sample. A group never crosses folds, no fold is empty, and class numbers (or, without labels,
    samples) are spread as evenly as whole groups allow.

    Groups are dealt out one by one, the most unbalanced first, each to the fold where it leaves the classes most even.
    scikit-learn's StratifiedGroupKFold deals alike, but can leave a fold empty and refuses classes smaller than the
    number of folds.
    """
    if count < 2:
        raise ValueError(f"{count} folds: type 2 or more, or there is nothing to train on")
    _, group = np.unique(groups, return_inverse=True)
    available = int(group.max()) + 1
    if available < count:
        hint = f"Type protocol.folds={available}, or bring" if available > 1 else "Bring"
        raise ValueError(f"{available} groups can not fill {count} folds. {hint} more groups")
    hot = np.ones((len(group), 1)) if labels is None else np.eye(int(labels.max()) + 1)[labels]
    share = np.zeros((available, hot.shape[1]))
    np.add.at(share, group, hot / np.maximum(hot.sum(0), 1))
    order = np.random.default_rng(seed).permutation(available)
    order = order[np.argsort(-share[order].std(1), kind="stable")]
    held, of_group = np.zeros((count, hot.shape[1])), np.empty(available, int)
    for dealt, g in enumerate(order):
        empty = ~held.any(1)
        unevenness = [(held + share[g] * (np.arange(count) == f)[:, None]).std(0).sum() for f in range(count)]
        must = empty if empty.sum() == available - dealt else np.ones(count, bool)
        best = min(np.flatnonzero(must), key=lambda f: (round(unevenness[f], 12), held[f].sum()))
        held[best] += share[g]
        of_group[g] = best
    return of_group[group]


# --- the null ----------------------------------------------------------------------------------------------------


def exchange(labels: np.ndarray, sources: np.ndarray, groups: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, str, float]:
    """Labels under the null, at the level where they vary.

    Among the copies of an image where copies differ in label; else among the images of a group where they differ;
    else between whole groups of similar size (same power of two). Decided source by source and group by group.

    Returns [count, N] labels, the levels used in words, and log2 of the number of arrangements.
    """
    rng = np.random.default_rng(seed)
    blocks, levels, bits = _blocks(labels, sources, groups)
    out = np.tile(labels, (count, 1))
    for units in blocks:  # each unit is an array of samples with one label
        first = np.array([u[0] for u in units])
        order = np.argsort(rng.random((count, len(units))), axis=1)
        moved = labels[first][order]
        for j, unit in enumerate(units):
            out[:, unit] = moved[:, j, None]
    return out, " and ".join(levels) or "none", bits


def renamings(labels: np.ndarray, sources: np.ndarray, groups: np.ndarray) -> float:
    """log2 of the number of ways to rename the classes that map the arrangements of `exchange` onto themselves. They
    leave every statistic as it is, so that many arrangements can not be told apart."""
    from math import factorial, log2

    blocks, _, _ = _blocks(labels, sources, groups)
    moved = np.zeros(len(labels), bool)
    for units in blocks:
        moved[np.concatenate(units)] = True
    profile = [
        (*(sum(labels[u[0]] == k for u in b) for b in blocks), k if (labels[~moved] == k).any() else -1)
        for k in np.unique(labels)
    ]
    return sum(log2(factorial(n)) for n in Counter(profile).values())


def _blocks(labels: np.ndarray, sources: np.ndarray, groups: np.ndarray) -> tuple[list[list[np.ndarray]], list[str], float]:
    """Sets of units whose labels may be exchanged."""
    from math import lgamma, log

    named: dict[str, list[list[np.ndarray]]] = {"copies of an image": [], "images of a group": [], "whole groups": []}
    constant: dict[int, list[np.ndarray]] = {}
    for group in np.unique(groups):
        inside = np.flatnonzero(groups == group)
        images = [inside[sources[inside] == s] for s in np.unique(sources[inside])]
        mixed = [i for i in images if len(np.unique(labels[i])) > 1]
        named["copies of an image"] += [[np.array([j]) for j in i] for i in mixed]
        same = [i for i in images if len(np.unique(labels[i])) == 1]
        if len({labels[i[0]] for i in same}) > 1:
            named["images of a group"].append(same)
        elif same and not mixed:
            constant.setdefault(len(inside).bit_length(), []).append(inside)
    named["whole groups"] = [units for units in constant.values() if len({labels[u[0]] for u in units}) > 1]
    blocks = [b for level in named.values() for b in level]
    bits = 0.0
    for units in blocks:
        _, repeats = np.unique([labels[u[0]] for u in units], return_counts=True)
        bits += (lgamma(len(units) + 1) - sum(lgamma(r + 1) for r in repeats)) / log(2)
    return blocks, [name for name, found in named.items() if found], bits


def ridge_null(
    values: np.ndarray, labels: np.ndarray, exchanged: np.ndarray, fold: np.ndarray, classes: int | None
) -> tuple[float, np.ndarray]:
    """The statistic of a ridge probe under the labels as they are, and under each exchanged labelling.

    Out-of-fold balanced accuracy (K = `classes`) or R2 (None), the best over penalties of 1e-3 ... 10 times the mean
    eigenvalue: one search for the true labels and for every exchange, so that the comparison is fair. `fold` must not
    depend on labels. values [N,D], exchanged [P,N]; returns (statistic, [P]).
    """
    everything = np.concatenate([labels[None], exchanged])
    if classes is None:  # R2 knows no unit, and float32 likes numbers near 1
        everything = (everything - labels.mean()) / max(labels.std(), 1e-12)
    penalties = np.logspace(-3, 1, 5)
    sums = np.zeros((len(penalties), len(everything), 2 * classes if classes else 2))
    for f in np.unique(fold):
        train, test = fold != f, fold == f
        for i, predicted in enumerate(_ridge(values[train], values[test], everything[:, train], classes, penalties)):
            truth = everything[:, test]
            if classes:
                for k in range(classes):
                    sums[i, :, k] += ((truth == k) & (predicted == k)).sum(1)
                    sums[i, :, classes + k] += (truth == k).sum(1)
            else:
                sums[i, :, 0] += ((predicted - truth) ** 2).sum(1)
    spread = np.maximum(((everything - everything.mean(1, keepdims=True)) ** 2).sum(1), 1e-12)
    statistic = (balanced_accuracy(sums) if classes else 1 - sums[..., 0] / spread).max(0)
    return float(statistic[0]), statistic[1:]


def _ridge(
    train: np.ndarray, test: np.ndarray, labels: np.ndarray, classes: int | None, penalties: Sequence[float] | np.ndarray
) -> list[np.ndarray]:
    """Predictions [P, N_test] per penalty, through one eigendecomposition of the training Gram matrix."""
    centre = train.mean(0)
    train, test = (train - centre).astype(np.float32), (test - centre).astype(np.float32)
    narrow = train.shape[1] < len(train)  # the smaller of the two Gram matrices gives the same predictions
    eigenvalues, vectors = np.linalg.eigh(train.T @ train if narrow else train @ train.T)
    project = test @ vectors if narrow else (test @ train.T) @ vectors
    scale = max(float((train**2).sum()) / len(train), 1e-12)
    targets = [(labels == k).T.astype(np.float32) for k in range(classes)] if classes else [labels.T.astype(np.float32)]
    means = [t.mean(0) for t in targets]
    turned = [vectors.T @ (train.T @ (t - m) if narrow else t - m) for t, m in zip(targets, means, strict=True)]
    out = []
    for penalty in penalties:
        hat = project / (np.maximum(eigenvalues, 0) + penalty * scale)
        fitted = [hat @ t for t in turned]  # classes compete on centred targets: none gains by being frequent
        out.append(np.argmax(fitted, 0).T if classes else (fitted[0] + means[0]).T)
    return out
