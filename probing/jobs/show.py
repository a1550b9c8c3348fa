"""What a result says: in result.json, predictions.csv and results.csv, and on the terminal."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from probing import records
from probing.jobs.configure import PROTOCOL, Plan
from probing.types import ENCODER, TWIN, ProbeResult, Task, digest

if TYPE_CHECKING:
    from probing.jobs import Launch

log = logging.getLogger("probing")
SHOWN_FILES = 20  # of those that were left out


def about_run(
    cfg: DictConfig,
    task: Task,
    plans: Sequence[Plan],
    keys: Iterable[str],
    skipped: Mapping[str, str],
    launch: Launch,
    seconds: float,
) -> dict[str, Any]:
    """What every result.json says of itself. Roots are written by name, never as paths."""
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    config = {k: v for k, v in config.items() if k not in ("hydra", "outputs", "store")}
    secret = {path: f"<root:{name}>" for name, path in roots_of(cfg, launch).items()}
    packages = ("torch", "timm", "scikit-learn", "numpy", "pillow", "h5py", "hydra-core", "vision-probing")
    text = _replace([config, launch.command], secret)
    return {
        "config": text[0],
        "command": text[1],
        "defaults": list(launch.defaults),
        "task": {"name": task.name, "kind": task.kind, "classes": list(task.classes), "unit": task.unit},
        "samples": len(task.samples),
        "images": len({s.source for s in task.samples}),
        "groups": len({s.group for s in task.samples}),
        "skipped": dict(skipped),
        "content": digest(sorted(keys)),
        "encoders": {
            p.role: {
                "name": p.name,
                "fingerprint": p.store.card()["fingerprint"] if p.store else None,
                "checked": str(p.settings.get("checked")),
            }
            for p in plans
        },
        "versions": {p: _version(p) for p in packages} | {"python": platform.python_version()},
        "commit": _commit(),
        "protocol": PROTOCOL,
        "wall_seconds": round(seconds, 1),
    }


def roots_of(cfg: DictConfig, launch: Launch) -> dict[str, str]:
    """The folders and files of this machine that a run was pointed to, by name; the longest path first."""
    searched = next((o.partition("=")[2].strip("[]") for o in launch.overrides if o.startswith("hydra.searchpath=")), "")
    named = {
        "images": cfg.images.get("path"),
        "images-root": cfg.images.get("root"),
        "labels": cfg.images.get("labels"),
        "encoder": cfg.encoder.get("path"),
        "searchpath": searched.replace("file://", ""),
        "weights": cfg.weights,
        "store": cfg.store,
        "outputs": cfg.outputs,
        "config-dir": launch.config_dir,
    }
    paths = {name: str(path) for name, path in named.items() if path and os.sep in str(path)}
    return dict(sorted(paths.items(), key=lambda item: -len(item[1])))


def _replace(value: Any, secret: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {k: _replace(v, secret) for k, v in value.items()}
    if isinstance(value, list):
        return [_replace(v, secret) for v in value]
    if isinstance(value, str):
        for path, name in secret.items():
            value = value.replace(path, name)
    return value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return None


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, if it does."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, str]:
    """What this machine has: torch, its CUDA, where the hub's cache lies and what is free there."""
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    cache = Path(HF_HUB_CACHE)
    place = next(p for p in (cache, *cache.parents) if p.exists())
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "torch": torch.__version__,
        "CUDA": f"{torch.version.cuda}: {', '.join(devices)}" if devices else "none that torch can use",
        "CPU threads": str(torch.get_num_threads()),
        "hub cache (HF_HOME)": f"{cache}{', offline' if HF_HUB_OFFLINE else ''}",
        "free there": f"{shutil.disk_usage(place).free / 1e9:.0f} GB",
    }


def cell_of(r: ProbeResult) -> dict[str, Any]:
    estimates = {row: {m: vars(e) for m, e in by.items()} for row, by in r.estimates.items()}
    return {
        "tap": r.tap,
        "readout": r.readout,
        "p": r.p,
        "finding": r.finding,
        "tags": list(r.tags),
        "sentence": r.sentence,
        "notes": list(r.notes),
        "chosen": list(r.chosen),
        "estimates": estimates,
    }


def rows_of(about: Mapping[str, Any], found: Sequence[ProbeResult]) -> list[dict[str, Any]]:
    """The tidy rows of results.csv: one per estimate of the encoder, its floors beside it."""
    own = about["encoders"][ENCODER]
    rows = []
    for r in found:
        for metric, e in r.estimates[ENCODER].items():
            floors = {f"floor_{row.replace(' ', '_')}": by[metric].value for row, by in r.estimates.items() if row != ENCODER}
            rows.append(
                {
                    "encoder": own["name"],
                    "fingerprint": own["fingerprint"],
                    "tap": r.tap,
                    "readout": r.readout,
                    "task": about["task"]["name"],
                    "data": about["config"]["images"]["name"],
                }
                | {
                    "where": str(about["config"]["images"].get("where") or ""),
                    "n": e.n,
                    "groups": e.groups,
                    "metric": metric,
                    "value": e.value,
                    "low": e.low,
                    "high": e.high,
                }
                | {"p": r.p, "finding": r.finding, "tags": "; ".join(r.tags)}
                | floors
                | {
                    "seed": about["config"]["seed"],
                    "limit": about["config"]["limit"],
                    "protocol": f"{about['config']['protocol']['name']} {about['protocol']}",
                }
                | {"versions": " ".join(f"{k}={v}" for k, v in about["versions"].items()), "checked": own["checked"]}
            )
    return rows


def predictions_of(task: Task, found: Sequence[ProbeResult]) -> list[list[Any]]:
    """predictions.csv: one line per sample, repeat and cell, out of fold."""
    names = [f"p_{c}" for c in task.classes] or ["predicted"]
    rows: list[list[Any]] = [["tap", "readout", "repeat", "id", "group", "label", "fold", *names]]
    for r in found:
        for repeat in range(len(r.score)):
            for s, score, fold in zip(task.samples, r.score[repeat], r.fold[repeat], strict=True):
                rows.append([r.tap, r.readout, repeat, s.id, s.group, s.label, int(fold), *(f"{x:.6g}" for x in score)])
    return rows


def print_result(result: Mapping[str, Any], this: records.Run, command: str, already: bool) -> None:
    task, cfg = result["task"], result["config"]
    note = lambda key: " (default)" if key in result["defaults"] else ""  # noqa: E731
    kind = (
        f"{len(task['classes'])} classes"
        if task["kind"] == "classes"
        else f"a number{', ' + task['unit'] if task['unit'] else ''}"
    )
    log.info(
        f"\nencoder={result['encoders'][ENCODER]['name']}{note('encoder')} task={task['name']}{note('task')} images={cfg['images']['name']}{note('images')}"
        + (f" weights={cfg['weights']}" if cfg["weights"] else "")
    )
    log.info(
        f"{result['samples']:,} samples of {result['images']:,} images in {result['groups']} groups; {kind}; protocol {cfg['protocol']['name']}{note('protocol')}\n"
    )
    rows = []
    for cell in result["cells"]:
        for row, by in cell["estimates"].items():
            shown = {
                "tap": f"{cell['tap']} {cell['readout']}".strip(),
                "": result["encoders"].get(row, {}).get("name", row) if row != TWIN else row,
            }
            rows.append(shown | {m: f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for m, e in by.items()})
    guess = {"balanced accuracy": f"{1 / len(task['classes']):.3f}"} if task["classes"] else {"R2": "0.000"}
    rows.append({"": "chance", **guess})
    if len(result["cells"]) == 1:
        rows = [{k: v for k, v in r.items() if k != "tap"} for r in rows]
    log.info(table(rows))
    for cell in result["cells"]:
        log.info(f"\n{cell['sentence']}" + (f" ({'; '.join(cell['notes'])})" if cell["notes"] else ""))
    if result["skipped"]:
        reasons = list(result["skipped"].values())
        more = [f"and {len(reasons) - SHOWN_FILES} more, in result.json"] if len(reasons) > SHOWN_FILES else []
        log.info(f"\nleft out, {len(reasons)} files:\n  " + "\n  ".join([*reasons[:SHOWN_FILES], *more]))
    log.info(f"\n{'already done: ' if already else ''}{this.folder}\nagain: {command}")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    from tabulate import tabulate

    columns = list(dict.fromkeys(k for r in rows for k in r))
    return tabulate([[r.get(c, "") for c in columns] for r in rows], columns, disable_numparse=True)
