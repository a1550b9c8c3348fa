"""The nouns refuse what can not be, and what does not matter does not count."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probing.types import Embeddings, Sample, Task, Tokens, View, digest

VIEW = View(Path("films/a.png"), "a.png")
BYTES = "0" * 64


def sample(i: int, label: str | float | None = "up", **changes: Any) -> Sample:
    made = Sample(f"s{i:02d}", (replace(VIEW, name=f"{i}.png"),), f"patient {i // 2}", f"s{i:02d}", label)
    return replace(made, **changes)


def task(*samples: Sample, classes: tuple[str, ...] = ("up", "down")) -> Task:
    return Task("orientation", "classes", classes, samples)


def numbers(*labels: Any) -> Task:
    return Task("position", "number", (), tuple(sample(i, label) for i, label in enumerate(labels)), "mm")


def test_a_view_is_its_bytes_its_decode_and_its_steps() -> None:
    key = VIEW.key(BYTES)
    moved = View(Path("elsewhere/b.jpg"), "b.jpg")
    assert moved.key(BYTES) == key, "the same file elsewhere is the same view"
    others = [
        VIEW.key("1" * 64),
        replace(VIEW, frame=("axial", 3)).key(BYTES),
        replace(VIEW, frame=("axial", 4)).key(BYTES),
        replace(VIEW, frame=("coronal", 3)).key(BYTES),
        replace(VIEW, decode=("pillow", 2)).key(BYTES),
        replace(VIEW, decode=("nifti", 1, 0.5, 99.5)).key(BYTES),
        replace(VIEW, decode=("nifti", 1, 1.0, 99.0)).key(BYTES),
        VIEW.then(("mirror",)).key(BYTES),
        VIEW.then(("rot90", 1)).key(BYTES),
        VIEW.then(("rot90", 2)).key(BYTES),
        VIEW.then(("mirror",), ("rot90", 1)).key(BYTES),
        VIEW.then(("rot90", 1), ("mirror",)).key(BYTES),
    ]
    assert len({key, *others}) == len(others) + 1


def test_a_square_canvas_needs_no_centred_square() -> None:
    padded = VIEW.then(("pad", 241))
    assert padded.then(("square",)) == padded
    assert padded.then(("square",), ("mirror",)) == padded.then(("mirror",))
    assert VIEW.then(("square",), ("square",)) == VIEW.then(("square",))
    assert VIEW.then(("square",)) != VIEW
    assert VIEW.then(("mirror",), ("square",)).steps == (("mirror",), ("square",))


def test_a_digest_keeps_its_parts_apart_and_ignores_the_order_of_a_mapping() -> None:
    assert digest("a", "bc") != digest("ab", "c")
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([1, 2]) != digest([2, 1])


@pytest.mark.parametrize("group", ["", "  ", None, float("nan")])
def test_a_sample_without_a_group_is_refused(group: Any) -> None:
    with pytest.raises(ValueError, match=r"s03.*group"):
        sample(3, group=group)


def test_a_sample_without_a_view_is_refused() -> None:
    with pytest.raises(ValueError, match=r"s03.*view"):
        sample(3, views=())


def test_a_task_refuses_one_class_and_says_how_many_samples_have_it() -> None:
    with pytest.raises(ValueError, match=r"up") as refusal:
        task(*(sample(i) for i in range(12)))
    assert "12" in str(refusal.value)


def test_a_task_refuses_no_samples() -> None:
    with pytest.raises(ValueError, match="no sample"):
        task()


def test_a_task_refuses_an_unknown_label() -> None:
    with pytest.raises(ValueError, match="sideways"):
        task(sample(0), sample(1, "down"), sample(2, "sideways"))


def test_a_task_refuses_a_class_without_samples() -> None:
    with pytest.raises(ValueError, match="left"):
        task(sample(0), sample(1, "down"), classes=("up", "down", "left"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "3 mm"])
def test_a_task_refuses_what_is_no_finite_number_and_names_its_sample(bad: Any) -> None:
    with pytest.raises(ValueError, match="s01"):
        numbers(1.0, bad, 2.0)


@pytest.mark.parametrize("good", [3, 2.5, np.int64(3), np.float32(2.5), np.float64(2.5)])
def test_a_number_is_a_number_whoever_made_it(good: Any) -> None:
    assert numbers(1.0, good).labels.tolist() == [1.0, float(good)]


def test_a_task_refuses_two_samples_with_one_id() -> None:
    with pytest.raises(ValueError, match="s01"):
        task(sample(0), sample(1, "down"), sample(1, "up"))


def test_repeats_count_once_and_are_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("probing"), "propagate", True)
    few = [sample(0), sample(1, "down"), sample(2)]
    assert task(*few, few[0], few[0], few[1]) == task(*few)
    assert "3 repeated" in caplog.text


def test_the_order_of_samples_changes_nothing() -> None:
    samples = [sample(i, ("up", "down")[i % 3 > 0]) for i in range(12)]
    straight = task(*samples)
    for seed in range(5):
        mixed = task(*(samples[i] for i in np.random.default_rng(seed).permutation(12)))
        assert mixed == straight
        for numbers_of in ("labels", "groups", "sources"):
            assert (getattr(mixed, numbers_of) == getattr(straight, numbers_of)).all()


def test_groups_and_sources_number_what_is_shared() -> None:
    made = task(*(sample(i, ("up", "down")[i % 2]) for i in range(8)))
    assert made.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert made.sources.tolist() == list(range(8))


def test_tokens_must_fit_their_kinds_and_grid() -> None:
    values = torch.zeros(2, 5, 3)
    patches = ("cls", *["patch"] * 4)
    assert Tokens(values, patches, (2, 2)).grid == (2, 2)
    with pytest.raises(ValueError, match="kinds"):
        Tokens(values, patches[:-1], None)
    with pytest.raises(ValueError, match="grid"):
        Tokens(values, patches, (2, 3))


def test_embeddings_must_be_finite_and_one_row_per_key() -> None:
    values = np.ones((3, 2), np.float32)
    Embeddings("tiny", "f", "norm", "mean", ("a", "b", "c"), values)
    with pytest.raises(ValueError, match="keys"):
        Embeddings("tiny", "f", "norm", "mean", ("a", "b"), values)
    for bad in (np.nan, np.inf):
        broken = values.copy()
        broken[1:, 0] = bad
        with pytest.raises(ValueError, match="2 rows are not finite, first key b"):
            Embeddings("tiny", "f", "norm", "mean", ("a", "b", "c"), broken)
