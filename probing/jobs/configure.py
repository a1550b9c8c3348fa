"""From a composed config to objects: encoders with their stores, tasks, probes, protocols, run folders."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from probing import collect, records, tables
from probing.types import ENCODER, PIXELS, READOUTS, TWIN, Sample, Tap, Task, digest

if TYPE_CHECKING:
    from probing.nested import Probe, Protocol
    from probing.store import Cell, Store
    from probing.types import Arrays, Encoder

log = logging.getLogger("probing")
PACKAGED = Path(__file__).parents[1] / "conf"
CONF = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[2] / "conf"  # in a wheel, else in a checkout
PROTOCOL = 1  # raised when a change of ours changes numbers; results of two protocols are never mixed
AFTERWARDS = ("where", "labels", "key", "group")  # of an image source's YAML: what is done with the images it gives
NO_IDENTITY = (
    "hydra",
    "device",
    "batch_size",
    "workers",
    "outputs",
    "store",
    "rerun",
    "allow",
    "check",
    "fetch",
)  # change no number
SHOWN = ("display", "licence", "gated", "cite", "checked", "tap", "floor", "taps")  # of an encoder's YAML: no row depends on them


@dataclass
class Plan:
    """What a run needs of one encoder: the row it fills, its YAML with all overrides, the cells to read."""

    role: str
    name: str
    settings: dict[str, Any]
    cells: list[Cell]
    spec: str
    store: Store | None = None


LEAST = {
    "batch_size": 1, "shards": 1, "shard": 0, "seed": 0, "limit": 1, "workers": 0,
    "protocol.folds": 2, "protocol.inner": 2, "protocol.repeats": 1, "protocol.permutations": 0,
}  # fmt: skip


def check_options(cfg: DictConfig) -> None:
    """Raise ValueError for a value that no job can work with, before anything is read or written."""
    for key, least in LEAST.items():
        value = OmegaConf.select(cfg, key)
        if (key, value) in (("limit", None), ("workers", "auto")):
            continue
        if type(value) is not int or not least <= value < 2**32:
            raise ValueError(f"{key}={value}: type a whole number, {least} or more")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(cfg.device)):
        raise ValueError(f"device={cfg.device}: type auto, cpu, cuda or cuda:1")
    if not isinstance(cfg.protocol.delta, (int, float)) or not 0 < cfg.protocol.delta < 1:
        raise ValueError(f"protocol.delta={cfg.protocol.delta}: type a number between 0 and 1")
    if cfg.input not in ("exact", "fast"):
        raise ValueError(f"input={cfg.input}: type exact or fast")
    if cfg.protocol.null not in ("ridge", "nested"):
        raise ValueError(f"protocol.null={cfg.protocol.null}: type ridge or nested")
    for key in ("outputs", "store", "weights", "name"):
        optional = key in ("weights", "name") and cfg[key] is None
        if not optional and (not isinstance(cfg[key], str) or not cfg[key]):
            raise ValueError(f"{key}={cfg[key]}: type a text; quotes keep a number a text: '{key}=\"{cfg[key]}\"'")
    for key in ("tap", "readout", "encoders", "check", "fetch"):
        if cfg[key] is not None and not isinstance(cfg[key], (str, ListConfig)):
            raise ValueError(f"{key}={cfg[key]}: type a name or a list such as {key}=[a,b]")


def plans_of(cfg: DictConfig) -> list[Plan]:
    """The encoder, its random twin and the pixel floor (floors and random encoders have no floors of their own)."""
    own: dict[str, Any] = OmegaConf.to_container(cfg.encoder, resolve=True)  # type: ignore[assignment]
    for key, value in (
        ("weights", cfg.weights),
        ("weights_prefix", cfg.weights_prefix),
        ("allow_pickle", cfg.allow_pickle or None),
    ):
        if value is not None:
            if "weights" not in own:
                raise ValueError(f"{key}={value}: encoder={own['name']} has no weights")
            own[key] = value
    if cfg.weights not in (None, "hub"):
        own["checked"] = "no"
    random = own.get("weights") == "random"
    if random:
        own["seed"] = cfg.seed
    plans = [_plan(cfg, ENCODER, name_of(cfg), own)]
    if cfg.floors and not own.get("floor") and not random and "weights" in own:
        twin = {k: v for k, v in own.items() if k not in ("weights_prefix", "allow_pickle")} | {
            "weights": "random",
            "seed": cfg.seed,
            "checked": "no",
        }
        plans.append(_plan(cfg, TWIN, f"{cfg.encoder.name}_random", twin))
    if cfg.floors and not own.get("floor"):
        plans.append(_plan(cfg, PIXELS, cfg.floor.name, OmegaConf.to_container(cfg.floor, resolve=True)))  # type: ignore[arg-type]
    return plans


def _plan(cfg: DictConfig, role: str, name: str, settings: dict[str, Any]) -> Plan:
    from probing import weights

    if cfg.input == "fast" and "image" in settings:
        settings["image"] = {**settings["image"], "input": "fast"}
    choice = settings.get("weights", "none")
    stamp: Any = "none" if choice == "none" else weights.stamp(choice, settings.get("source"))
    if "path" in settings:
        stat = tables.root_of(settings["path"], "encoder.path").stat()
        stamp = ["file", stat.st_size, stat.st_mtime_ns]
    permit(settings["_target_"], cfg.allow)  # before its package is looked for, which imports what lies around it
    hidden = (*SHOWN, "name", "weights", "source", "path")
    spec = digest({k: v for k, v in settings.items() if k not in hidden}, stamp, code_of(settings["_target_"]))
    cells = _cells(
        expand(settings["taps"]), settings["tap"], None if role == PIXELS else cfg.tap, None if role == PIXELS else cfg.readout
    )
    return Plan(role, name, settings, cells, spec)


def expand(taps: Mapping[str, Mapping[str, Any]]) -> list[Tap]:
    """The taps of an encoder's YAML: `block.{i}` with a count becomes one Tap each."""
    out = []
    for name, tap in taps.items():
        for i in range(tap.get("count", 1)):
            out.append(
                Tap(name.replace("{i}", str(i)), tap["path"].replace("{i}", str(i)), tap["layout"], tuple(tap.get("prefix", ())))
            )
    return out


def _cells(taps: Sequence[Tap], default: str, tap: Any, readout: Any) -> list[Cell]:
    """The cells that tap= and readout= ask for. tap=all takes every tap that has the readout."""
    from probing import readouts

    by_name = {t.name: t for t in taps}
    wanted = list(by_name) if tap == "all" else [default] if tap is None else [tap] if isinstance(tap, str) else list(tap)
    cells = []
    for name in wanted:
        if name not in by_name:
            raise ValueError(f"tap={name}: there is no such tap.{near(name, by_name)} There are: {', '.join(by_name)}")
        found = by_name[name]
        asked = (
            ["native" if found.layout == "vector" else "mean"]
            if readout is None
            else [readout]
            if isinstance(readout, str)
            else list(readout)
        )
        for r in asked:
            if tap == "all" and r in READOUTS and r not in readouts.valid(found):
                continue
            readouts.check(found, r)
            cells.append((found, r))
    if not cells:
        raise ValueError(f"readout={readout}: no tap of this encoder has it")
    return cells


def open_store(cfg: DictConfig, plan: Plan) -> bool:
    """Whether the plan's store is known from before, so that neither weights nor torch are needed to read it."""
    from probing import store, weights

    plan.store = store.find(Path(cfg.store), plan.name, plan.spec, store.versions())
    choice = plan.settings.get("weights", "random")
    if plan.store is None and choice != "random":
        try:
            weights.find(choice, plan.settings.get("source"))
        except FileNotFoundError:
            plan.store = store.find(Path(cfg.store), plan.name, plan.spec, None)
            if plan.store is not None:
                log.warning(
                    f"{plan.name}: its weights are not on this machine; reading {plan.store.folder.name}, written under other library versions"
                )
    return plan.store is not None


def load_encoder(cfg: DictConfig, plan: Plan) -> Encoder | Arrays:
    call = {k: v for k, v in plan.settings.items() if k not in SHOWN}
    target = call.pop("_target_")
    encoder = method(target, cfg.allow)(**{**call, "name": plan.name, "taps": tuple(expand(plan.settings["taps"]))})
    code = code_of(target)
    return replace(encoder, fingerprint=digest(encoder.fingerprint, code)[:16]) if code else encoder


def code_of(target: str) -> str | None:
    """Digest of the file that holds a loader which is not ours: when it changes, its rows are embedded anew."""
    if target.startswith("probing."):
        return None
    spec = importlib.util.find_spec(target.rpartition(".")[0])
    return digest(Path(spec.origin).read_text()) if spec and spec.has_location and spec.origin else None


def with_pictures(plans: Sequence[Plan], task: Task) -> list[Plan]:
    """The plans that can be asked about the samples of a task: rows without pictures have no floor from pictures."""
    if all(v.decode[0] != "none" for s in task.samples for v in s.views):
        return list(plans)
    if any("path" not in p.settings for p in plans if p.role == ENCODER):
        raise ValueError(
            f"encoder={plans[0].name} needs pictures, and images.image=null says that there are none. Type encoder=file"
        )
    log.warning("there are no pictures, so there is no pixel floor")
    return [p for p in plans if p.role == ENCODER]


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config that a command line with these overrides has, outside of one."""
    import hydra

    with hydra.initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
        return hydra.compose("config", list(overrides))


def each_encoder(names: str | Sequence[str], overrides: Sequence[str]) -> list[DictConfig]:
    """The config of this run, once per name of an encoder."""
    import hydra

    kept = [o for o in overrides if not o.startswith(("encoder=", "encoders=", "check=", "fetch="))]
    return [hydra.compose("config", [*kept, f"encoder={name}"]) for name in ([names] if isinstance(names, str) else names)]


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Every YAML of a config group, along Hydra's search path: option -> content."""
    from hydra.core.global_hydra import GlobalHydra

    found: dict[str, dict[str, Any]] = {}
    for entry in GlobalHydra.instance().config_loader().get_search_path().get_path():
        for path in sorted(Path(entry.path.removeprefix("file://")).glob(f"{name}/*.yaml")):
            found.setdefault(path.stem, OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    return found


def task_of(cfg: DictConfig, left: dict[str, str]) -> Task:
    """The labelled samples that images, images.where, limit and task stand for. What a source can not read goes to
    `left`, name -> reason."""
    samples = _call(cfg.images, cfg.allow, drop=AFTERWARDS, memo=Path(cfg.store), left=left)
    asked: dict[str, Any] = OmegaConf.to_container(cfg.images, resolve=True)  # type: ignore[assignment]
    if asked.get("labels"):
        samples = collect.join(samples, asked["labels"], asked.get("key"))
    samples = keep(samples, asked.get("where"))
    if "group" in asked:
        samples = collect.grouped(samples, asked["group"])
    return _call(cfg.task, cfg.allow, spread(samples, cfg.limit, cfg.seed))


def keep(samples: Sequence[Sample], where: Mapping[str, Any] | None) -> list[Sample]:
    """The samples whose columns have these values: {plane: axial, volume: [symmetric, asymmetric]}."""
    columns = sorted({c for s in samples for c in s.meta})
    kept = list(samples)
    for column, value in (where or {}).items():
        if column not in columns:
            raise ValueError(f"images.where: there is no column {column}.{near(column, columns)} There are: {', '.join(columns)}")
        values = {str(v) for v in (value if isinstance(value, Sequence) and not isinstance(value, str) else [value])}
        there = {str(s.meta.get(column)) for s in kept}
        kept = [s for s in kept if str(s.meta.get(column)) in values]
        if not kept:
            raise ValueError(
                f"images.where: no image has {column} = {' or '.join(sorted(values))}. There are: {', '.join(sorted(there)[:10])}"
            )
    return kept


def spread(samples: Sequence[Sample], limit: int | None, seed: int) -> list[Sample]:
    """At most `limit` source images, taken from the groups in turn."""
    if limit is None or limit >= len(samples):
        return list(samples)
    if limit < 1:
        raise ValueError(f"limit={limit}: type a number of images, at least 1")
    import numpy as np

    rng = np.random.default_rng(seed)
    turns: dict[str, int] = {}
    ranked = []
    for i in rng.permutation(len(samples)):
        turn = turns[samples[i].group] = turns.get(samples[i].group, -1) + 1
        ranked.append((turn, int(i)))  # the groups' first images come first
    chosen = {i for _, i in sorted(ranked, key=lambda r: r[0])[:limit]}
    return [s for i, s in enumerate(samples) if i in chosen]


def probe_of(cfg: DictConfig, task: Task) -> Probe:
    from probing.nested import Probe

    if cfg.probe.scaling not in ("none", "global", "feature"):
        raise ValueError(f"probe.scaling={cfg.probe.scaling}: type none, global or feature")
    spec = cfg.probe[task.kind]
    return Probe(_call(spec.estimator, cfg.allow), OmegaConf.to_container(spec.grid), cfg.probe.scaling)  # type: ignore[arg-type]


def protocol_of(cfg: DictConfig, task: Task) -> Protocol:
    """The protocol, marked as limited where limit= left fewer groups than folds, or a class in one group alone."""
    from probing.nested import Protocol

    groups = len(set(task.groups))
    pairs = {(s.label, s.group) for s in task.samples} if task.kind == "classes" else set()
    starved = groups < cfg.protocol.folds or any(sum(c == name for c, _ in pairs) < 2 for name in task.classes)
    limited = cfg.limit is not None and len(set(task.sources)) >= cfg.limit and starved
    settings = {**cfg.protocol, "folds": max(2, min(groups, cfg.protocol.folds))} if limited else dict(cfg.protocol)
    return Protocol(**settings, number=PROTOCOL, seed=cfg.seed, limited=limited)


def _call(spec: DictConfig, allow: Sequence[str], *args: Any, drop: Sequence[str] = (), **offered: Any) -> Any:
    """Call the function that `_target_` names with the rest of the YAML, and with those offers that it takes."""
    call: dict[str, Any] = OmegaConf.to_container(spec, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    function = method(call.pop("_target_"), allow)
    taken = {k: v for k, v in offered.items() if k in inspect.signature(function).parameters}
    return function(*args, **{k: v for k, v in call.items() if k not in drop}, **taken)


def permit(target: str, allow: Sequence[str]) -> None:
    """Raise ValueError unless a YAML may name this function."""
    if target.partition(".")[0] not in ("probing", "sklearn", *allow):
        raise ValueError(
            f"_target_: {target} is neither ours nor scikit-learn's. Type allow=[{target.partition('.')[0]}] if you trust it"
        )


def method(target: str, allow: Sequence[str]) -> Any:
    from hydra.utils import get_method

    permit(target, allow)
    found = get_method(target)
    home = getattr(found, "__module__", None) or "?"
    if home.partition(".")[0] not in ("probing", "sklearn", *allow):  # reached through one of our modules
        raise ValueError(f"_target_: {target} is of {home}, neither ours nor scikit-learn's")
    return found


def workers_of(cfg: DictConfig) -> int:
    import torch

    from probing.embed import device_of

    if cfg.workers != "auto":
        return int(cfg.workers)
    if multiprocessing.current_process().name != "MainProcess":  # a launcher's worker can not start workers
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8) if device_of(cfg.device).type == "cuda" else max(cores - torch.get_num_threads(), 0)


def name_of(cfg: DictConfig) -> str:
    random = (
        cfg.weights == "random" and cfg.encoder.get("weights", "random") != "random"
    )  # what is random by its YAML says so itself
    name = cfg.name or cfg.encoder.name + ("_random" if random else "")
    if not re.fullmatch(r"\w[\w.+-]*", str(name)):
        raise ValueError(f"name={name}: a name is made of letters, digits, _ . + and -")
    return str(name)


def run_of(cfg: DictConfig, plans: Sequence[Plan], choices: Sequence[str]) -> records.Run:
    """The run folder: a digest of the config, the stamp of the data and the specs of the encoders."""
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    config = {k: v for k, v in config.items() if k not in (*NO_IDENTITY, "encoder", "floor", "encoders", "weights")}
    config["images"] = {k: v for k, v in config["images"].items() if k not in ("path", "root", "labels")}
    call: dict[str, Any] = OmegaConf.to_container(cfg.images, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    stamp = method(call.pop("_target_").rpartition(".")[0] + ".stamp", cfg.allow)(**call)
    stamp += tables.stamp_of(call.get("labels"))
    cells = [[p.role, p.name, p.spec, [[t.name, t.definition, r] for t, r in p.cells]] for p in plans]
    return records.Run.of(
        cfg.outputs, cfg.job.name, choices, {"config": config, "data": stamp, "encoders": cells, "protocol": PROTOCOL}
    )


def near(word: str, words: Any) -> str:
    """A did-you-mean, or nothing."""
    close = difflib.get_close_matches(str(word), [str(w) for w in words], 1)
    return f" Did you mean {close[0]}?" if close else ""
