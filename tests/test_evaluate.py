"""A result stands beside its floors and its null, and the best of many cells is not taken for granted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, mean_absolute_error, r2_score
from test_nested import PROTOCOL, RIDGE, planted, task_of
from threadpoolctl import threadpool_limits

from probing import stats
from probing.evaluate import MAJORITY, PLANTED, SHUFFLED, evaluate, evaluations, plant
from probing.jobs.configure import protocol_of
from probing.nested import Probe
from probing.types import ENCODER, PIXELS, TWIN, ProbeResult, Task

CONF = Path(__file__).parents[1] / "conf"
FAST = replace(PROTOCOL, folds=3)
CELL = ("last", "mean")
Cells = Mapping[tuple[str, str], Mapping[str, np.ndarray]]


class Means(ClassifierMixin, BaseEstimator):
    """The nearest class mean, through a softmax: the fastest probe there is."""

    def __init__(self, sharpness: float = 1.0) -> None:
        self.sharpness = sharpness

    def fit(self, values: np.ndarray, labels: np.ndarray) -> Means:
        self.classes_ = np.unique(labels)
        self.means_ = np.stack([values[labels == k].mean(0) for k in self.classes_])
        return self

    def predict_proba(self, values: np.ndarray) -> np.ndarray:
        return softmax(-self.sharpness * ((values[:, None] - self.means_) ** 2).sum(2), 1)


NEAREST = Probe(Means(), {"sharpness": [0.1, 0.5]}, "none")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def run(task: Task, cells: Cells, probe: Probe = NEAREST, **changes: Any) -> list[ProbeResult]:
    return evaluate(task, cells, probe, replace(FAST, **changes))


def alone(task: Task, values: np.ndarray, probe: Probe = NEAREST, **changes: Any) -> ProbeResult:
    (found,) = run(task, {CELL: {ENCODER: values}}, probe, **changes)
    return found


def balanced(found: ProbeResult, row: str = ENCODER) -> float:
    return found.estimates[row]["balanced accuracy"].value


def noise(seed: int, task: Task, width: int = 6) -> np.ndarray:
    return np.random.default_rng([seed, 1]).normal(size=(len(task.samples), width)).astype(np.float32)


# --- rows --------------------------------------------------------------------------------------------------------


def test_a_signal_stands_beside_its_floors() -> None:
    values, task = planted(many=40, size=5.0)
    rows = {ENCODER: values, TWIN: noise(0, task), PIXELS: noise(1, task)}
    (found,) = run(task, {CELL: rows}, permutations=199)
    assert set(found.estimates) == {ENCODER, TWIN, PIXELS, SHUFFLED, PLANTED, MAJORITY}
    assert all(set(row) == {"balanced accuracy", "accuracy"} for row in found.estimates.values())
    assert balanced(found) > 0.85 and balanced(found, PLANTED) > 0.85
    for row in (TWIN, PIXELS, SHUFFLED):
        assert abs(balanced(found, row) - 0.5) < 0.15
    assert (found.finding, found.tags, found.p) == ("decodable", (), 1 / 200)
    assert (found.tap, found.readout) == CELL
    assert balanced(found) == pytest.approx(balanced_accuracy_score(task.labels, found.score[0].argmax(1)))
    main = found.estimates[ENCODER]["balanced accuracy"]
    assert (main.n, main.groups) == (120, 40)


def test_noise_is_not_called_decodable_and_its_planted_signal_is_found() -> None:
    values, task = planted(many=100, per=6, size=0.0)
    found = alone(task, values)
    assert found.finding == "not decodable"
    assert balanced(found, PLANTED) > 0.8 and found.p > 0.05


def test_each_row_is_judged_by_the_labels_it_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every label turned round: features that know the labels know the turned ones as well."""
    values, task = planted(size=6.0)
    turned = np.tile(1 - task.labels, (FAST.permutations + 2, 1))
    monkeypatch.setattr(stats, "exchange", lambda *_: (turned, "a test", 60.0))
    found = alone(task, values)
    assert min(balanced(found, row) for row in (ENCODER, SHUFFLED, PLANTED)) > 0.9


def test_rows_average_over_repeats() -> None:
    values, task = planted(size=1.0)
    found = alone(task, values, repeats=3)
    each = [balanced_accuracy_score(task.labels, s.argmax(1)) for s in found.score]
    assert len(set(each)) > 1 and balanced(found) == pytest.approx(np.mean(each))


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2), (0.4, 0.3, 0.3)])
def test_majority_is_chance_in_balanced_accuracy(shares: tuple[float, ...], seed: int) -> None:
    """Groups of unlike sizes: the majority of a training part may be the minority of its test part."""
    groups = np.repeat(np.arange(20), np.random.default_rng(seed).integers(1, 12, 20))
    labels = np.repeat(np.arange(len(shares)), np.round(np.array(shares) * 20).astype(int))[groups]
    task = task_of(labels, groups)
    found = alone(task, noise(0, task), NEAREST, permutations=0)
    assert balanced(found, MAJORITY) == pytest.approx(1 / len(shares), abs=1e-9)
    most = np.bincount(labels).max() / len(labels)
    assert found.estimates[MAJORITY]["accuracy"].value == pytest.approx(most)


def test_what_pixels_or_random_weights_do_as_well_is_tagged() -> None:
    values, task = planted(many=40, size=5.0)
    (found,) = run(task, {CELL: {ENCODER: values, TWIN: values, PIXELS: noise(0, task)}})
    assert (found.finding, found.tags) == ("decodable", ("not learned",))
    (found,) = run(task, {CELL: {ENCODER: values, TWIN: noise(0, task), PIXELS: values}})
    assert (found.finding, found.tags) == ("decodable", ("easy from pixels",))
    assert f"reach {balanced(found, PIXELS):.2f}" in found.sentence


def test_a_floor_that_is_clearly_behind_is_no_tag() -> None:
    """Pixels above chance, the encoder above the pixels: paired over groups."""
    values, task = planted(many=60, per=4, size=6.0)
    weaker = planted(seed=9, many=60, per=4, size=2.5)[0]
    (found,) = run(task, {CELL: {ENCODER: values, PIXELS: weaker}})
    assert found.estimates[PIXELS]["balanced accuracy"].low > 0.5
    assert (found.finding, found.tags) == ("decodable", ())


def test_fits_that_did_not_converge_are_a_note() -> None:
    values, task = planted()
    hasty = Probe(LogisticRegression(max_iter=1), {"C": [1.0]}, "global")
    assert "9 of 9 fits did not converge" in alone(task, values, hasty).notes


# --- numbers -----------------------------------------------------------------------------------------------------


def number_task(seed: int, many: int, per: int, signal: float) -> tuple[np.ndarray, Task]:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(many), per)
    values, labels = rng.normal(size=(many * per, 6)), rng.normal(40, 10, many * per)
    values[:, 0] += signal * (labels - 40) / 10
    return values.astype(np.float32), task_of(labels, groups)


def test_a_number_is_found() -> None:
    values, task = number_task(0, 30, 4, signal=3.0)
    found = alone(task, values, RIDGE)
    rows = found.estimates[ENCODER]
    assert rows["R2"].value == pytest.approx(r2_score(task.labels, found.score[0, :, 0])) and rows["R2"].value > 0.8
    assert rows["mean absolute error"].value == pytest.approx(mean_absolute_error(task.labels, found.score[0, :, 0]))
    assert found.finding == "decodable" and "against chance 0.00" in found.sentence
    assert found.estimates[PLANTED]["R2"].low > 0.5
    for row in (SHUFFLED, MAJORITY):
        assert abs(found.estimates[row]["R2"].value) < 0.15


def test_a_number_that_is_not_there_is_not_decodable() -> None:
    values, task = number_task(1, 60, 4, signal=0.0)
    found = alone(task, values, RIDGE)
    main = found.estimates[ENCODER]["R2"]
    assert abs(main.value) < 0.1 and found.finding == "not decodable", found.sentence
    assert found.estimates[PLANTED]["R2"].low > 0


# --- the null ----------------------------------------------------------------------------------------------------


def test_p_counts_exchanged_labels_that_do_as_well() -> None:
    values, task = planted(size=0.5)
    found = alone(task, values, permutations=59)
    fold = stats.folds(None, task.groups, 3, 0)
    observed, _ = stats.ridge_null(values, task.labels, task.labels[None], fold, 2)
    assert len(found.null) == 59
    assert found.p == (1 + (found.null >= observed - 1e-9).sum()) / 60
    assert found.notes == ("labels exchanged among images of a group",)


def test_the_null_depends_on_data_and_labels_alone() -> None:
    values, task = planted(size=1.0)
    cells = {CELL: {ENCODER: values}, ("last", "cls"): {ENCODER: values.copy()}}
    one, other, _ = run(task, cells)
    again = alone(task, values, replace(NEAREST, grid={}), repeats=2, delta=0.2)
    assert np.array_equal(one.null, other.null) and np.array_equal(one.null, again.null)
    relabelled = replace(task, samples=tuple(replace(s, label="b" if s.label == "a" else "a") for s in task.samples))
    assert not np.array_equal(alone(relabelled, values).null, one.null)


def test_the_nested_null_repeats_the_whole_search() -> None:
    values, task = planted(size=6.0)
    single = replace(NEAREST, grid={"sharpness": [0.5]})
    found = alone(task, values, single, null="nested", permutations=19)
    assert found.p == 1 / 20 and len(found.null) == 19
    assert abs(found.null.mean() - 0.5) < 0.06
    values, task = planted(size=0.0)
    found = alone(task, values, single, null="nested", permutations=19)
    assert found.p > 1 / 20
    assert found.p == (1 + (found.null >= balanced(found) - 1e-9).sum()) / 20


@pytest.mark.parametrize("many", [4, 6])
def test_too_few_arrangements_are_not_testable(many: int) -> None:
    """2 + 2 groups can be labelled in 6 ways, 3 + 3 in 20, but swapping the two names leaves the statistic as it is:
    p can not get below .33 and .10, however clear the signal."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(many), 10)
    task = task_of(groups % 2, groups)
    values = (rng.normal(size=(10 * many, 4)) + 20 * task.labels[:, None]).astype(np.float32)
    found = alone(task, values, folds=2)
    assert found.p is None and len(found.null) == 0
    assert found.finding == "undetermined" and found.reason.startswith("not testable")


def test_many_classes_in_small_groups_are_testable() -> None:
    """Pairs of images whose two labels change places: 2^12 ways, of which 2^3 rename the classes a pair is made of."""
    groups = np.repeat(np.arange(12), 2)
    task = task_of((2 * groups + np.arange(24) % 2) % 6, groups)
    values = (noise(0, task) + 20 * np.eye(6)[task.labels]).astype(np.float32)
    found = alone(task, values)
    assert found.p is not None and found.p <= 0.05, found.reason


def test_too_few_permutations_are_not_testable() -> None:
    values, task = planted(size=6.0)
    found = alone(task, values, permutations=18)
    assert found.p is None and found.finding == "undetermined"


# --- several cells -----------------------------------------------------------------------------------------------


def test_each_cell_has_a_result_and_one_is_chosen_inside() -> None:
    good, task = planted(many=20, per=6, size=5.0)
    cells = {("1", "mean"): noise(0, task), ("2", "mean"): good, ("3", "mean"): noise(1, task)}
    found = run(task, {c: {ENCODER: v} for c, v in cells.items()}, repeats=2)
    assert [(r.tap, r.readout) for r in found] == [*cells, ("chosen inside", "")]
    chosen, best = found[-1], found[1]
    assert set(chosen.chosen) == {"2 mean"}
    assert np.array_equal(chosen.score, best.score) and balanced(chosen) == balanced(best)
    assert chosen.p is None and chosen.finding == "" and "chosen in the inner folds" in chosen.sentence
    assert all(np.array_equal(r.fold, best.fold) for r in found)
    assert [r.finding for r in found].count("decodable") == 1


def best_of_noise(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """24 cells of noise: the highest score of a cell, and the score chosen inside."""
    highest, chosen = [], []
    for seed in seeds:
        _, task = planted(many=15, per=8)
        cells = {(f"{i:02}", "mean"): {ENCODER: noise(100 * seed + i, task, 4)} for i in range(24)}
        *each, inside = run(task, cells, replace(NEAREST, grid={}), permutations=0)
        highest.append(max(map(balanced, each)))
        chosen.append(balanced(inside))
    return np.array(highest), np.array(chosen)


def test_choosing_among_24_cells_of_noise_gains_nothing() -> None:
    highest, chosen = best_of_noise(range(1))
    assert highest.mean() > 0.57 and abs(chosen.mean() - 0.5) < 0.08


@pytest.mark.slow
def test_choosing_among_24_cells_of_noise_gains_nothing_on_average() -> None:
    highest, chosen = best_of_noise(range(8))
    assert highest.min() > 0.55 and highest.mean() > 0.58
    assert abs(chosen.mean() - 0.5) < 0.05


@pytest.mark.parametrize("floors", ["in all cells", "not in the first", "not in the second", "in none"])
def test_evaluations_is_the_number_of_ticks(floors: str) -> None:
    values, task = planted(many=10)
    own = {ENCODER: values}
    cells = {(str(i), "mean"): own | {TWIN: values, PIXELS: values} for i in range(3)}
    if floors == "in none":
        cells = dict.fromkeys(cells, own)
    if floors.startswith("not"):
        cells["0" if "first" in floors else "1", "mean"] = own
    ticks: list[int] = []
    protocol = replace(FAST, folds=2, repeats=2)
    evaluate(task, cells, replace(NEAREST, grid={}), protocol, lambda: ticks.append(1))
    assert len(ticks) == evaluations(cells, protocol)


# --- awkward tasks -----------------------------------------------------------------------------------------------


def test_a_class_in_one_group_only_is_refused_by_name() -> None:
    groups = np.repeat(np.arange(12), 3)
    labels = (groups % 2) + 2 * (groups == 5) - (groups == 5)
    task = task_of(labels, groups)
    with pytest.raises(ValueError, match=r"class 'c' \(3 samples\) lies in one group"):
        alone(task, noise(0, task))


def test_a_class_in_two_groups_is_probed() -> None:
    groups = np.repeat(np.arange(20), 4)
    task = task_of((groups < 2).astype(int), groups)
    values = noise(0, task) + 6 * task.labels[:, None]
    logistic = Probe(LogisticRegression(class_weight="balanced"), {"C": [0.01, 1.0]}, "global")
    found = alone(task, values.astype(np.float32), logistic)
    assert np.isfinite(found.score).all() and balanced(found) > 0.6


def test_fewer_groups_than_folds_are_refused_with_both_numbers() -> None:
    values, task = planted(many=4)
    with pytest.raises(ValueError, match=r"4 groups .* 5 folds\. Type protocol\.folds=4"):
        alone(task, values, folds=5)
    assert alone(task, values, folds=4).score.shape == (1, 12, 2)


def test_limit_shrinks_folds_and_leaves_it_undetermined() -> None:
    values, task = planted(many=4, per=10, size=8.0)
    settings = OmegaConf.load(CONF / "protocol" / "quick.yaml")
    protocol = protocol_of(OmegaConf.create({"protocol": settings, "limit": 4, "seed": 0}), task)
    assert (protocol.folds, protocol.limited) == (4, True)
    (found,) = evaluate(task, {CELL: {ENCODER: values}}, NEAREST, protocol)
    assert found.finding == "undetermined" and "limit" in found.reason
    assert "undetermined" in found.sentence and "limit" in found.sentence


def test_limit_that_leaves_a_class_in_one_group_is_undetermined_and_no_error() -> None:
    values, task = planted(many=8, per=4)
    apart = replace(task, samples=tuple(replace(s, label="a" if s.group == task.samples[0].group else "b") for s in task.samples))
    apart = replace(apart, classes=("a", "b"))
    cfg = OmegaConf.create({"protocol": OmegaConf.load(CONF / "protocol" / "quick.yaml"), "limit": None, "seed": 0})
    with pytest.raises(ValueError, match="in one group alone"):
        evaluate(apart, {CELL: {ENCODER: values}}, NEAREST, protocol_of(cfg, apart))
    cfg.limit = 8
    (found,) = evaluate(apart, {CELL: {ENCODER: values}}, NEAREST, protocol_of(cfg, apart))
    assert found.finding == "undetermined" and "larger limit" in found.reason


@pytest.mark.parametrize("name, repeats, permutations, null", [("quick", 1, 1000, "ridge"), ("full", 10, 200, "nested")])
def test_packaged_protocols(name: str, repeats: int, permutations: int, null: str) -> None:
    _, task = planted()
    cfg = OmegaConf.create({"protocol": OmegaConf.load(CONF / "protocol" / f"{name}.yaml"), "limit": None, "seed": 3})
    found = protocol_of(cfg, task)
    assert (found.folds, found.inner, found.repeats, found.permutations, found.null) == (5, 4, repeats, permutations, null)
    assert (found.delta, found.seed, found.limited) == (0.1, 3, False)


@pytest.mark.parametrize("kind", ["classes", "number"])
def test_a_planted_signal_keeps_its_size_in_any_unit(kind: str) -> None:
    values, task = planted() if kind == "classes" else number_task(0, 30, 3, 0.0)
    before = values.copy()
    one = plant(values, task.labels, task, 7)
    assert np.array_equal(values, before) and one.dtype == np.float32
    np.testing.assert_allclose(plant(1000 * values, task.labels, task, 7), 1000 * one, rtol=1e-3, atol=0.1)
    assert np.array_equal(one, plant(values, task.labels, task, 7))
