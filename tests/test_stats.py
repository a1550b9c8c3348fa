"""Folds never split a group, labels are exchanged where they may be, intervals cover."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, kstest
from sklearn.linear_model import Ridge
from sklearn.metrics import accuracy_score, balanced_accuracy_score, mean_absolute_error, r2_score
from threadpoolctl import threadpool_limits

from probing import stats


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Hundreds of tiny matrices: threads cost more than they save."""
    with threadpool_limits(1):
        yield


# --- folds -------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(6, 20), st.integers(2, 4), st.booleans())
def test_no_group_crosses_folds(seed: int, count: int, available: int, classes: int, stratified: bool) -> None:
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(available), rng.integers(1, 7, available)))
    labels = rng.integers(0, classes, len(groups))
    labels[:classes] = np.arange(classes)
    fold = stats.folds(labels if stratified else None, groups, count, seed)
    assert all(len(np.unique(fold[groups == g])) == 1 for g in range(available))
    assert set(fold) == set(range(count))


def test_folds_do_not_depend_on_sample_order() -> None:
    rng = np.random.default_rng(0)
    groups, labels = rng.integers(0, 20, 150), rng.integers(0, 3, 150)
    order = rng.permutation(150)
    for strata in (labels, None):
        fold = stats.folds(strata, groups, 5, 7)
        again = stats.folds(None if strata is None else strata[order], groups[order], 5, 7)
        assert np.array_equal(fold[order], again)
        assert not np.array_equal(fold, stats.folds(strata, groups, 5, 8))


def test_folds_balance_classes() -> None:
    labels = np.repeat(np.arange(40) % 4 == 0, 3).astype(int)
    fold = stats.folds(labels, np.repeat(np.arange(40), 3), 5, 0)
    assert [labels[fold == f].sum() for f in range(5)] == [6] * 5


@pytest.mark.parametrize(
    "labels, sizes",
    [
        ([[0] * 4, [2] * 4, [1] * 2, [0] * 7, [0]], [4, 4, 2, 7, 1]),  # scikit-learn leaves a fold empty
        ([[0], [0], [1], [1], [2], [2]], [1] * 6),  # every class has fewer samples than there are folds
    ],
)
def test_enough_groups_fill_every_fold(labels: list[list[int]], sizes: list[int]) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    for seed in range(50):
        assert set(stats.folds(np.concatenate(labels), groups, 5, seed)) == set(range(5))


@pytest.mark.parametrize("available", [1, 2, 4])
def test_too_few_groups_say_what_to_type(available: int) -> None:
    groups = np.repeat(np.arange(available), 10)
    with pytest.raises(ValueError, match=f"{available} group.* 5 folds") as caught:
        stats.folds(None, groups, 5, 0)
    advice = re.search(r"protocol\.folds=(\d+)", str(caught.value))
    assert advice or available == 1
    if advice:  # and typing it helps
        assert len(set(stats.folds(None, groups, int(advice[1]), 0))) == int(advice[1])


@pytest.mark.parametrize("count", [0, 1])
def test_less_than_two_folds_are_refused(count: int) -> None:
    """One fold would leave nothing to train on."""
    with pytest.raises(ValueError, match="fold"):
        stats.folds(None, np.arange(10), count, 0)


# --- exchange ----------------------------------------------------------------------------------------------------

COPIES = ([0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1])  # labels, sources, groups
IMAGES = ([0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 1, 1])
GROUPS = ([0, 0, 1, 1, 1, 0, 0, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 1, 2, 2, 3, 3])
STRATA = ([0] * 2 + [1] * 3 + [0] * 4 + [1] * 7, list(range(16)), [0] * 2 + [1] * 3 + [2] * 4 + [3] * 7)
FIXED = ([0] * 2 + [1] * 5, list(range(7)), [0] * 2 + [1] * 5)  # two groups of unlike size


def joined(*cases: tuple[list[int], list[int], list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cases side by side, their sources and groups renumbered."""
    labels, sources, groups = [], [], []
    for i, (y, s, g) in enumerate(cases):
        labels += y
        sources += [100 * i + x for x in s]
        groups += [100 * i + x for x in g]
    return np.array(labels), np.array(sources), np.array(groups)


@pytest.mark.parametrize(
    "case, level, arrangements",
    [
        (COPIES, "copies of an image", 2**3),
        (IMAGES, "images of a group", 2 * 2),
        (GROUPS, "whole groups", 6),
        (STRATA, "whole groups", 2 * 2),
        (FIXED, "none", 1),
    ],
)
def test_level_and_bits_of_an_exchange(case: tuple[list[int], list[int], list[int]], level: str, arrangements: int) -> None:
    out, name, bits = stats.exchange(*joined(case), 500, 0)
    assert name == level
    assert bits == pytest.approx(np.log2(arrangements), abs=1e-9)
    assert len(np.unique(out, axis=0)) == arrangements


def test_arrangements_of_a_mixed_task_are_counted_and_equally_likely() -> None:
    out, level, bits = stats.exchange(*joined(COPIES, IMAGES, GROUPS), 40_000, 1)
    assert level == "copies of an image and images of a group and whole groups"
    _, seen = np.unique(out, axis=0, return_counts=True)
    assert len(seen) == round(2**bits) == 8 * 4 * 6
    expected = 40_000 / len(seen)
    assert ((seen - expected) ** 2 / expected).sum() < 192 + 4 * np.sqrt(2 * 192)


def test_an_exchange_keeps_the_labels_of_each_unit() -> None:
    labels, sources, groups = joined(COPIES, IMAGES, GROUPS, STRATA, FIXED)
    out, *_ = stats.exchange(labels, sources, groups, 200, 0)
    inside = groups < 100
    for s in np.unique(sources[inside]):  # among the copies of one image
        assert (np.sort(out[:, sources == s], 1) == np.sort(labels[sources == s])).all()
    first = np.array([np.flatnonzero(sources == s)[0] for s in np.unique(sources)])
    for s in np.unique(sources[~inside]):  # copies of an image stay alike
        assert (np.ptp(out[:, sources == s], axis=1) == 0).all()
    for g in np.unique(groups[(groups >= 100) & (groups < 200)]):  # among the images of one group
        units = first[groups[first] == g]
        assert (np.sort(out[:, units], 1) == np.sort(labels[units])).all()
    heads = np.array([np.flatnonzero(groups == g)[0] for g in np.unique(groups[groups >= 200])])
    sizes = np.array([(groups == groups[h]).sum() for h in heads])
    for g in groups[heads]:
        assert (np.ptp(out[:, groups == g], axis=1) == 0).all()
    for low, high in pairwise((1, 2, 4, 8)):  # among whole groups of similar size
        units = heads[(sizes >= low) & (sizes < high)]
        assert (np.sort(out[:, units], 1) == np.sort(labels[units])).all()


def test_an_exchange_depends_on_the_seed_alone() -> None:
    case = joined(COPIES, IMAGES, STRATA)
    one, again, other = (stats.exchange(*case, 50, seed)[0] for seed in (3, 3, 4))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_numbers_are_exchanged_like_classes() -> None:
    labels, sources, groups = joined(COPIES, IMAGES, GROUPS)
    same = stats.exchange(labels, sources, groups, 50, 0)[0]
    assert np.array_equal(stats.exchange(labels + 0.5, sources, groups, 50, 0)[0], same + 0.5)


# --- the null ----------------------------------------------------------------------------------------------------


def p_of(statistic: float, null: np.ndarray) -> float:
    return (1 + (null >= statistic - 1e-9).sum()) / (1 + len(null))


def transform_like(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """24 images in 12 groups, each image once per class; features know image and group."""
    sources = np.repeat(np.arange(24), 3)
    groups = sources // 2
    return rng.normal(size=(24, 6))[sources] + rng.normal(size=(12, 6))[groups], np.tile(np.arange(3), 24), sources, groups


def one_label_per_group(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """30 groups of one to four; features know the group."""
    groups = np.repeat(np.arange(30), rng.integers(1, 5, 30))
    labels = (rng.permutation(30) % 2)[groups]
    return rng.normal(size=(30, 6))[groups], labels, np.arange(len(groups)), groups


def labels_within_groups(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """16 groups of five, each with its own share of a class: some are constant, most vary; features know the group."""
    groups = np.repeat(np.arange(16), 5)
    labels = (rng.random(80) < rng.beta(0.7, 0.7, 16)[groups]).astype(int)
    return rng.normal(size=(16, 6))[groups], labels, np.arange(80), groups


@pytest.mark.parametrize("draw", [transform_like, one_label_per_group, labels_within_groups])
def test_p_is_uniform_without_a_signal(draw: Callable[[np.random.Generator], tuple[np.ndarray, ...]]) -> None:
    rng, runs, small, ranks = np.random.default_rng(0), 120, 0, []
    for seed in range(runs):
        values, labels, sources, groups = draw(rng)
        values = values + rng.normal(size=values.shape)
        exchanged, *_ = stats.exchange(labels, sources, groups, 39, seed)
        statistic, null = stats.ridge_null(values, labels, exchanged, stats.folds(None, groups, 4, seed), labels.max() + 1)
        small += p_of(statistic, null) <= 0.05
        ties = (np.abs(null - statistic) <= 1e-9).sum()
        ranks.append(((null > statistic + 1e-9).sum() + rng.random() * (ties + 1)) / 40)  # uniform also with ties
    assert small <= binom.ppf(0.999, runs, 0.05)
    assert binom.ppf(0.001, runs, 0.05) <= (np.array(ranks) <= 0.05).sum() <= binom.ppf(0.999, runs, 0.05)
    assert kstest(ranks, "uniform").pvalue > 0.01


def test_a_signal_is_found_where_every_group_holds_every_class() -> None:
    rng, many, classes, width = np.random.default_rng(0), 100, 4, 64
    labels, groups = np.tile(np.arange(classes), many), np.repeat(np.arange(many), classes)
    directions = rng.normal(size=(classes, width))
    values = rng.normal(size=(many, width))[groups] + 0.35 * directions[labels] + rng.normal(size=(many * classes, width))
    fold = stats.folds(None, groups, 5, 0)
    exchanged, level, _ = stats.exchange(labels, groups, groups, 199, 0)
    assert level == "copies of an image"
    assert p_of(*stats.ridge_null(values, labels, exchanged, fold, classes)) == 1 / 200
    between = np.stack([labels.reshape(many, classes)[rng.permutation(many)].ravel() for _ in range(19)])
    assert p_of(*stats.ridge_null(values, labels, between, fold, classes)) == 1  # what exchange must not do


@pytest.mark.parametrize("classes", [2, None])
def test_a_signal_is_found_where_each_group_has_one_label(classes: int | None) -> None:
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), rng.integers(2, 6, 40))
    labels = (np.arange(40) % 2 if classes else rng.normal(size=40))[groups]
    values = rng.normal(size=(40, 16))[groups] + 0.3 * rng.normal(size=(len(groups), 16))
    values[:, 0] += 4 * labels
    exchanged, *_ = stats.exchange(labels, np.arange(len(groups)), groups, 199, 0)
    statistic, null = stats.ridge_null(values, labels, exchanged, stats.folds(None, groups, 5, 0), classes)
    assert p_of(statistic, null) == 1 / 200
    assert statistic > 0.5


def test_constant_groups_are_exchanged_beside_varying_ones() -> None:
    """54 constant and 6 varying groups: exchange within groups alone would leave nearly all labels where they are."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 5)
    labels = (np.arange(60) % 2)[groups]
    labels[:30] = np.tile([0, 1, 0, 1, 0, 1, 0, 1, 0, 1], 3)
    values = rng.normal(size=(60, 24))[groups] + rng.normal(size=(300, 24)) + 2 * labels[:, None] * (np.arange(24) < 2)
    fold = stats.folds(None, groups, 5, 0)
    exchanged, level, _ = stats.exchange(labels, np.arange(300), groups, 199, 0)
    assert level == "images of a group and whole groups"
    statistic, null = stats.ridge_null(values, labels, exchanged, fold, 2)
    exchanged[:, 30:] = labels[30:]
    _, stuck = stats.ridge_null(values, labels, exchanged, fold, 2)
    assert abs(null.mean() - 0.5) < 0.05 < stuck.mean() - 0.5
    assert p_of(statistic, null) == 1 / 200


# --- the ridge probe behind it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, None])
@pytest.mark.parametrize("width", [8, 150])
def test_ridge_agrees_with_scikit_learn(classes: int | None, width: int) -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(3, 2, (80, width)), rng.normal(3, 2, (30, width))
    labels = rng.integers(0, classes, (4, 80)) if classes else rng.normal(5, 3, (4, 80))
    penalties = [1e-2, 1.0, 10.0]
    alphas = np.array(penalties) * ((train - train.mean(0)) ** 2).sum() / 80
    for alpha, ours in zip(alphas, stats._ridge(train, test, labels, classes, penalties), strict=True):
        for y, predicted in zip(labels, ours, strict=True):
            hot = np.eye(classes)[y] if classes else y
            theirs = Ridge(alpha=alpha).fit(train, hot).predict(test)
            if classes:
                assert np.array_equal(predicted, (theirs - hot.mean(0)).argmax(1))
            else:
                np.testing.assert_allclose(predicted, theirs, atol=1e-3)


@pytest.mark.parametrize("classes", [3, None])
def test_ridge_null_is_the_best_out_of_fold_score(classes: int | None) -> None:
    """Also for exchanged labels that stand in groups of other sizes than the true ones."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), rng.integers(4, 8, 20))
    labels = (np.arange(20) % 3 if classes else rng.normal(size=20) ** 3)[groups]
    values = rng.normal(size=(len(groups), 10)) + labels[:, None]
    fold = stats.folds(None, groups, 4, 0)
    exchanged, *_ = stats.exchange(labels, np.arange(len(groups)), groups, 6, 0)
    statistic, null = stats.ridge_null(values, labels, exchanged, fold, classes)
    for y, ours in zip([labels, *exchanged], [statistic, *null], strict=True):
        theirs = []
        for penalty in np.logspace(-3, 1, 5):
            predicted = np.empty(len(y))
            for f in range(4):
                train, test = values[fold != f], values[fold == f]
                alpha = penalty * ((train - train.mean(0)) ** 2).sum() / len(train)
                hot = np.eye(classes)[y[fold != f]] if classes else y[fold != f]
                fitted = Ridge(alpha=alpha).fit(train, hot).predict(test)
                predicted[fold == f] = (fitted - hot.mean(0)).argmax(1) if classes else fitted
            theirs.append(balanced_accuracy_score(y, predicted) if classes else r2_score(y, predicted))
        assert ours == pytest.approx(max(theirs), abs=2e-3 if classes is None else 1e-9)


@pytest.mark.parametrize("shift, scale", [(0, 1e-3), (1_000, 50), (1e6, 1)])
def test_ridge_null_of_numbers_knows_no_unit(shift: float, scale: float) -> None:
    rng = np.random.default_rng(0)
    labels, groups = rng.normal(size=60), np.arange(60)
    values = rng.normal(size=(60, 5)) + labels[:, None]
    exchanged, *_ = stats.exchange(labels, groups, groups, 19, 0)
    fold = stats.folds(None, groups, 5, 0)
    one, null = stats.ridge_null(values, labels, exchanged, fold, None)
    same, again = stats.ridge_null(values, shift + scale * labels, shift + scale * exchanged, fold, None)
    assert same == pytest.approx(one, abs=1e-4)
    np.testing.assert_allclose(again, null, atol=1e-4)


# --- metrics and intervals ---------------------------------------------------------------------------------------


def test_metrics_of_sums_equal_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 3, 200), rng.integers(0, 3, 200)
    sums = stats.class_parts(labels, (labels == predicted).astype(float), 3).sum(0)
    assert stats.accuracy(sums) == pytest.approx(accuracy_score(labels, predicted))
    assert stats.balanced_accuracy(sums) == pytest.approx(balanced_accuracy_score(labels, predicted))
    truth = rng.normal(40, 10, 200)
    guess = truth + rng.normal(0, 5, 200)
    sums = stats.number_parts(truth, guess).sum(0)
    assert stats.r2(sums) == pytest.approx(r2_score(truth, guess))
    assert stats.mean_absolute_error(sums) == pytest.approx(mean_absolute_error(truth, guess))


@pytest.mark.parametrize("hits, n, low, high", [(3, 15, 7.05, 45.19), (929, 1429, 62.50, 67.44), (44, 176, 19.2, 31.9)])
def test_wilson(hits: int, n: int, low: float, high: float) -> None:
    digits = 2 if n != 176 else 1
    assert [round(100 * v, digits) for v in stats.wilson(hits, n)] == [low, high]


def answers(rng: np.random.Generator, count: int, balanced: bool) -> tuple[np.ndarray, np.ndarray]:
    """Right and wrong answers in groups of one to eight: the share of right ones differs by group, .7 in the mean."""
    groups = np.repeat(np.arange(count), rng.integers(1, 9, count))
    right = (rng.random(len(groups)) < rng.beta(2.8, 1.2, count)[groups]).astype(float)
    return stats.class_parts(groups % 2 if balanced else 0 * groups, right, 2 if balanced else 1), groups


def coverage(count: int, runs: int, balanced: bool) -> float:
    rng, covered = np.random.default_rng(count), 0
    metric = stats.balanced_accuracy if balanced else stats.accuracy
    for seed in range(runs):
        found = stats.cluster_interval(*answers(rng, count, balanced), metric, seed)
        covered += found.low <= 0.7 <= found.high
    return covered / runs


@pytest.mark.parametrize("count, runs", [(12, 300), (60, 150)])
def test_intervals_cover(count: int, runs: int) -> None:
    assert 0.91 <= coverage(count, runs, balanced=False) <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("count", [12, 25, 60])
def test_95_percent_intervals_cover_95_percent(count: int, balanced: bool) -> None:
    """The estimand: the expected share of right answers of fixed predictions, over groups."""
    assert 0.93 <= coverage(count, 2_000, balanced) <= (0.97 if count >= 60 else 0.98)


def test_few_groups_widen_an_interval() -> None:
    """The same groups 25 times over: the interval shrinks by more than the root of 25, as Student's quantile does."""
    hits = np.array([0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4])
    right = (np.arange(4) < hits[:, None]).astype(float).ravel()
    few, many = (
        stats.cluster_interval(
            stats.class_parts(np.zeros(48 * k, int), np.tile(right, k), 1), np.repeat(np.arange(12 * k), 4), stats.accuracy
        )
        for k in (1, 25)
    )
    assert 1.06 < (few.high - few.low) / (many.high - many.low) / 5 < 1.25


def test_interval_of_independent_samples_is_wilsons() -> None:
    for hits, n in ((929, 1429), (116, 178)):
        right = (np.arange(n) < hits).astype(float)
        found = stats.cluster_interval(stats.class_parts(np.zeros(n, int), right, 1), np.arange(n), stats.accuracy)
        assert (found.low, found.high) == pytest.approx(stats.wilson(hits, n), abs=0.01)
        assert (found.n, found.groups, found.method) == (n, n, "cluster bootstrap")


def test_interval_counts_groups_not_samples() -> None:
    rng = np.random.default_rng(0)
    right = (rng.random(40) < 0.7).astype(float)
    alone, fivefold = (
        stats.cluster_interval(
            stats.class_parts(np.zeros(40 * k, int), right.repeat(k), 1), np.arange(40).repeat(k), stats.accuracy
        )
        for k in (1, 5)
    )
    assert (alone.low, alone.high) == pytest.approx((fivefold.low, fivefold.high))
    assert (fivefold.n, fivefold.groups) == (200, 40)


def test_interval_does_not_depend_on_sample_order() -> None:
    rng = np.random.default_rng(0)
    parts, groups = answers(rng, 30, balanced=True)
    order = rng.permutation(len(groups))
    one = stats.cluster_interval(parts, groups, stats.balanced_accuracy)
    other = stats.cluster_interval(parts[order], groups[order], stats.balanced_accuracy)
    assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high), abs=1e-12)


@pytest.mark.parametrize("metric", [stats.accuracy, stats.balanced_accuracy])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_all_or_none_still_has_an_interval(metric: stats.Metric, share: float) -> None:
    labels, groups = np.arange(60) % 3, np.arange(60) // 3
    found = stats.cluster_interval(stats.class_parts(labels, np.full(60, share), 3), groups, metric)
    assert found.method == "Wilson over groups"
    assert (found.low, found.high) == pytest.approx(stats.wilson(20 * share, 20))


def test_a_90_percent_interval_lies_within_the_95_percent_one() -> None:
    parts, groups = answers(np.random.default_rng(0), 25, balanced=True)
    wide, narrow = (stats.cluster_interval(parts, groups, stats.balanced_accuracy, level=v) for v in (0.95, 0.9))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_difference_of_a_run_with_itself_is_zero() -> None:
    parts, groups = answers(np.random.default_rng(0), 25, balanced=True)
    found = stats.paired_difference(parts, parts, groups, stats.balanced_accuracy)
    assert (found.value, found.low, found.high) == (0, 0, 0)


@pytest.mark.parametrize("metric", [stats.accuracy, stats.balanced_accuracy])
def test_difference_changes_its_sign_when_swapped(metric: stats.Metric) -> None:
    rng = np.random.default_rng(0)
    labels, groups = np.arange(120) % 2, np.arange(120) // 4
    one, other = (stats.class_parts(labels, (rng.random(120) < share).astype(float), 2) for share in (0.85, 0.6))
    ahead, behind = (stats.paired_difference(*pair, groups, metric) for pair in ((one, other), (other, one)))
    assert ahead.low > 0 > behind.high
    assert (ahead.value, ahead.low, ahead.high) == pytest.approx((-behind.value, -behind.high, -behind.low))


def test_difference_of_paired_runs_is_tighter_than_their_intervals() -> None:
    rng = np.random.default_rng(0)
    groups = np.arange(200) // 5
    truth = rng.normal(size=40)[groups]
    one, other = (stats.number_parts(truth, truth + rng.normal(0, s, 40)[groups]) for s in (0.5, 0.5))
    other[:, :2] = one[:, :2] * 1.05
    paired = stats.paired_difference(one, other, groups, stats.r2)
    alone = stats.cluster_interval(one, groups, stats.r2)
    assert paired.low > 0 and paired.high - paired.low < (alone.high - alone.low) / 4
