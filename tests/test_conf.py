"""Every YAML composes, every `_target_` resolves, and every key is an argument of the function it goes to."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from omegaconf import DictConfig, OmegaConf

from probing.jobs.configure import AFTERWARDS, SHOWN, compose, expand

CONF = ROOT / "conf"
OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml"))]
SCIKIT = {"estimator"}


def resolve(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def targets(node: Any, where: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, by its place in the config."""
    found = []
    if isinstance(node, dict):
        if "_target_" in node:
            found.append((where, node))
        for key, value in node.items():
            found += targets(value, f"{where}.{key}")
    return found


@pytest.mark.parametrize("group,name", OPTIONS)
def test_every_option_composes_and_fits_its_function(group: str, name: str) -> None:
    cfg = compose([f"{group}={name}"])
    plain: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    for where, node in targets(plain):
        function = resolve(node["_target_"])
        allowed = set(inspect.signature(function).parameters)
        given = set(node) - {"_target_"}
        if where in (".encoder", ".floor"):
            given -= set(SHOWN)
        if where == ".images":
            given -= set(AFTERWARDS)
            allowed -= {"memo", "left"}  # what every source is offered
        if where == ".job":
            given -= {"name"}
        assert given <= allowed, f"{where}: {given - allowed} are no arguments of {node['_target_']}"


@pytest.mark.parametrize("name", [n for g, n in OPTIONS if g == "encoder"])
def test_every_encoder_says_what_it_is(name: str) -> None:
    encoder = compose([f"encoder={name}"]).encoder
    assert encoder.name == name
    for key in ("display", "licence", "gated", "cite", "checked", "taps", "tap"):
        assert key in encoder, key
    assert {"image", "path"} & set(encoder.keys())  # how a picture is prepared, or where rows lie
    names = [t.name for t in expand(OmegaConf.to_container(encoder.taps))]  # type: ignore[arg-type]
    assert encoder.tap in names and len(names) == len(set(names))


@pytest.mark.parametrize("group", ["images", "task", "probe", "protocol", "job"])
def test_options_carry_their_own_name(group: str) -> None:
    for name in [n for g, n in OPTIONS if g == group]:
        spec = OmegaConf.load(CONF / group / f"{name}.yaml")
        assert isinstance(spec, DictConfig)
        assert spec._get_node("name") is not None
        assert name in ("column", spec.name if name != "column" else "column")


def test_every_option_is_documented() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    for key in OmegaConf.load(CONF / "config.yaml"):
        if key not in ("defaults", "hydra"):
            assert f"`{key}`" in page, key


def test_the_data_cards_bind_images_and_task() -> None:
    for path in (CONF / "data").glob("*.yaml"):
        cfg = compose([f"data={path.stem}"])
        assert cfg.images.where and cfg.task.name
    assert compose(["data=flip_symmetric", "task=plane"]).task.name == "plane"  # the command line is on top


def test_a_launcher_for_slurm_composes() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    import hydra

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("config", ["hydra/launcher=slurm"], return_hydra_config=True)
    assert cfg.hydra.launcher.cpus_per_task == 8


def test_the_packaged_configuration_is_this_one() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'force-include = { conf = "probing/conf" }' in text
    assert Path(CONF / "config.yaml").exists()
