"""Results to and from `outputs/`: arrays first, result.json last. What says "done" is result.json itself.

outputs/<job>/<choices>-<8 hex>/   result.json  predictions.csv  arrays.npz
    status.json while it runs or when it failed; roots.local.json: paths of this machine, not to be passed on
"""

from __future__ import annotations

import csv
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probing.files import read_json, sweep, whole, write_json
from probing.types import digest

if TYPE_CHECKING:
    import numpy as np
    import pandas


log = logging.getLogger("probing")


@dataclass(frozen=True)
class Run:
    """A run folder. Its name ends in a digest of all that its numbers depend on, so a run finds its own folder."""

    folder: Path
    identity: str

    @classmethod
    def of(cls, outputs: str, job: str, choices: Sequence[str], identity: Mapping[str, Any]) -> Run:
        mark = digest(identity)
        return cls(Path(outputs) / job / f"{'-'.join(_plain(c) for c in choices)}-{mark[:8]}", mark)

    def finished(self) -> dict[str, Any] | None:
        """The stored result, if this very run has one."""
        path = self.folder / "result.json"
        if not path.exists():
            return None
        result = read_json(path, "identity")
        if result["identity"] != self.identity:
            raise ValueError(f"{self.folder} holds another run with the same first eight hex digits. Move it away")
        return result

    def begin(self, roots: Mapping[str, str]) -> None:
        """Say that this process is at it, for job=status, and which paths of this machine the names of roots stand
        for. Nothing depends on either."""
        sweep(self.folder)
        write_json(self.folder / "roots.local.json", roots)
        where = {"host": socket.gethostname(), "pid": os.getpid(), "slurm": os.environ.get("SLURM_JOB_ID"), "time": time.time()}
        write_json(self.folder / "status.json", {"state": "running", **where})

    def fail(self, reason: str) -> None:
        write_json(self.folder / "status.json", {"state": "failed", "reason": reason, "time": time.time()})

    def save(
        self, result: Mapping[str, Any], arrays: Mapping[str, np.ndarray], tables: Mapping[str, Iterable[Sequence[Any]]]
    ) -> None:
        """Arrays and tables (name -> rows, the header first), then result.json."""
        if arrays:
            import numpy as np

            with whole(self.folder / "arrays.npz") as temporary:
                np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]
        for name, rows in tables.items():
            with (
                whole(self.folder / f"{name}.csv") as temporary,
                open(temporary, "w", newline="", encoding="utf-8", errors="surrogateescape") as file,
            ):
                csv.writer(file, lineterminator="\n").writerows(rows)
        write_json(self.folder / "result.json", {**result, "identity": self.identity})
        (self.folder / "status.json").unlink(missing_ok=True)


def _plain(choice: Any) -> str:
    """A choice as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", str(choice)).strip(".") or "_"


def status(outputs: str) -> list[dict[str, Any]]:
    """One row per run folder: job, run, state (done, running, interrupted, failed) and the reason or finding."""
    rows = []
    for folder in sorted(p for p in Path(outputs).glob("*/*") if (p / "result.json").exists() or (p / "status.json").exists()):
        row = {"job": folder.parent.name, "run": folder.name}
        try:
            rows.append(row | _state(folder))
        except ValueError as error:
            rows.append(row | {"state": "damaged", "says": str(error)})
    return rows


def _state(folder: Path) -> dict[str, Any]:
    if (folder / "result.json").exists():
        return {"state": "done", "says": read_json(folder / "result.json", "identity").get("summary", "")}
    found = read_json(folder / "status.json", "state")
    state = found["state"]
    if state == "running" and found.get("host") == socket.gethostname() and not _alive(found.get("pid", 0)):
        state = "interrupted"
    at = f"pid {found.get('pid')} on {found.get('host')}" + (f", Slurm job {found['slurm']}" if found.get("slurm") else "")
    return {"state": state, "says": found.get("reason") or at}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def results(outputs: str | Path) -> pandas.DataFrame:
    """One tidy row per estimate of every finished run under `outputs`."""
    import pandas

    rows = []
    for path in sorted(Path(outputs).glob("*/*/result.json")):
        try:
            rows += read_json(path, "identity").get("rows", [])
        except ValueError as error:
            log.warning(f"left out: {error}")
    return pandas.DataFrame(rows)


def write_results(outputs: str) -> Path | None:
    """results.csv in `outputs`, or nothing if no run is finished."""
    table = results(outputs)
    path = Path(outputs) / "results.csv"
    if table.empty:
        return None
    with whole(path) as temporary:
        table.to_csv(temporary, index=False)
    return path
