"""What may be said of an estimate: the truth table, and the sentences."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from test_nested import PROTOCOL, task_of

from probing.findings import chance_of, conclude, finding_of
from probing.types import ENCODER, PIXELS, TWIN, Estimate, ProbeResult

TASK = task_of(np.arange(12) % 2, np.arange(12) // 2)
FOUND = Estimate(0.95, 0.9, 0.99, 100, 20, "test")


def estimate(value: float, half: float, groups: int = 20) -> Estimate:
    return Estimate(value, value - half, value + half, 5 * groups, groups, "test")


# --- the truth table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, half, p, planted, finding, reason",
    [
        (0.70, 0.10, 0.01, FOUND, "decodable", ""),
        (0.70, 0.10, 0.05, FOUND, "decodable", ""),
        (0.50, 0.08, 0.60, FOUND, "not decodable", ""),
        (0.45, 0.04, 0.90, FOUND, "not decodable", ""),
        (0.50, 0.08, 0.60, estimate(0.55, 0.1), "undetermined", "planted signal was not found"),
        (0.50, 0.08, None, FOUND, "undetermined", "not testable"),
        (0.70, 0.10, None, FOUND, "undetermined", "not testable"),
        (0.50, 0.15, 0.60, FOUND, "undetermined", "beyond chance ± 0.1"),
        (0.30, 0.08, 1.00, FOUND, "undetermined", "beyond chance ± 0.1"),  # below chance is no absence
        (0.30, 0.08, 0.01, FOUND, "undetermined", "reaches down to chance"),
        (0.60, 0.12, 0.02, FOUND, "undetermined", "reaches down to chance"),
        (0.70, 0.10, 0.06, FOUND, "undetermined", "does not confirm it"),
        (0.50, 0.08, 0.04, FOUND, "undetermined", "reaches down to chance"),
    ],
)
def test_truth_table(value: float, half: float, p: float | None, planted: Estimate, finding: str, reason: str) -> None:
    band = estimate(value, 0.84 * half)
    said, why = finding_of(estimate(value, half), band, 0.5, p, planted, PROTOCOL)
    assert said == finding
    assert reason in why and bool(why) == (finding == "undetermined")
    limited, why = finding_of(estimate(value, half), band, 0.5, p, planted, replace(PROTOCOL, limited=True))
    assert limited == "undetermined" and "limit" in why


@pytest.mark.parametrize("chance, delta", [(0.5, 0.1), (0.25, 0.05), (0.0, 0.1)])
def test_absence_needs_the_whole_band_on_both_sides(chance: float, delta: float) -> None:
    protocol = replace(PROTOCOL, delta=delta)
    for off, finding in ((0.0, "not decodable"), (0.4, "undetermined"), (-0.4, "undetermined")):
        main = estimate(chance + off * delta, 0.8 * delta)
        assert finding_of(main, main, chance, 0.5, FOUND, protocol)[0] == finding


@pytest.mark.parametrize("p", [0.01, 0.5])
@pytest.mark.parametrize("value, half", [(0.5, 0.15), (0.52, 0.3), (0.57, 0.12), (0.56, 0.061), (0.44, 0.12), (0.43, 0.09)])
def test_the_groups_that_would_decide_do_decide(value: float, half: float, p: float) -> None:
    """Intervals shrink with the root of the number of groups: with as many as said, one finding or the other is due."""

    def said(groups: int, p: float) -> tuple[str, str]:
        main = estimate(value, half * (20 / groups) ** 0.5, groups)
        return finding_of(main, replace(main), 0.5, p, FOUND, PROTOCOL)

    finding, why = said(20, p)
    assert finding == "undetermined"
    if p <= 0.05 and value <= 0.5:
        return  # a signal that ranks above exchanged labels and yet not above chance: no number of groups is promised
    needed = re.search(r"about (\d+) groups", why)
    assert needed, why
    assert int(needed[1]) > 20
    assert {said(int(needed[1]) + 1, each)[0] for each in (0.01, 0.5)} & {"decodable", "not decodable"}


def test_the_number_of_groups_needed() -> None:
    wide = estimate(0.5, 0.151)  # 20 groups x (.151 / .1)^2
    assert "about 46 groups like these" in finding_of(wide, wide, 0.5, 0.5, FOUND, PROTOCOL)[1]


def test_chance() -> None:
    assert chance_of(TASK) == 0.5
    assert chance_of(task_of(np.arange(12) % 3, np.arange(12))) == pytest.approx(1 / 3)
    assert chance_of(task_of(np.arange(12.0), np.arange(12))) == 0


# --- absent ------------------------------------------------------------------------------------------------------


def cell(
    tap: str, readout: str, finding: str = "not decodable", pixels: Estimate | None = FOUND, tags: tuple[str, ...] = ()
) -> ProbeResult:
    rows = {ENCODER: estimate(0.51, 0.04), TWIN: estimate(0.73, 0.05)} | ({PIXELS: pixels} if pixels else {})
    estimates = {name: {"balanced accuracy": e, "accuracy": e, "R2": e} for name, e in rows.items()}
    empty = np.empty(0)
    reason = "not testable: so" if finding == "undetermined" else ""
    return ProbeResult(tap, readout, empty, empty, (), estimates, 0.42, empty, finding, tags, reason)


def findings(*cells: ProbeResult) -> list[str]:
    return [r.finding for r in conclude(cells, TASK)]


def test_absent_needs_mean_and_grid4_of_one_tap_and_the_pixels() -> None:
    assert findings(cell("5", "mean"), cell("5", "grid4")) == ["absent", "absent"]
    assert findings(cell("5", "mean"), cell("5", "grid4"), cell("7", "mean")) == ["absent", "absent", "not decodable"]


@pytest.mark.parametrize(
    "cells",
    [
        (cell("5", "mean"),),
        (cell("5", "grid4"),),
        (cell("5", "mean"), cell("7", "grid4")),
        (cell("5", "mean"), cell("5", "grid2")),
        (cell("5", "mean"), cell("5", "grid4", "undetermined")),
        (cell("5", "mean"), cell("5", "grid4", "decodable")),
        (cell("5", "mean", pixels=None), cell("5", "grid4", pixels=None)),
        (cell("5", "mean", pixels=estimate(0.52, 0.05)), cell("5", "grid4", pixels=estimate(0.52, 0.05))),
        (cell("5", "native"),),
    ],
)
def test_nothing_less_is_absent(cells: tuple[ProbeResult, ...]) -> None:
    assert findings(*cells) == [c.finding for c in cells]


def test_what_another_readout_of_the_tap_decodes_is_not_absent_there() -> None:
    assert findings(cell("5", "mean"), cell("5", "grid4"), cell("5", "cls", "decodable"))[:2] == ["not decodable"] * 2


# --- sentences ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finding", ["decodable", "not decodable", "undetermined"])
def test_a_sentence_holds_the_numbers(finding: str) -> None:
    (said,) = conclude([cell("5", "cls", finding)], TASK)
    assert said.sentence.startswith(f"test is {finding}")
    for part in ("(5, cls)", "balanced accuracy 0.510 [0.470, 0.550]", "chance 0.50", "p = 0.42"):
        assert part in said.sentence
    assert ("not testable: so" in said.sentence) == (finding == "undetermined")


def test_the_sentence_of_absence_names_the_reference() -> None:
    said, _ = conclude([cell("5", "mean"), cell("5", "grid4")], TASK)
    assert said.sentence.startswith("test is absent (5, mean)")
    assert "pixels reach 0.95" in said.sentence and "0.510 [0.470, 0.550]" in said.sentence


def test_tags_say_what_the_floor_reaches() -> None:
    (said,) = conclude([cell("5", "mean", "decodable", tags=("easy from pixels", "not learned"))], TASK)
    assert "easy from pixels (24 x 24 pixels reach 0.95)" in said.sentence
    assert "not learned (random weights reach 0.73)" in said.sentence


def test_a_sentence_without_p_prints_none() -> None:
    (said,) = conclude([replace(cell("5", "mean", "undetermined"), p=None)], TASK)
    assert "p =" not in said.sentence and "None" not in said.sentence


def test_numbers_are_told_by_r2_against_0() -> None:
    task = task_of(np.arange(12.0), np.arange(12))
    (said,) = conclude([cell("5", "mean")], task)
    assert "R2 0.510 [0.470, 0.550] against chance 0.00" in said.sentence


def test_every_sentence_is_one() -> None:
    chosen = replace(cell("chosen inside", "", ""), p=None)
    said = conclude([cell("5", "mean"), cell("5", "cls", "undetermined"), chosen], TASK)
    assert "chosen in the inner folds: balanced accuracy 0.510 [0.470, 0.550]" in said[-1].sentence
    assert all(r.sentence.endswith(".") for r in said)
