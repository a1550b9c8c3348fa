"""A scikit-learn estimator x embeddings x a task -> ProbeResults: nested, grouped, beside floors, with a finding.

The protocol is described, with its sources, in docs/statistics.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probing import stats
from probing.types import Estimate, ProbeResult, Task, digest

ENCODER, TWIN, PIXELS, SHUFFLED, PLANTED, MAJORITY = (
    "encoder",
    "random weights",
    "pixels",
    "shuffled labels",
    "planted signal",
    "majority",
)
PLANTED_SIZE = 4.0  # of the root mean square of a feature: a signal that a working procedure finds
SMALL = 5_000_000  # values x settings
HEADLINE = {"classes": "balanced accuracy", "number": "R2"}


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
    small = values.size * len(settings) < SMALL  # starting worker processes costs more than it saves
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

    train, y = values[~test], labels[~test]
    inside = stats.folds(y if classes else None, groups[~test], min(protocol.inner, len(np.unique(groups[~test]))), protocol.seed)
    scores, failed = np.zeros(len(settings)), 0
    with threadpool_limits(1):  # many small fits; and the same bits however many processes share them
        for g in np.unique(inside):
            fit, held = inside != g, inside == g
            predictions, missed = _fit(train[fit], y[fit], train[held], settings, classes, probe)
            scores += [_inner_score(p, y[held], classes) / len(np.unique(inside)) for p in predictions]
            failed += missed
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

    train, test = _scale(train, test, probe.scaling)
    estimator = clone(probe.estimator)
    found, failed = [], 0
    for setting in settings:
        estimator.set_params(**setting)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            estimator.fit(train, labels)
        failed += any(issubclass(w.category, ConvergenceWarning) for w in caught)
        if classes is None:
            found.append(np.asarray(estimator.predict(test)).reshape(-1, 1))
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


# --- one cell, beside its floors ---------------------------------------------------------------------------------


def evaluate(
    task: Task,
    cells: Mapping[tuple[str, str], Mapping[str, np.ndarray]],
    probe: Probe,
    protocol: Protocol,
    tick: Callable[[], object] = lambda: None,
) -> list[ProbeResult]:
    """One ProbeResult per cell (tap, readout), and one more, chosen in the inner folds, if there are several.

    cells: (tap, readout) -> row name -> values [N,D]: the encoder itself, and the encoders that are its floors.
    """
    _check_groups(task, protocol)
    labels, seed = task.labels, int(digest([s.id for s in task.samples], task.labels.tolist())[:8], 16)
    exchanged, level, bits = stats.exchange(labels, task.sources, task.groups, protocol.permutations + 2, seed)
    shared: dict[str, Nested] = {}  # floors that do not depend on the cell
    shared[MAJORITY] = nested(np.zeros((len(labels), 1), np.float32), labels, task, _majority(task), protocol)
    found: list[tuple[tuple[str, str], dict[str, Nested], float | None, np.ndarray]] = []
    for cell, rows in cells.items():
        runs = {}
        for name, values in rows.items():
            if name == PIXELS and PIXELS in shared:
                runs[name] = shared[PIXELS]
                continue
            runs[name] = nested(values, labels, task, probe, protocol, tick)
            if name == PIXELS:
                shared[PIXELS] = runs[name]
        values = rows[ENCODER]
        runs[SHUFFLED] = nested(values, exchanged[-1], task, probe, protocol, tick)
        runs[PLANTED] = nested(plant(values, exchanged[-2], task, seed), exchanged[-2], task, probe, protocol, tick)
        runs[MAJORITY] = shared[MAJORITY]
        p, null = _null(values, labels, exchanged[:-2], task, probe, protocol, bits)
        found.append((cell, runs, p, null))
    truths = {SHUFFLED: exchanged[-1], PLANTED: exchanged[-2]}
    results = [_result(task, cell, runs, truths, p, null, level, protocol) for cell, runs, p, null in found]
    if len(results) > 1:
        results.append(_chosen_inside(task, [(c, r[ENCODER]) for c, r, _, _ in found], protocol))
    return _conclude(results, task)


def evaluations(cells: Mapping[tuple[str, str], Mapping[str, np.ndarray]], protocol: Protocol) -> int:
    """How often `evaluate` calls tick()."""
    own = sum(len(rows) + 2 for rows in cells.values()) - sum(PIXELS in rows for rows in list(cells.values())[1:])
    return own * protocol.folds * protocol.repeats


def plant(values: np.ndarray, labels: np.ndarray, task: Task, seed: int) -> np.ndarray:
    """`values` with a signal for `labels` along random directions: what a working procedure must find."""
    rng = np.random.default_rng(seed)
    size = PLANTED_SIZE * np.sqrt(((values - values.mean(0)) ** 2).mean())
    directions = rng.normal(size=(max(len(task.classes), 1), values.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    if task.kind == "number":
        shift = ((labels - labels.mean()) / max(labels.std(), 1e-12))[:, None] * directions
    else:
        shift = directions[labels]
    return (values + size * shift).astype(np.float32)


def _majority(task: Task) -> Probe:
    from sklearn.dummy import DummyClassifier, DummyRegressor

    return Probe(DummyRegressor() if task.kind == "number" else DummyClassifier(strategy="prior"), {}, "none")


def _check_groups(task: Task, protocol: Protocol) -> None:
    if task.kind == "classes":
        for i, name in enumerate(task.classes):
            inside = task.labels == i
            if len(np.unique(task.groups[inside])) < 2:
                raise ValueError(
                    f"task {task.name}: class {name!r} ({inside.sum()} samples) lies in one group alone, so no fold can train on it and test on it. "
                    "Bring another group of that class, or leave it out with images.where"
                )
    if len(np.unique(task.groups)) < protocol.folds:
        raise ValueError(
            f"task {task.name}: {len(np.unique(task.groups))} groups can not fill {protocol.folds} folds. Type protocol.folds={max(2, len(np.unique(task.groups)))}, or bring more groups"
        )


def _null(
    values: np.ndarray, labels: np.ndarray, exchanged: np.ndarray, task: Task, probe: Probe, protocol: Protocol, bits: float
) -> tuple[float | None, np.ndarray]:
    """p of the encoder's statistic among exchanged labels, or None where too few arrangements exist to reach .05."""
    if 2**-bits > 0.05 or protocol.permutations < 19:
        return None, np.empty(0)
    if protocol.null == "nested":
        metric, parts = _headline(task), _parts(task)
        observed = float(metric(parts(labels, nested(values, labels, task, probe, protocol)).sum(0)))
        null = np.array([metric(parts(e, nested(values, e, task, probe, protocol)).sum(0)) for e in exchanged])
    else:
        fold = stats.folds(None, task.groups, protocol.folds, protocol.seed)
        observed, null = stats.ridge_null(values, labels, exchanged, fold, len(task.classes) or None)
    return float((1 + (null >= observed - 1e-9).sum()) / (1 + len(null))), null


def _headline(task: Task) -> Callable[[np.ndarray], np.ndarray]:
    return stats.r2 if task.kind == "number" else stats.balanced_accuracy


def _parts(task: Task) -> Callable[[np.ndarray, Nested], np.ndarray]:
    """(labels, run) -> the sums over samples that the metrics read; a mean over repeats."""

    def numbers(labels: np.ndarray, run: Nested) -> np.ndarray:
        return np.mean([stats.number_parts(labels, run.score[r, :, 0]) for r in range(len(run.score))], 0)

    def classes(labels: np.ndarray, run: Nested) -> np.ndarray:
        return stats.class_parts(labels, (run.score.argmax(2) == labels).mean(0), len(task.classes))

    return numbers if task.kind == "number" else classes


def _metrics(task: Task) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    if task.kind == "number":
        return {"R2": stats.r2, "mean absolute error": stats.mean_absolute_error}
    return {"balanced accuracy": stats.balanced_accuracy, "accuracy": stats.accuracy}


def _result(
    task: Task,
    cell: tuple[str, str],
    runs: Mapping[str, Nested],
    truths: Mapping[str, np.ndarray],
    p: float | None,
    null: np.ndarray,
    level: str,
    protocol: Protocol,
) -> ProbeResult:
    parts, groups, metric = _parts(task), task.groups, _headline(task)
    sums = {name: parts(truths.get(name, task.labels), run) for name, run in runs.items()}
    estimates: dict[str, dict[str, Estimate]] = {
        name: {m: stats.cluster_interval(s, groups, f, protocol.seed) for m, f in _metrics(task).items()}
        for name, s in sums.items()
    }
    main, chance = estimates[ENCODER][HEADLINE[task.kind]], chance_of(task)
    band = stats.cluster_interval(sums[ENCODER], groups, metric, protocol.seed, level=0.90)
    finding, why = _finding(main, band, chance, p, estimates[PLANTED][HEADLINE[task.kind]], protocol)
    tags = []
    for floor, tag in ((PIXELS, "easy from pixels"), (TWIN, "not learned")):
        if floor in sums and finding == "decodable" and estimates[floor][HEADLINE[task.kind]].low > chance:
            gain = stats.paired_difference(sums[ENCODER], sums[floor], groups, metric, protocol.seed)
            tags += [tag] if gain.low <= 0 else []
    run = runs[ENCODER]
    notes = [f"labels exchanged among {level}"] if p is not None else []
    if run.unconverged:
        notes.append(f"{run.unconverged} of {run.fits} fits did not converge")
    return ProbeResult(
        cell[0], cell[1], run.score, run.fold, tuple(run.chosen), estimates, p, null, finding, tuple(tags), why, tuple(notes)
    )


def chance_of(task: Task) -> float:
    """What guessing gives: 1/K of balanced accuracy, 0 of R2."""
    return 0.0 if task.kind == "number" else 1 / len(task.classes)


def _finding(
    main: Estimate, band: Estimate, chance: float, p: float | None, planted: Estimate, protocol: Protocol
) -> tuple[str, str]:
    """decodable, not decodable or undetermined, and the reason for the last.

    decodable: p <= .05 and the interval above chance. not decodable: the 90 % interval inside chance +- delta (two
    one-sided tests of equivalence, as in Schuirmann 1987) while a planted signal is found.
    """
    if protocol.limited:
        return "undetermined", "limit: too few samples were asked for"
    if p is None:
        return "undetermined", "not testable: too few arrangements of the labels can be told apart"
    if p <= 0.05 and main.low > chance:
        return "decodable", ""
    if planted.low <= chance:
        return "undetermined", f"a planted signal was not found in these samples either ({planted})"
    if chance - protocol.delta <= band.low and band.high <= chance + protocol.delta and p > 0.05:
        return "not decodable", ""
    half = (band.high - band.low) / 2
    needed = int(np.ceil(main.groups * (half / protocol.delta) ** 2))
    return (
        "undetermined",
        f"the interval is neither above chance nor inside chance ± {protocol.delta:g}; about {max(needed, main.groups + 1)} groups like these would decide",
    )


def _chosen_inside(task: Task, runs: Sequence[tuple[tuple[str, str], Nested]], protocol: Protocol) -> ProbeResult:
    """Each outer fold takes the cell that its inner folds score best: the honest number for "the best layer"."""
    best = np.argmax([run.inner for _, run in runs], 0)  # [R,F]
    fold = runs[0][1].fold
    pick = np.take_along_axis(best, fold, 1)  # [R,N]
    score = np.take_along_axis(np.stack([run.score for _, run in runs]), pick[None, :, :, None], 0)[0]
    run = Nested(score, fold, np.max([r.inner for _, r in runs], 0), tuple(" ".join(runs[i][0]) for i in best.ravel()), 0, 0)
    sums = _parts(task)(task.labels, run)
    estimates = {ENCODER: {m: stats.cluster_interval(sums, task.groups, f, protocol.seed) for m, f in _metrics(task).items()}}
    return ProbeResult("chosen inside", "", score, fold, tuple(run.chosen), estimates, None, np.empty(0), "", (), "")


def _conclude(results: Sequence[ProbeResult], task: Task) -> list[ProbeResult]:
    """Write the sentence of each result, and say *absent* where design allows: not decodable in mean and grid4 of one
    tap, while the pixels decode the same samples."""
    chance, key = chance_of(task), HEADLINE[task.kind]
    blind = {(r.tap, r.readout) for r in results if r.finding == "not decodable"}
    out = []
    for r in results:
        finding = r.finding
        readable = PIXELS in r.estimates and r.estimates[PIXELS][key].low > chance
        if finding == "not decodable" and {(r.tap, "mean"), (r.tap, "grid4")} <= blind and readable:
            finding = "absent"
        out.append(replace(r, finding=finding, sentence=_sentence(r, finding, task)))
    return out


def _sentence(r: ProbeResult, finding: str, task: Task) -> str:
    key, chance = HEADLINE[task.kind], chance_of(task)
    main = r.estimates[ENCODER][key]
    number = f"{key} {main} against chance {chance:.2f}"
    if r.tap == "chosen inside":
        return f"{task.name}, tap and readout chosen in the inner folds: {number}"
    p = f", p = {r.p:.2g}" if r.p is not None else ""
    floor = {f: r.estimates[f][key].value for f in (PIXELS, TWIN) if f in r.estimates}
    says = {
        "easy from pixels": f"easy from pixels (24 x 24 pixels reach {floor.get(PIXELS, 0):.2f})",
        "not learned": f"not learned (random weights reach {floor.get(TWIN, 0):.2f})",
    }
    head = {
        "decodable": f"{task.name} is decodable",
        "not decodable": f"{task.name} is not decodable from this vector",
        "absent": f"{task.name} is absent",
        "undetermined": f"{task.name} is undetermined",
    }[finding]
    where = f" ({r.tap}, {r.readout})"
    tail = "".join(f"; {says[t]}" for t in r.tags)
    if finding == "absent":
        tail = f"; the picture holds it (24 x 24 pixels reach {floor[PIXELS]:.2f}), neither mean nor grid4 of this tap does"
    if finding == "undetermined" and r.sentence:
        tail = f"; {r.sentence}"
    return f"{head}{where}: {number}{p}{tail}."
