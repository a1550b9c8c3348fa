"""A probe x embeddings x a task -> ProbeResults: every cell beside its floors, with its null and its finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from probing import stats
from probing.findings import HEADLINE, chance_of, conclude, finding_of
from probing.nested import Nested, Probe, Protocol, nested
from probing.types import ENCODER, PIXELS, TWIN, Estimate, ProbeResult, Task, digest

SHUFFLED, PLANTED, MAJORITY = "shuffled labels", "planted signal", "majority"  # rows made here
PLANTED_SIZE = 4.0  # of the root mean square of a feature: a signal that a working procedure finds


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
    check(task, protocol)
    labels, seed = task.labels, int(digest([s.id for s in task.samples], task.labels.tolist())[:8], 16)
    exchanged, level, bits = stats.exchange(labels, task.sources, task.groups, protocol.permutations + 2, seed)
    if bits == 0:  # nothing may be exchanged: there is no test, but shuffled labels are still shuffled
        exchanged[-2:] = np.random.default_rng(seed).permuted(exchanged[-2:], axis=1)
    majority = _majority(task, protocol)
    pixels: Nested | None = None  # the same for every cell
    found: list[tuple[tuple[str, str], dict[str, Nested], float | None, np.ndarray]] = []
    for cell, rows in cells.items():
        runs = {n: pixels if n == PIXELS and pixels else nested(v, labels, task, probe, protocol, tick) for n, v in rows.items()}
        pixels = pixels or runs.get(PIXELS)
        values = rows[ENCODER]
        runs[SHUFFLED] = nested(values, exchanged[-1], task, probe, protocol, tick)
        runs[PLANTED] = nested(plant(values, exchanged[-2], task, seed), exchanged[-2], task, probe, protocol, tick)
        runs[MAJORITY] = majority
        p, null = _null(values, labels, exchanged[:-2], runs[ENCODER], task, probe, protocol, bits, tick)
        found.append((cell, runs, p, null))
    truths = {SHUFFLED: exchanged[-1], PLANTED: exchanged[-2]}
    results = [_result(task, cell, runs, truths, p, null, level, protocol) for cell, runs, p, null in found]
    if len(results) > 1:
        results.append(_chosen_inside(task, [(c, r[ENCODER]) for c, r, _, _ in found], protocol))
    return conclude(results, task)


def evaluations(cells: Mapping[tuple[str, str], Mapping[str, np.ndarray]], protocol: Protocol) -> int:
    """How often `evaluate` calls tick() (less often where a nested null turns out not to be testable)."""
    shared = max(sum(PIXELS in rows for rows in cells.values()) - 1, 0)
    null = len(cells) * protocol.permutations if protocol.null == "nested" else 0
    return (sum(len(rows) + 2 for rows in cells.values()) - shared + null) * protocol.folds * protocol.repeats


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


def _majority(task: Task, protocol: Protocol) -> Nested:
    """The constant answer: the most frequent class, or the mean."""
    labels = task.labels
    answer = np.eye(len(task.classes))[np.bincount(labels).argmax()] if task.classes else np.array([labels.mean()])
    score = np.tile(answer, (protocol.repeats, len(labels), 1))
    return Nested(score, np.zeros(score.shape[:2], int), np.empty((0, 0)), (), 0, 0)


def check(task: Task, protocol: Protocol) -> None:
    """Raise ValueError for a task that can not be probed: a class in one group alone, fewer groups than folds."""
    if protocol.limited:
        return
    if task.kind == "classes":
        for i, name in enumerate(task.classes):
            inside = task.labels == i
            if len(np.unique(task.groups[inside])) < 2:
                raise ValueError(
                    f"task {task.name}: class {name!r} ({inside.sum()} samples) lies in one group alone, so no fold can train on it and test on it. "
                    "Bring another group of that class, or leave it out with images.where"
                )
    groups = len(np.unique(task.groups))
    if groups < max(protocol.folds, 3):
        hint = f"Type protocol.folds={groups}, or bring" if groups > 2 else "A probe needs 3: bring"
        raise ValueError(f"task {task.name}: {groups} groups can not fill {protocol.folds} folds. {hint} more groups")


def _null(
    values: np.ndarray,
    labels: np.ndarray,
    exchanged: np.ndarray,
    run: Nested,
    task: Task,
    probe: Probe,
    protocol: Protocol,
    bits: float,
    tick: Callable[[], object],
) -> tuple[float | None, np.ndarray]:
    """p of the encoder's statistic among exchanged labels, or None where too few arrangements exist to reach .05."""
    alike = stats.renamings(labels, task.sources, task.groups) if task.kind == "classes" else 0.0
    if 2 ** (alike - bits) > 0.05 or protocol.permutations < 19:
        return None, np.empty(0)
    if protocol.null == "nested":
        metric, parts = _headline(task), _parts(task)
        observed = float(metric(parts(labels, run).sum(0)))
        null = np.array([metric(parts(e, nested(values, e, task, probe, protocol, tick)).sum(0)) for e in exchanged])
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
    finding, why = finding_of(main, band, chance, p, estimates[PLANTED][HEADLINE[task.kind]], protocol)
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
        cell[0],
        cell[1],
        run.score,
        run.fold,
        tuple(run.chosen),
        estimates,
        p,
        null,
        finding,
        tuple(tags),
        why,
        notes=tuple(notes),
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
