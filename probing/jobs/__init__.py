"""The recipes, one screen each: what `python probe.py job=...` does, from a composed config to a run folder."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from probing import records
from probing.jobs.configure import (
    Plan,
    check_options,
    each_encoder,
    load_encoder,
    method,
    name_of,
    open_store,
    options_of,
    plans_of,
    probe_of,
    protocol_of,
    run_of,
    task_of,
    with_pictures,
    workers_of,
)
from probing.jobs.show import about_run, cell_of, machine, predictions_of, print_result, roots_of, rows_of, table
from probing.types import ENCODER, PIXELS, Arrays, Sample, Task, View

if TYPE_CHECKING:
    import numpy as np

    from probing.store import Cell
    from probing.types import Encoder

log = logging.getLogger("probing")


@dataclass(frozen=True)
class Launch:
    """What was typed: the overrides, the config groups that were left to their defaults, and --config-dir."""

    overrides: tuple[str, ...]
    defaults: tuple[str, ...] = ()
    config_dir: str | None = None

    @property
    def command(self) -> str:
        return shlex.join(
            ["python", "probe.py", *(["--config-dir", self.config_dir] if self.config_dir else []), *self.overrides]
        )


def run(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """Call the recipe that `job` names. Returns what the closing table shows."""
    check_options(cfg)
    recipe = method(cfg.job._target_, cfg.allow)
    started = time.monotonic()
    outcome = recipe(cfg, launch)
    return {"job": cfg.job.name, "seconds": round(time.monotonic() - started, 1), **outcome}


def probe(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """Embed what is missing, probe every cell under the protocol, write and print the result."""
    if cfg.encoders:
        raise ValueError(f"encoders= belongs to job=embed. To probe several type -m encoder={','.join(cfg.encoders)}")
    if cfg.shards != 1:
        raise ValueError("shards= belongs to job=embed: a probe needs every sample. Type job=embed, then job=probe without it")
    plans = plans_of(cfg)
    this = run_of(cfg, plans, [name_of(cfg), cfg.task.name, cfg.images.name])
    shown = {"encoder": name_of(cfg), "task": cfg.task.name, "images": cfg.images.name, "folder": str(this.folder)}
    if (result := this.finished()) and not cfg.rerun:
        print_result(result, this, launch.command, already=True)
        return {**shown, "state": "already done", "says": result["summary"]}
    with _under_way(this, roots_of(cfg, launch)):
        result, arrays, tables = _probe(cfg, plans, launch)
    this.save(result, arrays, tables)
    print_result(result, this, launch.command, already=False)
    return {**shown, "state": "done", "says": result["summary"]}


def _probe(cfg: DictConfig, plans: Sequence[Plan], launch: Launch) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    from tqdm import tqdm

    from probing import evaluate

    started = time.monotonic()
    left: dict[str, str] = {}
    task = task_of(cfg, left)
    estimator = probe_of(cfg, task)  # what can be refused is refused before the long work
    evaluate.check(task, protocol_of(cfg, task))
    plans = with_pictures(plans, task)
    keys, unread = _embed(cfg, plans, task.samples)
    task = _joined(_without(task, unread), keys)
    skipped = {name: f"{name}: {reason}" for name, reason in left.items()} | unread
    protocol = protocol_of(cfg, task)
    cells: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for plan in plans:
        for tap, readout in plan.cells:
            values = _values(plan, task, keys, (tap, readout))
            for cell in [(tap.name, readout)] if plan.role != PIXELS else list(cells):
                cells.setdefault(cell, {})[plan.role] = values
    with tqdm(total=evaluate.evaluations(cells, protocol), desc="probe", unit="fold", mininterval=0.5) as bar:
        found = evaluate.evaluate(task, cells, estimator, protocol, bar.update)
    about = about_run(cfg, task, plans, keys.values(), skipped, launch, time.monotonic() - started)
    result = {
        **about,
        "summary": " ".join(r.sentence for r in found),
        "cells": [cell_of(r) for r in found],
        "rows": rows_of(about, found),
    }
    arrays = {f"{kind} {r.tap} {r.readout}".strip(): getattr(r, kind) for r in found for kind in ("score", "fold", "null")}
    return result, arrays, {"predictions": predictions_of(task, found)}


def embed(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """The GPU part alone: the task's views through one or several encoders and their floors."""
    if not 0 <= cfg.shard < cfg.shards:
        raise ValueError(f"shard={cfg.shard} of shards={cfg.shards}: type shard=0 to shard={cfg.shards - 1}")
    configs = each_encoder(cfg.encoders, launch.overrides) if cfg.encoders else [cfg]
    plans = list({(p.name, p.spec): p for c in configs for p in plans_of(c)}.values())
    names = [p.name for p in plans if p.role == ENCODER]
    this = run_of(cfg, plans, ["+".join(names) if len(names) < 4 else f"{len(names)}encoders", cfg.task.name, cfg.images.name])
    shown = {"encoder": ", ".join(names), "task": cfg.task.name, "images": cfg.images.name, "folder": str(this.folder)}
    if (result := this.finished()) and not cfg.rerun and all((Path(cfg.store) / s).exists() for s in result["stores"]):
        log.info(f"already done: {result['summary']}")
        return {**shown, "state": "already done", "says": result["summary"]}
    with _under_way(this, roots_of(cfg, launch)):
        started = time.monotonic()
        left: dict[str, str] = {}
        task = task_of(cfg, left)
        plans = with_pictures(plans, task)
        several = sorted(task.samples, key=lambda s: (s.views[0].name, s.views[0].frame or ("", 0), s.id))
        share = several[len(several) * cfg.shard // cfg.shards : len(several) * (cfg.shard + 1) // cfg.shards]
        keys, unread = _embed(cfg, plans, share)
        skipped = {name: f"{name}: {reason}" for name, reason in left.items()} | unread
    stores = sorted(p.store.folder.name for p in plans if p.store)
    summary = f"{len(keys):,} views in {', '.join(stores)}" + (f"; {len(skipped)} files could not be read" if skipped else "")
    this.save(
        {
            **about_run(cfg, task, plans, keys.values(), skipped, launch, time.monotonic() - started),
            "summary": summary,
            "stores": stores,
        },
        {},
        {},
    )
    log.info(summary)
    return {**shown, "state": "done", "says": summary}


def encoders(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """Print the table of the encoders there are, and what this machine has; or check or fetch some of them."""
    if cfg.check:
        return _check(cfg, launch)
    if cfg.fetch:
        return _fetch(cfg, launch)
    rows = []
    for name, spec in options_of("encoder").items():
        taps = ", ".join(name.replace("{i}", f"0-{tap.get('count', 1) - 1}") for name, tap in spec["taps"].items())
        rows.append(
            {
                "encoder": name,
                "is": spec.get("display", ""),
                "weights": _weights_here(spec),
                "taps": taps,
                "licence": spec.get("licence", ""),
                "checked": spec.get("checked", ""),
            }
        )
    log.info(table(rows))
    log.info("\nencoder=NAME chooses one; weights=random or weights=PATH gives it other weights\n")
    log.info(table([{"this machine": k, "has": v} for k, v in machine().items()]))
    return {"state": "done", "says": f"{len(rows)} encoders"}


def _weights_here(spec: Mapping[str, Any]) -> str:
    from probing import weights

    choice = spec.get("weights", "none")
    if choice in ("none", "random"):
        return str(choice)
    try:
        return "here" if weights.find(choice, spec.get("source"), fetch=False).exists() else "not here"
    except FileNotFoundError as error:
        return _first_line(error)


def _check(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """Hold encoders to the contract."""
    from probing import contract

    rows = []
    for one in each_encoder(cfg.check, launch.overrides):
        plan = plans_of(one)[0]
        encoder, again = (load_encoder(one, plan) for _ in range(2))
        if isinstance(encoder, Arrays) or isinstance(again, Arrays):
            raise ValueError(f"check={encoder.name}: arrays from a file are no model that can be checked")
        rows += contract.check(encoder, again, cfg.device)
    log.info(table(rows))
    broken = [f"{r['encoder']}: {r['found']}" for r in rows if r["holds"] == "no"]
    if broken:
        raise ValueError(f"{len(broken)} of {len(rows)} promises are broken. {'; '.join(broken)}")
    return {"state": "done", "says": f"all {len(rows)} promises hold"}


def _fetch(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """Show what the weights of encoders weigh, then download those that are not here."""
    from probing import weights

    specs = {one.encoder.name: plans_of(one)[0].settings for one in each_encoder(cfg.fetch, launch.overrides)}
    rows, faults = [], []
    for name, spec in specs.items():
        state = _weights_here(spec)
        rows.append({"encoder": name, "weights": state, **weights.describe(spec.get("source")), "gated": spec.get("gated", "")})
    log.info(table(rows))
    for name, spec in specs.items():
        if spec.get("weights") == "hub":
            try:
                weights.find("hub", spec.get("source"))
            except FileNotFoundError as error:
                faults.append(f"{name}: {error}")
    if faults:
        raise ValueError("; ".join(faults))
    return {"state": "done", "says": f"{len(specs)} encoders are here"}


def status(cfg: DictConfig, launch: Launch) -> dict[str, Any]:
    """Print what has run under outputs=, and write results.csv."""
    rows = records.status(cfg.outputs)
    if not rows:
        log.info(f"nothing has run under outputs={cfg.outputs}. Type python probe.py")
        return {"state": "not applicable", "says": "nothing has run"}
    log.info(table(rows))
    if path := records.write_results(cfg.outputs):
        log.info(f"\nevery estimate: {path}")
    states = [r["state"] for r in rows]
    return {"state": "done", "says": ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))}


def embeddings(cfg: DictConfig) -> tuple[list[str], np.ndarray]:
    """The ids [N] and embeddings [N,D] of one cell, for `probing.embeddings`."""
    task, (plan,) = task_of(cfg, {}), plans_of(cfg)
    if len(plan.cells) > 1:
        raise ValueError(f"{len(plan.cells)} cells were asked for; name one tap and one readout")
    keys, skipped = _embed(cfg, [plan], task.samples)
    task = _without(task, skipped)
    return [s.id for s in task.samples], _values(plan, task, keys, plan.cells[0])


def load(cfg: DictConfig) -> Encoder:
    """The encoder of a config, for `probing.load`."""
    encoder = load_encoder(cfg, plans_of(cfg)[0])
    if isinstance(encoder, Arrays):
        raise ValueError(f"encoder={encoder.name}: arrays from a file are no model that can be loaded")
    return encoder


def _embed(cfg: DictConfig, plans: Sequence[Plan], samples: Sequence[Sample]) -> tuple[dict[View, str], dict[str, str]]:
    """Fill the stores of all plans. Returns the key of each view, and its name -> reason for what can not be read."""
    from probing.picture import digests

    root = Path(cfg.store)
    views = [v for s in samples for v in s.views]
    found, unread = digests(root / "digests", views)
    gone = {v.name: f"{v.name}: {reason}" for v, reason in unread.items()}
    keys = {v: v.key(d) for v, d in found.items()}
    by_key = {k: v for v, k in keys.items()}
    lacking = [p for p in plans if "path" in p.settings or not open_store(cfg, p) or p.store.missing(list(by_key), p.cells)[0]]  # type: ignore[union-attr]
    if lacking:
        from probing import embed as pass_through

        requests: list[Any] = []
        failed: dict[str, str] = {}
        for plan in lacking:
            encoder = load_encoder(cfg, plan)
            if isinstance(encoder, Arrays):
                ids: dict[str, str] = {}
                for key, own in ((keys[v], s.id) for s in samples for v in s.views if v in keys):
                    if ids.setdefault(key, own) != own:
                        raise ValueError(
                            f"encoder={encoder.name}: {ids[key]} and {own} are one picture, of which a file can have one row"
                        )
                plan.store, missed = pass_through.copy(root, encoder, plan.spec, plan.cells, ids)
                failed |= missed
            else:
                plan.store = pass_through.settle(root, encoder, plan.spec, cfg.device, cfg.batch_size)
                requests.append(pass_through.Request(encoder, plan.cells, plan.store))
        failed |= pass_through.embed(requests, by_key, cfg.device, workers_of(cfg))
        gone |= {v.name: f"{v.name}: {failed[k].removeprefix(f'{by_key[k].name}: ')}" for v, k in keys.items() if k in failed}
    for reason in gone.values():
        log.warning(f"left out: {reason}")
    return {v: k for v, k in keys.items() if v.name not in gone}, gone


def _without(task: Task, skipped: Mapping[str, str]) -> Task:
    if not skipped:
        return task
    left = tuple(s for s in task.samples if not any(v.name in skipped for v in s.views))
    if not left:
        raise ValueError(f"none of the {len(task.samples):,} pictures can be read. The first: {next(iter(skipped.values()))}")
    present = {s.label for s in left}
    for lost in [c for c in task.classes if c not in present]:
        log.warning(f"no picture of class {lost!r} can be read: {len(present)} classes are left")
    return replace(task, samples=left, classes=tuple(c for c in task.classes if c in present))


def _joined(task: Task, keys: Mapping[View, str]) -> Task:
    """Groups that hold one and the same picture become one group, or its copies would stand on both sides of a fold."""
    from probing.collect import joined

    number = joined([[s.group, *(keys[v] for v in s.views)] for s in task.samples])
    names = [task.samples[n].group for n in number]
    moved = sorted({s.group for s, name in zip(task.samples, names, strict=True) if s.group != name})
    if not moved:
        return task
    log.warning(f"{len(moved)} groups hold a picture of another group and are joined with it: {', '.join(moved[:5])}")
    return replace(task, samples=tuple(replace(s, group=g) for s, g in zip(task.samples, names, strict=True)))


def _values(plan: Plan, task: Task, keys: Mapping[View, str], cell: Cell) -> np.ndarray:
    """[N,D] of a cell, in the order of the task's samples, checked to be finite."""
    from probing.types import Embeddings

    assert plan.store is not None
    if several := next((s.id for s in task.samples if len(s.views) > 1), None):
        raise ValueError(f"sample {several} has more than one view, which a probe of single pictures can not take")
    wanted = tuple(keys[s.views[0]] for s in task.samples)
    values = plan.store.read(wanted, cell)
    return Embeddings(plan.name, plan.store.card()["fingerprint"], cell[0].name, cell[1], wanted, values).values


@contextmanager
def _under_way(this: records.Run, roots: Mapping[str, str]) -> Iterator[None]:
    """Say in the run folder that this process is at it, and why it ended if it ends badly."""
    this.begin(roots)
    try:
        yield
    except BaseException as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else _first_line(error)
        for name, path in roots.items():
            reason = reason.replace(path, f"<root:{name}>")
        this.fail(reason)
        raise


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
