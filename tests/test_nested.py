"""The nested search finds a signal, finds no leak, and depends on nothing that should not matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.naive_bayes import GaussianNB
from threadpoolctl import threadpool_limits

from probing import nested as module
from probing import stats
from probing.jobs.configure import probe_of
from probing.nested import Nested, Probe, Protocol, nested
from probing.types import Sample, Task, View

CONF = Path(__file__).parents[1] / "conf"
PROTOCOL = Protocol(
    "test", number=1, folds=5, inner=2, repeats=1, permutations=99, null="ridge", delta=0.1, seed=0, limited=False
)
LOGISTIC = Probe(LogisticRegression(max_iter=1000, warm_start=True, class_weight="balanced"), {"C": [1e-3, 1.0]}, "global")
RIDGE = Probe(Ridge(), {"alpha": [1, 100, 1e4]}, "global")
VIEW = View(Path("none.png"), "none.png")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def task_of(
    labels: Sequence[Any] | np.ndarray,
    groups: Sequence[int] | np.ndarray,
    sources: Sequence[int] | np.ndarray | None = None,
    names: Sequence[str] | None = None,
) -> Task:
    """A task without pictures. Whole labels are classes a, b, c ...; others are numbers."""
    labels, many = np.asarray(labels), range(len(labels))
    number = labels.dtype.kind == "f"
    samples = tuple(
        Sample(
            names[i] if names else f"{i:05}",
            (VIEW,),
            f"g{groups[i]:04}",
            f"s{(sources[i] if sources is not None else i):05}",
            float(labels[i]) if number else "abcdefgh"[labels[i]],
        )
        for i in many
    )
    return Task("test", "number" if number else "classes", () if number else tuple("abcdefgh"[: labels.max() + 1]), samples)


def run(values: np.ndarray, task: Task, probe: Probe = LOGISTIC, **changes: Any) -> Nested:
    return nested(values, task.labels, task, probe, replace(PROTOCOL, **changes))


def right(found: Nested, task: Task) -> float:
    return float((found.score.argmax(2) == task.labels).mean())


def planted(seed: int = 0, many: int = 30, per: int = 3, width: int = 12, size: float = 2.0) -> tuple[np.ndarray, Task]:
    """Samples of two classes in groups that hold both; the first feature knows the class."""
    rng = np.random.default_rng(seed)
    groups, labels = np.repeat(np.arange(many), per), np.arange(many * per) % 2
    values = rng.normal(size=(many, width))[groups] + rng.normal(size=(len(groups), width))
    values[:, 0] += size * labels
    return values.astype(np.float32), task_of(labels, groups)


def packaged(name: str, task: Task) -> Probe:
    return probe_of(OmegaConf.create({"probe": OmegaConf.load(CONF / "probe" / f"{name}.yaml"), "allow": []}), task)


# --- no leak -----------------------------------------------------------------------------------------------------


def test_near_copies_do_not_leak() -> None:
    """60 groups of 5 near copies, labels of groups that features know nothing of: methods.md (c) 10."""
    scores = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        groups, labels = np.repeat(np.arange(60), 5), rng.permutation(60) % 2
        values = (rng.normal(size=(60, 768))[groups] + 0.1 * rng.normal(size=(300, 768))).astype(np.float32)
        task = task_of(labels[groups], groups)
        scores.append(right(run(values, task), task))
    assert abs(np.mean(scores) - 0.45) < 0.1
    leak = cross_val_predict(LogisticRegression(C=0.01), values, task.labels, cv=KFold(5, shuffle=True, random_state=0))
    assert (leak == task.labels).mean() >= 0.99


class Spy(ClassifierMixin, BaseEstimator):
    """Remembers which groups (the first feature) it was fitted on and asked about, over all its clones."""

    seen: list[tuple[set[int], set[int]]] = []  # noqa: RUF012

    def __init__(self, setting: int = 0) -> None:
        self.setting = setting

    def fit(self, values: np.ndarray, labels: np.ndarray) -> Spy:
        self.known_, self.classes_ = {int(v) for v in values[:, 0]}, np.unique(labels)
        return self

    def predict_proba(self, values: np.ndarray) -> np.ndarray:
        Spy.seen.append((self.known_, {int(v) for v in values[:, 0]}))
        return np.full((len(values), len(self.classes_)), 1 / len(self.classes_))


def test_no_estimator_ever_sees_a_group_that_it_is_asked_about() -> None:
    values, task = planted()
    values[:, 0] = task.groups
    Spy.seen.clear()
    found = run(values, task, Probe(Spy(), {"setting": [0, 1]}, "none"), repeats=2)
    assert len(Spy.seen) == found.fits == 2 * 5 * (2 * 2 + 1)
    assert all(fitted and asked and not fitted & asked for fitted, asked in Spy.seen)


@pytest.mark.parametrize("group", ["", "  "])
def test_a_sample_without_a_group_is_refused(group: str) -> None:
    with pytest.raises(ValueError, match=r"7.*no group.*images\.group=file"):
        Sample("7", (VIEW,), group, "7", "a")


def test_choices_and_predictions_never_see_the_labels_of_their_fold() -> None:
    rng = np.random.default_rng(0)
    values, groups = rng.normal(size=(90, 6)), np.repeat(np.arange(30), 3)
    labels = values[:, 0] + rng.normal(size=90)
    task = task_of(labels, groups)
    before = run(values, task, RIDGE)
    for f in range(2):
        inside = before.fold[0] == f
        after = nested(values, np.where(inside, 1e3 * labels[::-1], labels), task, RIDGE, PROTOCOL)
        assert np.array_equal(after.fold, before.fold)
        assert np.array_equal(after.score[0, inside], before.score[0, inside])
        assert (after.chosen[f], after.inner[0, f]) == (before.chosen[f], before.inner[0, f])
        assert not np.array_equal(after.score[0, ~inside], before.score[0, ~inside])


def test_class_choices_and_predictions_never_see_the_labels_of_their_fold() -> None:
    values, task = planted(size=1.0)
    test, settings = task.groups < 6, module._settings(LOGISTIC)
    one, other = (
        module._outer(values, labels, task.groups, 2, test, LOGISTIC, settings, PROTOCOL)
        for labels in (task.labels, np.where(test, 1 - task.labels, task.labels))
    )
    assert np.array_equal(one[0], other[0]) and one[1:] == other[1:]


@pytest.mark.parametrize("scaling", ["none", "global", "feature"])
def test_scaling_never_sees_the_samples_of_its_fold(scaling: str) -> None:
    values, task = planted()
    probe = replace(LOGISTIC, scaling=scaling)
    before = run(values, task, probe)
    moved = values.copy()
    moved[task.groups == 0] *= 1e3
    after = run(moved, task, probe)
    fold = before.fold[0]
    same = (fold == fold[task.groups == 0][0]) & (task.groups != 0)
    assert np.array_equal(after.score[0, same], before.score[0, same])


# --- controls ----------------------------------------------------------------------------------------------------


def test_a_planted_direction_is_found_and_noise_is_not() -> None:
    values, task = planted(size=6.0)
    assert right(run(values, task), task) > 0.9
    noise = [planted(seed, many=60, per=4, size=0.0) for seed in range(3)]
    assert abs(np.mean([right(run(v, t), t) for v, t in noise]) - 0.5) < 0.06


def test_every_sample_is_predicted_once_per_repeat_and_folds_are_pure() -> None:
    values, task = planted()
    found = run(values, task, repeats=3)
    assert found.score.shape == (3, 90, 2) and found.fold.shape == (3, 90) and found.inner.shape == (3, 5)
    assert np.isfinite(found.score).all() and np.isfinite(found.inner).all()
    np.testing.assert_allclose(found.score.sum(2), 1, atol=1e-5)
    assert all(len(np.unique(fold[task.groups == g])) == 1 for fold in found.fold for g in np.unique(task.groups))
    assert not np.array_equal(found.fold[0], found.fold[1])
    assert len(found.chosen) == 15


def test_ticks_once_per_outer_fold() -> None:
    values, task = planted()
    ticks: list[int] = []
    nested(values, task.labels, task, LOGISTIC, replace(PROTOCOL, repeats=2), lambda: ticks.append(1))
    assert len(ticks) == 10


@pytest.mark.parametrize("name", ["linear", "knn"])
def test_packaged_probes_find_classes_and_numbers(name: str) -> None:
    values, task = planted(size=5.0)
    assert right(run(values, task, packaged(name, task)), task) > 0.85
    rng = np.random.default_rng(0)
    values[:, 0] = 3 * rng.normal(size=90)
    numbers = task_of(values[:, 0].astype(float), task.groups)
    found = run(values, numbers, packaged(name, numbers))
    assert found.score.shape == (1, 90, 1)
    assert r2_score(numbers.labels, found.score[0, :, 0]) > 0.4


def test_packaged_neighbours_work_with_few_samples() -> None:
    """The grid goes to 20 neighbours; an inner training part of 24 samples has 14."""
    values, task = planted(many=12, per=2, size=5.0)
    found = run(values, task, packaged("knn", task))
    assert np.isfinite(found.score).all() and right(found, task) > 0.7


# --- what must not matter ----------------------------------------------------------------------------------------


def test_order_and_repeats_of_samples_change_nothing() -> None:
    values, task = planted(size=1.0)
    rows = {s.id: v for s, v in zip(task.samples, values, strict=True)}
    before = run(values, task)
    order = np.random.default_rng(0).permutation(90)
    shuffled = replace(task, samples=tuple(task.samples[i] for i in (*order, *order[:20])))
    after = run(np.stack([rows[s.id] for s in shuffled.samples]), shuffled)
    assert np.array_equal(after.score, before.score) and np.array_equal(after.fold, before.fold)


def test_names_of_samples_change_nothing() -> None:
    """Other names put the samples in another order inside."""
    values, task = planted(size=1.0)
    before, order = run(values, task), np.random.default_rng(0).permutation(90)
    names = [f"{i:05}" for i in np.argsort(order)]
    renamed = task_of(task.labels, task.groups, names=names)
    assert np.array_equal(renamed.labels, task.labels[order])
    after = run(values[order], renamed)
    assert np.array_equal(after.fold, before.fold[:, order])
    np.testing.assert_allclose(
        after.score, before.score[:, order], atol=1e-3
    )  # the solver stops within its tolerance, and another order stops elsewhere


@pytest.mark.parametrize("change", ["columns", "scale", "shift"])
def test_column_order_and_a_common_scale_change_nothing(change: str) -> None:
    values, task = planted(size=1.0)
    columns = np.random.default_rng(0).permutation(12)
    other = {"columns": values[:, columns], "scale": values * np.float32(1000), "shift": values + np.float32(4)}[change]
    before, after = run(values, task), run(other, task)
    np.testing.assert_allclose(after.score, before.score, atol=1e-5)
    assert after.chosen == before.chosen


def test_values_are_left_alone_and_processes_change_no_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values, task = planted(size=1.0)
    before = values.copy()
    alone = run(values, task)
    assert np.array_equal(values, before)
    np.save(tmp_path / "values.npy", values)
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    together = run(np.load(tmp_path / "values.npy", mmap_mode="r"), task)
    assert np.array_equal(together.score, alone.score) and np.array_equal(together.inner, alone.inner)
    assert (together.chosen, together.unconverged, together.fits) == (alone.chosen, alone.unconverged, alone.fits)


def test_read_only_values_are_enough(tmp_path: Path) -> None:
    values, task = planted()
    np.save(tmp_path / "values.npy", values)
    probe = replace(LOGISTIC, scaling="none")
    found = run(np.load(tmp_path / "values.npy", mmap_mode="r"), task, probe)
    assert np.array_equal(found.score, run(values, task, probe).score)


# --- scaling -----------------------------------------------------------------------------------------------------


def test_what_scaling_does() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(5, [1, 10, 100], (50, 3)), rng.normal(5, [1, 10, 100], (20, 3))
    assert all(a is b for a, b in zip(module._scale(train, test, "none"), (train, test), strict=True))
    one, other = module._scale(train, test, "global")
    np.testing.assert_allclose(one.mean(0), 0, atol=1e-12)
    assert (one**2).mean() == pytest.approx(1)
    np.testing.assert_allclose(other, (test - train.mean(0)) * (one.std() / (train - train.mean(0)).std()))
    one, other = module._scale(train, test, "feature")
    np.testing.assert_allclose([one.mean(0), one.std(0)], [[0] * 3, [1] * 3], atol=1e-12)
    np.testing.assert_allclose(other, (test - train.mean(0)) / train.std(0))
    flat = np.ones((50, 1))
    assert not module._scale(flat, flat, "feature")[0].any()


def test_a_rarely_varying_feature_is_safe_under_global_scaling_only() -> None:
    """It hardly moves in training; another cohort shifts it."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 3)
    values = rng.normal(size=(90, 5))
    labels = values[:, 0] + 0.3 * rng.normal(size=90)
    values[:, 4] = 1e-4 * rng.normal(size=90) + (groups == 0)
    task = task_of(labels, groups)
    shifted = task.groups == 0
    wrong = {}
    for scaling in ("global", "feature"):
        found = run(values, task, Probe(Ridge(), {"alpha": [1.0]}, scaling))
        wrong[scaling] = np.abs(found.score[0, :, 0] - labels)[shifted].max()
    assert wrong["global"] < 2 and wrong["feature"] > 20


# --- awkward tasks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_an_inner_fold_may_lack_a_class(classes: int) -> None:
    """The last class lies in two groups: one outer fold holds one of them, and an inner fold the other."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 4)
    labels = (np.arange(20) % (classes - 1))[groups]
    labels[groups < 2] = classes - 1
    values = rng.normal(size=(80, 8)) + 2 * np.eye(8)[labels]
    task = task_of(labels, groups)
    found = run(values, task)
    assert found.score.shape == (1, 80, classes)
    assert np.isfinite(found.score).all() and np.isfinite(found.inner).all()
    np.testing.assert_allclose(found.score.sum(2), 1, atol=1e-5)


def test_a_class_that_training_lacked_has_probability_0_in_its_own_column() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([1, 2], 20)
    values = rng.normal(size=(40, 4)) + 6 * np.eye(4)[labels]
    (predicted,), _ = module._fit(values, labels, values, [{"C": 1.0}], 3, LOGISTIC)
    assert not predicted[:, 0].any() and np.array_equal(predicted.argmax(1), labels)


def test_inner_scores_count_a_class_that_training_lacked() -> None:
    """-log p over the full class list: a sample of the lacking class costs as much as a certain error."""
    predicted, labels = np.array([[0.5, 0.5, 0], [0.2, 0.8, 0], [0.6, 0.4, 0]]), np.array([0, 1, 2])
    assert module._inner_score(predicted, labels, 3) == pytest.approx(np.log([0.5, 0.8, 1e-7]).mean())
    assert module._inner_score(np.array([[1.0], [3.0]]), np.array([1.0, 1.0]), None) == -2


@pytest.mark.parametrize("groups", [2, 3])
def test_the_fewest_groups_that_can_be_folded(groups: int) -> None:
    """Two groups leave one to train on: the settings can not be chosen in inner folds. Run, or say so plainly."""
    values, task = planted(many=groups, per=20, size=5.0)
    try:
        found = run(values, task, folds=groups)
    except ValueError as error:
        assert groups == 2 and "group" in str(error)
    else:
        assert np.isfinite(found.score).all()


@pytest.mark.parametrize("changes", [{"folds": 1}, {"inner": 1}])
def test_less_than_two_folds_are_refused(changes: dict[str, int]) -> None:
    """One outer fold leaves nothing to train on; one inner fold would leave the setting to chance."""
    values, task = planted()
    with pytest.raises(ValueError, match="fold"):
        run(values, task, **changes)


class Broken(GaussianNB):
    def predict_proba(self, values: np.ndarray) -> np.ndarray:
        return np.full_like(super().predict_proba(values), np.nan)


class BrokenNumber(Ridge):
    def predict(self, values: np.ndarray) -> np.ndarray:
        return np.full(len(values), np.nan)


def test_an_inner_score_that_is_not_finite_is_an_error() -> None:
    values, task = planted()
    with pytest.raises(ValueError, match="not finite"):
        run(values, task, Probe(Broken(), {"var_smoothing": [1e-9, 1.0]}, "none"))
    numbers = task_of(np.arange(90.0), task.groups)
    with pytest.raises(ValueError, match="not finite"):
        run(values, numbers, Probe(BrokenNumber(), {"alpha": [1.0, 2.0]}, "none"))


def test_fits_that_did_not_converge_are_counted() -> None:
    values, task = planted()
    hasty = Probe(LogisticRegression(max_iter=1), {"C": [1.0, 100.0]}, "global")
    found = run(values, task, hasty)
    assert found.unconverged == found.fits == 5 * (2 * 2 + 1)
    assert run(values, task).unconverged == 0


def test_settings_are_chosen_by_inner_log_loss() -> None:
    """A penalty that forbids learning is chosen for noise, a mild one for a signal."""
    probe = replace(LOGISTIC, grid={"C": [1e-6, 1.0]})
    values, task = planted(size=5.0)
    assert run(values, task, probe).chosen == ("{'C': 1.0}",) * 5
    values, task = planted(size=0.0)
    assert run(values, task, probe).chosen == ("{'C': 1e-06}",) * 5


def test_folds_of_classes_are_balanced_and_too_few_groups_are_an_error() -> None:
    values, task = planted(many=30)
    fold = run(values, task).fold[0]
    assert np.ptp([task.labels[fold == f].sum() for f in range(5)]) <= 2
    assert np.array_equal(fold, stats.folds(task.labels, task.groups, 5, 0))
    values, task = planted(many=4)
    with pytest.raises(ValueError, match=r"4 groups .* 5 folds.*protocol\.folds=4"):
        run(values, task)
