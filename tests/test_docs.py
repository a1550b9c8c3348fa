"""What the pages say exists: commands compose, links lead somewhere, tables agree with the code, examples run."""

from __future__ import annotations

import copy
import functools
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from probing.jobs.configure import NO_IDENTITY, compose, load_encoder, method, plans_of
from probing.readouts import VALID
from probing.types import READOUTS

CONF = ROOT / "conf"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.name: page.read_text() for page in PAGES}
ALL = "\n".join(TEXT.values())
OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml"))]


def commands() -> list[str]:
    """Every `python probe.py ...` of a code block, of a YAML's comment or between backticks."""
    found = []
    for text in TEXT.values():
        for line in text.splitlines():
            if line.startswith(("|", "- ")) or line.count("`python probe.py"):
                found += re.findall(r"`(python probe\.py[^`]*)`", line)
            elif "python probe.py" in line and not line[: line.index("python probe.py")].endswith('"'):
                found.append(line[line.index("python probe.py") :])
    return sorted({re.sub(r"\s+#.*", "", command) for command in found})


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables under a heading."""
    part = f"\n{TEXT[page]}".split(f"\n{heading}\n")[1].split("\n## ")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if not set("".join(line)) <= set("- ")]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of the pages as files: YAMLs named by their first line, and mylab.py of all Python that defines something."""
    folder = tmp_path_factory.mktemp("own")
    for path, yaml in re.findall(r"```yaml\n# (conf/\S+)\n(.*?)```", ALL, re.S):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(yaml)
    blocks = re.findall(r"```python\n(.*?)```", TEXT["data.md"] + TEXT["encoders.md"], re.S)
    (folder / "mylab.py").write_text("\n".join(b for b in blocks if "def " in b))
    return folder


@pytest.fixture
def mylab(own: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides that make the examples known."""
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.delitem(sys.modules, "mylab", raising=False)
    return [f"hydra.searchpath=[file://{own / 'conf'}]", "allow=[mylab]"]


@functools.cache
def base(*choices: str) -> DictConfig:
    return compose(list(choices))


def config(typed: list[str], more: list[str]) -> DictConfig:
    """What `compose` would give. Choices of groups are composed once for all commands; values are set on a copy."""
    parsed = [o for o in OverridesParser.create().parse_overrides(typed) if not o.key_or_group.startswith("hydra")]
    groups = {"encoder@floor", *(p.name for p in CONF.iterdir())}
    is_group = [o.get_key_element().lstrip("+~") in groups for o in parsed]
    chosen = sorted(str(o.input_line) for o, group in zip(parsed, is_group, strict=True) if group)
    cfg = copy.deepcopy(base(*more, *chosen))
    for override in (o for o, group in zip(parsed, is_group, strict=True) if not group):
        key, value = override.key_or_group, override.value()
        if override.is_delete():
            parent, _, last = key.rpartition(".")
            with open_dict(cfg):
                del OmegaConf.select(cfg, parent)[last]
        else:
            OmegaConf.update(cfg, key, value, force_add=override.is_add())
    return cfg


@pytest.mark.parametrize("command", commands())
def test_every_command_composes_and_names_taps_and_readouts_that_are_there(command: str, mylab: list[str]) -> None:
    typed = shlex.split(command)[2:]
    if {"--help", "--cfg"} & set(typed):
        return
    if "--config-dir" in typed:
        del typed[typed.index("--config-dir") : typed.index("--config-dir") + 2]
    sweep = "-m" in typed
    typed = [t for t in typed if t != "-m"]
    several: list[list[str]] = []
    for text, override in zip(typed, OverridesParser.create().parse_overrides(typed), strict=True):
        assert sweep or not override.is_sweep_override(), f"{text} needs -m"
        values = override.sweep_string_iterator() if override.is_sweep_override() else ()
        several.append([f"{override.get_key_element()}={v}" for v in values] or [text])
    longest = max(map(len, several), default=1)
    assert not sweep or longest > 1, "a sweep of one"
    for i in range(longest):  # every choice once, not every combination
        cfg = config([choices[i % len(choices)] for choices in several], mylab)
        cfg.weights = None  # files of users are not here
        if "path" in cfg.encoder:
            cfg.encoder.path = __file__
        plans_of(cfg)


def test_there_are_commands() -> None:
    assert len(commands()) > 30


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_to_files_and_headings(page: str) -> None:
    folder = next(p for p in PAGES if p.name == page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = folder / path if path else folder / page
        assert file.exists(), target
        headings = [
            re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", file.read_text(), re.M)
        ]
        assert not anchor or anchor in headings, target


@pytest.mark.parametrize("group,name", OPTIONS)
def test_every_option_is_mentioned(group: str, name: str) -> None:
    assert re.search(rf"`(?:{group}=)?{name}`", ALL), f"{group}={name}"


@pytest.mark.parametrize("page", TEXT)
def test_no_path_of_a_machine(page: str) -> None:
    assert not re.search(r"/work/|/tmp/|/root/", TEXT[page])


def test_the_table_of_options_has_all_of_them_with_their_defaults() -> None:
    own = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(own, DictConfig)
    plain: dict[Any, Any] = OmegaConf.to_container(own)  # type: ignore[assignment]
    shown = {r[0].strip("`"): (r[1].strip("`"), r[3]) for r in rows("options.md", "## Options of every job")[1:]}
    assert set(shown) == set(plain) - {"defaults", "hydra"}
    spell = {None: "null", True: "true", False: "false"}
    for key, (default, identity) in shown.items():
        value = plain[key]
        assert default == (spell[value] if value is None or isinstance(value, bool) else str(value)), key
        assert identity.startswith("yes") == (key not in NO_IDENTITY), key


def test_the_options_of_groups_are_there() -> None:
    files = [(group, OmegaConf.load(CONF / group / f"{name}.yaml")) for group, name in OPTIONS]
    shown = {key for row in rows("options.md", "## Options of the groups")[1:] for key in re.findall(r"`([\w.]+)`", row[0])}
    for key in shown:
        group, _, inner = key.partition(".")
        assert any(g == group and {inner.split(".")[0]} <= set(spec) for g, spec in files), key
    for group, spec in files:
        if group in ("images", "task", "protocol"):
            assert {f"{group}.{key}" for key in spec} - {f"{group}._target_", f"{group}.name"} <= shown


def test_the_table_of_readouts_is_that_of_the_code() -> None:
    head, *table = rows("encoders.md", "## Readouts")
    assert [h.strip("`") for h in head[1:]] == list(READOUTS)
    shown = {r[0].split("`")[1]: tuple(n for n, cell in zip(READOUTS, r[1:], strict=True) if cell == "yes") for r in table}
    assert shown == VALID


def test_the_table_of_protocols_is_that_of_the_code() -> None:
    head, *table = rows("statistics.md", "# Statistics")
    for row in table[:2]:
        spec = OmegaConf.load(CONF / "protocol" / f"{row[0].strip('`').partition('=')[2]}.yaml")
        for key, value in zip(head[1:], row[1:], strict=True):
            assert str(spec[key]) == value.replace(",", ""), (row[0], key)  # type: ignore[index]


def test_the_table_of_windows_is_that_of_the_code() -> None:
    from probing.decode import WINDOWS

    part = TEXT["data.md"].split("| window | centre |")[1].split("\n\n")[0]
    shown = {n: (int(c), int(w)) for n, c, w in re.findall(r"\| `(\w+)` \| (-?\d+) \| (\d+) \|", part)}
    assert shown == WINDOWS


@pytest.mark.parametrize("name", ["resnet18", "mine"])
def test_the_taps_of_the_example_encoders_are_there(name: str, mylab: list[str]) -> None:
    import torch

    from probing.embed import hooks
    from probing.readouts import tokens

    cfg = compose([*mylab, f"encoder={name}", "weights=random"])
    plan = plans_of(cfg)[0]
    with torch.device("meta"):  # shapes alone
        encoder = load_encoder(cfg, plan)
        with hooks(encoder, encoder.taps) as found:
            encoder.module(torch.empty(1, 3, 224, 224))
    assert [t.name for t in encoder.taps] == list(found)
    for tap in encoder.taps:
        tokens(tap, found[tap.name])


def test_the_examples_of_a_source_a_task_and_a_card_run(own: Path, mylab: list[str]) -> None:
    from probing.jobs.configure import task_of

    table = own / "knees.csv"
    table.write_text(
        "file,patient,view\n" + "".join(f"k{i}_{'LR'[i % 2]}.png,p{i // 2},{'AP' if i < 8 else 'PA'}\n" for i in range(12))
    )
    cfg = compose([*mylab, "data=knees", f"images.path={table}"])
    task = task_of(cfg, {})
    assert task.classes == ("left", "right") and len(task.samples) == 8 and len(set(task.groups)) == 4
    assert method("mylab.stamp", cfg.allow)(**cfg.images) == method("mylab.stamp", cfg.allow)(path=table)
