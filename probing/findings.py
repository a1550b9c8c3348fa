"""From estimates to a finding, and from a finding to a sentence.

decodable      the permutation test and the interval both say so
not decodable  the interval lies within chance +- delta (two one-sided tests), where a planted signal is found
absent         not decodable in mean and grid4 of one tap, while the pixels decode the same samples
undetermined   anything else, with the reason
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from probing.nested import Protocol
from probing.types import ENCODER, PIXELS, TWIN, Estimate, ProbeResult, Task

HEADLINE = {"classes": "balanced accuracy", "number": "R2"}


def chance_of(task: Task) -> float:
    """What guessing gives: 1/K of balanced accuracy, 0 of R2."""
    return 0.0 if task.kind == "number" else 1 / len(task.classes)


def finding_of(
    main: Estimate, band: Estimate, chance: float, p: float | None, planted: Estimate, protocol: Protocol
) -> tuple[str, str]:
    """The finding of one cell, and the reason if it is undetermined. `band` is the 90 % interval of `main`.

    Equivalence by two one-sided tests: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657-680.
    """
    if protocol.limited:
        return "undetermined", "limit= left too few groups to decide. Type a larger limit"
    if p is None:
        return "undetermined", "not testable: the labels can not be exchanged in enough ways to reach p = .05"
    if p <= 0.05 and main.low > chance:
        return "decodable", ""
    if planted.low <= chance:
        return "undetermined", f"a planted signal was not found in these samples either ({planted})"
    if p > 0.05 and chance - protocol.delta <= band.low and band.high <= chance + protocol.delta:
        return "not decodable", ""
    needed = _needed(main, band, chance, protocol.delta)
    if p <= 0.05:
        return "undetermined", "the permutation test sees something, but the interval reaches down to chance" + needed
    if main.low > chance:
        return "undetermined", "the interval lies above chance, but the permutation test does not confirm it"
    return "undetermined", f"the interval reaches beyond chance ± {protocol.delta:g}" + needed


def _needed(main: Estimate, band: Estimate, chance: float, delta: float) -> str:
    """How many groups like these would shrink an interval until it lies above chance, or within chance +- delta."""
    above, within = main.value - chance, delta - abs(main.value - chance)
    ways = [(i.high - i.low) / 2 / room for i, room in ((main, above), (band, within)) if room > 0]
    if not ways or min(ways) <= 1:
        return ""
    return f"; about {math.ceil(main.groups * min(ways) ** 2)} groups like these would decide"


def conclude(results: Sequence[ProbeResult], task: Task) -> list[ProbeResult]:
    """Say *absent* where both deciding readouts of a tap and the pixels allow it, and write each sentence."""
    chance, key = chance_of(task), HEADLINE[task.kind]
    blind = {(r.tap, r.readout) for r in results if r.finding == "not decodable"}
    read = {r.tap for r in results if r.finding == "decodable"}
    out = []
    for r in results:
        finding = r.finding
        readable = PIXELS in r.estimates and r.estimates[PIXELS][key].low > chance
        if finding == "not decodable" and {(r.tap, "mean"), (r.tap, "grid4")} <= blind and r.tap not in read and readable:
            finding = "absent"
        out.append(replace(r, finding=finding, sentence=_sentence(r, finding, task)))
    return out


def _sentence(r: ProbeResult, finding: str, task: Task) -> str:
    key, chance = HEADLINE[task.kind], chance_of(task)
    main = r.estimates[ENCODER][key]
    number = f"{key} {main} against chance {chance:.2f}"
    if r.tap == "chosen inside":
        return f"{task.name}, tap and readout chosen in the inner folds: {number}."
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
    if finding == "undetermined":
        tail = f"; {r.reason}"
    return f"{head}{where}: {number}{p}{tail}."
