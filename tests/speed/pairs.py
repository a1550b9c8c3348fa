"""Interleaved timing for machines that are never quiet: ours, rival / rival, ours / ours, rival ..., judged pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def spent(call: Callable[[], object]) -> tuple[float, float]:
    """The seconds that a call takes, and the seconds that this process computes meanwhile on all its cores."""
    computed = time.process_time()
    return timed(call), time.process_time() - computed


def rounds(calls: Mapping[str, Callable[[], T]], count: int, first: int = 0) -> dict[str, list[T]]:
    """`count` rounds of all calls, every odd round backwards. Name -> what its call returned in each round."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    for i in range(first, first + count):
        for name in list(calls) if i % 2 == 0 else reversed(list(calls)):
            found[name].append(calls[name]())
    return found


def ratio(rival: Sequence[float], ours: Sequence[float], target: float) -> dict[str, str]:
    """Rival's seconds / our seconds, pair by pair: 1 is as fast as the rival, less is slower."""
    pairs = [r / o for r, o in zip(rival, ours, strict=True)]
    middle = statistics.median(pairs)
    return {
        "ours / rival": f"{middle:.3f}",
        "min - max": f"{min(pairs):.3f} - {max(pairs):.3f}",
        "target": f">= {target:.2f} {'met' if middle >= target else 'MISSED'}",
    }
